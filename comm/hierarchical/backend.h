// The backend over several hosts with several ranks each: one transport inside each host, another
// one between them, so that what the ranks of a host have in common crosses the link once.
//
//   auto backend = std::make_unique<HierarchicalBackend>(rank);
//   EK_RETURN_IF_ERROR(
//       backend->Compose(map, {.inside = shm half, .between = tcp half, .all = tcp half}));
//
// collectives.h describes how each collective goes. Messages go inside if both ends
// are on one host, else over `all`; where all ranks are on one host everything goes inside, and
// where no host has two everything over `all`, untouched.
//
// A channel's collectives run one after the other on a thread of the channel's own, as its steps in
// the transports do; there the channel has ids of its own, derived from the group's. The
// transports ensure that two different collectives never complete as a pair: each step names the
// operation to which it belongs (Operation::step_of).
//
// Threads: as Backend; Compose() once, before the first operation; Abort() at any time.

#ifndef EVENKEEL_COMM_HIERARCHICAL_BACKEND_H_
#define EVENKEEL_COMM_HIERARCHICAL_BACKEND_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/hierarchical/collectives.h"
#include "evenkeel/comm/hierarchical/host_map.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

class HierarchicalBackend : public Backend {
 public:
  explicit HierarchicalBackend(int rank);
  ~HierarchicalBackend() override;

  // From now on Abort() reaches the transports, so they may still be about to connect. Not OK: it
  // came before.
  absl::Status Compose(const HostMap& map, HierarchicalTransports transports);

  // That of the one transport, where there is only one; else "hierarchical".
  absl::string_view name() const override;
  absl::Status Supports(const Collective& what) const override;
  bool checks_pairs() const override;
  void Start(Operation operation, std::shared_ptr<WorkState> work) override;
  void Abort(const absl::Status& why) override;
  void Flush(absl::Time deadline) override;
  // For the ranks of the host.
  absl::StatusOr<Memory> Allocate(int64_t bytes) override;

 private:
  class Lane;

  // Null where there are several.
  Backend* only() const;
  std::array<Backend*, 3> AllTransports() const {  // Null: this rank has none.
    return {transports_.inside.get(), transports_.between.get(), transports_.all.get()};
  }
  void AbortTransports(const absl::Status& why);
  // Ends everything because an operation has failed here.
  void Break(const absl::Status& why);
  // A lane that runs an operation, whose buffers are in use; not OK: the group has ended.
  absl::Status Enter();
  void Leave();
  absl::Status ended() const;

  const int rank_;
  std::optional<HostMap> map_;
  HierarchicalTransports transports_;

  mutable absl::Mutex mutex_;
  bool is_composed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);  // By channel.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_HIERARCHICAL_BACKEND_H_
