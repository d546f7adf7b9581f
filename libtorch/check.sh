#!/bin/bash
# Checks the door for libtorch's users: the tests, parity with PyTorch's DistributedDataParallel, and
# the examples as a CMake project of its own.
#
#   libtorch/check.sh
#   libtorch/check.sh --all   parity over 2,000 steps, and not 500
#
# Uses the Python of EVENKEEL_TORCH_PYTHON, which has torch 2.15, else the environment that
# python/check.sh makes. Where there is neither, it prints why, and checks nothing. Needs cmake.
# Prints "ok ..." or "FAILED ..." for each promise.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

read -r -a bazel <<<"${BAZEL:-$PWD/bazelw}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
export OMP_NUM_THREADS=1

source tests/promise.sh

steps=500
[[ ${1:-} == --all ]] && steps=2000
python=${EVENKEEL_TORCH_PYTHON:-${XDG_CACHE_HOME:-$HOME/.cache}/evenkeel/torch-2.15.0/bin/python}
if ! "$python" -c 'import torch' >"$work/out" 2>&1; then
  echo "skipped: $python has no torch: $(tail -n 1 "$work/out")"
  exit 0
fi
flags=(--noshow_progress --repo_env=EVENKEEL_TORCH_PYTHON="$python")

promise 'tests of the steps, the optimizers and the layers' \
  "${bazel[@]}" test "${flags[@]}" --nocache_test_results --test_tag_filters= //libtorch:all
promise 'the parity program builds' "${bazel[@]}" build "${flags[@]}" //libtorch/parity //tools:launch
promise 'it trains as DistributedDataParallel, bit for bit' \
  timeout 900 "$python" libtorch/parity/parity.py --program=bazel-bin/libtorch/parity/parity --steps="$steps"

fashion() {
  local file
  mkdir "$work/fashion" && for file in /usr/share/datasets/fashion-mnist/*.gz; do
    gunzip -c "$file" >"$work/fashion/$(basename "$file" .gz)" || return 1
  done
}

# The numbers that the examples end with are good enough for them.
trains_cnn() { # program
  fashion && timeout 300 bazel-bin/tools/launch --nproc=2 -- "$1" --data="$work/fashion" | tee "$work/cnn" &&
    awk '/accuracy/ { good = $NF > 0.8 } END { exit !good }' "$work/cnn"
}
trains_dcgan() { # program
  timeout 300 bazel-bin/tools/launch --nproc=3 -- "$1" --data="$work/fashion" --images=3000 | tee "$work/dcgan" &&
    awk '/epoch/ { good = $NF < 0.15 } END { exit !good }' "$work/dcgan"
}
trains_gpt() { # ranks program
  timeout 300 bazel-bin/tools/launch --nproc="$1" -- "$2" --text=docs/internals.md --epochs=3 | tee "$work/gpt" &&
    awk '/loss/ { good = $4 + 0 < 3 } END { exit !good }' "$work/gpt"
}

builds_with_cmake() {
  "${bazel[@]}" run --noshow_progress //tools:install -- --prefix="$work/evenkeel" &&
    cmake -S libtorch/examples -B "$work/build" -DCMAKE_PREFIX_PATH="$work/evenkeel" \
      -Devenkeel_TORCH="$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')" &&
    cmake --build "$work/build" -j "$(nproc)"
}
promise 'the examples are a CMake project over an installed evenkeel' builds_with_cmake
promise 'the CNN learns Fashion-MNIST' trains_cnn "$work/build/cnn"
promise 'the DCGAN learns from unequal parts of it' trains_dcgan "$work/build/dcgan"
promise 'the GPT learns with 2 ranks' trains_gpt 2 "$work/build/gpt"
promise 'and with 3' trains_gpt 3 "$work/build/gpt"

exit "$failed"
