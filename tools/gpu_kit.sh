#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Packs what a machine with a GPU and no build tools needs: carry/go_tests.sh and carry/gpu.
#
#   gpu_kit.sh [BUILD_FOLDER] [KIT_FOLDER]        (build/cuda, carry)
#
# There: bash carry/go_tests.sh [--perf] [--no-sanitizer]. It takes the C library, bash and the
# NVIDIA driver from that machine; the programs are stripped, with the shared libraries they need
# beside them. Fails when the kit is larger than 60 MB.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=${1:-$root/build/cuda}
kit=${2:-$root/carry}

cmake --build "$build" --target gpu_tests pkv_cli pkv_shared | tail -n 1
mkdir -p "$kit"
rm -rf "$kit/gpu" "$kit/go_tests.sh"
mkdir -p "$kit/gpu/lib"
for program in tests/gpu_tests pkv; do
  strip -o "$kit/gpu/$(basename "$program")" "$build/$program"
done
strip -o "$kit/gpu/libpkv.so" "$build/libpkv.so" # for the Python tests
# FlashInfer's kernels, where its headers were found at configure time
if cmake --build "$build" --target help | grep -q '^pkv_flashinfer:'; then
  cmake --build "$build" --target pkv_flashinfer | tail -n 1
  strip -o "$kit/gpu/pkv_flashinfer.so" "$build/pkv_flashinfer.so"
else
  echo "gpu_kit: without FlashInfer's kernels (PKV_FLASHINFER_DIR): the tests there will fail" >&2
fi
# All but what comes with the C library.
for program in "$kit"/gpu/*; do
  [ -f "$program" ] || continue
  ldd "$program" | awk '$2 == "=>" && $3 ~ "^/" {print $3}' |
    grep -v -E '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*)\.so' || true
done | sort -u | while read -r library; do
  cp -L "$library" "$kit/gpu/lib/"
done
cp "$root/tools/gpu_tests.sh" "$kit/go_tests.sh"
git -C "$root" rev-parse --short HEAD >"$kit/gpu/commit" 2>/dev/null || true
kb=$(du -sk "$kit/gpu" | cut -f 1)
ls "$kit/gpu" "$kit/gpu/lib"
echo "gpu_kit: $kit/gpu has $((kb / 1024)) MiB; there: bash $(basename "$kit")/go_tests.sh"
if [ "$kb" -gt 60000 ]; then
  echo "gpu_kit: more than 60 MB" >&2
  exit 1
fi
