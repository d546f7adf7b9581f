// A link whose exchanges travel over the tree of the ranks. All other messages go directly to the
// hub and come directly from it.
//
//   if (shape.is_star()) return direct;
//   return std::make_unique<TreeLink>(shape, rank, std::move(direct), std::move(edges));
//
// So the hub receives an exchange in `fanout` messages, however large the group is, and still
// notices at once that a rank is lost, inner ranks included. A tree is never repaired: the group
// has ended then.
//
// Heartbeats contain the exchanges that this rank has begun, because the hub learns of them from
// the tree only later. For the same reason the hub asks all ranks (to_rank::Poll) when a rank asks
// which ranks are missing.
//
// Order:  messages from the hub keep their order, and so do those over an edge; a failure may
//         overtake a result.
// Ending: a rank that leaves must have the results of its exchanges, because the ranks below it
//         receive them through it. Finalize() ensures this.
//
// Threads: as ControlLink.

#ifndef EVENKEEL_COMM_CONTROL_TREE_LINK_H_
#define EVENKEEL_COMM_CONTROL_TREE_LINK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/link.h"

namespace evenkeel::internal {

// A rank's connections to its parent (unless that is the hub) and its children.
class TreeEdges {
 public:
  virtual ~TreeEdges() = default;
  // Called once, before anything else. The callbacks run on threads of the edges. `lost`: the
  // neighbour's end is gone; for kHub, these edges cannot work, and Start() may call it.
  virtual void Start(std::function<void(int child, ToHub message)> from_child,
                     std::function<void(ToRank message)> from_parent,
                     std::function<void(int neighbour, const absl::Status& why)> lost) = 0;
  // Returns whether neighbours need each other's addresses.
  virtual bool HasAddress() const = 0;
  // Returns the address at which children find this rank.
  virtual std::string Address() const = 0;
  // Connects to the parent at `address`; called at most once.
  virtual void AttachParent(const std::string& address) = 0;
  // Never wait. A neighbour receives earlier messages when it connects.
  virtual void SendToParent(const ToHub& message) = 0;
  virtual void SendToChildren(absl::Span<const int> to, const ToRank& message) = 0;
  // No callback runs after it returns. Messages that were sent before are still delivered.
  virtual void Stop() = 0;
  virtual ControlCounters Counters() const = 0;
};

class TreeLink : public ControlLink {
 public:
  TreeLink(TreeShape shape, int rank, std::unique_ptr<ControlLink> direct,
           std::unique_ptr<TreeEdges> edges);
  ~TreeLink() override { Stop(); }

  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override;
  void Send(ToHub message) override;
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank,
                                                    int world_size, absl::Duration timeout,
                                                    const Origin& origin) override {
    return direct_->Open(group, rank, world_size, timeout, origin);
  }
  std::string Key(absl::string_view purpose) const override { return direct_->Key(purpose); }
  absl::Duration Silence() const override { return direct_->Silence(); }
  int HubRank() const override { return direct_->HubRank(); }
  ControlCounters Counters() const override;
  void Stop() override;

 private:
  // Handles a part of an exchange, of this rank or of a child.
  void Gather(int from, to_hub::Exchange part);
  void OnDirect(ToRank message);
  void OnChild(int child, ToHub message);
  void OnEdgeLost(int neighbour, const absl::Status& why);
  // Passes a message of the parent on, if it is a result, to this rank and to those below it.
  void PassOn(ToRank message);
  void Reply(const to_rank::Poll& poll);
  void Fail(const absl::Status& why);

  const TreeShape shape_;
  const int rank_;
  const int parent_;
  const std::vector<int> children_;
  const std::unique_ptr<ControlLink> direct_;
  const std::unique_ptr<TreeEdges> edges_;

  absl::Mutex deliver_;  // Held while the receiver runs: several threads call it, one at a time.
  std::function<void(ToRank)> receive_;

  absl::Mutex mutex_;
  ExchangeRelay relay_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> begun_
      ABSL_GUARDED_BY(mutex_);                         // By topic: the number of exchanges begun.
  std::set<ExchangeId> open_ ABSL_GUARDED_BY(mutex_);  // Those without a result.
  absl::Status parent_lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_TREE_LINK_H_
