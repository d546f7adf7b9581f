#!/bin/bash
# Checks the check of commit messages, .githooks/commit-msg. Prints one line per promise, "ok" or "FAILED" first,
# and exits with 1 if one is broken.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
source tests/promise.sh

accepts() { printf '%b' "$1" >"$work/message" && .githooks/commit-msg "$work/message"; }
refuses() { # message, sentence
  ! accepts "$1" 2>"$work/said" && grep -F "$2" "$work/said"
}

seventy_two='bucket: '$(printf 'ü%.0s' {1..64})
promise 'a subject of 72 characters and a body are accepted' accepts "$seventy_two\n\nBecause.\n"
promise 'one of 73 is refused' refuses "${seventy_two}x\n\nBecause.\n" 'the subject has 73 characters'
promise 'a second line that is not empty is refused' refuses 'comm: a\nBecause.\n' 'the second line is not empty'
promise 'a message without a body is refused' refuses 'comm: a\n\nSigned-off-by: A <a@b>\n# why\n' 'has no body'
promise 'comments and the difference below the scissors do not count' \
  accepts "# $seventy_two long\ncomm: a\n\nBecause.\n# ------------------------ >8 ------------------------\ndiff\n"
promise 'merges, reverts and fixups need no body' eval \
  "accepts \"Merge branch 'x'\n\" && accepts 'Revert \"comm: a\"\n' && accepts 'fixup! comm: a\n'"

exit "$failed"
