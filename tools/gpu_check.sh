#!/bin/bash
# Runs all checks of evenkeel that need a GPU, on a bare machine: no Bazel,
# no compiler, only the folder that tools/gpu/pack.sh made elsewhere.
#
#   tools/gpu/pack.sh /tmp/gpu_check           # where evenkeel is built
#   /tmp/gpu_check/gpu_check.sh                # on the machine with GPUs
#
# In this order, the most informative first: the devices; the tests of kernels
# and models; benchmarks against the copy bandwidth of this machine, and against
# PyTorch if python3 has it; all other tests with the tag "gpu", the conformance
# suite last; those of kernels again under compute-sanitizer (memcheck, racecheck,
# synccheck).
#
#   --json=FILE      default ./gpu_check.json; there after each row
#   --logs=FOLDER    what each program said; default ./gpu_check_logs
#   --timeout=300    seconds for a program
#   --seconds=N      for all together: what does not fit is skipped, and says so
#   --quick          no compute-sanitizer, short benchmarks
#   --only=REGEX     rows whose name matches, e.g. nccl, or '^(race|sync)check'
#
# Libraries that are not in the folder are looked for in LD_LIBRARY_PATH, in the
# toolkit, and among python3's packages.
#
# Says each row when it is there (on stderr), and ends with one table of them, also
# when a signal ends it (SIGTERM, SIGINT): passed, failed, or skipped with the
# reason, which is never a pass. Exits with 0 only if something passed and nothing
# failed.
set -uo pipefail

bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
json=gpu_check.json
logs=gpu_check_logs
limit=300
budget=0
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
    --seconds=*) budget=${argument#*=} ;;
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
[[ $budget =~ ^[0-9]+$ ]] || fail_usage "--seconds='$budget' is no number of seconds"
[[ -r $bundle/tests.txt ]] || fail_usage "$bundle has no tests.txt: tools/gpu/pack.sh makes a folder that has"
mkdir -p "$logs" || exit 2
logs=$(cd "$logs" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

root=$bundle/runfiles/evenkeel
libraries=$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TEST_SRCDIR=$bundle/runfiles TEST_WORKSPACE=evenkeel RUNFILES_DIR=$bundle/runfiles
export EVENKEEL_REQUIRE_GPU=1
export OMP_NUM_THREADS=1 # As their rules say of those tests that compute on the host as well.

rows=()
rows_json=''
devices=()
passed=0 failed=0 skipped=0
running='' # The process of a program,
allowed=0  # and its seconds.
SECONDS=0 row_began=0

# row NAME RESULT FIGURE [BAR]
row() {
  rows+=("$1"$'\t'"$2"$'\t'"${3//$'\t'/ }"$'\t'"${4:-}")
  case $2 in
    passed) passed=$((passed + 1)) ;;
    skipped) skipped=$((skipped + 1)) ;;
    shown) ;; # a figure without a bar
    *) failed=$((failed + 1)) ;;
  esac
  rows_json+=${rows_json:+,}$'\n'"  {\"name\": $(quoted "$1"), \"result\": $(quoted "$2"), \"figure\": $(quoted "$3"),"
  rows_json+=" \"bar\": $(quoted "${4:-}"), \"seconds\": $((SECONDS - row_began))}"
  printf '%4d s  %-8s%s: %s\n' "$SECONDS" "$2" "$1" "$3" >&2
  row_began=$SECONDS
  write_json
}

is_wanted() { [[ $1 =~ $only ]]; }

log_of() { printf '%s/%s.log' "$logs" "$(tr -c 'A-Za-z0-9_\n' _ <<<"$1")"; }

# How many seconds a program may take; 0: none are left.
allowance() {
  local left=$((budget - SECONDS))
  if [[ $budget == 0 ]] || ((left > limit)); then
    echo "$limit"
  else
    echo $((left < 0 ? 0 : left))
  fi
}

# program LOG COMMAND...: where its data is, with a limit; returns its exit code, 125 if no time is left. Waited for in
# such a way that a signal comes through.
program() {
  local log=$1 seconds code
  shift
  seconds=$(allowance)
  [[ $seconds != 0 ]] || return 125
  allowed=$seconds
  TEST_TMPDIR=$(mktemp -d -p "$scratch")
  export TEST_TMPDIR
  (cd "$root" && exec timeout -k 10 "$seconds" "$@") >"$log" 2>&1 </dev/null &
  running=$!
  wait "$running"
  code=$?
  running=''
  return "$code"
}

# ours LOG COMMAND...: one of our own programs: python3's PyTorch has libraries of the same names.
ours() {
  local log=$1
  shift
  program "$log" env "LD_LIBRARY_PATH=$libraries" "$@"
}

# Prints the number in GoogleTest's last summary of tests that $1 ("PASSED  ", "SKIPPED ",
# "FAILED  "); nothing if there is none.
counted() { sed -n "s/^\[  $1\] \([0-9][0-9]*\) tests\{0,1\}[.,].*/\1/p" "$2" | tail -n 1; }

# test_row NAME EXIT_CODE LOG: judges what a GoogleTest said.
test_row() {
  local name=$1 code=$2 log=$3 good missed bad names
  good=$(counted 'PASSED  ' "$log")
  missed=$(counted 'SKIPPED ' "$log")
  bad=$(counted 'FAILED  ' "$log")
  if [[ $code == 125 ]]; then
    row "$name" skipped "none of the $budget seconds are left"
  elif [[ $code == 124 || $code == 137 ]]; then
    row "$name" failed "ended after $allowed s, see $log"
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

# Those that programs need and the folder has not.
missing_libraries() {
  local name
  [[ -r $bundle/libraries.txt ]] || return
  while IFS= read -r name; do
    [[ -e $bundle/lib/$name ]] || echo "$name"
  done <"$bundle/libraries.txt"
}

# has NAME: any folder of `libraries`.
has() {
  local folder
  while IFS= read -r -d : folder; do
    [[ -n $folder && -e $folder/$1 ]] && return
  done <<<"$libraries:"
  return 1
}

# Finds what is not in the folder on this machine.
find_libraries() {
  local name folder home=${CUDA_HOME:-/usr/local/cuda} missing=() folders=()
  mapfile -t missing < <(missing_libraries)
  [[ ${#missing[@]} != 0 ]] || return
  folders=("$home/lib64" "$home/lib" "$home/extras/CUPTI/lib64")
  mapfile -t -O "${#folders[@]}" folders < <(
    ldconfig -p 2>/dev/null | sed -n 's/.* => \(.*\)\/[^/]*$/\1/p' | sort -u
    python3 - 2>/dev/null <<'END'
import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
for place in spec.submodule_search_locations if spec else []:
    print("\n".join(sorted(set(glob.glob(place + "/*/lib") + glob.glob(place + "/*/*/lib")))))
END
  )
  for name in "${missing[@]}"; do
    has "$name" && continue
    for folder in "${folders[@]}"; do
      [[ -e $folder/$name ]] || continue
      # A link of its own: the rest of a system's folder may not suit.
      mkdir -p "$scratch/lib"
      ln -sf "$folder/$name" "$scratch/lib/"
      break
    done
  done
  libraries+=:$scratch/lib
  for name in "${missing[@]}"; do
    has "$name" || row "$name" skipped 'is not on this machine: whatever loads it fails'
  done
}

look_at_devices() {
  local log line said='' code
  log=$(log_of devices)
  # It only tells: programs are what must find a device.
  if command -v nvidia-smi >/dev/null; then
    if nvidia-smi --query-gpu=index,name,memory.total,driver_version,compute_cap --format=csv,noheader >"$log" 2>&1; then
      mapfile -t devices < <(grep -v '^ *$' "$log")
    else
      said="; nvidia-smi says: $(head -n 1 "$log")"
    fi
  fi
  ours "$log" ./tools/gpu/bench_device --devices
  code=$?
  if [[ $code != 0 ]]; then
    row devices failed "no GPU: $(grep -v '^ *$' "$log" | tail -n 1)$said"
    return 1
  fi
  [[ ${#devices[@]} != 0 ]] || mapfile -t devices <"$log"
}

# group_of LABEL KIND: kernels, conformance (many, and long), or others.
group_of() {
  case $2:$1 in
    kernels:*) echo kernels ;;
    *://tests/conformance:*) echo conformance ;;
    *) echo others ;;
  esac
}

# run_tests GROUP
run_tests() {
  local label path kind log
  while IFS=$'\t' read -r label path kind; do
    is_wanted "$label" || continue
    [[ $(group_of "$label" "$kind") == "$1" ]] || continue
    if [[ $kind == missing ]]; then
      row "$label" failed 'is not in the folder: it was not built'
      continue
    fi
    log=$(log_of "$label")
    ours "$log" "./$path"
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

# sanitizer_arguments CHECK: memcheck looks at the libraries' kernels as well, to which we gave addresses and sizes; and
# not at errors that calls answer, which tests expect or see. The others take long, and are for our own kernels.
sanitizer_arguments() {
  if [[ $1 == memcheck ]]; then
    echo --report-api-errors no
  else
    echo "$kernel_filter"
  fi
}

# Whether it works at all: not each machine lets it. Else why_no_sanitizer says.
probe_sanitizer() {
  local log check code
  why_no_sanitizer=''
  if [[ -z $sanitizer ]]; then
    why_no_sanitizer='there is no compute-sanitizer'
    return
  fi
  for check in memcheck racecheck; do
    log=$(log_of "probe of $check")
    # shellcheck disable=SC2046
    ours "$log" "$sanitizer" --tool "$check" --error-exitcode 99 $(sanitizer_arguments "$check") \
      ./tools/gpu/bench_device --devices
    code=$?
    if [[ $code == 125 ]]; then
      why_no_sanitizer="none of the $budget seconds are left"
      return
    fi
    [[ $code == 0 ]] && grep -q 'SUMMARY: 0 ' "$log" && continue
    if [[ $check == racecheck ]]; then
      kernel_filter='' # One that knows no filter.
    else
      why_no_sanitizer="compute-sanitizer does not work here: $(grep -v '^[= ]*$' "$log" | head -n 1), see $log"
      return
    fi
  done
}

run_sanitizer() {
  local label path kind log sanitizer check code why_no_sanitizer has_probed=0 kernel_filter='--kernel-regex kns=ek_'
  sanitizer=$(find_sanitizer)
  for check in "${sanitizer_checks[@]}"; do
    while IFS=$'\t' read -r label path kind; do
      [[ $kind == kernels ]] || continue
      is_wanted "$check $label" || continue
      [[ $has_probed == 1 ]] || probe_sanitizer
      has_probed=1
      if [[ -n $why_no_sanitizer ]]; then
        row "$check $label" skipped "$why_no_sanitizer"
        continue
      fi
      log=$(log_of "$check $label")
      # shellcheck disable=SC2046
      ours "$log" "$sanitizer" --tool "$check" --error-exitcode 99 $(sanitizer_arguments "$check") "./$path"
      code=$?
      if [[ $code == 99 ]]; then
        row "$check $label" failed "$(grep 'SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//'), see $log"
      elif [[ $code == 0 ]] && ! grep -q 'SUMMARY: 0 ' "$log"; then
        row "$check $label" failed "compute-sanitizer printed no summary, see $log"
      else
        test_row "$check $label" "$code" "$log"
      fi
    done <"$bundle/tests.txt"
  done
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
  ours "$log" ./tools/gpu/bench_device "${arguments[@]}"
  code=$?
  if [[ $code == 125 ]]; then
    row benchmarks skipped "none of the $budget seconds are left"
    return
  fi
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
  printf '"%s"' "${text//[[:cntrl:]]/ }"
}

# Anew after each row: whoever ends us with no word still finds it.
write_json() {
  local line separator='' list=''
  for line in "${devices[@]}"; do
    list+=$separator$(quoted "$line")
    separator=', '
  done
  {
    printf '{"date": %s, "commit": %s,\n' "$(quoted "$date")" "$(quoted "$commit")"
    printf ' "devices": [%s],\n "passed": %d, "failed": %d, "skipped": %d,\n' "$list" "$passed" "$failed" "$skipped"
    printf ' "rows": [%s\n]}\n' "$rows_json"
  } >"$json.new" && mv "$json.new" "$json"
}

finish() {
  trap '' TERM INT HUP
  [[ ${#rows[@]} == 0 ]] || table
  write_json || failed=$((failed + 1))
  printf '\n%d passed, %d failed, %d skipped; %s\n' "$passed" "$failed" "$skipped" "$json"
  [[ $failed == 0 && $passed != 0 ]]
  exit
}

# shellcheck disable=SC2317 # The trap calls it.
told_to_end() {
  trap '' TERM INT HUP
  [[ -z $running ]] || kill "$running" 2>/dev/null
  row 'gpu_check' failed "was ended by a signal after $SECONDS s: the missing checks did not run"
  finish
}

date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
commit=$(cat "$bundle/commit" 2>/dev/null)
trap told_to_end TERM INT HUP
find_libraries
if look_at_devices; then
  printf '%d device(s):\n' "${#devices[@]}"
  printf '  %s\n' "${devices[@]}"
  run_tests kernels
  run_benchmarks
  run_tests others
  run_tests conformance
  [[ $quick == 1 ]] || run_sanitizer
fi
finish
