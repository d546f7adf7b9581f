#!/bin/bash
# Makes a release of a commit: sources with which CMake alone builds, packages, checksums and notes.
#
#   tools/release.sh COMMIT FOLDER
#
# Everything is built without CUDA, in a clean worktree of the commit. FOLDER gets
#
#   evenkeel-VERSION-source.tar.gz     the sources, and what CMake needs beside them
#   evenkeel-VERSION-linux-ARCHITECTURE.tar.gz, evenkeel_VERSION_ARCHITECTURE.deb
#                                      see docs/install.md
#   evenkeel_c10d-VERSION-....whl      if EVENKEEL_TORCH_PYTHON names a Python: the wheel for it, and
#                                      for the versions of torch in python/torches.sh (from PyPI);
#                                      tested with the torch of that Python alone
#   release_notes.md                   the version's entry of CHANGELOG.md
#   SHA256SUMS
#
# Then it builds the sources with CMake, and sets the tag vVERSION if git allows it; with --no-tag
# behind FOLDER it does not. Exits with 1 if one of these checks fails.
set -euo pipefail
shopt -s nullglob

stop() {
  printf 'release: %s\n' "$1" >&2
  exit 1
}

[[ $# == 2 || ($# == 3 && $3 == --no-tag) ]] || stop 'usage: tools/release.sh COMMIT FOLDER [--no-tag]'
umask 022  # The modes of what is packed and written.
to=$(realpath -m "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD
commit=$(git rev-parse --verify --quiet "$1^{commit}") || stop "$1 is no commit"
version=$(git show "$commit:comm/version.h" | sed -n 's/^#define EVENKEEL_BUILD "\(.*\)"$/\1/p')
tag=v$version
tagged=$(git rev-parse --verify --quiet "refs/tags/$tag^{commit}" || true)
[[ -z $tagged || $tagged == "$commit" ]] ||
  stop "the tag $tag is on ${tagged:0:10}; a release of another commit needs another version in comm/version.h"
notes=$(git show "$commit:CHANGELOG.md" |
  awk -v entry="## $version " 'index($0, "## ") == 1 { inside = index($0, entry) == 1; next } inside')
[[ $notes ]] || stop "CHANGELOG.md has no entry \"## $version (...)\""
mkdir -p "$to"
[[ -z $(ls -A "$to") ]] || stop "$to is not empty"
printf '# evenkeel %s (%s)\n%s\n' "$version" "${commit:0:8}" "$notes" >"$to/release_notes.md"

work=$(mktemp -d)
tree=$work/evenkeel
has_bazel=''
clean_up() {
  cd "$repository"
  [[ -z $has_bazel ]] || (cd "$tree" && ./bazelw clean --expunge) >"$work/log" 2>&1 || true
  [[ ! -e $tree ]] || git worktree remove --force "$tree" || true
  rm -rf "$work"
}
trap clean_up EXIT
git worktree add --quiet --detach "$tree" "$commit"

export CUDA_HOME=/nonexistent
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH
sources=evenkeel-$version-source
mkdir "$work/$sources"
git archive "$commit" | tar -C "$work/$sources" -x
cd "$tree"
export BAZEL=./bazelw  # Not a Bazel of another tree.
has_bazel=1
tools/cmake/write_sources.py --to="$work/$sources"
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
  --mode=u=rwX,go=rX -c "$sources" | gzip -n >"$to/$sources.tar.gz"
./bazelw run --noshow_progress //tools:package -- --to="$to"
if [[ -n ${EVENKEEL_TORCH_PYTHON:-} ]]; then
  python/torches.sh --python "$EVENKEEL_TORCH_PYTHON" --only-wheel "$to"
  "$EVENKEEL_TORCH_PYTHON" -m pip install --quiet --no-deps --no-index --target "$work/site" "$to"/*.whl
  for test in operations wheel; do
    PYTHONPATH=$work/site OMP_NUM_THREADS=1 \
      "$EVENKEEL_TORCH_PYTHON" "python/evenkeel_c10d/tests/${test}_test.py"
  done
  echo 'The wheel was tested with the torch of EVENKEEL_TORCH_PYTHON alone; for the others:' \
    python/torches.sh --wheel "$to"/*.whl
fi
(cd "$to" && sha256sum -- *.tar.gz *.deb *.whl *.md >SHA256SUMS)

"$work/$sources/tools/cmake/check.sh" "$work/$sources"

if [[ $# == 2 && -z $tagged ]] && ! git tag --annotate "$tag" --message="evenkeel $version" "$commit"; then
  echo "release: git sets no tag here; set it by: git tag --annotate $tag ${commit:0:8}" >&2
fi
echo "evenkeel $version of ${commit:0:8} is in $to:"
cat "$to/SHA256SUMS"
if grep -q "^## $version (unreleased)" CHANGELOG.md; then
  echo "Next: write \"## $version (${commit:0:8})\" in CHANGELOG.md, and the next version in comm/version.h."
fi
