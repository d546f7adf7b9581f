#!/bin/bash
# Builds and runs this workspace's programs, and checks their dependencies:
# Gloo, oneDNN and CUDA only in programs that depend on them.
#
#   tests/consumer/check.sh                          uses bazelw
#   BAZEL="bazel --batch" tests/consumer/check.sh    uses that
#
# Prints one line per promise, "ok" or "FAILED" first, and exits with 1 if one
# is broken.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

read -r -a bazel <<<"${BAZEL:-../../bazelw}"
out=$(mktemp)
trap 'rm -f "$out"' EXIT
failed=0

programs=(planner tcp join zero_optim)
heavy='lib(gloo|dnnl|gomp|cudart|cublas|cublasLt|cudnn|nccl)[.]'

# promise SENTENCE COMMAND...: the command succeeds; what it says is shown if not.
promise() {
  local sentence=$1
  shift
  if "$@" >"$out" 2>&1; then
    printf 'ok      %s\n' "$sentence"
  else
    printf 'FAILED  %s\n' "$sentence"
    sed 's/^/        /' "$out"
    failed=1
  fi
}

# Succeeds if the heavy libraries that a program links are exactly $2.
links() {
  local all found
  all=$(ldd "$bin/$1") || return 1
  found=$(grep -oE "$heavy" <<<"$all" | sort -u | tr -d . | xargs)
  echo "expected '$2', found '$found' in:"
  echo "$all"
  [[ "$found" == "$2" ]]
}

# Which of the repositories a user might not want a program's targets know is
# exactly $2.
knows() {
  local all found
  all=$("${bazel[@]}" query --noshow_progress "deps(//:$1)") || return 1
  found=$(grep -oE '^@(gloo|onednn|cuda|com_google_googletest)//' <<<"$all" |
    sort -u | tr -d / | xargs)
  echo "expected '$2', found '$found'"
  [[ -n "$all" && "$found" == "$2" ]]
}

promise 'a workspace that takes evenkeel in builds its programs' \
  "${bazel[@]}" build --noshow_progress //...
[[ $failed == 0 ]] || exit 1  # what lies there is from an earlier build
bin=$("${bazel[@]}" info bazel-bin 2>/dev/null)

for program in "${programs[@]}"; do
  promise "$program runs" "$bin/$program"
done
promise 'the planner links no Gloo, oneDNN or CUDA' links planner ''
promise 'the planner knows no Gloo, oneDNN, CUDA or GoogleTest' knows planner ''
promise 'the backend over TCP links no Gloo, oneDNN or CUDA' links tcp ''
promise 'the backend over TCP knows no Gloo, oneDNN, CUDA or GoogleTest' knows tcp ''
promise 'join links no Gloo, oneDNN or CUDA' links join ''
promise 'join knows no Gloo, oneDNN, CUDA or GoogleTest' knows join ''
promise 'zero_optim links no Gloo, oneDNN or CUDA' links zero_optim ''
promise 'zero_optim knows no Gloo, oneDNN, CUDA or GoogleTest' knows zero_optim ''

exit $failed
