// Over a transport that pairs whatever has equal size, no wrong gradient reaches an optimizer: what
// the ranks have launched is compared before a step's FinishStep() answers OK.

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/groups.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::RunRanksOver;
using internal::Transport;

const std::vector<int> kSizes = {3, 5, 1, 8, 2};

absl::Status TrainStep(DataParallel& ddp, ToyModel& model, int rank, int batch) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  model.Forward(rank, batch);
  EK_RETURN_IF_ERROR(
      model.Backward(rank, batch, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

TEST(BlindTransportTest, StepsThatAgreeAreAsOverAnyOther) {
  const absl::Status status =
      RunRanksOver(Transport::kBlind, 3, [](Communicator& comm) -> absl::Status {
        ToyModel model(kSizes);
        EK_ASSIGN_OR_RETURN(auto ddp,
                            DataParallel::Create(&comm, &model.params(), model.buffers(), {}));
        for (int step = 0; step < 4; ++step)
          EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BlindTransportTest, AWrongPairBeforeTheStepsEndIsFoundOnAllRanks) {
  absl::Mutex mutex;
  std::vector<absl::Status> seen(3);
  RunRanksOver(Transport::kBlind, 3,
               [&](Communicator& comm) -> absl::Status {
                 ToyModel model(kSizes);
                 EK_ASSIGN_OR_RETURN(
                     auto ddp, DataParallel::Create(&comm, &model.params(), model.buffers(), {}));
                 EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
                 // Something on the reducer's channel that is not the same on rank 1.
                 EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel("data_parallel#0"));
                 std::vector<float> data(4, 1.0f);
                 const Work wrong = comm.rank() == 1
                                        ? channel->Broadcast(absl::MakeSpan(data), 1)
                                        : channel->AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
                 EXPECT_TRUE(wrong.Wait().ok()) << "the transport cannot know";
                 const absl::Status status = TrainStep(*ddp, model, comm.rank(), 1);
                 absl::MutexLock lock(&mutex);
                 seen[comm.rank()] = status;
                 return absl::OkStatus();
               },
               {.watch = {.beat = absl::InfiniteDuration()}})  // Nothing else is to find it.
      .IgnoreError();
  for (const absl::Status& status : seen) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 is at ")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "broadcast (user) float32[4] root 1"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "ranks 0,2 are at ")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "the ranks disagree")) << status;
  }
}

}  // namespace
}  // namespace evenkeel
