#!/bin/bash
# Checks with clang-format that all sources have the format of .clang-format, that none is empty,
# that the sources that comments name exist, and that entries of the changelog are short:
#
#   tests/format.sh           lists the others
#   tests/format.sh --fix     formats them
#
# Prints one line per check, "ok" or "FAILED" first, and exits with 1 if a check fails.
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
mapfile -d '' files < <(sources)
empty=()
for file in "${files[@]}"; do
  [[ -s $file ]] || empty+=("$file")
done
if [[ ${#files[@]} != 0 && ${#empty[@]} == 0 ]]; then
  echo 'ok      no source is empty'
else
  echo "FAILED  no source is empty: ${empty[*]:-git lists no sources}"
  failed=1
fi
# As a path from the top or the end of one. Headers of others are in comments as <omp.h>.
unknown=$(git ls-files | awk '
  FNR == NR {
    for (name = $0; name != ""; name = index(name, "/") ? substr(name, index(name, "/") + 1) : "") have[name] = 1
    next
  }
  match($0, /^[^:]*:[0-9]*:/) {
    place = substr($0, 1, RLENGTH); rest = substr($0, RLENGTH + 1)
    while (match(rest, /(^|[^A-Za-z0-9_\/.<$-])[A-Za-z0-9_][A-Za-z0-9_\/-]*\.(h|cc|cu)([^A-Za-z0-9_\/.]|\.?$|\. )/)) {
      name = substr(rest, RSTART, RLENGTH); rest = substr(rest, RSTART + RLENGTH - 1)
      gsub(/^[^A-Za-z0-9_]|[^A-Za-z0-9_]+$/, "", name); sub(/^evenkeel\//, "", name)
      if (!(name in have)) print place, name
    }
  }' - <(sources | xargs -0 grep -nE '^ *//.*\.(h|cc|cu)\b'))
if [[ -z $unknown ]]; then
  echo 'ok      the sources that comments name exist'
else
  echo 'FAILED  the sources that comments name exist; not these:'
  sed 's/^/        /' <<<"$unknown"
  failed=1
fi
long=$(awk '/^- / { entry = FNR; lines = 0 } !/^(- |  )/ { entry = 0 } entry && ++lines == 3 { print "CHANGELOG.md:" entry }' CHANGELOG.md)
if [[ -z $long ]]; then
  echo 'ok      entries of the changelog have at most two lines'
else
  echo 'FAILED  entries of the changelog have at most two lines; these have more:'
  sed 's/^/        /' <<<"$long"
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
