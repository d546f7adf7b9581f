#!/bin/bash
# Installs evenkeel into an empty folder and builds this project against it:
# with CMake and with pkg-config. Then in another folder, into which the packed
# tarball is unpacked, its own example as that says.
#
#   tests/consumer_cmake/check.sh                          uses bazelw
#   BAZEL="bazel --batch" tests/consumer_cmake/check.sh    uses that
#   tests/consumer_cmake/check.sh FOLDER                   checks what is installed there, without Bazel
#
# Needs cmake, g++ and pkg-config, with Bazel also dpkg-dev. Prints one line per promise, "ok" or "FAILED"
# first, and exits with 1 if one is broken.
set -uo pipefail
[[ $# == 0 ]] || set -- "$(realpath "$1")"
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

read -r -a bazel <<<"${BAZEL:-../../bazelw}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# promise SENTENCE COMMAND...: the command succeeds; what it says is shown if not.
promise() {
  local sentence=$1
  shift
  if "$@" >"$work/out" 2>&1; then
    printf 'ok      %s\n' "$sentence"
  else
    printf 'FAILED  %s\n' "$sentence"
    sed 's/^/        /' "$work/out"
    failed=1
  fi
}

# The checks that follow would repeat an earlier failure, or test an earlier build.
needs_what_came_before() { [[ $failed == 0 ]] || exit 1; }

has_tools() {
  local tool
  for tool in cmake g++ pkg-config; do
    command -v "$tool" || { echo "apt-get install $tool"; return 1; }
  done
}

install_into() { "${bazel[@]}" run --noshow_progress //tools:install -- --prefix="$1"; }

# A second time nothing is written, and what an older version had is removed.
reinstalls() {
  echo 'int older;' >"$1/include/evenkeel/comm/older.h"
  echo include/evenkeel/comm/older.h >>"$1/share/evenkeel/installed_files.txt"
  install_into "$1" && [[ ! -e $1/include/evenkeel/comm/older.h ]] &&
    grep -q ' 0 files written, .* 1 removed' "$work/out"
}

# The rule names every target that is for users.
names_every_public_target() {
  local folders='//comm/... + //join/... + //bucket/... + //zero_optim/...' missing
  missing=$("${bazel[@]}" query --noshow_progress "
    attr(visibility, //visibility:public, kind('cc_library rule', $folders))
    except attr(testonly, 1, $folders)
    except labels(deps, //tools/installation:libraries)") || return 1
  echo "not in //tools/installation:libraries: $missing"
  [[ -z $missing ]]
}

# Each header is a program of its own, and includes evenkeel, Abseil, C++ and C.
header_compiles_alone() {
  local all strange
  all=$(g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror -MD \
    -MF /dev/stdout -I"$1/include" -include "evenkeel/$2" -x c++ /dev/null) || return 1
  strange=$(tr -s ' \\' '\n' <<<"$all" |
    grep -E '^/usr/(local/)?include/(gloo|openssl|nlohmann|nccl|cuda)|^/usr/local/cuda|/comm/(tcp|nccl)/' |
    grep -v "/evenkeel/$2$")
  [[ -z $strange ]] || { echo "evenkeel/$2 includes $strange"; return 1; }
}
export -f header_compiles_alone

headers_compile_alone() {
  local headers
  headers=$(cd "$1/include/evenkeel" && find . -name '*.h' | sed 's,^\./,,')
  echo "$(wc -l <<<"$headers") headers"
  [[ $(wc -l <<<"$headers") -ge 60 ]] &&
    xargs -P "$(nproc)" -I{} bash -c 'header_compiles_alone "$0" "$1"' "$1" {} <<<"$headers"
}

# Under an older C++ a header for users says what it needs, or it compiles. GCC reads a whole header before it parses it,
# so the preprocessor alone finds the same first error, in a tenth of the time.
header_says_what_it_needs() {
  local command=(g++ -std=c++17 "-I$1/include" -include "evenkeel/$2" -x c++ /dev/null) first
  first=$("${command[@]}" -E -o /dev/null 2>&1 | grep -m1 -w error)
  [[ $first == *'headers need C++20: '* ]] || "${command[@]}" -fsyntax-only || { echo "evenkeel/$2: $first"; return 1; }
}
export -f header_says_what_it_needs

headers_say_what_they_need() {
  local headers header there=''
  headers=$("${bazel[@]}" query --noshow_progress 'labels(hdrs, labels(deps, //tools/installation:libraries))' |
    sed -n 's,:,/,; s,^//\(.*\.h\)$,\1,p') || return 1
  # A build without CUDA installs none of CUDA's.
  for header in $headers; do [[ ! -e $1/include/evenkeel/$header ]] || there+=$header$'\n'; done
  headers=${there%$'\n'}
  [[ $(wc -l <<<"$headers") -ge 60 ]] &&
    xargs -P "$(nproc)" -I{} bash -c 'header_says_what_it_needs "$0" "$1"' "$1" {} <<<"$headers"
}

cmake_builds() { # prefix, build folder
  cmake -S . -B "$2" -DCMAKE_PREFIX_PATH="$1" -DCMAKE_BUILD_TYPE=Release && cmake --build "$2" -j "$(nproc)"
}

pkg_config_builds() { # prefix, program
  local flags
  flags=$(PKG_CONFIG_PATH="$1/lib/pkgconfig" pkg-config --cflags --libs --static evenkeel) || return 1
  # shellcheck disable=SC2086  # a list of words
  g++ -std=c++20 -o "$2" train.cc fit_line.cc $flags
}

# Two processes with the backend $2 find the same line.
trains() { # program, backend
  local job rank ranks=() all=0
  job=$(mktemp -d -p "$work")
  for rank in 0 1; do
    EVENKEEL_JOB=check EVENKEEL_STORE=$job/ RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 \
      timeout 60 "$1" "$2" >"$job.$rank" 2>&1 &
    ranks+=($!)
  done
  for rank in "${ranks[@]}"; do wait "$rank" || all=1; done
  cat "$job".[01]
  [[ $all == 0 && $(cat "$job".[01]) == $'2 ranks: y = 2.00 x -1.00\n2 ranks: y = 2.00 x -1.00' ]]
}

# A project with other expectations is told so before it builds.
cmake_refuses() { # prefix, arguments of find_package, what it says
  mkdir -p "$work/refused" && rm -rf "$work/refused/build"
  printf 'cmake_minimum_required(VERSION 3.21)\nproject(p LANGUAGES CXX)\nfind_package(evenkeel %s)\n' "$2" \
    >"$work/refused/CMakeLists.txt"
  cmake -S "$work/refused" -B "$work/refused/build" -DCMAKE_PREFIX_PATH="$1" >"$work/said" 2>&1
  local status=$?
  cat "$work/said"
  [[ $status != 0 ]] && tr -s ' \n' ' ' <"$work/said" | grep -qF "$3"
}

links_no() { # program, pattern
  ldd "$1" && ! ldd "$1" | grep -qE "$2"
}

# Nor do they name a folder for the loader, or of this machine.
names_no_nccl() { # prefix
  ! grep -rnE 'lnccl|libnccl|rpath|-L/' "$1/lib/cmake" "$1/lib/pkgconfig"
}

# evenkeel_HAS_NCCL is true if the header is there.
says_whether_it_has_nccl() { # prefix
  local has=FALSE
  [[ -e $1/include/evenkeel/comm/nccl/nccl.h ]] && has=TRUE
  grep "set(evenkeel_HAS_NCCL $has)" "$1/lib/cmake/evenkeel/evenkeelConfig.cmake"
}

pack_into() { "${bazel[@]}" run --noshow_progress //tools:package -- --to="$1"; }

packs_the_same_again() { pack_into "$1.again" && diff -r "$1" "$1.again"; }

# All files belong to root, and the package depends on the libraries of the programs, none of them of CUDA.
is_for_apt() { # package
  dpkg-deb -c "$1" | grep -v 'root/root' && return 1
  dpkg-deb -f "$1" Depends | grep -iE 'cuda|cudnn|cublas|nccl|nvidia' && return 1
  dpkg-deb -c "$1" | grep ' \./usr/bin/evenkeel-launch$' && dpkg-deb -f "$1" Depends | grep 'libabsl-dev.*libssl-dev'
}

unpack() { mkdir "$2" && tar -C "$2" --strip-components=1 -xzf "$1"; } # tarball, folder

# As on a system of another release: the script is a program's, what it starts is linked with a library that has gone.
lacks_a_library() ( # prefix
  mkdir -p "$work/lacks/bin" "$work/lacks/libexec/evenkeel" && cd "$work/lacks" || return 1
  "$1/bin/evenkeel-top" --help | head -n 1 | grep '^evenkeel-top: ' || return 1
  echo 'void gone() {}' | g++ -shared -fPIC -x c++ - -o libgone.so.7 -Wl,-soname,libgone.so.7 &&
    echo 'void gone(); int main() { gone(); }' | g++ -x c++ - -o libexec/evenkeel/evenkeel-top -L. -l:libgone.so.7 || return 1
  rm libgone.so.7
  cp "$1/bin/evenkeel-top" bin/ && cp -r "$1/share" . || return 1
  ! bin/evenkeel-top 2>said && cat said && [[ $(wc -l <said) == 1 ]] &&
    grep "^evenkeel-top: this system lacks libgone.so.7; install .*apt-get install .*libmicrohttpd" said || return 1
  sed -i "s/^built_on=.*/built_on='Other 1'/" bin/evenkeel-top
  ! bin/evenkeel-top 2>said && cat said && grep 'lacks libgone.so.7; it was built on Other 1, and this is Debian' said
)

launches() { # prefix, program
  "$1/bin/evenkeel-launch" --nproc=2 -- "$2" auto && [[ $(<"$work/out") == $'2 ranks: y = 2.00 x -1.00\n2 ranks: y = 2.00 x -1.00' ]]
}

# The commands of its README, in an empty folder.
example_works() ( # prefix
  mkdir "$work/user" && cd "$work/user" || return 1
  lines=$(sed -n "/^cp -r/,/^\`\`\`/{/^\`\`\`/!p}" "$1/share/doc/evenkeel/examples/README.md")
  [[ $lines == *$'\n'*evenkeel-launch* ]] || { echo "commands: $lines"; return 1; }
  CMAKE_PREFIX_PATH=$1 PATH=$1/bin:$PATH bash -euxc "${lines//\/usr\/share/\"$1/share\"}" &&
    grep -q '^rank=1 steps=.* loss=' "$work/out"
)

prefix=$work/first
moved="$work/moved to another place"
promise 'cmake, g++ and pkg-config are here' has_tools
needs_what_came_before
if [[ $# != 0 ]]; then
  promise "$1 can be copied" cp -a "$1" "$prefix"
else
  promise 'bazel run //tools:install fills an empty folder' install_into "$prefix"
  needs_what_came_before
  promise 'installing again writes nothing and removes what is obsolete' reinstalls "$prefix"
  promise 'every public target is installed' names_every_public_target
  promise 'headers under -std=c++17 report the standard that they need' headers_say_what_they_need "$prefix"
  promise 'bazel run //tools:package packs it' pack_into "$work/packed"
  needs_what_came_before
  promise 'packing again gives the same bytes' packs_the_same_again "$work/packed"
  promise 'the .deb belongs to root and depends on the libraries' is_for_apt "$work"/packed/*.deb
  promise 'the tarball can be unpacked' unpack "$work"/packed/*.tar.gz "$moved"
fi
promise 'each installed header compiles alone, without Gloo, OpenSSL, NCCL or JSON' headers_compile_alone "$prefix"

promise 'what CMake and pkg-config read links no NCCL' names_no_nccl "$prefix"
promise 'and says whether the backend nccl is there' says_whether_it_has_nccl "$prefix"
promise 'a CMake project builds' cmake_builds "$prefix" "$work/build"
promise 'its ranks train over shared memory' trains "$work/build/train" shm
promise 'its ranks train over TCP' trains "$work/build/train" tcp
promise 'its ranks link no NCCL' links_no "$work/build/train" nccl
promise 'its planner runs' "$work/build/planner"
promise 'its planner links no Gloo, OpenSSL, NCCL or CUDA' links_no "$work/build/planner" 'gloo|crypto|nccl|cuda'
promise 'CMake refuses another minor version' \
  cmake_refuses "$prefix" '0.3 CONFIG REQUIRED' 'compatible with requested version "0.3"'
promise 'CMake refuses a part that is not there' \
  cmake_refuses "$prefix" 'CONFIG REQUIRED COMPONENTS comm sails' 'evenkeel has no part sails'

[[ -e $moved ]] || mv "$prefix" "$moved"
if [[ -e $moved/share/doc ]]; then
  promise "a program of the tarball that lacks a library says which, and what to install" lacks_a_library "$moved"
  promise "the tarball's example builds and trains as its README says, in any folder" example_works "$moved"
else
  promise 'the CMake project builds in any folder' cmake_builds "$moved" "$work/build_moved"
  promise 'and trains, started by the launcher there' launches "$moved" "$work/build_moved/train"
fi
mv "$moved" "$work/moved"  # pkg-config's output is split at spaces
promise 'pkg-config and one line of g++ build, too' pkg_config_builds "$work/moved" "$work/train"
promise 'and what they built trains' trains "$work/train" tcp

exit $failed
