#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Packs what a machine with a GPU and nothing else needs to run the benchmark into a folder:
#
#   tools/pack_gpu_kit.sh [FOLDER [BUILD]]      (default: carry build/cuda)
#
# The command with its shared libraries, cells, and go_bench.sh; then over there
# `bash FOLDER/go_bench.sh`. The C library is not packed: it must be as new as here.
set -eu

MOST_KIB=61440

cd "$(dirname "$0")/.."
kit=${1:-carry}
build=${2:-build/cuda}
pkv=$build/pkv

[ -x "$pkv" ] || {
  echo "pack_gpu_kit: no $pkv: ./run build cuda" >&2
  exit 1
}
case $("$pkv" bench attention --device cuda --lengths 1 2>&1 || :) in
*"PKV_CUDA is OFF"*)
  echo "pack_gpu_kit: $pkv was built without CUDA" >&2
  exit 1
  ;;
esac

mkdir -p "$kit"
(cd "$kit" && rm -rf pkv lib bench go_bench.sh COMMIT && mkdir -p lib bench/cells)
cp "$pkv" "$kit/pkv"
strip "$kit/pkv"
rm -f "$kit/pkv_flashinfer.so"
[ ! -e "$build/pkv_flashinfer.so" ] || strip -o "$kit/pkv_flashinfer.so" "$build/pkv_flashinfer.so"
cp bench/cells/* "$kit/bench/cells/"
cp bench/go_bench.sh "$kit/"

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD -- src include CMakeLists.txt cmake 2>/dev/null || commit="$commit-dirty"
echo "$commit" >"$kit/COMMIT"

# Libraries that any Linux has are not packed.
ldd "$pkv" | awk '/=> \// { print $3 }' | while read -r library; do
  case $library in
  */libc.so.* | */libm.so.* | */libdl.so.* | */libpthread.so.* | */librt.so.*) ;;
  *) cp -L "$library" "$kit/lib/" ;;
  esac
done

# Everything must be found inside, and the command must start.
missing=$(LD_LIBRARY_PATH="$kit/lib" ldd "$kit/pkv" | grep 'not found' || :)
[ -z "$missing" ] || {
  echo "pack_gpu_kit: not found: $missing" >&2
  exit 1
}
outside=$(LD_LIBRARY_PATH="$kit/lib" ldd "$kit/pkv" | awk '/=> \// { print $3 }' |
  grep -v -e "^$kit/lib/" -e '/libc\.so' -e '/libm\.so' -e '/libdl\.so' -e '/libpthread\.so' \
    -e '/librt\.so' || :)
[ -z "$outside" ] || {
  echo "pack_gpu_kit: these are not in the kit: $outside" >&2
  exit 1
}
LD_LIBRARY_PATH="$kit/lib" "$kit/pkv" --version >/dev/null
size=$(du -sk "$kit/pkv" "$kit/lib" "$kit/bench" | awk '{ sum += $1 } END { print sum }')
[ "$size" -le $MOST_KIB ] || {
  echo "pack_gpu_kit: $size KiB, more than $MOST_KIB" >&2
  exit 1
}
echo "pack_gpu_kit: $kit, $size KiB, commit $commit: bash $kit/go_bench.sh"
