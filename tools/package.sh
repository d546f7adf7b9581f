#!/bin/bash
# Packs evenkeel for machines without Bazel: a tarball, which may be unpacked
# anywhere, and a package for the Debian that this is.
#
#   ./bazelw run //tools:package -- --to=FOLDER
#
# Writes FOLDER/evenkeel-VERSION-linux-ARCHITECTURE.tar.gz and
# FOLDER/evenkeel_VERSION_ARCHITECTURE.deb. The same build gives the same bytes:
# times are SOURCE_DATE_EPOCH, by default that of the last commit. Needs dpkg-dev.
set -euo pipefail
umask 022

stop() {
  printf 'package: %s\n' "$1" >&2
  exit 1
}

[[ $# == 1 && $1 == --to=?* ]] || stop 'usage: ./bazelw run //tools:package -- --to=FOLDER'
command -v dpkg-shlibdeps >/dev/null || stop 'dpkg-shlibdeps is missing; apt-get install dpkg-dev'
to=$(cd "${BUILD_WORKING_DIRECTORY:-.}" && realpath -m "${1#--to=}")
mkdir -p "$to"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

read -r committed maintainer < <(
  git -C "${BUILD_WORKSPACE_DIRECTORY:-.}" log -1 --format='%ct %an <%ae>' 2>/dev/null ||
    date '+%s evenkeel <evenkeel@localhost>'
)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$committed}

root=$work/root
usr=$root/usr
DESTDIR=$root tools/install --prefix=/usr >"$work/log" || stop "$(<"$work/log")"
config=$usr/lib/cmake/evenkeel/evenkeelConfig.cmake
version=$(sed -n '1s/^# evenkeel \(.*\), for CMake:$/\1/p' "$config")
architecture=$(dpkg --print-architecture)
strip --strip-unneeded --remove-section=.comment "$usr"/bin/*
chmod 755 "$usr/share/evenkeel/train.sbatch"
# The programs contain code of these.
for linked in libabsl-dev libgflags-dev libjs-dygraphs nlohmann-json3-dev; do
  install -D -m 644 "/usr/share/doc/$linked/copyright" "$usr/share/evenkeel/licenses/$linked"
done
if [[ -e $usr/lib/libevenkeel_cudart.a ]]; then
  cat >"$usr/share/evenkeel/licenses/cudart" <<END
libevenkeel_cudart.a, which is also linked into the programs, is the CUDA runtime:
the libcudart_static.a of the toolkit of the build, Copyright NVIDIA Corporation, a
file that the CUDA Toolkit's license agreement (https://docs.nvidia.com/cuda/eula)
lists as redistributable with applications.
END
fi
pages=$usr/share/doc/evenkeel
for page in *.md docs/*.md examples/*; do install -D -m 644 "$page" "$pages/$page"; done

# The packages that the programs need, with the versions that have the symbols they use.
mkdir "$work/debian" "$root/DEBIAN"
printf 'Source: evenkeel\n\nPackage: evenkeel\nArchitecture: any\n' >"$work/debian/control"
programs_need=$(cd "$work" && dpkg-shlibdeps -O --ignore-missing-info "$usr"/bin/* |
  sed -n 's/^shlibs:Depends=//p')
# The packages that programs linked with the archives need. Abseil's ABI differs between releases.
abseil=$(sed -n 's/^Requires:.* = \([0-9]*\)$/\1/p' "$usr/lib/pkgconfig/evenkeel.pc")
archives_need="libabsl-dev (>= $abseil), libabsl-dev (<< $((abseil + 1)))"
for file in $(grep -o 'l:lib[^, ]*' "$usr/lib/pkgconfig/evenkeel.pc"); do
  owner=$(dpkg -S "*/${file#l:}" 2>/dev/null | sed -n '1s/:.*//p') || stop "no package has ${file#l:}"
  archives_need+=", $owner"
done
# The libraries of CUDA that the programs load where there are GPUs, as NVIDIA's packages are called.
loaded_number() { # libcudnn cuDNN
  local number
  number=$({ grep -ao "the folder of $1[.]so[.][0-9]*" "$usr/bin/evenkeel-train" || true; } | sed -n '1s/.*[.]//p')
  [[ -n $number || ! -e $usr/lib/libevenkeel_cudart.a ]] || grep -aq "this build is without $2" "$usr/bin/evenkeel-train" ||
    stop "evenkeel-train has no number of $1.so"
  printf '%s' "$number"
}
cudnn=$(loaded_number libcudnn cuDNN)
cuda=$(loaded_number libcublasLt cuBLAS)
suggests=
case $cudnn:$cuda in
  *: | :*) ;;
  8:*) suggests=libcudnn8 ;;
  *) suggests=libcudnn$cudnn-cuda-$cuda ;;
esac
[[ -z $suggests ]] || suggests="
Suggests: $suggests, libnccl2"

folder=evenkeel-$version
mkdir "$work/$folder"
cp -a "$usr"/. "$work/$folder/"
sed 's/ ([^)]*)//g; s/, /\n/g' <<<"$programs_need" >"$work/$folder/share/evenkeel/packages.txt"
# apt does not look after what is unpacked, so a script compares the libraries before it starts a program.
mkdir -p "$work/$folder/libexec/evenkeel"
mv "$work/$folder"/bin/* "$work/$folder/libexec/evenkeel/"
for program in "$work/$folder"/libexec/evenkeel/*; do
  sed "s|@SYSTEM@|$(. /etc/os-release && printf %s "$PRETTY_NAME")|" tools/installation/start_program.sh >"$work/$folder/bin/${program##*/}"
  chmod 755 "$work/$folder/bin/${program##*/}"
  echo "libexec/evenkeel/${program##*/}" >>"$work/$folder/share/evenkeel/installed_files.txt"
done
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
  -c "$folder" | gzip -n >"$work/$folder-linux-$architecture.tar.gz"

# Debian keeps licenses and lists of files elsewhere.
rm "$usr/share/evenkeel/LICENSE" "$usr/share/evenkeel/installed_files.txt"
mkdir -p "$usr/share/man/man1"
cat >"$pages/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Comment: Licenses of what is linked into the programs are in /usr/share/evenkeel/licenses.

Files: *
Copyright: $(date -u -d "@$SOURCE_DATE_EPOCH" +%Y) the authors of evenkeel
License: Apache-2.0
 On Debian systems the license is in /usr/share/common-licenses/Apache-2.0.
END
if [[ -e $usr/lib/libevenkeel_cudart.a ]]; then
  cat >>"$pages/copyright" <<END

Files: usr/lib/libevenkeel_cudart.a
Copyright: NVIDIA Corporation
License: NVIDIA
$(sed 's/^/ /' "$usr/share/evenkeel/licenses/cudart")
END
fi
gzip -9n >"$pages/changelog.gz" <<END
evenkeel ($version) unstable; urgency=medium

  * A build of this version.

 -- $maintainer  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
END
# The page of a program is its --help, whose first line describes it.
for program in "$usr"/bin/*; do
  name=${program##*/}
  "$program" --help >"$work/help"
  {
    printf '.TH %s 1 "" "evenkeel %s"\n.SH NAME\n' "${name^^}" "$version"
    sed -n "s/^[a-z-]*: //; s/^\(.*\)[.]\$/$name \\\\- \1/p; q" "$work/help"
    printf '.SH DESCRIPTION\n.nf\n'
    sed '1d; s/\\/\\e/g; s/-/\\-/g; s/^\([.'\'']\)/\\\&\1/' "$work/help"
  } | gzip -9n >"$usr/share/man/man1/$name.1.gz"
done
(cd "$root" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums)
cat >"$root/DEBIAN/control" <<END
Package: evenkeel
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du -sk "$usr" | cut -f1)
Depends: $programs_need, $archives_need
Recommends: dataset-fashion-mnist, jargon-text$suggests
Section: science
Priority: optional
Description: data-parallel training for ranks that are not in step
 A C++ library for training with uneven inputs, layers frozen during training,
 gradients in any order, and an optimizer's state split over the ranks. A rank
 that is lost is an error on all others within seconds.
 .
 This package has the launcher, viewers of running and of failed jobs, the
 reference trainer, and headers and archives for CMake and pkg-config.
END
dpkg-deb -z3 --root-owner-group --build "$root" "$work/evenkeel_${version}_$architecture.deb" \
  >"$work/log" || stop "$(<"$work/log")"
for file in "$work"/*.tar.gz "$work"/*.deb; do
  mv "$file" "$to/"
  printf '%s\n' "$to/${file##*/}"
done
