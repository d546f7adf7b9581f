#!/bin/bash
# Everything that only a GPU can show about evenkeel, on a bare machine: no Bazel,
# no compiler, only the folder that tools/gpu/pack.sh made elsewhere.
#
#   tools/gpu/pack.sh /tmp/gpu_check           # where evenkeel is built
#   /tmp/gpu_check/gpu_check.sh                # on the machine with GPUs
#
# In turn: the devices; every test with the tag "gpu"; those of kernels again
# under compute-sanitizer (memcheck, racecheck, synccheck); benchmarks against the
# copy bandwidth of this machine, and against PyTorch if python3 has it.
#
#   --json=FILE      default ./gpu_check.json
#   --logs=FOLDER    what each program said; default ./gpu_check_logs
#   --timeout=600    seconds for a program
#   --quick          no compute-sanitizer, short benchmarks
#   --only=REGEX     rows whose name matches, e.g. nccl
#
# Ends with one table, one row per program or figure: passed, failed, or skipped
# with the reason, which is never a pass. Exits with 0 only if something passed
# and nothing failed.
set -uo pipefail

bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
json=gpu_check.json
logs=gpu_check_logs
limit=600
quick=0
only=.
sanitizer_checks=(memcheck racecheck synccheck)

fail_usage() {
  printf 'gpu_check: %s\n' "$1" >&2
  exit 2
}

for argument in "$@"; do
  case $argument in
    --json=?*) json=${argument#*=} ;;
    --logs=?*) logs=${argument#*=} ;;
    --timeout=*) limit=${argument#*=} ;;
    --only=?*) only=${argument#*=} ;;
    --quick) quick=1 ;;
    --help | -h)
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail_usage "unknown argument '$argument'; see --help" ;;
  esac
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail_usage "--timeout='$limit' is no number of seconds"
[[ -r $bundle/tests.txt ]] || fail_usage "$bundle has no tests.txt: tools/gpu/pack.sh makes a folder that has"
mkdir -p "$logs" || exit 2
logs=$(cd "$logs" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

root=$bundle/runfiles/evenkeel
# For our own programs: python3's PyTorch brings other libraries of the same names.
ours=(env "LD_LIBRARY_PATH=$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
export TEST_SRCDIR=$bundle/runfiles TEST_WORKSPACE=evenkeel RUNFILES_DIR=$bundle/runfiles
export EVENKEEL_REQUIRE_GPU=1
export OMP_NUM_THREADS=1 # As their rules say of those tests that compute on the host as well.

rows=()
devices=()
passed=0 failed=0 skipped=0

# row NAME RESULT FIGURE [BAR]
row() {
  rows+=("$1"$'\t'"$2"$'\t'"${3//$'\t'/ }"$'\t'"${4:-}")
  case $2 in
    passed) passed=$((passed + 1)) ;;
    skipped) skipped=$((skipped + 1)) ;;
    shown) ;; # a figure without a bar
    *) failed=$((failed + 1)) ;;
  esac
  printf '%-8s%s: %s\n' "$2" "$1" "$3" >&2
}

is_wanted() { [[ $1 =~ $only ]]; }

log_of() { printf '%s/%s.log' "$logs" "$(tr -c 'A-Za-z0-9_\n' _ <<<"$1")"; }

# program LOG COMMAND...: where its data is, with a limit; returns its exit code.
program() {
  local log=$1
  shift
  TEST_TMPDIR=$(mktemp -d -p "$scratch")
  export TEST_TMPDIR
  (cd "$root" && timeout -k 10 "$limit" "$@") >"$log" 2>&1 </dev/null
}

# What GoogleTest says last about tests that $1 ("PASSED  ", "SKIPPED ", "FAILED  "); nothing if it says nothing.
counted() { sed -n "s/^\[  $1\] \([0-9][0-9]*\) tests\{0,1\}[.,].*/\1/p" "$2" | tail -n 1; }

# test_row NAME EXIT_CODE LOG: judges what a GoogleTest said.
test_row() {
  local name=$1 code=$2 log=$3 good missed bad names
  good=$(counted 'PASSED  ' "$log")
  missed=$(counted 'SKIPPED ' "$log")
  bad=$(counted 'FAILED  ' "$log")
  if [[ $code == 124 || $code == 137 ]]; then
    row "$name" failed "ended after $limit s, see $log"
  elif [[ -n $bad && $bad != 0 ]]; then
    names=$(sed -n 's/^\[  FAILED  \] \([^ ,]*\.[^ ,]*\).*/\1/p' "$log" | sort -u | head -n 3 | paste -sd ' ')
    row "$name" failed "$bad failed: $names, see $log"
  elif [[ $code != 0 ]]; then
    row "$name" failed "exit code $code: $(grep -v '^ *$' "$log" | tail -n 1)"
  elif [[ -z $good ]]; then
    row "$name" failed "ended without a test's summary, see $log"
  elif [[ $good == 0 ]]; then
    row "$name" skipped "$(grep -A1 ': Skipped$' "$log" | sed -n 2p)"
  elif [[ ${missed:-0} != 0 ]]; then
    row "$name" passed "$good passed, $missed skipped"
  else
    row "$name" passed "$good passed"
  fi
}

look_at_devices() {
  local log line code
  log=$(log_of devices)
  if command -v nvidia-smi >/dev/null; then
    if ! nvidia-smi --query-gpu=index,name,memory.total,driver_version,compute_cap --format=csv,noheader >"$log" 2>&1; then
      row devices failed "no GPU: nvidia-smi says: $(head -n 1 "$log")"
      return 1
    fi
    while IFS= read -r line; do
      [[ -n $line ]] && devices+=("$line")
    done <"$log"
  fi
  program "$log" "${ours[@]}" ./tools/gpu/bench_device --devices
  code=$?
  if [[ $code != 0 ]]; then
    row devices failed "no GPU: $(grep -v '^ *$' "$log" | tail -n 1)"
    return 1
  fi
  [[ ${#devices[@]} != 0 ]] || mapfile -t devices <"$log"
}

run_tests() {
  local label path kind log
  while IFS=$'\t' read -r label path kind; do
    is_wanted "$label" || continue
    if [[ $kind == missing ]]; then
      row "$label" failed 'is not in the folder: it was not built'
      continue
    fi
    log=$(log_of "$label")
    program "$log" "${ours[@]}" "./$path"
    test_row "$label" $? "$log"
  done <"$bundle/tests.txt"
}

find_sanitizer() {
  local candidate
  for candidate in compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" \
    "${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer/compute-sanitizer"; do
    command -v "$candidate" && return
  done
}

run_sanitizer() {
  local label path kind log sanitizer check code
  sanitizer=$(find_sanitizer)
  while IFS=$'\t' read -r label path kind; do
    [[ $kind == kernels ]] || continue
    for check in "${sanitizer_checks[@]}"; do
      is_wanted "$check $label" || continue
      if [[ -z $sanitizer ]]; then
        row "$check $label" skipped 'there is no compute-sanitizer'
        continue
      fi
      log=$(log_of "$check $label")
      program "$log" "${ours[@]}" "$sanitizer" --tool "$check" --error-exitcode 99 "./$path"
      code=$?
      if [[ $code == 99 ]]; then
        row "$check $label" failed "$(grep 'SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//'), see $log"
      elif [[ $code == 0 ]] && ! grep -q 'SUMMARY: 0 ' "$log"; then
        row "$check $label" failed "compute-sanitizer told no summary, see $log"
      else
        test_row "$check $label" "$code" "$log"
      fi
    done
  done <"$bundle/tests.txt"
}

run_benchmarks() {
  local log code name result figure bar arguments=(--rows) torch
  is_wanted benchmarks || return
  [[ $quick == 0 ]] || arguments+=(--quick)

  # Before ours and in one run with them: the same elements, the same device.
  torch=$(log_of pytorch)
  if ! command -v python3 >/dev/null; then
    row "AdamW beside PyTorch's fused one" skipped 'there is no python3'
  elif ! program "$torch" python3 tools/gpu/pytorch_adamw.py; then
    row "AdamW beside PyTorch's fused one" skipped "$(grep -v '^ *$' "$torch" | tail -n 1)"
  else
    arguments+=("--pytorch_adamw_seconds=$(tail -n 1 "$torch")")
  fi

  log=$(log_of benchmarks)
  program "$log" "${ours[@]}" ./tools/gpu/bench_device "${arguments[@]}"
  code=$?
  while IFS=$'\t' read -r name result figure bar; do
    [[ $result =~ ^(passed|failed|shown)$ ]] && row "$name" "$result" "$figure" "$bar"
  done <"$log"
  [[ $code == 0 ]] || grep -q $'\tfailed\t' "$log" || row benchmarks failed "exit code $code: $(tail -n 1 "$log")"
}

table() {
  local line name result figure bar width=4
  for line in "${rows[@]}"; do
    name=${line%%$'\t'*}
    ((${#name} > width)) && width=${#name}
  done
  printf "\n%-${width}s  %-8s %-12s %s\n" name result bar figure
  for line in "${rows[@]}"; do
    # Not read: it takes two tabs for one.
    name=${line%%$'\t'*} line=${line#*$'\t'}
    result=${line%%$'\t'*} line=${line#*$'\t'}
    figure=${line%%$'\t'*} bar=${line#*$'\t'}
    printf "%-${width}s  %-8s %-12s %s\n" "$name" "$result" "${bar:--}" "$figure"
  done
}

quoted() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "$(tr '\000-\037' ' ' <<<"$text" | sed 's/ $//')"
}

as_json() {
  local line separator='' name result figure bar
  printf '{"date": %s,\n "devices": [' "$(quoted "$(date -u +%Y-%m-%dT%H:%M:%SZ)")"
  for line in "${devices[@]}"; do
    printf '%s%s' "$separator" "$(quoted "$line")"
    separator=', '
  done
  printf '],\n "passed": %d, "failed": %d, "skipped": %d,\n "rows": [' "$passed" "$failed" "$skipped"
  separator=$'\n'
  for line in "${rows[@]}"; do
    name=${line%%$'\t'*} line=${line#*$'\t'}
    result=${line%%$'\t'*} line=${line#*$'\t'}
    figure=${line%%$'\t'*} bar=${line#*$'\t'}
    printf '%s  {"name": %s, "result": %s, "figure": %s, "bar": %s}' "$separator" \
      "$(quoted "$name")" "$(quoted "$result")" "$(quoted "$figure")" "$(quoted "$bar")"
    separator=$',\n'
  done
  printf '\n]}\n'
}

if look_at_devices; then
  printf '%d device(s):\n' "${#devices[@]}"
  printf '  %s\n' "${devices[@]}"
  run_tests
  [[ $quick == 1 ]] || run_sanitizer
  run_benchmarks
fi

[[ ${#rows[@]} == 0 ]] || table
as_json >"$json" || failed=$((failed + 1))
printf '\n%d passed, %d failed, %d skipped; %s\n' "$passed" "$failed" "$skipped" "$json"
[[ $failed == 0 && $passed != 0 ]]
