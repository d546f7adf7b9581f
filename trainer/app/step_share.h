// Sends all ranks, before the optimizer's update, the data that would otherwise be lost with one
// rank: the sum of the ranks' results, and the buffers with which the next step begins. For runs
// whose lost ranks are replaced; exhausted ranks take part.
//
//   StepShare share(comm, buffers);
//   share.on_shared = [&](const Evaluation& all) { ... };         // on an exhausted rank
//   EK_ASSIGN_OR_RETURN(const Evaluation all, share.Share(mine));  // once in each own step
//
// Ownership: the communicator and the buffers must outlive it.
// Threads:   thread-compatible.

#ifndef EVENKEEL_TRAINER_APP_STEP_SHARE_H_
#define EVENKEEL_TRAINER_APP_STEP_SHARE_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/trainer/models/evaluate.h"

namespace evenkeel {

class StepShare : public Joinable {
 public:
  StepShare(Communicator* comm, std::vector<TensorView> buffers)
      : Joinable(comm, "share"), buffers_(std::move(buffers)) {}

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }

  absl::StatusOr<Evaluation> Share(const Evaluation& mine) {
    EK_RETURN_IF_ERROR(Notify().status());
    // Does not block: the answer has arrived with the reduced gradients.
    EK_ASSIGN_OR_RETURN(const StepAnswer answer, StepControl::Of(communicator()).current()->Wait());
    return Exchange(mine, answer);
  }

  std::function<void(const Evaluation&)> on_shared;  // Set while an epoch runs.

 private:
  struct Hook : JoinHook {
    explicit Hook(StepShare* owner) : share(owner) {}
    absl::Status MainHook(const StepAnswer& step) override {
      EK_ASSIGN_OR_RETURN(const Evaluation all, share->Exchange({}, step));
      share->on_shared(all);
      return absl::OkStatus();
    }
    StepShare* const share;
  };

  absl::StatusOr<Evaluation> Exchange(const Evaluation& mine, const StepAnswer& answer) {
    EK_ASSIGN_OR_RETURN(Channel* const channel, communicator().OpenChannel(join_name()));
    double sums[] = {static_cast<double>(mine.predictions), static_cast<double>(mine.correct),
                     mine.loss_sum};
    const Work buffers = buffers_.empty() ? Work(absl::OkStatus())
                                          : channel->Broadcast(buffers_, answer.highest_active);
    absl::Status status = channel->AllReduce(absl::MakeSpan(sums), ReduceOp::kSum).Wait();
    status.Update(buffers.Wait());
    EK_RETURN_IF_ERROR(status);
    return Evaluation{.predictions = static_cast<int64_t>(sums[0]),
                      .correct = static_cast<int64_t>(sums[1]),
                      .loss_sum = sums[2]};
  }

  const std::vector<TensorView> buffers_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_STEP_SHARE_H_
