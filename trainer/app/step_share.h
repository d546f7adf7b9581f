// Sends all ranks, before the optimizer's update, the sum of the ranks' results, which would
// otherwise be lost with one rank. For runs whose lost ranks are replaced; exhausted ranks take
// part. Over a network it travels beside the last gradients.
//
//   StepShare share(comm);
//   share.on_shared = [&](const Evaluation& all) { ... };          // on an exhausted rank
//   EK_RETURN_IF_ERROR(share.Start(mine));          // once in each own step
//   EK_ASSIGN_OR_RETURN(const Evaluation all, share.Wait());       // before the update
//
// Ownership: the communicator must outlive it.
// Threads:   thread-compatible.

#ifndef EVENKEEL_TRAINER_APP_STEP_SHARE_H_
#define EVENKEEL_TRAINER_APP_STEP_SHARE_H_

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/trainer/models/evaluate.h"

namespace evenkeel {

class StepShare : public Joinable {
 public:
  explicit StepShare(Communicator* comm) : Joinable(comm, "share") {}

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }

  absl::Status Start(const Evaluation& mine) {
    sums_ = {static_cast<double>(mine.predictions), static_cast<double>(mine.correct),
             mine.loss_sum};
    // Within a host, waiting for such an operation takes less time than a switch to the thread that
    // would move it meanwhile. There it is announced behind the step's end, too: exhausted ranks
    // follow in the order of the announcements, and the end makes buffers equal.
    const absl::string_view backend = communicator().backend_name();
    return backend == "shm" || backend == "local" ? absl::OkStatus() : Send();
  }
  absl::StatusOr<Evaluation> Wait() {
    if (!sent_.has_value()) EK_RETURN_IF_ERROR(Send());
    return Received();
  }

  std::function<void(const Evaluation&)> on_shared;  // Each epoch sets it.

 private:
  struct Hook : JoinHook {
    explicit Hook(StepShare* owner) : share(owner) {}
    absl::Status MainHook(const StepAnswer& /*step*/) override {
      share->sums_ = {};
      EK_RETURN_IF_ERROR(share->Issue());
      EK_ASSIGN_OR_RETURN(const Evaluation all, share->Received());
      share->on_shared(all);
      return absl::OkStatus();
    }
    StepShare* const share;
  };

  // Exhausted ranks follow with their part where the active ones issue theirs.
  absl::Status Send() {
    EK_RETURN_IF_ERROR(Notify().status());
    return Issue();
  }
  absl::Status Issue() {
    EK_ASSIGN_OR_RETURN(Channel* const channel, communicator().OpenChannel(join_name()));
    sent_ = channel->AllReduce(absl::MakeSpan(sums_), ReduceOp::kSum);
    return absl::OkStatus();
  }
  absl::StatusOr<Evaluation> Received() {
    EK_RETURN_IF_ERROR(std::exchange(sent_, std::nullopt)->Wait());
    return Evaluation{.predictions = static_cast<int64_t>(sums_[0]),
                      .correct = static_cast<int64_t>(sums_[1]),
                      .loss_sum = sums_[2]};
  }
  void LeaveGroup(Communicator* /*old*/, const GroupChange& /*change*/) override { sent_.reset(); }

  std::array<double, 3> sums_ = {};
  std::optional<Work> sent_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_STEP_SHARE_H_
