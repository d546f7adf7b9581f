#!/bin/bash
# Checks that gpu_tests.txt, beside this script, names every test that has the
# tag "gpu": required_gpus_test counts them there, without a call of Bazel.
#
#   tests/gpu/list.sh             prints "ok" or "FAILED" and what differs
#   tests/gpu/list.sh --write     writes the list
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

read -r -a bazel <<<"${BAZEL:-./bazelw}"
list=tests/gpu/gpu_tests.txt
sentence='every test that needs a GPU is in tests/gpu/gpu_tests.txt'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A tag is found in the text "[exclusive, gpu]".
if ! "${bazel[@]}" query --noshow_progress --keep_going=false \
  'attr(tags, "[\[ ]gpu[,\]]", tests(//...))' >"$work/found" 2>"$work/errors"; then
  printf 'FAILED  %s\n' "$sentence"
  sed 's/^/        /' "$work/errors"
  exit 1
fi
LC_ALL=C sort "$work/found" >"$work/sorted"

if [[ ${1:-} == --write ]]; then
  cp "$work/sorted" "$list"
elif ! diff "$list" "$work/sorted" >"$work/difference"; then
  printf 'FAILED  %s\n' "$sentence"
  sed 's/^/        /' "$work/difference"
  echo '        tests/gpu/list.sh --write'
  exit 1
fi
printf 'ok      %s\n' "$sentence"
