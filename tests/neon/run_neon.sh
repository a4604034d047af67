#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run_neon.sh SOURCE BUILD: libpkv and its kernel tests for AArch64, built and run in an emulator,
# on a processor with and on one without the dot product of bytes. In small sizes, where each
# kernel has its turn, or with PKV_TEST_WHOLE in more. 77 = skipped: a tool is missing.
set -eu
source=$1
build=$2
for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
  if ! command -v $tool >/dev/null; then
    echo "1 skipped: no $tool (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)"
    exit 77
  fi
done
cmake -S "$source" -B "$build" -G Ninja -DPKV_NEON_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_TOOLCHAIN_FILE="$source/cmake/aarch64-linux-gnu.cmake" >"$build.log" 2>&1 &&
  cmake --build "$build" >>"$build.log" 2>&1 || {
  tail -30 "$build.log"
  exit 1
}
run() {
  echo "== $*"
  qemu-aarch64 -cpu "$@" >"$build.out" 2>&1 || {
    tail -5 "$build.out"
    exit 1
  }
  tail -1 "$build.out"
}
for cpu in cortex-a57 neoverse-n1; do
  run $cpu "$build/neon_matmul"
done
run cortex-a57 "$build/neon_dense_ops"
run cortex-a57 "$build/neon_attend_blocks"
run cortex-a57 "$build/neon_append"
run cortex-a57 "$build/neon_dispatch"
