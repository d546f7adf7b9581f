// Steps that another rank sends and that do not fit the phase of this one's.

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

// Rank 1 has no inputs. Rank 0 announces a step of the optimizer before the reduction has ended, as
// a rank that runs another program could do.
absl::Status SendAStepTooEarly(Communicator& comm, const Slices& placement) {
  TestModel model({5, 40});
  ParameterSet& params = model.params();
  EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}));
  EK_ASSIGN_OR_RETURN(auto optimizer,
                      Optimizer::Create(*ddp, Sgd{.learning_rate = 0.1}, {.placement = placement}));
  return RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
    if (comm.rank() == 1) return absl::OkStatus();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    StepMessage step{.rules = optimizer->groups().rules()};
    step.sources.assign(params.size(), GradientSource::kHere);
    EK_RETURN_IF_ERROR(ActionHook<OptimizerAction>::Announce(*optimizer, step));
    for (int param = params.size() - 1; param >= 0; --param) {
      model.PutGradient(comm.rank(), /*step=*/0, param, /*adds=*/false);
      params.SetGradState(param, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp->GradientReady(param));
    }
    return ddp->FinishStep();
  });
}

TEST(SlicesOptimizerTest, AnExhaustedRankRefusesAStepInTheMiddleOfAReduction) {
  for (const bool in_backward : {false, true}) {
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) {
      return SendAStepTooEarly(comm, {.update_in_backward = in_backward});
    });
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("Step() was called while the gradients are being reduced"))
        << status;
  }
}

}  // namespace
}  // namespace evenkeel::internal
