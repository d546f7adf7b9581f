// Parameters without a gradient: on some ranks, on all, in some steps; and buckets that nobody
// needs.

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

const std::vector<int> kSizes = {3, 5, 1, 8, 2};
constexpr int kParams = 5;

DataParallelOptions Options(bool views, bool skip) {
  return {.reducer = {.caps = {Bytes{8}, Bytes{24}},
                      .gradient_as_bucket_view = views,
                      .find_unused = true,
                      .skip_unused_buckets = skip}};
}

using Uses = std::vector<bool>;  // By parameter.

// How the adapter of an autograd engine runs backward: it knows from a walk of the graph what will
// be reached, or finds out as it goes.
enum class Knows { kBefore, kAfter };

std::vector<int> Unused(const Uses& uses) {
  std::vector<int> unused;
  for (int p = 0; p < kParams; ++p) {
    if (!uses[p]) unused.push_back(p);
  }
  return unused;
}

absl::Status TrainStep(DataParallel& ddp, ToyModel& model, int rank, int batch, const Uses& uses,
                       Knows knows) {
  model.buffer() = {0, 0, 0};  // Not what this is about.
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  if (knows == Knows::kBefore) EK_RETURN_IF_ERROR(ddp.MarkUnused(Unused(uses)));
  for (int p = kParams - 1; p >= 0; --p) {
    if (!uses[p]) continue;
    EK_RETURN_IF_ERROR(
        model.BackwardOf(p, rank, batch, [&](int param) { return ddp.GradientReady(param); }));
  }
  return ddp.FinishStep();
}

class UnusedParametersTest : public testing::TestWithParam<std::tuple<int, bool, bool>> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  DataParallelOptions options() const {
    return Options(std::get<1>(GetParam()), std::get<2>(GetParam()));
  }
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(world(), body);
    EXPECT_TRUE(status.ok()) << status;
  }
};

// Expects the average over the ranks that use it, and none where nobody does.
void ExpectGradients(ToyModel& model, const std::vector<Uses>& uses, int batch) {
  for (int p = 0; p < kParams; ++p) {
    bool is_used = false;
    std::vector<float> sum(kSizes[p], 0.0f);
    for (size_t rank = 0; rank < uses.size(); ++rank) {
      if (!uses[rank][p]) continue;
      is_used = true;
      for (int j = 0; j < kSizes[p]; ++j)
        sum[j] += model.GradientAt(p, j, static_cast<int>(rank), batch);
    }
    const std::string what = absl::StrCat("p", p, " in step ", batch);
    EXPECT_EQ(model.params().grad_state(p), is_used ? GradState::kReduced : GradState::kNone)
        << what;
    for (int j = 0; is_used && j < kSizes[p]; ++j) {
      EXPECT_NEAR(model.Gradient(p)[j], sum[j] / static_cast<float>(uses.size()), 1e-6f) << what;
    }
  }
}

// Something else for each rank and step.
Uses UsesOf(int rank, int batch) {
  Uses uses(kParams);
  for (int p = 0; p < kParams; ++p) uses[p] = ToyModel::Noise(rank, batch, p, 7) > 0.2f;
  return uses;
}

TEST_P(UnusedParametersTest, WhatSomeRanksUseIsAveragedAndWhatNoneUsesIsLeftAlone) {
  for (const Knows knows : {Knows::kBefore, Knows::kAfter}) {
    Run([&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options()));
      for (int batch = 0; batch < 8; ++batch) {
        std::vector<Uses> uses;
        for (int rank = 0; rank < comm.world_size(); ++rank) uses.push_back(UsesOf(rank, batch));
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), batch, uses[comm.rank()], knows));
        ExpectGradients(model, uses, batch);
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(UnusedParametersTest, ARankThatRanDryUsesNothing) {
  // Every rank uses all parameters at first; the last rank goes on alone, without p1 and p3.
  const Uses all(kParams, true), some = {true, false, true, false, true};
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options()));
    const bool goes_on = comm.rank() == comm.world_size() - 1;
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (goes_on ? 5 : 2); ++step) {
        EK_RETURN_IF_ERROR(
            TrainStep(*ddp, model, comm.rank(), step, step < 2 ? all : some, Knows::kBefore));
        for (int p = 0; p < kParams; ++p) {
          const bool is_used = step < 2 || some[p];
          EXPECT_EQ(model.params().grad_state(p), is_used ? GradState::kReduced : GradState::kNone)
              << "p" << p;
        }
      }
      return absl::OkStatus();
    }));
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnusedParametersTest,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Bool(),
                                          testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<int, bool, bool>>& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param) ? "Views" : "Copies",
                                               std::get<2>(info.param) ? "Skips" : "");
                         });

TEST(SkippedBucketsTest, ABucketThatNobodyUsesIsReducedByNoRankDryOnesIncluded) {
  for (const Knows knows : {Knows::kBefore, Knows::kAfter}) {
    absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes);
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params(), {}, Options(false, true)));
      EK_ASSIGN_OR_RETURN(Channel* const channel, comm.OpenChannel(ddp->join_name()));
      const Uses all(kParams, true);
      Uses some = all;
      int64_t per_step = 0, buckets_unused = 0, first = 0;
      EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
        for (int step = 0; step < 2; ++step) {  // The second has the buckets of the recorded order.
          first = channel->position();
          EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step, all, knows));
        }
        per_step = channel->position() - first;
        first = channel->position();
        for (const BucketInfo& bucket : ddp->buckets()) {
          if (bucket.index % 2 == 0) continue;
          ++buckets_unused;
          for (const int param : bucket.params) some[param] = false;
        }
        if (comm.rank() == 0) return absl::OkStatus();
        for (int step = 2; step < 4; ++step) {
          EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step, some, knows));
        }
        return absl::OkStatus();
      }));
      EXPECT_GT(buckets_unused, 0);
      EXPECT_EQ(channel->position() - first, 2 * (per_step - buckets_unused))
          << "rank " << comm.rank();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(UnusedParametersErrorsTest, AGradientOfWhatWasMarkedUnusedEndsTheStepOnAllRanks) {
  std::vector<absl::Status> results(2);
  (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    // Whether rank 0 has begun by then or not, or is still in Create().
    const auto step = [&]() -> absl::Status {
      ToyModel model(kSizes);
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params(), {}, Options(false, false)));
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      if (comm.rank() == 1) EK_RETURN_IF_ERROR(ddp->MarkUnused({2}));
      (void)model.Backward(comm.rank(), 0, [&](int param) { return ddp->GradientReady(param); });
      return ddp->FinishStep();
    };
    return results[comm.rank()] = step();
  });
  for (const absl::Status& status : results)
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"p2\" (2)"));
}

TEST(UnusedStepsTest, StepsWithTheSameUnusedParametersAreCounted) {
  absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(false, false)));
    const Uses some = {true, false, true, true, true}, others = {false, true, true, true, true};
    for (int step = 0; step < 4; ++step) {
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step, some, Knows::kAfter));
      EXPECT_EQ(ddp->reducer().stats().same_unused_steps, step + 1);
    }
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 4, others, Knows::kAfter));
    EXPECT_EQ(ddp->reducer().stats().same_unused_steps, 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CheckCompleteTest, SaysAtTheEndOfBackwardWhatFinishStepWillMiss) {
  absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, {}));
    EXPECT_EQ(ddp->CheckComplete().code(), absl::StatusCode::kFailedPrecondition);  // No step.
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    const auto announce = [&](int param) { return ddp->GradientReady(param); };
    for (int p = kParams - 1; p > 0; --p) EK_RETURN_IF_ERROR(model.BackwardOf(p, 0, 0, announce));
    EXPECT_THAT(std::string(ddp->CheckComplete().message()), HasSubstr("\"p0\" (0)"));
    EK_RETURN_IF_ERROR(model.BackwardOf(0, 0, 0, announce));
    EK_RETURN_IF_ERROR(ddp->CheckComplete());
    return ddp->FinishStep();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CheckCompleteTest, AParameterWithoutElementsIsNotMissed) {
  for (const int world_size : {1, 3}) {
    for (const bool views : {false, true}) {
      absl::Status status = RunTestRanks(world_size, [&](Communicator& comm) -> absl::Status {
        ToyModel model({3, 0, 2});
        EK_ASSIGN_OR_RETURN(auto ddp,
                            DataParallel::Create(&comm, &model.params(), {},
                                                 {.reducer = {.caps = {Bytes{8}, Bytes{24}},
                                                              .gradient_as_bucket_view = views}}));
        for (int step = 0; step < 3; ++step) {
          model.params().ClearGradients();
          EK_RETURN_IF_ERROR(ddp->BeginStep());
          for (const int p : {2, 1, 0}) {
            if (p == 1 && comm.rank() != step) continue;  // One rank uses it, in the end none.
            EK_RETURN_IF_ERROR(model.BackwardOf(
                p, comm.rank(), step, [&](int param) { return ddp->GradientReady(param); }));
          }
          EK_RETURN_IF_ERROR(ddp->CheckComplete());
          EK_RETURN_IF_ERROR(ddp->FinishStep());
          for (const int p : {0, 2}) {
            float sum = 0;
            for (int rank = 0; rank < world_size; ++rank) sum += model.GradientAt(p, 1, rank, step);
            EXPECT_NEAR(model.Gradient(p)[1], sum / static_cast<float>(world_size), 1e-6f);
          }
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(CheckCompleteTest, NothingIsMissedWhereWhatWasNotAnnouncedHasNoGradient) {
  const ReducerOptions each[] = {{.find_unused = true}, {.static_graph = true}};
  for (const ReducerOptions& options : each) {
    absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes);
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params(), {}, {.reducer = options}));
      for (int step = 0; step < 2; ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(
            model.BackwardOf(2, 0, step, [&](int param) { return ddp->GradientReady(param); }));
        EK_RETURN_IF_ERROR(ddp->CheckComplete());
        EK_RETURN_IF_ERROR(ddp->FinishStep());
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace evenkeel
