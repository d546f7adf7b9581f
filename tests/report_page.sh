#!/bin/bash
# Checks what the script of a report's page shows of example runs, without a browser: report_page.js.
#
#   tests/report_page.sh                              uses bazelw
#   BAZEL="bazel --batch" tests/report_page.sh        uses that
#
# Needs node. Prints one line per promise, "ok" or "FAILED" first, and exits with 1 if one is broken.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

read -r -a bazel <<<"${BAZEL:-./bazelw}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
source tests/promise.sh

pages() {
  command -v node || { echo 'apt-get install nodejs'; return 1; }
  # The link bazel-bin stays as it is.
  "${bazel[@]}" run --experimental_convenience_symlinks=ignore //trainer/report:example_pages -- "$work"
}

shows() { # page texts...
  local text
  timeout 60 node tests/report_page.js "$work/$1.html" >"$work/shown" || return 1
  for text in "${@:2}"; do
    grep -qF -- "$text" "$work/shown" || { echo "it lacks: $text"; cat "$work/shown"; return 1; }
  done
}

promise 'pages of example runs are written' pages
promise 'the page of a resumed run shows all of its parts' shows resumed '7 charts' 'Test loss' 'epoch 2' \
  'first exhausted after step 93, shadowed 14 steps' 'step 151' 'with 3 ranks' 'cost the group 25.0 %' \
  'bucket 1, 1.0 MiB' 'reduced for 2.00 ms' 'After step 1' 'process at most 300 MiB' 'Steps are counted from 1.'
promise 'the page of a run that lost a rank shows until which step it had it' shows lost '8 charts' \
  'until step 160' 'rank 2, until step 150' 'step 161' '2 at the end' 'step 3'
promise 'the page of a run that diverged shows its results' shows diverged \
  'The run did not come to its end. ' 'Test bits per byte' 'inf' 'training nan'
promise 'the page of a run without a step is no empty page' shows empty '0 charts' 'No step was run.' 'Written by evenkeel'
promise 'the page of a forecast shows its curves and numbers' shows forecast '1 charts' 'Duration' 'ranks 64' '64 ranks'

exit "$failed"
