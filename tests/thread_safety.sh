#!/bin/bash
# Checks with clang that the libraries obey their annotations of locks
# (ABSL_GUARDED_BY and others), which GCC does not read:
#
#   tests/thread_safety.sh                     all of comm, join, bucket, zero_optim,
#                                              files and launch
#   tests/thread_safety.sh comm/work.cc ...    these sources
#
# Prints one line for each library, "ok" or "FAILED" first, and clang's messages;
# exits with 1 if one fails. Nothing is built. Sources whose includes are missing
# on this machine (CUDA, NCCL, images of kernels that Bazel has not built) are
# skipped, and named.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

sentence='keeps to its annotations of locks'
command -v clang++ >/dev/null || { echo "FAILED  each library $sentence: apt-get install clang"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/ours" "$work/built"
ln -s "$PWD" "$work/ours/evenkeel"
ln -s "$PWD/bazel-bin" "$work/built/evenkeel"  # Images of kernels.
flags=(-std=c++20 -Wthread-safety -Werror "-I$work/ours" "-I$work/built")
cuda=${CUDA_HOME:-/usr/local/cuda}/include
[[ -e $cuda/cuda_runtime.h ]] && flags+=(-isystem "$cuda")

# Parsing these headers is more than half of the time of most sources: once for all.
{
  printf '#include <%s>\n' algorithm chrono functional map memory sstream string vector
  printf '#include "absl/%s.h"\n' container/flat_hash_map status/statusor strings/str_{cat,format,join,split} \
    synchronization/mutex time/clock time/time
  printf '#include "evenkeel/%s.h"\n' comm/communicator comm/control/control comm/status bucket/parameter_set
} >"$work/common.h"
clang++ "${flags[@]}" -x c++-header "$work/common.h" -o "$work/common.pch" ||
  { echo "FAILED  each library $sentence: clang cannot precompile common.h"; exit 1; }
flags+=(-fsyntax-only -include-pch "$work/common.pch")
export work
export flags_text="${flags[*]}"

# check SOURCE: what clang says goes to $work/<library>.broken, or a line to left_out.
check() {
  local said flags missing library=${1%%/*}
  read -r -a flags <<<"$flags_text"
  said=$(clang++ "${flags[@]}" "$1" 2>&1) && return
  missing=$(sed -n "s/.*fatal error: '\(.*\)' file not found.*/\1/p" <<<"$said" | head -n 1)
  case $missing in
    cuda*.h | cub/* | nccl*.h | *image*.h) echo "        $1: no $missing here" >>"$work/left_out" ;;
    *) printf '%s\n' "$said" >>"$work/$library.broken" ;;
  esac
}
export -f check

if [[ $# -gt 0 ]]; then
  sources=("$@")
else
  mapfile -t sources < <(git ls-files -- comm join bucket zero_optim files launch |
    grep '\.cc$' | grep -Ev '(_test|_benchmark)\.cc$|/testing/')
fi
[[ ${#sources[@]} -gt 0 ]] || { echo "FAILED  each library $sentence: no sources"; exit 1; }
printf '%s\0' "${sources[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'check "$1"' check

failed=0
for library in $(printf '%s\n' "${sources[@]%%/*}" | sort -u); do
  if [[ -e $work/$library.broken ]]; then
    echo "FAILED  $library $sentence"
    sed 's/^/        /' "$work/$library.broken"
    failed=1
  else
    echo "ok      $library $sentence"
  fi
done
if [[ -e $work/left_out ]]; then
  echo 'left out:'
  sort "$work/left_out"
fi
exit $failed
