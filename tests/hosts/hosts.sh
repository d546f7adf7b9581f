#!/bin/bash
# Runs a program once per rank, on hosts that are network namespaces of this one,
# with a bridge between them:
#
#   tests/hosts/hosts.sh HOSTS RANKS_PER_HOST RATE PROGRAM [ARGUMENT...]
#
# RATE limits what each host can send and receive (1gbit), none means no limit. HOSTS_BURST is what
# it may send at once after a pause (256kb).
# Run it as root. Exit code 77: no namespaces permitted. Removes them at its end.
set -euo pipefail
(($# >= 4)) || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
hosts=$1 per_host=$2 rate=$3
shift 3

id=ek$$ # Unique, and short enough for the name of an interface.
bridge=${id}b
net=10.213.8
pids=()
clean_up() {
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for ((host = 0; host < hosts; ++host)); do
    ip link del "${id}v$host" 2>/dev/null || true
    ip netns del "$id-$host" 2>/dev/null || true
  done
  ip link del "$bridge" 2>/dev/null || true
}
trap clean_up EXIT

reason=$( (command -v ip && ip netns add "$id-0" && ip link add "$bridge" type bridge) 2>&1) || {
  echo "no network namespaces here: ${reason##*$'\n'}"
  exit 77
}
ip link set "$bridge" up
for ((host = 0; host < hosts; ++host)); do
  space=$id-$host
  ((host == 0)) || ip netns add "$space"
  ip link add "${id}v$host" type veth peer name eth0 netns "$space"
  ip link set "${id}v$host" master "$bridge" up
  ip -n "$space" addr add "$net.$((host + 1))/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$space" link set lo up
  [[ $rate == none ]] && continue
  ip netns exec "$space" tc qdisc add dev eth0 root tbf rate "$rate" burst "${HOSTS_BURST:-256kb}" latency 200ms
  tc qdisc add dev "${id}v$host" root tbf rate "$rate" burst "${HOSTS_BURST:-256kb}" latency 200ms
done

secret=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
ranks=$((hosts * per_host))
for ((rank = 0; rank < ranks; ++rank)); do
  host=$((rank / per_host))
  ip netns exec "$id-$host" env RANK="$rank" WORLD_SIZE="$ranks" LOCAL_RANK="$((rank % per_host))" \
    LOCAL_WORLD_SIZE="$per_host" EVENKEEL_STORE="$net.1:29517" EVENKEEL_ADDRESS="$net.$((host + 1))" \
    EVENKEEL_SECRET="$secret" EVENKEEL_JOB="$id" "$@" &
  pids+=($!)
done
# A rank that was stopped never ends by itself: the others have all the time they need, and then it is killed.
end=$((SECONDS + ${HOSTS_SECONDS:-60}))
running() { for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && [[ $(ps -o stat= -p "$pid") != T* ]] && return; done; return 1; }
while running && ((SECONDS < end)); do sleep 0.1; done
