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
net=10.213.8
network=$(dirname "${BASH_SOURCE[0]}")/network.sh
pids=()
clean_up() {
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  "$network" down "$id" "$hosts"
}
trap clean_up EXIT
"$network" up "$id" "$hosts" "$rate"

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
