#!/bin/bash
# Checks that the tests notice when a promise is broken: each mutant of
# tests/mutants/*.txt is one small change, and names the test that must fail.
#
#   tests/mutants.sh                          # all of them: run by hand, takes long
#   tests/mutants.sh --list                   # lists them
#   tests/mutants.sh bucket 'hub_*'           # of bucket.txt, and those of these names
#
# Ends with 1 if a mutant survives; `--help` has the options.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/mutants/run.py" "$@"
