#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone: the public ones as C11 and as C++17, those of src/ as C11.
set -eu
cd "$(dirname "$0")/.."
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
count=0
bad=0

# alone COMPILER FLAGS HEADER
alone() {
  count=$((count + 1))
  # shellcheck disable=SC2086 # flags are words
  if ! printf '#include "%s"\n' "$3" | $1 $2 $warnings -Iinclude -Isrc -fsyntax-only -; then
    echo "$3 does not compile alone with $1 $2"
    bad=$((bad + 1))
  fi
}

for header in include/pkv/*.h; do
  alone cc "-x c -std=c11 -Wstrict-prototypes" "${header#include/}"
  alone c++ "-x c++ -std=c++17" "${header#include/}"
done
# A template (x_impl.h) is included once an instruction set, by a file that defines its types
# first.
for header in $(find src -name '*.h' ! -name '*_impl.h' | sort); do
  isa=
  case $header in
  *_avx2.h) isa="-mavx2 -mfma -mf16c" ;;
  *_avx512.h) isa="-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl" ;;
  esac
  alone cc "-x c -std=c11 -D_GNU_SOURCE $isa" "${header#src/}"
done
echo "check_headers: $count compilations, $bad failed"
[ $bad -eq 0 ]
