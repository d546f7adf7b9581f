#!/bin/bash
# Checks that libevenkeel.so exports the symbols of exports.txt, and has the ABI number of its version:
#
#   ./bazelw test --config=full //join/abi:exports_test
#   ./bazelw run //join/abi:exports_test -- --write      after a change on purpose
set -euo pipefail
library=$1 list=$2 version=$3

exports() { # One line per symbol, after the name by which programs find the library.
  readelf -d "$library" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p'
  nm -D --defined-only --format=posix "$library" | cut -d ' ' -f 1 | LC_ALL=C sort
}

if [[ ${4:-} == --write ]]; then
  exports >"$BUILD_WORKSPACE_DIRECTORY/$list"
  exit
fi

status=0
minor=$(sed -n 's/^#define EVENKEEL_BUILD "\([0-9]*\.[0-9]*\)\..*/\1/p' "$version")
if [[ $(exports | head -n 1) != "libevenkeel.so.$minor" ]]; then
  echo "The library is called $(exports | head -n 1), and comm/version.h says $minor: set abi = \"$minor\" in join/abi/BUILD."
  status=1
fi
if ! difference=$(diff "$list" <(exports)); then
  echo 'libevenkeel.so and join/abi/exports.txt differ; ">" is in the library alone, "<" in the list alone:'
  grep '^[<>]' <<<"$difference" | c++filt
  echo 'Programs need every symbol of the list until the next minor version. After a change on purpose renew it:'
  echo '  ./bazelw run //join/abi:exports_test -- --write'
  status=1
fi
exit "$status"
