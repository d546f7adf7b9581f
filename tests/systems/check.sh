#!/bin/bash
# Builds and tests evenkeel on a fresh Debian 12 or 13, as in a fresh clone:
#
#   tests/systems/check.sh bookworm                   # Debian 12
#   tests/systems/check.sh trixie --clang             # Debian 13, and the libraries and their tests with its clang, too
#   tests/systems/check.sh trixie --root=/srv/trixie  # keeps that root, or takes it again with what is installed in it
#   tests/systems/check.sh trixie --jobs=2            # leaves processors to others
#
# Makes a root with debootstrap, clones HEAD into it (not what is uncommitted), and runs there both commands of the README,
# the checks of consumers, a release's sources with CMake, and the package. Only bazelw installs packages for the README's
# commands, and no build of another system is used. Ends with a table of the minutes, and with the lines of what failed.
# Exits with 0 if nothing failed and no compiler, linker or CMake printed a warning.
#
# Needs 12 GB below /var/tmp (or TMPDIR) and a network, or the proxies that http_proxy and https_proxy name. Exits with 77
# if it is not run by root, or debootstrap or namespaces are missing. FOLDER is new, empty, or a root that this script has
# made. Mounts and processes are in namespaces of their own, so they end with it, however it ends.
#
# shellcheck disable=SC2317  # stage() calls its arguments
set -uo pipefail
usage() { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
skip() { echo "skipped: $*"; exit 77; }
refuse() { echo "--root=$root: $*" >&2; exit 2; }

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
suite='' root='' clang='' jobs=''
for argument in "$@"; do
  case $argument in
    bookworm | trixie) suite=$argument ;;
    --root=?*) root=$(realpath -m "${argument#--root=}") ;;
    --jobs=?*) jobs="--jobs=${argument#--jobs=}" ;;
    --clang) clang=1 ;;
    *) usage ;;
  esac
done
[[ $suite ]] || usage
marker=$root/etc/made_by_evenkeel_systems_check  # What runs in a root deletes files of it.

[[ $(id -u) == 0 ]] || skip 'only root can make a root for another system'
command -v debootstrap >/dev/null || skip 'debootstrap is missing; apt-get install debootstrap'
if [[ -z ${EVENKEEL_SYSTEMS_INSIDE:-} ]]; then
  reason=$(unshare --mount --pid --fork true 2>&1) || skip "no namespaces here: $reason"
  made='' inside='' work=$(mktemp -d)
  # The mounts end with the namespace, so nothing but the root's own files is removed.
  clean_up() {
    [[ -z $inside ]] || { kill -KILL "$inside" && wait "$inside"; } 2>/dev/null
    rm -rf "$work"
    [[ -z $made ]] || rm -rf --one-file-system "$made"
  }
  trap clean_up EXIT
  trap 'exit 130' INT TERM
  if [[ $root ]]; then
    mkdir -p "$root" || refuse 'no folder can be made there'
  else
    root=$(mktemp -d -p "${TMPDIR:-/var/tmp}") && made=$root || exit 1
    marker=$root/${marker#/}
  fi
  exec {lock}<"$root" || exit 1
  flock -n "$lock" || refuse 'another check uses it'
  [[ $root != / ]] || refuse 'this is the system itself'
  [[ -e $marker || -z $(ls -A "$root") ]] || refuse 'it is neither empty nor a root that this script has made'
  # shellcheck disable=SC2086  # no argument if empty
  EVENKEEL_SYSTEMS_INSIDE=$work unshare --mount --pid --fork --kill-child --propagation private \
    "$repository/tests/systems/check.sh" "$suite" --root="$root" ${clang:+--clang} $jobs &
  inside=$!
  wait "$inside"
  status=$?
  inside=''
  exit "$status"
fi

work=$EVENKEEL_SYSTEMS_INSIDE
failed=0

proxies=()
for name in http_proxy https_proxy no_proxy; do [[ -z ${!name:-} ]] || proxies+=("$name=${!name}"); done

# inside MINUTES COMMAND: runs it in the root's clone, with nothing of this system's environment but its proxies.
inside() {
  timeout -k 30 "$(($1 * 60))" chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    DEBIAN_FRONTEND=noninteractive "${proxies[@]}" bash -c "cd /home/evenkeel && $2" </dev/null
}

tools='cc1|cc1plus|lto1|gcc|g\+\+|cc|c\+\+|clang|clang\+\+|ld(\.[a-z]+)?'
warning="^([^ ]+:[0-9]+|([^ ]*[/-])?($tools)(-[0-9]+)?): (.*: )?warning: |: warning: .*deprecated|^CMake .*Warning"

# stage TEXT COUNT COMMAND...: one row of the table. COUNT prints "passed failed skipped" of the output $work/out; with
# status $1 the command ended.
stage() {
  local text=$1 count=$2 began=$SECONDS status passed broken skipped warnings seconds
  shift 2
  printf '\n== %s\n' "$text"
  "$@" 2>&1 | tee "$work/out"
  status=${PIPESTATUS[0]}
  seconds=$((SECONDS - began))
  read -r passed broken skipped < <("$count" "$status")
  warnings=$(grep -cE "$warning" "$work/out")
  [[ $status == 124 || $status == 137 ]] && echo "$text: ended by its deadline after $((seconds / 60)) minutes" >>"$work/failures"
  grep -hE "$warning" "$work/out" | cut -c 1-200 >>"$work/failures"
  grep -hE '^(FAILED |ERROR: |//.* (FAILED|TIMEOUT|NO STATUS))|: error: ' "$work/out" | cut -c 1-200 >>"$work/failures"
  ((broken == 0 && warnings == 0)) || failed=1
  printf '%4d:%02d %7d %7d %8d %9d  %s\n' $((seconds / 60)) $((seconds % 60)) "$passed" "$broken" "$skipped" "$warnings" \
    "$text" >>"$work/table"
}

by_status() { if [[ $1 == 0 ]]; then echo 1 0 0; else echo 0 1 0; fi; }

by_accuracy() { if [[ $1 == 0 ]] && grep -q 'test_accuracy=0\.9' "$work/out"; then echo 1 0 0; else echo 0 1 0; fi; }

# The lines of scripts that check promises.
by_lines() {
  local ok broken skipped
  ok=$(grep -c '^ok ' "$work/out")
  broken=$(grep -c '^FAILED ' "$work/out")
  skipped=$(grep -c '^skipped' "$work/out")
  ((broken > 0 || $1 == 0)) || broken=1
  ((ok + broken + skipped > 0)) || broken=1
  echo "$ok $broken $skipped"
}

# Bazel's line for each test.
by_tests() {
  local passed broken skipped
  passed=$(grep -cE '^//[^ ]+ +(\(cached\) )?PASSED' "$work/out")
  broken=$(grep -cE '^//[^ ]+ +(FAILED|TIMEOUT|NO STATUS)' "$work/out")
  skipped=$(grep -cE '^//[^ ]+ +SKIPPED' "$work/out")
  ((broken > 0 || ($1 == 0 && passed > 0))) || broken=1
  echo "$passed $broken $skipped"
}

make_root() {
  if [[ -e $marker ]]; then
    grep -q "^VERSION_CODENAME=$suite$" "$root/etc/os-release" || { echo "$root has another system"; return 1; }
    echo "$root is taken as it is"
  else
    timeout -k 30 1800 debootstrap --variant=minbase --include=ca-certificates,git "$suite" "$root" ||
      { echo "debootstrap failed: $root is no root. Can this machine reach Debian's archive?"; return 1; }
    touch "$marker"
  fi
  # A machine has these; debootstrap makes the first alone.
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev" &&
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm" || return 1
  rm -rf "$root/home/evenkeel"
  timeout 300 git clone -q --no-local --depth 1 "file://$repository" "$root/home/evenkeel"
}

# Programs of the package need only what apt brings along.
package_runs() {
  inside 15 "./bazelw run --noshow_progress $jobs //tools:package -- --to=/home/packages" || return 1
  inside 15 'apt-get -q -y install --no-install-recommends /home/packages/evenkeel_*.deb >/dev/null' || return 1
  echo 'ok      apt installs the package'
  if inside 5 'evenkeel-launch --nproc=2 -- printenv RANK' | sort | tr -d '\n' | grep -q '^01$'; then
    echo 'ok      the launcher of the package starts ranks'
  else
    echo 'FAILED  the launcher of the package starts ranks'
  fi
  if inside 15 'evenkeel-train --max_steps=5'; then
    echo 'ok      the trainer of the package trains'
  else
    echo 'FAILED  the trainer of the package trains'
  fi
  inside 5 'apt-get -q -y remove evenkeel >/dev/null'
}

printf 'minutes  passed  failed  skipped  warnings\n' >"$work/table"
: >"$work/failures"
stage "a root with $suite" by_status make_root
if [[ $failed == 0 ]]; then
  stage './bazelw run //trainer:train' by_accuracy inside 120 "./bazelw run --noshow_progress $jobs //trainer:train"
  stage './bazelw test //...' by_tests inside 240 "./bazelw test --noshow_progress --keep_going $jobs //..."
  stage 'packages for the rest' by_status inside 15 'apt-get -q -y install --no-install-recommends cmake dpkg-dev pkg-config'
  stage 'evenkeel in a workspace of its own' by_lines inside 60 tests/consumer/check.sh
  stage 'evenkeel in a CMake project' by_lines inside 60 tests/consumer_cmake/check.sh
  stage 'the sources of a release with CMake alone' by_lines inside 120 "rm -rf /home/source && mkdir /home/source &&
    git archive HEAD | tar -x -C /home/source && tools/cmake/write_sources.py --to=/home/source &&
    CMAKE_BUILD_PARALLEL_LEVEL=${jobs#--jobs=} tools/cmake/check.sh /home/source"
  stage 'the Debian package' by_lines package_runs
  if [[ $clang ]]; then
    stage 'clang' by_status inside 15 'apt-get -q -y install --no-install-recommends clang'
    stage 'the libraries and their tests with clang' by_tests inside 240 \
      "./bazelw test --noshow_progress --keep_going --config=clang $jobs //comm/... //join/... //bucket/... //zero_optim/..."
  fi
fi

printf '\n%s at %s\n' "$suite" "$(git -C "$root/home/evenkeel" log -1 --format=%h)"
cat "$work/table"
if [[ -s $work/failures ]]; then
  echo
  sort -u "$work/failures" | head -n 60
fi
exit "$failed"
