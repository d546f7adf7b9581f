#!/bin/bash
# Makes a folder with everything that gpu_check.sh needs on a machine that has a
# GPU and nothing else: every test with the tag "gpu", their data, the device
# benchmark, and the shared libraries of all of them but the compiler's and the
# driver's: the machine's C library must not be older than the one here.
#
#   tools/gpu/pack.sh FOLDER [--without_libraries] [-- ARGUMENTS OF BAZEL BUILD]
#   tools/gpu/pack.sh /tmp/gpu_check -- --define=cuda_archs=sm_90
#   tar -C /tmp -czf gpu_check.tar.gz gpu_check
#
# --without_libraries: the machine has CUDA's, NCCL's and all others itself, in
# LD_LIBRARY_PATH or where they lie here.
set -uo pipefail
shopt -s nullglob

stop() {
  printf 'pack: %s\n' "$1" >&2
  exit 1
}

[[ $# -ge 1 && $1 != -* ]] || stop 'say where to: tools/gpu/pack.sh FOLDER'
folder=$1
shift
libraries=1
if [[ ${1:-} == --without_libraries ]]; then
  libraries=0
  shift
fi
[[ ${1:-} == -- ]] && shift
mkdir -p "$folder" || exit 1
[[ -z $(ls -A "$folder") ]] || stop "$folder is not empty"
folder=$(cd "$folder" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
read -r -a bazel <<<"${BAZEL:-./bazelw}"

# labels EXPRESSION
labels() { "${bazel[@]}" query --noshow_progress "$1" 2>"$folder/errors" || stop "$(cat "$folder/errors")"; }

gpu_tests='attr(tags, "[\[ ]gpu[,\]]", tests(//...))'
mapfile -t tests < <(labels "$gpu_tests" | LC_ALL=C sort)
mapfile -t multirank < <(labels "attr(tags, multirank, $gpu_tests)")
rm -f "$folder/errors"
[[ ${#tests[@]} != 0 ]] || stop 'no test has the tag "gpu"'

# One that is not for this machine, for want of NCCL or cuDNN, leaves no program.
"${bazel[@]}" build --noshow_progress "$@" //tools/gpu:bench_device ||
  stop 'the benchmark does not build'
printf '%s\n' "${tests[@]}" >"$folder/targets"
"${bazel[@]}" build --noshow_progress --keep_going "$@" --target_pattern_file="$folder/targets"
built=$?
rm -f "$folder/targets"
bin=$("${bazel[@]}" info "$@" bazel-bin 2>/dev/null) || stop 'where are the programs?'

# take PROGRAM: with its data.
take() {
  [[ -x $bin/$1 && -d $bin/$1.runfiles ]] || return 1
  mkdir -p "$folder/runfiles"
  cp -rL --no-clobber "$bin/$1.runfiles/." "$folder/runfiles/"
}

take tools/gpu/bench_device || stop 'the benchmark has no data'
packed=0
for label in "${tests[@]}"; do
  path=${label#//}
  path=${path/://}
  if ! take "$path"; then
    printf 'not packed: %s was not built\n' "$label" >&2
    printf '%s\t-\tmissing\n' "$label" >>"$folder/tests.txt"
    continue
  fi
  kind=-
  [[ $label == */device:* && " ${multirank[*]} " != *" $label "* ]] && kind=kernels
  printf '%s\t%s\t%s\n' "$label" "$path" "$kind" >>"$folder/tests.txt"
  packed=$((packed + 1))
done
[[ $packed != 0 ]] || stop 'nothing to pack'
chmod -R u+w "$folder/runfiles"
rm -f "$folder/runfiles/MANIFEST"
mkdir -p "$folder/runfiles/evenkeel/tools/gpu"
cp tools/gpu_check.sh "$folder/"
cp tools/gpu/pytorch_adamw.py "$folder/runfiles/evenkeel/tools/gpu/"

if [[ $libraries == 1 ]]; then
  mkdir -p "$folder/lib"
  find "$folder/runfiles" -type f -perm -u+x -exec sh -c 'ldd "$1" 2>/dev/null' _ {} \; |
    sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -Ev '/(libc|libstdc[+][+]|libgcc_s|libm|libdl|librt|libpthread|libresolv|libutil|libcuda|libnvidia-[a-z]*|ld-linux[^/]*)[.]so' |
    while IFS= read -r library; do
      cp -L --no-clobber "$library" "$folder/lib/"
      # cuDNN loads its other parts by name.
      if [[ $library == */libcudnn.so* ]]; then cp -L --no-clobber "${library%/*}"/libcudnn_*.so.[0-9] "$folder/lib/"; fi
      # The trainer loads cuBLASLt by name, too, when a device first multiplies.
      if [[ $library == */libcudnn.so* ]]; then
        for lt in {"${library%/*}",/usr/local/cuda/lib64}/libcublasLt.so.{[0-9],[0-9][0-9]}; do
          [[ ! -e $lt ]] || cp -L --no-clobber "$lt" "$folder/lib/"
        done
      fi
    done
fi
printf '%d tests in %s, %s\n' "$packed" "$folder" "$(du -sh "$folder" | cut -f1)"
[[ $built == 0 ]]
