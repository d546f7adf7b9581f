// The promise of all reductions that send less than the gradients: nothing is lost, and every rank
// ends with the same.

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/hooks/power_sgd.h"
#include "evenkeel/bucket/hooks/quantized_all_reduce.h"
#include "evenkeel/bucket/hooks/testing/quadratic.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {8 * 6, 5, 20 * 30};
const std::vector<MatrixShape> kShapes = {MatrixOf({8, 2, 3}), MatrixOf({5}), MatrixOf({20, 30})};

struct Hook {
  std::unique_ptr<BucketReduction> reduction;
  std::function<std::vector<float>(int param)> error;  // This rank's; empty if there is none.
};

Hook MakePowerSgd() {
  auto power = std::make_unique<PowerSgd>(
      PowerSgdOptions{.shapes = kShapes, .rank = 1, .min_compression_rate = 1.5});
  PowerSgd* const raw = power.get();
  return {std::move(power), [raw](int param) {
            return std::vector<float>(raw->error(param).begin(), raw->error(param).end());
          }};
}

Hook MakeQuantized() {
  auto quantized = std::make_unique<QuantizedAllReduce>();
  QuantizedAllReduce* const raw = quantized.get();
  return {std::move(quantized), [raw](int param) { return raw->Errors()[param]; }};
}

struct Case {
  std::string name;
  Hook (*make)();
  bool views = false;
};

class ErrorFeedbackTest : public testing::TestWithParam<Case> {
 protected:
  DataParallelOptions options() const {
    return {.reducer = {.caps = {Bytes{200}, Bytes{2500}},
                        .gradient_as_bucket_view = GetParam().views}};
  }
};
INSTANTIATE_TEST_SUITE_P(Hooks, ErrorFeedbackTest,
                         testing::Values(Case{"PowerSgd", MakePowerSgd},
                                         Case{"PowerSgdViews", MakePowerSgd, true},
                                         Case{"Quantized", MakeQuantized},
                                         Case{"QuantizedViews", MakeQuantized, true}),
                         [](const auto& info) { return info.param.name; });

// By parameter and element: what was applied, times the divisor, and what the ranks' gradients
//                           were.
struct Sums {
  std::vector<std::vector<double>> applied, gradients, errors;
  Sums() : applied(Zeros()), gradients(Zeros()), errors(Zeros()) {}
  static std::vector<std::vector<double>> Zeros() {
    std::vector<std::vector<double>> zeros;
    for (int size : kSizes) zeros.emplace_back(size, 0.0);
    return zeros;
  }
};

void Add(const std::vector<float>& values, double factor, std::vector<double>& to) {
  for (size_t j = 0; j < values.size(); ++j) to[j] += factor * values[j];
}

// Sums of at most 60 gradients below 3, each of whose parts was rounded in float32 a few times.
void ExpectNothingIsLost(const std::vector<Sums>& ranks) {
  for (size_t p = 0; p < kSizes.size(); ++p) {
    double largest_error = 0;
    for (int j = 0; j < kSizes[p]; ++j) {
      double gradients = 0, errors = 0;
      for (const Sums& rank : ranks) {
        gradients += rank.gradients[p][j];
        errors += rank.errors[p][j];
        largest_error = std::max(largest_error, std::abs(rank.errors[p][j]));
      }
      ASSERT_NEAR(ranks[0].applied[p][j] + errors, gradients, 1e-3)
          << "parameter " << p << ", element " << j;
    }
    if (p == 1) continue;  // May travel whole.
    EXPECT_GT(largest_error, 1e-3) << "parameter " << p << " was sent whole";
  }
}

TEST_P(ErrorFeedbackTest, WhatWasAppliedAndTheErrorsAddUpToTheGradients) {
  for (const int world : {1, 2, 3, 5}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    std::vector<Sums> sums(world);
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank(), /*noise=*/1.0f);
      Hook hook = GetParam().make();
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options(),
                                                         std::move(hook.reduction)));
      Sums& mine = sums[comm.rank()];
      for (int batch = 0; batch < 10; ++batch) {
        problem.params().SetTrainable(0,
                                      batch != 4 && batch != 5);  // Plans come and go, errors stay.
        problem.SetUnused(comm.rank() == 0 && batch % 3 == 1 ? std::vector<int>{2}
                                                             : std::vector<int>());
        EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, /*learning_rate=*/0.0f));
        for (int p = 0; p < 3; ++p) {
          if (!problem.params().trainable(p)) continue;
          if (problem.params().grad_state(p) == GradState::kReduced)
            Add(problem.Gradient(p), world, mine.applied[p]);
          if (comm.rank() == 0 && batch % 3 == 1 && p == 2) continue;
          for (int j = 0; j < kSizes[p]; ++j)
            mine.gradients[p][j] += problem.GradientAt(comm.rank(), batch, p, j);
        }
      }
      for (int p = 0; p < 3; ++p) Add(hook.error(p), 1.0, mine.errors[p]);
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    for (const Sums& rank : sums) EXPECT_EQ(rank.applied, sums[0].applied);  // Bit for bit.
    ExpectNothingIsLost(sums);
  }
}

TEST_P(ErrorFeedbackTest, TrainsToTheMeanOfTheTargets) {
  for (const int world : {1, 2, 3, 5}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank());
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options(),
                                                         GetParam().make().reduction));
      for (int batch = 0; batch < 500; ++batch)
        EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.02f));
      for (size_t p = 0; p < kSizes.size(); ++p) {
        for (int j = 0; j < kSizes[p]; ++j) {
          EXPECT_NEAR(problem.values()[p][j], Quadratic::MeanTarget(world, p, j), 0.02)
              << p << " " << j;
        }
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST_P(ErrorFeedbackTest, DryRanksLoseNothingAndTrainOn) {
  for (const int world : {2, 3, 5}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    std::vector<Sums> sums(world);
    std::vector<std::vector<std::vector<float>>> ended(world);
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank(), /*noise=*/1.0f);
      Hook hook = GetParam().make();
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options(),
                                                         std::move(hook.reduction)));
      ddp->SetOptimizerState({});
      Sums& mine = sums[comm.rank()];
      // Rank 0 has the most, so that it sees everything that is applied; the last rank has none at
      // all.
      const int inputs = comm.rank() == 0 ? 9 : comm.rank() == world - 1 ? 0 : 2 + comm.rank();
      EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
        for (int batch = 0; batch < inputs; ++batch) {
          EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, /*learning_rate=*/0.0f));
          for (int p = 0; p < 3; ++p) {
            Add(problem.Gradient(p), world, mine.applied[p]);
            for (int j = 0; j < kSizes[p]; ++j)
              mine.gradients[p][j] += problem.GradientAt(comm.rank(), batch, p, j);
          }
        }
        return absl::OkStatus();
      }));
      for (int p = 0; p < 3; ++p) Add(hook.error(p), 1.0, mine.errors[p]);
      // In the next loop all have inputs for a while, those that became exhausted before included.
      EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
        for (int batch = 0; batch < 40 + comm.rank(); ++batch) {
          EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, batch < 40 ? 0.01f : 0.0f));
        }
        return absl::OkStatus();
      }));
      ended[comm.rank()] = problem.values();
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    ExpectNothingIsLost(sums);
    for (const auto& values : ended) EXPECT_EQ(values, ended[0]);
  }
}

TEST_P(ErrorFeedbackTest, AGradientThatIsNotFiniteIsSeenOnAllRanksAndForgotten) {
  for (const int world : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank());
      Hook hook = GetParam().make();
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options(),
                                                         std::move(hook.reduction)));
      if (comm.rank() == world - 1) problem.SetPoison(/*batch=*/2, /*param=*/2);
      for (int batch = 0; batch < 6; ++batch) {
        EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.0f));
        EXPECT_EQ(std::isfinite(problem.Gradient(2)[3]), batch != 2) << batch;
        for (int p = 0; p < 3; ++p) {
          for (float error : hook.error(p)) EXPECT_TRUE(std::isfinite(error));
          if (p == 2 && batch == 2) continue;
          for (float gradient : problem.Gradient(p))
            EXPECT_TRUE(std::isfinite(gradient)) << p << " " << batch;
        }
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST_P(ErrorFeedbackTest, GoesTogetherWithSixteenBits) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    Quadratic problem(kSizes, comm.rank());
    auto both = std::make_unique<CompressedReduction>(DType::kFloat16, GetParam().make().reduction);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options(), std::move(both)));
    for (int batch = 0; batch < 500; ++batch) EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.02f));
    for (size_t p = 0; p < kSizes.size(); ++p) {
      for (int j = 0; j < kSizes[p]; ++j) {
        EXPECT_NEAR(problem.values()[p][j], Quadratic::MeanTarget(3, p, j), 0.03) << p << " " << j;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
