#!/bin/bash
# Checks with `bazel query` that the arrows between the folders point one way:
#
#   comm <- join <- bucket <- zero_optim <- {trainer, libtorch}
#   comm <- files <- {zero_optim, trainer, tools}
#   {comm, files} <- launch <- {trainer, tools}
#
# and inside comm, as docs/design.md draws them; and that the libraries use one clock.
#
#   tests/arrows.sh                            uses ./bazelw
#   BAZEL="bazel --batch" tests/arrows.sh      uses that
#
# Prints one line per promise, "ok" or "FAILED" first, and exits with 1 if one
# is broken. A folder or target that a promise names and that does not exist is
# a broken promise, never a silent pass.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

read -r -a bazel <<<"${BAZEL:-./bazelw}"
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
failed=0

query() {
  "${bazel[@]}" query --noshow_progress --keep_going=false \
    --order_output=full "$1" 2>"$errors"
}

ok() { printf 'ok      %s\n' "$1"; }

broken() {
  printf 'FAILED  %s\n' "$1"
  sed 's/^/        /'
  failed=1
}

# never SENTENCE FROM TO [EXCEPT]: no target of FROM reaches one of TO.
never() {
  local sentence=$1 from=$2 to=$3 except=${4:-"set()"} found
  if ! found=$(query "deps($from) intersect (($to) except ($except))"); then
    broken "$sentence" <"$errors"
  elif [[ -n $found ]]; then
    query "somepath($from, $(head -n 1 <<<"$found"))" | broken "$sentence"
  else
    ok "$sentence"
  fi
}

# only SENTENCE PATTERN DEPENDENCY: who names DEPENDENCY directly is in PATTERN,
# and there is such a target (otherwise the question has lost its meaning).
only() {
  local sentence=$1 pattern=$2 dependency=$3 users others
  if ! users=$(query "kind(rule, rdeps(//..., $dependency, 1)) except kind(rule, $dependency)"); then
    broken "$sentence" <"$errors"
    return
  fi
  users=$(grep '^//' <<<"$users")
  others=$(grep -Ev "$pattern" <<<"$users")
  if [[ -z $users ]]; then
    broken "$sentence" <<<"no target depends on $dependency"
  elif [[ -n $others ]]; then
    broken "$sentence" <<<"$others"
  else
    ok "$sentence"
  fi
}

core='//comm/... + //files/... + //join/... + //bucket/... + //zero_optim/...'
products="($core) except tests($core) except attr(testonly, 1, $core)"
above='(//tools/... except //tools/build_defs/...) + //tests/...'

never 'comm knows no other library' \
  //comm/... '//files/... + //launch/... + //join/... + //bucket/... + //zero_optim/... + //trainer/...'
values='deps(//comm:types + //comm:status + //comm:collective + //comm:memory + //comm:version + //comm:failure_info)'
# A folder with a class that derives from Backend is a backend.
mapfile -t backend_folders < <(grep -rl 'public Backend\b' comm/*/ | cut -d/ -f2 | sort -u | grep -vx testing)
backends=$(printf ' + //comm/%s/...' "${backend_folders[@]}")
backends=${backends# + }
group="//comm:communicator + //comm:factory + //comm/rendezvous/... + $backends"

never 'comm/base sees the values of comm alone' \
  "($products) intersect //comm/base/..." '//comm/... except //comm/base/...' "$values"
never 'comm/ranks sees the values of comm alone' \
  "($products) intersect //comm/ranks/..." '//comm/... except //comm/ranks/...' "$values"
never 'comm/net sees base and ranks' \
  "($products) intersect //comm/net/..." '//comm/... except //comm/net/... except //comm/base/... except //comm/ranks/...' "$values"
never 'comm/control sees net, base and ranks' \
  "($products) intersect //comm/control/..." \
  '//comm/... except //comm/control/... except //comm/net/... except //comm/base/... except //comm/ranks/...' "$values"
never 'comm/arith and comm/device see no group and no socket' \
  "($products) intersect (//comm/arith/... + //comm/device/...)" "//comm/net/... + $group"
never 'comm/rendezvous sees no group' \
  "($products) intersect //comm/rendezvous/..." "//comm:communicator + //comm:factory + $backends"
never 'a communicator sees no backend' \
  //comm:communicator "//comm:factory + //comm/rendezvous/... + $backends"
never 'no backend sees the factory or how processes find each other' \
  "($products) intersect ($backends)" '//comm:factory + //comm:environment + //comm/rendezvous/...'
for one in "${backend_folders[@]}"; do
  others=(local)
  [[ $one == hierarchical ]] && others+=(shm tcp)
  never "comm/$one sees no other backend but ${others[*]}" \
    "($products) intersect //comm/$one/..." "($backends) except //comm/$one/...$(printf ' except //comm/%s/...' "${others[@]}")"
done
never 'no library but join/abi sees comm/abi, and none sees join/abi' \
  "($products) except //comm/abi/... except //join/abi/..." '//comm/abi/... + //join/abi/...'
never 'join knows comm' \
  //join/... '//bucket/... + //zero_optim/... + //trainer/...'
never 'bucket knows comm and join' \
  //bucket/... '//zero_optim/... + //trainer/...'
never 'zero_optim knows comm, join and of bucket the plan, the parameters, the reduction, the broadcast and transfer of state, the checks of replicas and of gradients; its tests a DataParallel' \
  "($products) intersect //zero_optim/..." '//bucket/... + //trainer/...' \
  'deps(//bucket/plan:planner + //bucket:parameter_set + //bucket:parameter_facts + //bucket:reduction + //bucket:replica_check + //bucket:replica_transfer + //bucket:finite_check +
   //bucket:state_sync)'
never 'no library needs tests or tools' \
  "$products" "$above"
never 'files sees of comm the values and base' \
  "($products) intersect //files/..." '//... except //files/... except //comm/base/... except //tools/build_defs/...' "$values"
never 'launch sees comm and files' \
  '//launch/...' '//join/... + //bucket/... + //zero_optim/... + //trainer/... + //libtorch/...'
never 'the trainer sees no tool' //trainer/... '//tools/... except //tools/build_defs/...'
never 'launch sees no tool' //launch/... '//tools/... except //tools/build_defs/...'
never 'the planner sees only values of comm' \
  //bucket/plan:planner '//... except //tools/build_defs/... except //bucket/...' \
  'deps(//comm:types + //comm:collective + //comm:status)'
never 'the planner sees only Abseil of what others wrote' \
  //bucket/plan:planner 'filter("^@", deps(//bucket/plan:planner))' \
  'filter("^@(com_google_absl|bazel_tools|bazel_skylib|local_config_.*|platforms|rules_cc|rules_java|rules_proto|remote_coverage_tools)//", deps(//bucket/plan:planner))'
never 'libtorch sees comm, join, bucket and zero_optim' '//libtorch/...' "//trainer/... + $above"
never 'no other folder sees libtorch; what it installs are its files' \
  '//... except //libtorch/...' '//libtorch/...' \
  'set(//libtorch:sources) + labels(srcs, //libtorch:sources)'
only 'torch is seen by libtorch alone' '^//libtorch[/:]' @torch//:torch
for part in models layers gpt data tokenizer report checkpoint device; do
  never "trainer/$part knows nothing of the app" "//trainer/$part/..." '//trainer/app/...'
done
never "trainer/report sees no other part of the trainer" \
  "//trainer/report/..." '//trainer/... except //trainer/report/...'
never 'trainer/tokenizer sees no other part of the trainer' \
  //trainer/tokenizer/... '//trainer/... except //trainer/tokenizer/...'
never 'the examples see comm, join, bucket and zero_optim' 'kind(cc_binary, //examples/...)' \
  '//trainer/... + //libtorch/...'
never 'the trainer is used by tests and tools alone' \
  '//... except //trainer/... except //tests/... except //tools/...' '//trainer/...'
only 'Gloo is seen by the benchmarks that compare with it alone' \
  '^//(comm/tcp:transport_benchmark(_cases)?$|tools/bench:raw_gloo$)' @gloo//:gloo
only 'NCCL is seen by its backend alone' '^//comm/nccl:' @cuda//:nccl
never 'NCCL is linked by none: its backend loads it' //... 'attr(linkopts, "-lnccl", //... + @cuda//...)'
never 'only tests bring a path for the loader' '//... except //tests/...' 'attr(linkopts, rpath, @cuda//...)'
only 'CUDA is seen by what wraps it, and by its tests and benchmarks alone' \
  '^//(comm/nccl:|comm/device:(cuda|managed_devices)|trainer/device:|tests/gpu:)' @cuda//:cudart
only 'libmicrohttpd is seen by the status server alone' '^//launch:status_server$' @microhttpd//:microhttpd
only 'oneDNN is seen by the trainer alone' '^//trainer[/:]' @onednn//:dnnl
only 'libdeflate is seen by the data of the trainer alone' '^//trainer/data:' @libdeflate//:libdeflate
only 'dygraphs is seen by the template of the report alone' '^//trainer/report:report_template' @dygraphs//:dygraph.js
never 'flags are read by programs alone' \
  "$products" @com_github_gflags_gflags//...

# No arrow, but as easily broken. Times of day are for people: in reports, dumps and names.
sentence='deadlines and durations are on the clock of comm/base/clock.h, which is never set'
clocks='absl::Now\b|GetCurrentTimeNanos|system_clock|(Await|LockWhen|Wait|WaitForNotification)With(Timeout|Deadline)\('
of_day='sinks_\.|ToUnixNanos\(absl::Now\(\)\)|header\.time|trainer/report/tensorboard\.cc|://'
found=$(git grep -nE "$clocks" -- '*.cc' '*.h' ':!tests' ':!third_party' ':!*_test.cc' ':!*_benchmark.cc' ':!*/testing/*' \
  ':!comm/base/clock.*' ':!comm/base/notification.h' | grep -vE "$of_day")
if [[ -z $found ]]; then ok "$sentence"; else broken "$sentence" <<<"$found"; fi

exit $failed
