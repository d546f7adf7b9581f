// Sends all ranks, before the optimizer's update, the sum of the ranks' results, which would
// otherwise be lost with one rank. For runs whose lost ranks are replaced; exhausted ranks take
// part.
//
//   StepShare share(comm);
//   share.on_shared = [&](const Evaluation& all) { ... };         // on an exhausted rank
//   EK_ASSIGN_OR_RETURN(const Evaluation all, share.Share(mine));  // once in each own step
//
// Ownership: the communicator must outlive it.
// Threads:   thread-compatible.

#ifndef EVENKEEL_TRAINER_APP_STEP_SHARE_H_
#define EVENKEEL_TRAINER_APP_STEP_SHARE_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/trainer/models/evaluate.h"

namespace evenkeel {

class StepShare : public Joinable {
 public:
  explicit StepShare(Communicator* comm) : Joinable(comm, "share") {}

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }

  absl::StatusOr<Evaluation> Share(const Evaluation& mine) {
    EK_RETURN_IF_ERROR(Notify().status());
    return Exchange(mine);
  }

  std::function<void(const Evaluation&)> on_shared;  // Set while an epoch runs.

 private:
  struct Hook : JoinHook {
    explicit Hook(StepShare* owner) : share(owner) {}
    absl::Status MainHook(const StepAnswer& /*step*/) override {
      EK_ASSIGN_OR_RETURN(const Evaluation all, share->Exchange({}));
      share->on_shared(all);
      return absl::OkStatus();
    }
    StepShare* const share;
  };

  absl::StatusOr<Evaluation> Exchange(const Evaluation& mine) {
    EK_ASSIGN_OR_RETURN(Channel* const channel, communicator().OpenChannel(join_name()));
    double sums[] = {static_cast<double>(mine.predictions), static_cast<double>(mine.correct),
                     mine.loss_sum};
    EK_RETURN_IF_ERROR(channel->AllReduce(absl::MakeSpan(sums), ReduceOp::kSum).Wait());
    return Evaluation{.predictions = static_cast<int64_t>(sums[0]),
                      .correct = static_cast<int64_t>(sums[1]),
                      .loss_sum = sums[2]};
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_STEP_SHARE_H_
