// Runs one operation at a time over three transports, on the calling thread: `inside` each host,
// `between` the first ranks of the hosts, which lead them, and over `all` ranks.
//
//   HierarchicalCollectives collectives(
//       map, /*rank=*/3, transports, /*channel=*/17,
//       [&](const absl::Status& why) { ... abort the transports ... });
//   absl::Status status = collectives.Run(operation);
//
// The path of the data, which crosses the link between two hosts as few times as possible:
//   all_reduce      inside to the leader, between the leaders, inside from the leader; in chunks:
//                   one crosses while the next one is added up and the last one spread
//   reduce          inside to the leader, between the leaders to the root's one, there to the root
//   broadcast       inside the root's host, between the leaders, inside the other hosts
//   all_gather      inside each host, then whole hosts' blocks between the leaders, then the blocks
//                   of other hosts inside. Hosts with fewer ranks fill their blocks up to the size
//                   of the largest host's
//   reduce_scatter  inside to the leader, blocks of whole hosts between the leaders, each rank's
//                   share inside
//   barrier         inside, between, inside
//   all_to_all, all_to_all_v   over `all`: each byte has one receiver anyway
//   all_gather_v    inside each host, then between the leaders: the first ranks of all hosts, the
//                   second ones, ...; then the received parts inside
//
// Sums:  within a host in the order of `inside`, then over the hosts in that of `between`. So
//        results depend on which ranks share a host; they are equal on all ranks, because one
//        rank's result goes to all.
// Rules for `inside`: a reduce takes an input that is not the output, and does not change the
//        memory of ranks other than the root, like local and shm.
//
// Threads: thread-compatible; several objects may share the transports if their channels differ.

#ifndef EVENKEEL_COMM_HIERARCHICAL_COLLECTIVES_H_
#define EVENKEEL_COMM_HIERARCHICAL_COLLECTIVES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/hierarchical/host_map.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

// Returns the hash of the properties of the whole on which the ranks must agree:
// Operation::step_of.
uint64_t HashOfWhole(const Operation& operation);

// This rank's transports; one that is not needed is null. Their messages name ranks as the whole
// group does.
struct HierarchicalTransports {
  // The ranks of this host, by place; needed if there are two or more.
  std::unique_ptr<Backend> inside;
  // The hosts' leaders, by host; needed on leaders if there are several hosts, one of which has two
  // ranks or more.
  std::unique_ptr<Backend> between;
  // All ranks; needed if there are several hosts.
  std::unique_ptr<Backend> all;
};

class HierarchicalCollectives {
 public:
  // `map` and `transports` outlive it. `channel`: the channel of the transports to use. `abort`
  // ends all operations of the transports.
  HierarchicalCollectives(const HostMap& map, int rank, const HierarchicalTransports& transports,
                          uint64_t channel, std::function<void(const absl::Status&)> abort);

  // When it returns, nothing touches the operation's buffers any more. After a failure, which ends
  // the transports, it is not called again.
  absl::Status Run(const Operation& operation);

 private:
  // A transport's lane of this object.
  struct Line {
    Backend* backend = nullptr;
    int64_t sequence = 0;
    std::map<int, int64_t> messages = {};  // To or from a rank of it.
  };
  struct Step {
    CollectiveKind kind = CollectiveKind::kBarrier;
    int64_t count = 0;
    int root = -1;
    TensorList in, out;
    double scale = 1.0;
    bool contributes = true;
    bool as_bits = false;  // Combined bit by bit, whatever the elements are.
  };
  using Started = std::shared_ptr<WorkState>;  // A step.

  absl::Status RunKind(const Operation& operation);
  absl::Status AllReduce(const Operation& operation);
  absl::Status Reduce(const Operation& operation);
  absl::Status Broadcast(const Operation& operation);
  absl::Status AllGather(const Operation& operation);
  absl::Status AllGatherV(const Operation& operation);
  absl::Status ReduceScatter(const Operation& operation);
  absl::Status AllToAll(const Operation& operation);
  absl::Status Barrier(const Operation& operation);

  Started Start(Line& line, const Operation& whole, Step step);
  absl::Status Do(Line& line, const Operation& whole, Step step) {
    return Start(line, whole, std::move(step))->Wait();
  }

  // Reductions of `in` to the leader's `out`, over this host and over all.
  Step ReduceInside(const Operation& whole, TensorList in, TensorList out) const;
  double ScaleBetween(const Operation& whole) const;
  // Prepares this rank's contribution, where no other rank shares its host.
  void ContributeAlone(const Operation& whole, const TensorList& data) const;

  const std::vector<int>& peers() const { return map_.ranks_of(host_); }
  bool is_shared() const { return inside_.backend != nullptr; }
  bool leads() const { return between_.backend != nullptr; }
  // The shares of a host's ranks, `count` elements each, in a list with one for each rank.
  TensorList SharesOf(int host, const TensorList& views, int64_t count) const;
  // Memory that is kept from one operation to the next; contents are lost when it grows.
  absl::StatusOr<char*> Scratch(int64_t bytes);

  const HostMap& map_;
  const int rank_;
  const int host_;
  const uint64_t channel_;
  const std::function<void(const absl::Status&)> abort_;
  Line inside_, between_, all_;
  std::vector<Started> open_;  // Started by the operation that runs.
  Memory scratch_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_HIERARCHICAL_COLLECTIVES_H_
