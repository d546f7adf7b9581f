#!/bin/bash
# Checks that everything that docs/features.md names exists:
#
#   bazel test //tests:features_test, or tests/features_test.sh
#
# Every linked file, every `//package:target`, and every `Suite.Name` of a test,
# which must be in one of the files that its row links. Rows count, too: none of
# the numbered ones may be missing or out of order. Prints what is missing, and
# exits with 1 if anything is.
set -uo pipefail
page=docs/features.md
[[ -e $page ]] || cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# The files are in the source tree, wherever the test runs.
cd "$(dirname "$(readlink -f "$page")")/.." || exit 1

failed=0
missing() {
  printf '%s:%d: %s\n' "$page" "$line_number" "$1"
  failed=1
}

# has_target //package:name
has_target() {
  local label=${1#//} package name
  package=${label%%:*}
  name=${label##*:}
  [[ $label == *:* ]] || name=${package##*/}
  grep -q "name = \"$name\"" "${package:-.}/BUILD" 2>/dev/null
}

line_number=0
links=0
names=0
rows=''
while IFS= read -r line; do
  line_number=$((line_number + 1))
  [[ $line =~ ^\|\ ([CBJZT][0-9]+)\ \| ]] && rows+="${BASH_REMATCH[1]} "
  mapfile -t files < <(grep -o '](\.\./[^)#]*' <<<"$line" | cut -c6-)
  for file in "${files[@]}"; do
    links=$((links + 1))
    [[ -e $file ]] || missing "no $file"
  done
  while IFS= read -r label; do
    [[ -z $label ]] || has_target "$label" || missing "no target $label"
  done < <(grep -o '`//[^`]*`' <<<"$line" | tr -d '`')
  while IFS=. read -r suite name; do
    [[ -z $suite ]] && continue
    names=$((names + 1))
    grep -qE "\($suite, $name\)" "${files[@]}" /dev/null 2>/dev/null ||
      missing "no test $suite.$name in ${files[*]}"
  done < <(grep -oE '`[A-Z][A-Za-z0-9]*Test\.[A-Z][A-Za-z0-9]*`' <<<"$line" | tr -d '`')
done <"$page"

expected=''
for last in C27 B64 J41 Z29 T13; do
  for ((n = 1; n <= ${last:1}; ++n)); do expected+="${last:0:1}$n "; done
done
if [[ $rows != "$expected" ]]; then
  diff <(tr ' ' '\n' <<<"$expected") <(tr ' ' '\n' <<<"$rows")
  line_number=1 missing 'rows are missing, or out of order'
fi
# A page that this script can't read must not pass.
((links > 200 && names > 100)) || line_number=1 missing "only $links links and $names tests found"
exit $failed
