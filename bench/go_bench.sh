#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The whole table of `pkv bench attention --device cuda`, from a kit of tools/pack_gpu_kit.sh:
#
#   bash carry/go_bench.sh [STEP...]
#
# Steps, in this order when none is named: check decode planner cliff permuted fp8 shapes traces
# routes. Results go to the folder $OUT (default: results beside this script): one CSV a step, and
# bench.log with everything that was printed. A step that fails does not stop the others. LIMIT_S
# (default 560) bounds the whole: steps that do not fit any more are named at the end.
set -u
cd "$(dirname "$0")" || exit 1
OUT=${OUT:-results}
LIMIT_S=${LIMIT_S:-560}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/bench.log
export LD_LIBRARY_PATH="$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
COMMIT=$(cat COMMIT)
GRAPHS=
failed=
late=

say() {
  echo "== $*" | tee -a "$LOG"
}

left() {
  echo $((LIMIT_S - SECONDS))
}

# pkv_bench SECONDS ARGS...: at most so long, and never past the limit.
pkv_bench() {
  most=$1
  shift
  if [ "$(left)" -lt 5 ]; then
    late="$late [$*]"
    return 0
  fi
  [ "$most" -le "$(left)" ] || most=$(left)
  # shellcheck disable=SC2086 # a list of words
  timeout -k 5 "$most" ./pkv bench attention --device cuda $GRAPHS --commit "$COMMIT" "$@" \
    >>"$LOG" 2>&1
  code=$?
  if [ $code -ne 0 ]; then
    say "exit $code: $*"
    failed="$failed $step"
  fi
  return $code
}

ANCHORS="--anchors bench/cells/h200_decode_anchors.json"
SOME="--only b1_8192,b1_65536,b8_zipf,b32_uniform,ragged192"

# Small and odd, every type, layout and route: outputs only, hardly timed.
step_check() {
  for dtype in f16 bf16 fp8_e4m3; do
    for shape in "--layout hnd" "--layout nhd" "--layout interleaved" "--page 1" "--q-len 4" \
      "--head-dim 64 --query-heads 9 --kv-heads 3" "--head-dim 256 --query-heads 8 --kv-heads 4"; do
      check_one $dtype "$shape"
    done
  done
  for shape in "--page 64" "--page 19 --layout nhd" "--window 200" "--query-heads 64" \
    "--head-dim 80 --q-len 3 --window 77" "--batch-invariant"; do
    check_one f16 "$shape"
  done
}

check_one() {
  # shellcheck disable=SC2086 # a list of words
  pkv_bench 60 --lengths 1,17,700,64,65,0,300,4099 --kv-dtype "$1" $2 --memory 256 --repeats 1
}

step_decode() {
  # shellcheck disable=SC2086
  pkv_bench 200 $ANCHORS -r balanced --csv "$OUT/decode.csv"
}

step_planner() {
  pkv_bench 60 --cells bench/cells/planner.cells -r balanced --csv "$OUT/planner.csv"
}

step_cliff() {
  pkv_bench 100 --cells bench/cells/cliff.cells -r balanced --csv "$OUT/cliff.csv"
}

step_permuted() {
  # shellcheck disable=SC2086
  pkv_bench 100 $ANCHORS -r balanced --rows-permuted --needles 4 --csv "$OUT/shapes.csv"
}

step_fp8() {
  for layout in hnd nhd; do
    # shellcheck disable=SC2086
    pkv_bench 90 $ANCHORS $SOME -r balanced --kv-dtype fp8_e4m3 --layout $layout \
      --csv "$OUT/shapes.csv"
  done
  # the same cells in f16, for the ratio in one run
  # shellcheck disable=SC2086
  pkv_bench 60 $ANCHORS $SOME -r balanced --csv "$OUT/shapes.csv"
}

step_shapes() {
  for shape in "--page 1" "--page 32" "--page 64" "--layout nhd" "--layout interleaved" \
    "--page 1 --layout nhd" "--kv-dtype bf16" "--q-len 4" "--window 4096" "--query-heads 64" \
    "--query-heads 8" "--head-dim 64" "--head-dim 256 --query-heads 16 --kv-heads 4" \
    "--batch-invariant"; do
    # shellcheck disable=SC2086
    pkv_bench 60 $ANCHORS $SOME -r balanced --needles 8 $shape --csv "$OUT/shapes.csv"
  done
}

step_traces() {
  pkv_bench 120 --cells \
    b1_bucketed,b4_bimodal,b8_bimodal,b8_uniform,b8_zipf,b8_bucketed,b8_homogeneous \
    --steps 2 --needles 8 --csv "$OUT/traces.csv"
}

step_routes() {
  # shellcheck disable=SC2086
  pkv_bench 400 $ANCHORS --needles 8 --repeats 15 --csv "$OUT/routes.csv"
}

: >"$LOG"
say "commit $COMMIT, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
nvidia-smi >>"$LOG" 2>&1

# Whether all can be timed in one graph here; if not, each in its own, which counts as well.
step=start
first="--lengths 1024,300 --memory 256 --repeats 3"
# shellcheck disable=SC2086
if ! pkv_bench 60 $first --graphs one; then
  failed=
  GRAPHS="--graphs each"
  # shellcheck disable=SC2086
  if ! pkv_bench 60 $first; then
    say "no output is right, or nothing can be timed: see above"
    tail -n 40 "$LOG"
    exit 1
  fi
  say "one graph for all failed; each has a graph of its own"
fi

[ $# -gt 0 ] || set -- check decode planner cliff permuted fp8 shapes traces routes
for step in "$@"; do
  began=$SECONDS
  "step_$step"
  say "$step: $((SECONDS - began)) s"
done
[ -z "$failed" ] || say "failed:$failed"
[ -z "$late" ] || say "no time left for:$late"
say "all: $SECONDS s"
grep -v '^[|+]' "$LOG" | tail -n 150
[ -z "$failed" ]
