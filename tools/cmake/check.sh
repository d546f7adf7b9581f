#!/bin/bash
# Builds the sources of a release with CMake alone, and a project with what that installs:
#
#   tools/cmake/check.sh FOLDER          FOLDER is an unpacked evenkeel-VERSION-source.tar.gz
#
# Needs cmake, g++, pkg-config and the packages of docs/install.md. Prints one line per promise, "ok"
# or "FAILED" first, and exits with 1 if one is broken. Part of tools/release.sh and
# tests/systems/check.sh; not of .ci/run, since it compiles all of them.
set -uo pipefail
[[ $# == 1 ]] || { echo 'usage: tools/cmake/check.sh FOLDER' >&2; exit 1; }
cd "$1" || exit 1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
source tests/promise.sh

prints_no_warning() { ! grep -E '[Ww]arning' "$work/log"; }
builds() {
  { cmake -S . -B "$work/build" && cmake --build "$work/build" -j "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"; } 2>&1 |
    tee "$work/log"
}
trains() { tests/consumer_cmake/check.sh "$1" | tee "$work/consumer" && ! grep -q '^FAILED' "$work/consumer"; }

promise 'CMake alone builds the sources' builds
[[ $failed == 0 ]] || exit 1
promise 'without a warning' prints_no_warning
promise 'libevenkeel.so exports the symbols of the list' \
  join/abi/exports_test.sh "$work/build/libevenkeel.so" join/abi/exports.txt comm/version.h
promise 'it can be installed' cmake --install "$work/build" --prefix "$work/prefix"
promise 'a project builds with it, and its ranks train' trains "$work/prefix"

exit "$failed"
