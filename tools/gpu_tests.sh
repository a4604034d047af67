#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the GPU tests that were built before, here or elsewhere, and says how they came out.
#
#   gpu_tests.sh [--bin FOLDER] [--jobs N] [--perf] [--no-sanitizer] [--log FILE]
#
# FOLDER holds gpu_tests, and may hold pkv and a folder lib of shared libraries; by default the one
# named gpu beside this script. Every suite runs in a process of its own, N at a time (4). With a
# GPU a skipped test is a failure, and so is FlashInfer's absence (pkv_flashinfer.so beside pkv);
# without one everything is skipped, and that is said. --perf adds
# the suite of stated times, alone on the device. compute-sanitizer runs over a subset where it is
# installed. The Python package's tests on the GPU (FlashInfer's tests as a grid among them) run
# where FOLDER or the one above it holds libpkv.so and python3 has torch, NumPy and pytest. The last
# line is "N passed, N failed, N skipped"; exit 1 when something failed.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$here/gpu
jobs=4
perf=
sanitizer=yes
log=
while [ $# -gt 0 ]; do
  case $1 in
  --bin) bin=$(cd "${2:?--bin takes a folder}" && pwd) || exit 2; shift ;;
  --jobs) jobs=${2:?--jobs takes a number}; shift ;;
  --perf) perf=yes ;;
  --no-sanitizer) sanitizer= ;;
  --log) log=${2:?--log takes a file}; shift ;;
  *)
    echo "gpu_tests.sh: unknown option '$1'" >&2
    exit 2
    ;;
  esac
  shift
done

program=$bin/gpu_tests
[ -x "$program" ] || { echo "gpu_tests.sh: no program $program: build it first" >&2; exit 2; }
[ ! -d "$bin/lib" ] || export LD_LIBRARY_PATH="$bin/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# In a build folder FlashInfer's kernels lie beside pkv, one above the tests.
[ ! -e "$bin/../pkv_flashinfer.so" ] ||
  export LD_LIBRARY_PATH="$bin/..${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
[ -n "$log" ] || log=${OUT:-$(mktemp -d)}/gpu-tests.log
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$log"
started=$SECONDS
passed=0
failed=0
skipped=0

# sum KIND FILE: cmocka's count of this kind; several groups may have run.
sum() {
  sed -n "s/^\[  *$1 *\] \([^0-9]*: \)\{0,1\}\([0-9][0-9]*\) test(s).*/\2/p" "$2" |
    awk '{n += $1} END {print n + 0}'
}

# count NAME STATUS FILE: adds up one run; on a machine with a GPU nothing may be skipped.
count() {
  local ok bad left note=
  ok=$(sum PASSED "$3")
  bad=$(sum FAILED "$3")
  left=$(sum SKIPPED "$3")
  if [ "$2" -ne 0 ] && [ "$bad" -eq 0 ]; then
    bad=1
    note=", exit status $2"
  fi
  if [ "$left" -gt 0 ]; then
    bad=$((bad + left))
    note="$note, $left skipped although there is a GPU"
  fi
  passed=$((passed + ok))
  failed=$((failed + bad))
  printf '%-12s %4d passed, %d failed%s, %s s\n' "$1" "$ok" "$bad" "$note" \
    "$(cat "$3.time" 2>/dev/null)"
  { echo "== $1"; cat "$3"; } >>"$log"
  if [ "$bad" -gt 0 ]; then
    grep -v '^\[ RUN\|^\[       OK' "$3" | tail -n 30
  fi
}

# start NAME SECONDS COMMAND...: in the background, output to a file, status and time beside it.
start() {
  local file=$work/$1 limit=$2
  shift 2
  (
    from=$SECONDS
    timeout -k 10 "$limit" "$@" >"$file" 2>&1
    echo $? >"$file.status"
    echo $((SECONDS - from)) >"$file.time"
  ) &
}

# all NAME...: the counts of runs that have ended, in this order.
all() {
  local name
  for name in "$@"; do
    count "$name" "$(cat "$work/$name.status" 2>/dev/null || echo 1)" "$work/$name"
  done
}

wait_for_room() {
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
}

why=$("$program" --probe 2>&1)
case $? in
0) ;;
77)
  tests=$("$program" 2>/dev/null | sed -n 's/^\[==========\] Running \([0-9]*\) test.*/\1/p' |
    awk '{n += $1} END {print n + 0}')
  echo "gpu-test: there is no CUDA device: $why"
  echo "0 passed, 0 failed, $tests skipped"
  exit 0
  ;;
*)
  echo "gpu-test: there is a CUDA device, and it does not work: $why"
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
  ;;
esac
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1

# The longest first.
names=$("$program" --list | grep -v when)
for name in $names; do
  wait_for_room
  start "$name" 400 "$program" --need-gpu --suite "$name"
done
wait
# shellcheck disable=SC2086 # a list
all $names

pkv=$bin/pkv
[ -x "$pkv" ] || pkv=$bin/../pkv
if [ -x "$pkv" ]; then
  "$pkv" doctor >"$work/doctor" 2>&1
  sed -n '/^gpu/,/^$/p' "$work/doctor"
  if grep -q '^ *kernels  *ready' "$work/doctor"; then
    passed=$((passed + 1))
  else
    echo "pkv doctor does not call the device ready"
    failed=$((failed + 1))
  fi
fi

# FlashInfer is one of the policy's routes: here it must be there, take a batch and be right (each
# route is compared with double arithmetic before it is timed).
if [ -x "$pkv" ]; then
  "$pkv" bench attention --device cuda --policy fixed:flashinfer --lengths 4096x4,300 -n 1 \
    >"$work/flashinfer" 2>&1
  if [ $? -eq 0 ] && grep -q '^lengths .* flashinfer' "$work/flashinfer"; then
    passed=$((passed + 1))
    echo "flashinfer: runs as a route of the policy"
  else
    echo "flashinfer is missing or does not run: python3 -m pip install flashinfer-python, then" \
      "build pkv_flashinfer.so (cmake/flashinfer.cmake)"
    tail -n 4 "$work/flashinfer"
    failed=$((failed + 1))
  fi
  { echo "== flashinfer"; cat "$work/flashinfer"; } >>"$log"
fi

# The library beside the programs, the package from the tree; nothing may be skipped here either.
library=$bin/libpkv.so
[ -e "$library" ] || library=$bin/../libpkv.so
if [ ! -e "$library" ] || [ ! -d "$here/../tests/python" ]; then
  echo "python: no libpkv.so or no tests/python beside these programs, 1 suite skipped"
  skipped=$((skipped + 1))
elif ! python3 -c 'import numpy, pytest, torch; assert torch.cuda.is_available()' 2>/dev/null; then
  echo "python: no python3 with torch, NumPy and pytest here, 1 suite skipped"
  skipped=$((skipped + 1))
else
  export PERSISTENTKV_LIBRARY=$library PYTHONDONTWRITEBYTECODE=1
  export PYTHONPATH=$here/../python${PYTHONPATH:+:$PYTHONPATH}
  start python 400 python3 -m pytest -q -p no:cacheprovider -m "gpu and not full and not vllm" \
    "$here/../tests/python"
  wait
  # pytest's last line in cmocka's words
  tail -n 1 "$work/python" | tr ',' '\n' | sed -n \
    -e 's/^[= ]*\([0-9]*\) passed.*/[  PASSED  ] \1 test(s)./p' \
    -e 's/^[= ]*\([0-9]*\) failed.*/[  FAILED  ] \1 test(s)./p' \
    -e 's/^[= ]*\([0-9]*\) errors\{0,1\}.*/[  FAILED  ] \1 test(s)./p' \
    -e 's/^[= ]*\([0-9]*\) skipped.*/[  SKIPPED ] \1 test(s)./p' >"$work/python.sums"
  cat "$work/python.sums" >>"$work/python"
  all python
fi

if [ -n "$perf" ]; then
  start perf 300 "$program" --need-gpu --suite perf
  wait
  all perf
  grep '^  ' "$work/perf" || true
fi

# Races and uninitialised reads are looked for where launches are small: these tools are slow.
sanitize() {
  local name=$1
  shift
  start "$name" 280 "$tool" --error-exitcode 9 --launch-timeout 300 --report-api-errors no \
    --tool "$name" "$program" --need-gpu --small "$@"
}

if ! tool=$(command -v compute-sanitizer); then
  tool=/usr/local/cuda/bin/compute-sanitizer
fi
if [ -z "$sanitizer" ]; then
  echo "compute-sanitizer: left out as asked"
elif [ ! -x "$tool" ]; then
  echo "compute-sanitizer: not installed here, 3 runs skipped"
  skipped=$((skipped + 3))
else
  sanitize memcheck --suite sanitized --suite plans --suite append --suite complaints
  sanitize racecheck --suite sanitized
  sanitize initcheck --suite sanitized
  wait
  for name in memcheck racecheck initcheck; do
    if grep -q 'Device not supported' "$work/$name"; then
      echo "$name: compute-sanitizer cannot work on this machine (device not supported), skipped"
      skipped=$((skipped + 1))
    else
      count "$name" "$(cat "$work/$name.status")" "$work/$name"
      grep -h 'SUMMARY' "$work/$name"
    fi
  done
fi

echo "gpu-test: $((SECONDS - started)) s; everything that was printed is in $log"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
