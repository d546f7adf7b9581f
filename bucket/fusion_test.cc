// The two ways in which a bucket's gradients go out together.

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 0, 8, 2};

DataParallelOptions Options(Fusion fusion, bool views = false) {
  return {.reducer = {.caps = {Bytes{8}, Bytes{24}},
                      .gradient_as_bucket_view = views,
                      .fusion = fusion,
                      .find_unused = true}};
}

absl::Status TrainStep(DataParallel& ddp, ToyModel& model, int rank, int batch) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  for (int p = 4; p >= 0; --p) {
    if (p == 1 && (rank + batch) % 2 == 0)
      continue;  // Unused on some ranks; at world 1 in every other step.
    EK_RETURN_IF_ERROR(
        model.BackwardOf(p, rank, batch, [&](int param) { return ddp.GradientReady(param); }));
  }
  return ddp.FinishStep();
}

class FusionTest : public testing::TestWithParam<int> {};

// Rank 0 is exhausted before the first step, after it, before it has seen the buckets of the
// recorded order, or later.
TEST_P(FusionTest, GradientsFromWhereTheyLieGiveTheSameAsCopiedOnes) {
  const auto train = [&](Communicator& comm, int least) -> absl::Status {
    ToyModel model(kSizes), reference(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(Fusion::kCoalesced)));
    EK_ASSIGN_OR_RETURN(
        auto flat, DataParallel::Create(&comm, &reference.params(), {}, Options(Fusion::kFlat)));
    const void* const memory = model.params()[3].grad.data;
    const int steps = least + comm.rank();
    EK_RETURN_IF_ERROR(RunJoined({ddp.get(), flat.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < steps; ++step) {
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
        EK_RETURN_IF_ERROR(TrainStep(*flat, reference, comm.rank(), step));
        for (int p = 0; p < 5; ++p) {
          EXPECT_EQ(model.params().grad_state(p), reference.params().grad_state(p))
              << "p" << p << ", step " << step;
          if (model.params().grad_state(p) == GradState::kNone) continue;
          EXPECT_EQ(model.Gradient(p), reference.Gradient(p)) << "p" << p << ", step " << step;
        }
      }
      return absl::OkStatus();
    }));
    EXPECT_EQ(model.params()[3].grad.data, memory);
    for (const BucketInfo& bucket : ddp->buckets()) {
      EXPECT_EQ(bucket.data.count, 0);
      EXPECT_EQ(bucket.parts.size(), bucket.params.size() + 1);
    }
    return absl::OkStatus();
  };
  for (const int least : {0, 1, 2}) {
    SCOPED_TRACE(absl::StrCat("rank 0 has ", least, " steps"));
    absl::Status status =
        RunTestRanks(GetParam(), [&](Communicator& comm) { return train(comm, least); });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(FusionTest, ARankThatNeverHadAGradientTakesPartInWhatTheOthersReduce) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(Fusion::kCoalesced)));
    ddp->SetOptimizerState({});
    const int last = comm.world_size() - 1;
    return RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (comm.rank() == last ? 3 : 0); ++step) {
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
        for (int j = 0; j < kSizes[3]; ++j) {
          EXPECT_NEAR(model.Gradient(3)[j], model.GradientAt(3, j, last, step) / comm.world_size(),
                      1e-6);
        }
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, FusionTest, testing::Values(1, 2, 3, 5, 8));

TEST(FusionErrorsTest, CoalescedBucketsHaveNoMemoryForViewsOrReductionsOfOnesOwn) {
  for (const bool views : {true, false}) {
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes);
      return DataParallel::Create(&comm, &model.params(), {}, Options(Fusion::kCoalesced, views),
                                  views ? nullptr : std::make_unique<AllReduceBuckets>())
          .status();
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("coalesced buckets have no memory of their own"));
    EXPECT_EQ(std::vector<std::string>(absl::StrSplit(status.message(), "data_parallel#0")).size(),
              2u)
        << status;
  }
}

TEST(FusionErrorsTest, AReductionThatIsInstalledLaterIsRefusedInOneSentence) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(Fusion::kCoalesced)));
    return ddp->InstallReduction(std::make_unique<AllReduceBuckets>());
  });
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("data_parallel#0: coalesced buckets have no memory of their own"))
      << status;
}

}  // namespace
}  // namespace evenkeel
