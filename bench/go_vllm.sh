#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The proof in vLLM on one GPU, step by step: each engine in a process with a time limit, results
# appended to OUT at once, the judgement printed after each step. Ends early when something is wrong
# that makes what follows worthless.
#
#   bench/go_vllm.sh [-t SECONDS] [-o OUT] [-p PYTHON] STEP...
#
#   tests      pytest of the package and the plug-in on the GPU                        up to 120 s
#   small      stock, then ours: 32 rows on one prefix (a difference ends everything), greedy
#              answers of 200 prompts; ours: 100 rows for 1,000 steps                   about  90 s
#   ours       the second half of small, against stock's answers in OUT                 about  30 s
#   main       Feather's workload with prefixes of 10K and 2K tokens, mixed and homogeneous
#              batches; stock and ours on one GPU, measuring in turns                   about 420 s
#   plain      the six plain cells, in turns too                                       about 150 s
#   pressure   a small cache: preemption, re-admission (after small)                    about  40 s
#   overhead   planning and one layer from Python                                       about  20 s
#   tp2        small on two GPUs                                                        about 100 s
#   report     what OUT holds: table, CSV, plot
#
# -t: of all steps together (default 3600); a step that does not fit is cut short or left out.
# REPS: repetitions of what main and plain measure (3). main needs a GPU of 126 GiB.
set -u

usage() {
  sed -n '2,/^set -u/p' "$0" | sed '$d; s/^# \{0,1\}//'
}

total=3600
out=${OUT:-build/vllm}
python=python3
while getopts t:o:p:h option; do
  case $option in
  t) total=$OPTARG ;;
  o) out=$OPTARG ;;
  p) python=$OPTARG ;;
  h) usage && exit 0 ;;
  *) usage >&2 && exit 2 ;;
  esac
done
shift $((OPTIND - 1))
if [ $# -eq 0 ]; then usage >&2 && exit 2; fi

here=$(cd "$(dirname "$0")" && pwd)
driver=$here/vllm_decode.py
reps=${REPS:-3}
commit=${COMMIT:-$(git -C "$here" rev-parse --short HEAD 2>/dev/null || echo unknown)}
mkdir -p "$out"
results=$out/results.jsonl
answers=$out/answers.jsonl
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
failed=""
marked="^(loaded|cell|answers|steps|overhead|smoke|tokens|pressure|[a-z0-9_]+: [0-9]+ of)"
marked="$marked|persistentkv|libpkv"

left() {
  echo $((total - SECONDS))
}

say() {
  echo "[$SECONDS s] $*"
}

# step NAME LIMIT COMMAND...: shows the end of its output when it fails, else the marked lines.
step() {
  local name=$1 limit=$2 status=0 log=$out/last.log
  shift 2
  if [ "$(left)" -lt 25 ]; then
    say "$name: left out, $(left) s left"
    failed="$failed $name"
    return 1
  fi
  if [ "$limit" -gt $(($(left) - 5)) ]; then limit=$(($(left) - 5)); fi
  say "$name (at most $limit s)"
  timeout -k 5 -s INT "$limit" "$@" >"$log" 2>&1 || status=$?
  { echo "== $name: $* (status $status)" && tail -c 400000 "$log"; } >>"$out/go_vllm.log"
  if [ $status -ne 0 ]; then
    say "$name: FAILED, status $status"
    tail -n 45 "$log" | cut -c1-400
    failed="$failed $name"
    return 1
  fi
  grep -E "$marked" "$log" | cut -c1-300 | tail -n 40
  return 0
}

engine() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" "$driver" "$@"
}

judge() {
  "$python" "$driver" same "$answers" --names "$1" || failed="$failed judgement:$1"
}

# in_turns NAME LIMIT KV_GIB CELLS: both engines are loaded at once; what one measures, the other
# waits for.
in_turns() {
  local name=$1 limit=$2 gib=$3 cells=$4 number=0 backend pids=""
  if [ "$limit" -gt $(($(left) - 5)) ]; then limit=$(($(left) - 5)); fi
  say "$name (at most $limit s)"
  rm -f "$out"/turns*
  for backend in stock ours; do
    timeout -k 5 -s INT "$limit" "$python" "$driver" measure --backend "$backend" --out "$results" \
      --turns "$out/turns" --turn "$number/2" --kv-gib "$gib" --cells "$cells" \
      --seconds $((limit - 10)) >"$out/$name.$backend.log" 2>&1 &
    pids="$pids $!"
    number=$((number + 1))
  done
  for number in $pids; do
    wait "$number" || failed="$failed $name"
  done
  for backend in stock ours; do
    { echo "== $name $backend" && tail -c 200000 "$out/$name.$backend.log"; } >>"$out/go_vllm.log"
    grep -E "$marked|Error" "$out/$name.$backend.log" | cut -c1-300 | tail -n 40
    rm -f "$out/$name.$backend.log"
  done
  rm -f "$out"/turns*
}

report() {
  if [ -e "$results" ]; then
    "$python" "$driver" compare "$results" --csv "$out/vllm.csv" --commit "$commit" |
      tee "$out/table.md"
  fi
  if [ -e "$results" ] && "$python" -c 'import matplotlib' 2>/dev/null; then
    "$python" "$driver" compare "$results" --plot "$out/vllm.svg" >/dev/null
  fi
}

small_ours() {
  local file=$1
  shift
  engine small_ours 180 small --backend ours --out "$file" --against "$file" "$@"
}

small() {
  local file=$1
  engine small_stock 150 small --backend stock --out "$@" || return 1
  small_ours "$@"
}

run() {
  case $1 in
  tests)
    step tests 120 "$python" -m pytest -q -x -p no:cacheprovider -m "gpu and not full" tests/python
    tail -n 3 "$out/last.log"
    ;;
  small)
    small "$answers" || return 1
    judge smoke,tokens
    ;;
  ours)
    small_ours "$answers" || return 1
    judge smoke,tokens
    ;;
  main)
    in_turns main 450 42 "p10k:$reps,p10k_groups:$reps,p2k:$reps,p2k_groups:$reps"
    report
    ;;
  plain)
    in_turns plain 240 22 "plain:$reps"
    report
    ;;
  pressure)
    engine pressure 120 pressure --backend ours --out "$answers" && judge pressure
    ;;
  overhead) engine overhead 60 overhead --out "$out/overhead.jsonl" ;;
  tp2)
    export PERSISTENTKV_VLLM_COUNTERS=$out/served
    small "$out/tp2.jsonl" --tensor-parallel 2 &&
      "$python" "$driver" same "$out/tp2.jsonl" --names smoke,tokens
    cat "$out"/served.*.json 2>/dev/null | tr -d '\n' | cut -c1-1500
    rm -f "$out"/served.*.json
    ;;
  report) report ;;
  *)
    echo "no step $1" >&2
    return 2
    ;;
  esac
}

nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2>/dev/null
for name in "$@"; do
  if ! run "$name" && [ "$name" != pressure ] && [ "$name" != overhead ]; then
    say "ours are not stock's answers, or an engine failed: nothing else is run"
    break
  fi
done
rm -f "$out/last.log"
say "done;${failed:- nothing} failed"
if [ -n "$failed" ]; then exit 1; fi
