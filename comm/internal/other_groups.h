// Makes other groups of this group's ranks: subsets beside it (Communicator::Split()), or the
// survivors after it has failed (Communicator::Shrink()).
//
// Threads: thread-safe; all ranks call Split() in the same order.

#ifndef EVENKEEL_COMM_INTERNAL_OTHER_GROUPS_H_
#define EVENKEEL_COMM_INTERNAL_OTHER_GROUPS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/group/agreements.h"
#include "evenkeel/comm/group/group_end.h"

namespace evenkeel::internal {

class OtherGroups {
 public:
  // `make_group` is null if the backend cannot make other groups. The rest describes this group.
  OtherGroups(ControlChannel& control, Agreements& agreements, GroupEnd& end, GroupMaker make_group,
              const std::string& group, absl::string_view backend_name,
              const std::vector<int>& members)
      : control_(control),
        agreements_(agreements),
        end_(end),
        make_group_(std::move(make_group)),
        group_(group),
        backend_name_(backend_name),
        members_(members) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key, absl::Duration timeout);
  absl::StatusOr<std::unique_ptr<Communicator>> Shrink(absl::Duration timeout);

 private:
  int rank() const { return control_.rank(); }
  int world_size() const { return control_.world_size(); }
  // Makes this rank's half of a group of `ranks`, and waits until it is connected. `who` is the
  // calling function, for messages. An error that `status` returns ends the wait.
  using OriginStatus = std::function<absl::Status()>;
  absl::StatusOr<std::unique_ptr<Communicator>> MakeGroup(const std::string& name,
                                                          const std::vector<int>& ranks,
                                                          absl::Time deadline,
                                                          absl::string_view who,
                                                          OriginStatus status);

  ControlChannel& control_;
  Agreements& agreements_;
  GroupEnd& end_;
  const GroupMaker make_group_;
  const std::string& group_;
  const absl::string_view backend_name_;
  const std::vector<int>& members_;
  std::atomic<int> splits_ = 0;  // Equal on all ranks, which agree on each split.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_OTHER_GROUPS_H_
