#!/bin/bash
# Checks the code of the kernels, on a processor of any kind: the functions for AVX512 use its
# registers, and no product and sum are contracted, which would round differently.
#
#   vectorised_test.sh ARCHIVE...
set -uo pipefail
failed=0
for archive in "$@"; do
  code=$(objdump -d "$archive") || exit 1
  grep -q 'file format elf64-x86-64' <<<"$code" || { echo "skipped: not x86-64"; exit 0; }
  nm "$archive" | grep -E '__([at]san|ubsan)_' >/dev/null && { echo "skipped: built with a sanitizer"; exit 0; }
  wide=$(grep -c '%zmm' <<<"$code")
  contracted=$(grep -cE 'vfn?m(add|sub)' <<<"$code")
  echo "$archive: $wide instructions with zmm registers, $contracted contracted"
  if ((wide < 300 || contracted > 0)); then
    echo "FAILED: GCC compiled it with other options than its target names"
    failed=1
  fi
done
exit $failed
