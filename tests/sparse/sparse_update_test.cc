// A step on rows: that of the dense gradient on those rows, nothing elsewhere, and refused where it
//                 could not be.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int kRows = 6, kRowSize = 2;

struct Table {
  explicit Table(bool is_sparse) : is_sparse(is_sparse) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.25f * static_cast<float>(i);
    if (is_sparse) {
      params.AddSparse("table", absl::MakeSpan(values), kRowSize);
    } else {
      params.Add("table", absl::MakeSpan(values), absl::MakeSpan(grad));
    }
  }
  // Rows that depend on rank and step, one of them twice.
  absl::Status Write(int rank, int step) {
    const std::vector<int64_t> rows = {(rank + step) % kRows, 3, (rank + step) % kRows};
    std::vector<float> elements;
    for (int i = 0; i < 3 * kRowSize; ++i)
      elements.push_back(0.5f * static_cast<float>(rank + 1) + static_cast<float>(i + step));
    if (is_sparse) return params.SetSparseGrad(0, rows, absl::MakeSpan(elements));
    grad.assign(grad.size(), 0.0f);
    for (int i = 0; i < 3 * kRowSize; ++i)
      grad[rows[i / kRowSize] * kRowSize + i % kRowSize] += elements[i];
    params.SetGradState(0, GradState::kLocal);
    return absl::OkStatus();
  }

  const bool is_sparse;
  std::vector<float> values = std::vector<float>(kRows * kRowSize),
                     grad = std::vector<float>(kRows * kRowSize);
  ParameterSet params;
};

class SparseUpdateTest : public testing::TestWithParam<int> {};

// Uneven too: ranks that became exhausted update the same rows.
TEST_P(SparseUpdateTest, SgdUpdatesTheRowsAsItDoesWithTheDenseGradient) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    std::vector<std::vector<float>> results;
    for (bool is_sparse : {true, false}) {
      Table table(is_sparse);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &table.params, {}));
      EK_ASSIGN_OR_RETURN(auto optimizer,
                          Optimizer::Create(comm, table.params, Sgd{.learning_rate = 0.125}));
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step < 2 + comm.rank(); ++step) {
              table.params.ClearGradients();
              EK_RETURN_IF_ERROR(ddp->BeginStep());
              EK_RETURN_IF_ERROR(table.Write(comm.rank(), step));
              EK_RETURN_IF_ERROR(ddp->GradientReady(0));
              EK_RETURN_IF_ERROR(ddp->FinishStep());
              EK_RETURN_IF_ERROR(optimizer->Step({.clip = ClipOptions{.max_norm = 3.0}}));
            }
            return absl::OkStatus();
          }));
      results.push_back(table.values);
    }
    if (TheTestBackend().adds_in_rank_order) {
      EXPECT_THAT(results[0], testing::Pointwise(testing::FloatEq(), results[1]))
          << "rank " << comm.rank();
    } else {  // Terms of up to 3 cancel.
      EXPECT_THAT(results[0], testing::Pointwise(testing::FloatNear(2e-6f), results[1]))
          << "rank " << comm.rank();
    }
    EXPECT_NE(results[0], Table(true).values);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SparseUpdateTest, RulesThatWouldChangeAllRowsAreRefused) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Table table(true);
    for (const UpdateRule& rule :
         std::vector<UpdateRule>{AdamW{}, Sgd{.momentum = 0.9}, Sgd{.weight_decay = 0.1}}) {
      const absl::Status made = Optimizer::Create(comm, table.params, rule).status();
      EXPECT_EQ(made.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(made.message()), HasSubstr("parameter \"table\" is sparse, and "));
    }
    EXPECT_THAT(
        std::string(Optimizer::Create(comm, table.params, Sgd{}, {.placement = WholeTensors{}})
                        .status()
                        .message()),
        HasSubstr("parameter \"table\" is sparse: only the placement Replicated updates rows"));
    EXPECT_THAT(
        std::string(Optimizer::Create(comm, table.params, Sgd{}, {.placement = Slices{}})
                        .status()
                        .message()),
        HasSubstr("parameter \"table\" is sparse: only the placement Replicated updates rows"));
    EK_ASSIGN_OR_RETURN(auto optimizer,
                        Optimizer::Create(comm, table.params, Sgd{},
                                          {.placement = Replicated{.update_in_backward = true}}));
    for (const std::vector<int>& chosen : {std::vector<int>{}, std::vector<int>{0}}) {
      EXPECT_THAT(std::string(optimizer->TakeReduction({.params = chosen}).status().message()),
                  HasSubstr("cannot update parameter 0 \"table\" in backward: it is sparse"));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, SparseUpdateTest, testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace evenkeel
