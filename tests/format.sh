#!/bin/bash
# Checks with clang-format that all sources have the format of .clang-format, and that none of
# them is empty:
#
#   tests/format.sh           lists the files that do not
#   tests/format.sh --fix     formats them
#
# Prints a line for each, "ok" or "FAILED" first, and exits with 1 if one is "FAILED".
# Other versions than Debian 12's clang-format 14 may differ from it in details.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

sentence='the sources look as .clang-format says'
command -v clang-format >/dev/null || { echo "FAILED  $sentence: apt-get install clang-format"; exit 1; }

sources() { git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh'; }
if [[ ${1:-} == --fix ]]; then
  sources | xargs -0 -n 50 -P "$(nproc)" clang-format -i
  exit
fi
failed=0
empty=$(sources | xargs -0 -n 50 sh -c 'find "$@" -empty' _)
if [[ -z $empty ]]; then
  echo 'ok      no source is empty'
else
  echo 'FAILED  no source is empty:'
  sed 's/^/        /' <<<"$empty"
  failed=1
fi
differ=$(sources | xargs -0 -n 50 -P "$(nproc)" clang-format --dry-run -Werror 2>&1 |
  sed -n 's/^\([^ :]*\):[0-9].*/\1/p' | sort | uniq -c)
if [[ -z $differ ]]; then
  echo "ok      $sentence"
else
  echo "FAILED  $sentence; tests/format.sh --fix mends these:"
  sed 's/^/        /' <<<"$differ"
  failed=1
fi
exit "$failed"
