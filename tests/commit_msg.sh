#!/bin/bash
# Checks the check of commit messages, .githooks/commit-msg. Prints one line per promise, "ok" or "FAILED" first,
# and exits with 1 if one is broken.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
source tests/promise.sh

# Git sets GIT_EDITOR to ":" if it opens no editor.
accepts() { printf '%b' "$1" >"$work/message" && GIT_EDITOR=${2:-vi} .githooks/commit-msg "$work/message"; }
refuses() { # message, sentence[, editor]
  ! accepts "$1" "${3:-}" 2>"$work/said" && grep -F "$2" "$work/said"
}

seventy_two='bucket: '$(printf 'ü%.0s' {1..64})
promise 'a subject of 72 characters and a body are accepted' accepts "$seventy_two\n\nBecause.\n"
promise 'one of 73 is refused' refuses "${seventy_two}x\n\nBecause.\n" 'the subject has 73 characters'
promise 'a second line that is not empty is refused' refuses 'comm: a\nBecause.\n' 'the second line is not empty'
promise 'a message without a body is refused' refuses 'comm: a\n\nSigned-off-by: A <a@b>\n# why\n' 'has no body'
promise 'a body of one line that begins like a trailer is accepted' \
  accepts 'comm: fix the hub\n\nMeasured: 3 ms before, 1 ms after.\n'
promise 'comments and the difference below the scissors do not count' \
  accepts "# $seventy_two long\ncomm: a\n\nBecause.\n# ------------------------ >8 ------------------------\ndiff\n"
promise 'without an editor a line that begins with # is text' \
  refuses "#46: $seventy_two\n\nBecause.\n" 'the subject has 77 characters' :
promise 'but not what Git writes into the message of a squash' \
  accepts "# This is a combination of 2 commits.\n# This is the 1st commit message:\n\ncomm: a\n\nBecause.\n" :
promise 'merges, reverts and fixups need no body' eval \
  "accepts \"Merge branch 'x'\n\" && accepts \"Merge remote-tracking branch 'o/x'\n\" && accepts 'Merge pull request #1 from x\n' &&
   accepts 'Revert \"comm: a\"\n' && accepts 'fixup! comm: a\n'"
promise 'a subject that only begins with "Merge" does' refuses 'Merge everything into one file\n' 'has no body'

exit "$failed"
