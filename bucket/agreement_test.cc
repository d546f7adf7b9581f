// A difference or an error on one rank is soon an error on all of them.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reducer/reducer.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 2};

// Where gradients have no memory, a reducer that copies can't be made.
TEST(AgreementTest, AReducerThatOneRankCannotMakeIsAnErrorOnAll) {
  absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
    std::vector<float> value(4), grad(4);
    ParameterSet params;
    params.Add("w", absl::MakeSpan(value),
               comm.rank() == 1 ? TensorView() : TensorView(absl::MakeSpan(grad)));
    const absl::Status made = Reducer::Create(&comm, &params, "reducer", {}).status();
    EXPECT_EQ(made.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(made.message()), HasSubstr("reducer: rank 1: parameter \"w\""));
    EXPECT_EQ(params[0].grad.data, comm.rank() == 1 ? nullptr : grad.data());
    return comm.Barrier();  // The group goes on.
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AgreementTest, ADataParallelThatOneRankCannotMakeIsAnErrorOnAll) {
  absl::Status status = RunRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    const absl::Status made =
        DataParallel::Create(&comm, &model.params(), {},
                             {.trainability = {.every = comm.rank() == 0 ? -1 : 1}})
            .status();
    EXPECT_THAT(std::string(made.message()),
                HasSubstr("data_parallel#0: rank 0: trainability.every is -1"));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The first DataParallel of a step is compared when the step begins. A difference in the others
// shows when ranks can't come together any more.
TEST(AgreementTest, TwoInOneStepOfWhichOneSynchronisesOnOneRankOnly) {
  for (bool differs_first : {true, false}) {
    std::vector<absl::Status> results(2);
    const absl::Time begin = absl::Now();
    (void)RunRanks(2, [&](Communicator& comm) -> absl::Status {
      ToyModel a(kSizes), b(kSizes);
      EK_ASSIGN_OR_RETURN(auto first, DataParallel::Create(&comm, &a.params(), {}));
      EK_ASSIGN_OR_RETURN(auto second, DataParallel::Create(&comm, &b.params(), {}));
      results[comm.rank()] = [&]() -> absl::Status {
        for (int step = 0; step < 4; ++step) {
          const StepMode mode =
              step == 2 && comm.rank() == 1 ? StepMode::kAccumulate : StepMode::kSync;
          EK_RETURN_IF_ERROR(first->BeginStep(differs_first ? mode : StepMode::kSync));
          EK_RETURN_IF_ERROR(second->BeginStep(differs_first ? StepMode::kSync : mode));
          for (auto [model, ddp] : {std::pair(&a, first.get()), std::pair(&b, second.get())}) {
            EK_RETURN_IF_ERROR(model->Backward(
                comm.rank(), step, [ddp = ddp](int param) { return ddp->GradientReady(param); }));
          }
          EK_RETURN_IF_ERROR(first->FinishStep());
          EK_RETURN_IF_ERROR(second->FinishStep());
        }
        return absl::OkStatus();
      }();
      return results[comm.rank()];
    });
    EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
    for (const absl::Status& result : results) {
      EXPECT_EQ(result.code(), absl::StatusCode::kFailedPrecondition) << result;
      EXPECT_THAT(std::string(result.message()), HasSubstr("disagree")) << result;
    }
  }
}

}  // namespace
}  // namespace evenkeel
