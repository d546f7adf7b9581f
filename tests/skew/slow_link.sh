#!/bin/bash
# Runs //tests/skew with each rank in a network namespace of its own, behind a
# link of the given rate, so that communication takes as long as over a network:
#
#   tests/skew/slow_link.sh RANKS RATE [FLAG...]      slow_link.sh 8 200mbit
#
# Run it as root. It removes the namespaces and the bridge at its end.
set -euo pipefail
(($# >= 2)) || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
ranks=$1 rate=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

read -r -a bazel <<<"${BAZEL:-./bazelw}"
"${bazel[@]}" build --noshow_progress --symlink_prefix=/ //tests/skew
program=$("${bazel[@]}" info --noshow_progress bazel-bin)/tests/skew/skew

id=ek$$ # Unique, and short enough for the name of an interface.
bridge=${id}b
net=10.213.7
pids=()
clean_up() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for ((rank = 0; rank < ranks; ++rank)); do
    ip link del "${id}v$rank" 2>/dev/null || true
    ip netns del "$id-$rank" 2>/dev/null || true
  done
  ip link del "$bridge" 2>/dev/null || true
}
trap clean_up EXIT

ip link add "$bridge" type bridge
ip link set "$bridge" up
for ((rank = 0; rank < ranks; ++rank)); do
  space=$id-$rank
  ip netns add "$space"
  ip link add "${id}v$rank" type veth peer name eth0 netns "$space"
  ip link set "${id}v$rank" master "$bridge" up
  ip -n "$space" addr add "$net.$((rank + 1))/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$space" link set lo up
  # Limits the rank's sent and received data.
  ip netns exec "$space" tc qdisc add dev eth0 root tbf rate "$rate" burst 64kb latency 200ms
  tc qdisc add dev "${id}v$rank" root tbf rate "$rate" burst 64kb latency 200ms
done

secret=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
for ((rank = 0; rank < ranks; ++rank)); do
  ip netns exec "$id-$rank" env RANK="$rank" WORLD_SIZE="$ranks" EVENKEEL_STORE="$net.1:29517" \
    EVENKEEL_ADDRESS="$net.$((rank + 1))" EVENKEEL_SECRET="$secret" EVENKEEL_JOB="$id" "$program" "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
pids=()
exit "$status"
