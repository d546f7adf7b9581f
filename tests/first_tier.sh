#!/bin/bash
# Checks the first tier, which tools/build_defs/first_tier.bzl lists:
#
#   tests/first_tier.sh                          uses ./bazelw
#   BAZEL="bazel --batch" tests/first_tier.sh    uses that command instead
#
# Checks that each promise of docs/internals.md and each program of the docs has a test in the list,
# that these tests exist and need no GPU, and that `./bazelw test //...` runs exactly these. Prints
# one line per check, "ok" or "FAILED" first, and exits with 1 if one fails.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/first_tier.py" "$@"
