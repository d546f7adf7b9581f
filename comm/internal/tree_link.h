// A link whose exchanges go over the tree of the ranks; everything else goes to the hub and comes from it directly.
//
//   if (shape.is_star()) return direct;
//   return std::make_unique<TreeLink>(shape, rank, std::move(direct), std::move(edges));
//
// So the hub gets an exchange in `fanout` messages however large the group is, and it still sees at once that a rank is
// lost, inner ones too: a tree need not be repaired, the group has ended then.
//
// Heartbeats take along which exchanges this rank has come to, because the hub can't know before the tree brings it;
// for the same reason the hub asks all ranks (kHaveCome) when somebody wants to know who is missing.
//
// Order: of what comes directly, and of what comes over an edge; a failure may overtake an answer.
// Ending: who leaves must have the answers to its exchanges, because those below it get them through it. Finalize()
//         sees to that.
//
// Threads: as ControlLink.

#ifndef EVENKEEL_COMM_INTERNAL_TREE_LINK_H_
#define EVENKEEL_COMM_INTERNAL_TREE_LINK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control_link.h"
#include "evenkeel/comm/internal/exchange_tree.h"

namespace evenkeel::internal {

// A rank's connections to its parent (unless that is the hub) and its children.
class TreeEdges {
 public:
  virtual ~TreeEdges() = default;
  // Called once, before anything else; on threads of the edges'. `lost`: the neighbour's end is gone.
  virtual void Start(std::function<void(int from, ControlMessage message)> receive,
                     std::function<void(int neighbour, const absl::Status& why)> lost) = 0;
  // Whether neighbours have to be told where they find each other.
  virtual bool HasAddress() const = 0;
  // Where children find this rank.
  virtual std::string Address() const = 0;
  // Where the parent is; called at most once.
  virtual void MeetParent(const std::string& address) = 0;
  // Never waits: what is sent before the neighbour is there, it gets when it comes.
  virtual void Send(int to, const ControlMessage& message) = 0;
  // No callback runs after it returns. What was sent before is still delivered.
  virtual void Stop() = 0;
  virtual ControlCounters Counters() const = 0;
};

class TreeLink : public ControlLink {
 public:
  TreeLink(TreeShape shape, int rank, std::unique_ptr<ControlLink> direct, std::unique_ptr<TreeEdges> edges);
  ~TreeLink() override { Stop(); }

  void Start(std::function<void(ControlMessage)> receive, std::function<void(absl::Status)> lost) override;
  void Send(ControlMessage message) override;
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank, int world_size) override {
    return direct_->Open(group, rank, world_size);
  }
  std::string Key(absl::string_view purpose) const override { return direct_->Key(purpose); }
  absl::Duration Silence() const override { return direct_->Silence(); }
  std::string HubName() const override { return direct_->HubName(); }
  ControlCounters Counters() const override;
  void Stop() override;

 private:
  // An exchange's part has come, from this rank or a child.
  void Gather(int from, ControlMessage message);
  void OnDirect(ControlMessage message);
  void OnEdge(int from, ControlMessage message);
  void OnEdgeLost(int neighbour, const absl::Status& why);
  // An answer: for this rank, and for those below it.
  void PassOn(ControlMessage message);
  void Fail(const absl::Status& why);

  const TreeShape shape_;
  const int rank_;
  const int parent_;
  const std::vector<int> children_;
  const std::unique_ptr<ControlLink> direct_;
  const std::unique_ptr<TreeEdges> edges_;

  absl::Mutex deliver_;  // Held while the receiver runs: it is called by several threads, one at a time.
  std::function<void(ControlMessage)> receive_;

  absl::Mutex mutex_;
  ExchangeRelay relay_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> begun_ ABSL_GUARDED_BY(mutex_);            // By topic: exchanges come to.
  std::set<std::pair<std::string, int64_t>> open_ ABSL_GUARDED_BY(mutex_);  // Those not answered: topic, sequence.
  absl::Status parent_lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_TREE_LINK_H_
