#!/bin/bash
# Makes hosts that are network namespaces of this one, with a bridge between them, and removes them:
#
#   tests/hosts/network.sh up ID HOSTS RATE
#   tests/hosts/network.sh down ID HOSTS
#
# Host n, from 0, is the namespace ID-n with the address 10.213.8.(n+1); ID has at most 10 characters. RATE limits what each
# host can send and receive (1gbit), none means no limit. HOSTS_BURST is what it may send at once after a pause (256kb).
# Run it as root. Exit code 77: no namespaces permitted.
set -euo pipefail
(($# >= 3)) || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
action=$1 id=$2 hosts=$3 rate=${4:-none}
bridge=${id}b

if [[ $action == down ]]; then
  for ((host = 0; host < hosts; ++host)); do
    ip link del "${id}v$host" 2>/dev/null || true
    ip netns del "$id-$host" 2>/dev/null || true
  done
  ip link del "$bridge" 2>/dev/null || true
  exit
fi

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
  ip -n "$space" addr add "10.213.8.$((host + 1))/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$space" link set lo up
  [[ $rate == none ]] && continue
  ip netns exec "$space" tc qdisc add dev eth0 root tbf rate "$rate" burst "${HOSTS_BURST:-256kb}" latency 200ms
  tc qdisc add dev "${id}v$host" root tbf rate "$rate" burst "${HOSTS_BURST:-256kb}" latency 200ms
done
