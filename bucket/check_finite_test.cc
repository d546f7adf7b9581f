// ReducerOptions::check_finite: the rank that brings the first number that is not finite is named
// on all ranks.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 8, 2};
constexpr int kBadStep = 3, kBadRank = 1, kBadParameter = 2, kBadElement = 4;

absl::Status Train(DataParallel& ddp, ToyModel& model, int rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp.BeginStep());
    for (int p = static_cast<int>(kSizes.size()) - 1; p >= 0; --p) {
      EK_RETURN_IF_ERROR(model.BackwardOf(p, rank, step, [&](int param) {
        if (step == kBadStep && rank == kBadRank && param == kBadParameter) {
          static_cast<float*>(model.params()[param].grad.data)[kBadElement] =
              -std::numeric_limits<float>::infinity();
        }
        return ddp.GradientReady(param);
      }));
    }
    EK_RETURN_IF_ERROR(ddp.FinishStep());
  }
  return absl::OkStatus();
}

void ExpectNamed(const absl::Status& status) {
  EXPECT_THAT(status.message(), HasSubstr("rank 1: the gradient of parameter \"p2\" (2) is not "
                                          "finite in step 4: element 4 of 8, in bucket "));
  const auto failure = FailureInfoOf(status);
  ASSERT_TRUE(failure.has_value()) << status;
  EXPECT_EQ(failure->kind, FailureKind::kRankFailed);
  EXPECT_THAT(failure->ranks, testing::ElementsAre(kBadRank));
}

TEST(CheckFiniteTest, NamesTheRankTheParameterAndTheStepOnAllRanks) {
  for (const bool views : {false, true}) {
    for (const bool joins : {false, true}) {
      const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
        ToyModel model(kSizes);
        EK_ASSIGN_OR_RETURN(const auto ddp,
                            DataParallel::Create(&comm, &model.params(), {},
                                                 {.reducer = {.caps = {Bytes{24}},
                                                              .gradient_as_bucket_view = views,
                                                              .check_finite = true}}));
        const int steps = joins && comm.rank() == 2 ? 2 : 6;
        ExpectNamed(
            joins ? RunJoined({ddp.get()}, {},
                              [&](JoinScope&) { return Train(*ddp, model, comm.rank(), steps); })
                  : Train(*ddp, model, comm.rank(), steps));
        return absl::OkStatus();
      });
      ExpectNamed(status);
    }
  }
}

TEST(CheckFiniteTest, TheVariableDoesTheSame) {
  setenv("EVENKEEL_CHECK_FINITE", "1", /*replace=*/1);
  ExpectNamed(RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                             {.reducer = {.caps = {Bytes{24}}}}));
    return Train(*ddp, model, comm.rank(), 6);
  }));
  setenv("EVENKEEL_CHECK_FINITE", "yes", /*replace=*/1);
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) {
    ToyModel model(kSizes);
    return DataParallel::Create(&comm, &model.params(), {}).status();
  });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("EVENKEEL_CHECK_FINITE=yes is not a number from 0 to 1"));
  unsetenv("EVENKEEL_CHECK_FINITE");
}

TEST(CheckFiniteTest, WithoutItTheNumbersSpread) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_RETURN_IF_ERROR(Train(*ddp, model, comm.rank(), kBadStep + 1));
    EXPECT_TRUE(
        std::isinf(static_cast<float*>(model.params()[kBadParameter].grad.data)[kBadElement]));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CheckFiniteTest, RowsOfASparseGradient) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    std::vector<float> table(12), rows = {1, 2, 3, 4, 5, 6};
    ParameterSet params;
    params.AddSparse("table", TensorView(absl::MakeSpan(table)), 3);
    EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &params, {},
                                                             {.reducer = {.check_finite = true}}));
    if (comm.rank() == 0) rows[4] = std::numeric_limits<float>::quiet_NaN();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    EK_RETURN_IF_ERROR(
        params.SetSparseGrad(0, std::vector<int64_t>{1, 3}, TensorView(absl::MakeSpan(rows))));
    absl::Status status = ddp->GradientReady(0);
    if (status.ok()) status = ddp->FinishStep();
    EXPECT_THAT(status.message(), HasSubstr("rank 0: the gradient of parameter \"table\" (0) is "
                                            "not finite in step 1: element 4 of 6, sparse"));
    return absl::OkStatus();
  });
  EXPECT_THAT(status.message(), HasSubstr("element 4 of 6"));
}

}  // namespace
}  // namespace evenkeel
