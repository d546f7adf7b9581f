#!/bin/bash
# Makes a folder with everything that gpu_check.sh needs on a machine with a GPU
# and no build tools: every test with the tag "gpu", their data, the device
# benchmark, and the shared libraries of all of them but the compiler's and the
# driver's: the machine's C library must not be older than the one here.
#
#   tools/gpu/pack.sh FOLDER [--without_cuda | --without_libraries] [-- ARGUMENTS OF BAZEL BUILD]
#   EVENKEEL_CUDA_ARCHS=sm_90 tools/gpu/pack.sh /tmp/gpu_check
#   tar -C /tmp -czf gpu_check.tar.gz gpu_check
#
# --without_cuda: the machine has CUDA's libraries, NCCL and cuDNN of these major
# versions, in a toolkit or with python3's PyTorch, where gpu_check.sh finds them:
# some 50 MB packed instead of 1 GB.
# --without_libraries: it has all others as well, in LD_LIBRARY_PATH or where they
# lie here.
set -uo pipefail
shopt -s nullglob

stop() {
  printf 'pack: %s\n' "$1" >&2
  exit 1
}

[[ $# -ge 1 && $1 != -* ]] || stop 'say where to: tools/gpu/pack.sh FOLDER'
folder=$1
shift
libraries=all
case ${1:-} in
  --without_cuda) libraries=without_cuda ;;
  --without_libraries) libraries=none ;;
esac
[[ $libraries == all ]] || shift
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

# needed FILE...: the libraries that these load, but the compiler's and the driver's.
needed() {
  local file
  for file; do ldd "$file" 2>/dev/null; done | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -Ev '/(libc|libstdc[+][+]|libgcc_s|libm|libdl|librt|libpthread|libresolv|libutil|libcuda|libnvidia-[a-z]*|ld-linux[^/]*)[.]so'
}

# Those that are loaded by name: NCCL, cuDNN and its parts, cuBLASLt, and the compiler that cuDNN may ask.
loaded_by_name() {
  local place cuda=${CUDA_HOME:-/usr/local/cuda}
  for place in "$cuda"/lib{64,} /usr/lib{/*-linux-gnu,64,}; do
    printf '%s\n' "$place"/libnccl.so.[2] "$place"/libcudnn{,_*}.so.[0-9] "$place"/libcublasLt.so.{[0-9],[0-9][0-9]} \
      "$place"/libnvrtc.so.{[0-9],[0-9][0-9]} "$place"/libnvrtc-builtins.so.[0-9]*
  done | awk -F/ 'NF > 1 && !seen[$NF]++'
}

mapfile -t programs < <(find "$folder/runfiles" -type f -perm -u+x)
mapfile -t found < <(needed "${programs[@]}")
mapfile -t named < <(loaded_by_name)
mapfile -t found < <({
  printf '%s\n' "${found[@]}" "${named[@]}"
  needed "${named[@]}"
} | grep . | awk -F/ '!seen[$NF]++')
cudas='^lib(cudnn.*|cublas.*|nvrtc.*|nccl|cupti|cudart|nvJitLink)[.]so'
for library in "${found[@]}"; do
  name=${library##*/}
  if [[ $name =~ $cudas ]]; then
    printf '%s\n' "$name" >>"$folder/libraries.txt"
    [[ $libraries == all ]] || continue
  fi
  [[ $libraries != none ]] || continue
  mkdir -p "$folder/lib"
  cp -L "$library" "$folder/lib/"
done
git rev-parse HEAD >"$folder/commit" 2>/dev/null
printf '%d tests in %s, %s\n' "$packed" "$folder" "$(du -sh "$folder" | cut -f1)"
[[ $built == 0 ]]
