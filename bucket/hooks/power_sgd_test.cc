#include "evenkeel/bucket/hooks/power_sgd.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/testing/quadratic.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {8 * 6, 5, 20 * 30};
const std::vector<MatrixShape> kShapes = {MatrixOf({8, 6}), MatrixOf({5}), MatrixOf({20, 30})};
const DataParallelOptions kOptions = {.reducer = {.caps = {Bytes{200}, Bytes{2500}}}};

struct Training {
  Training(Communicator& comm, PowerSgdOptions options, float noise = 0.0f)
      : problem(kSizes, comm.rank(), noise) {
    if (options.shapes.empty()) options.shapes = kShapes;
    auto hook = std::make_unique<PowerSgd>(std::move(options));
    power = hook.get();
    created = DataParallel::Create(&comm, &problem.params(), {}, kOptions, std::move(hook));
    if (created.ok()) ddp = std::move(*created);
  }
  Quadratic problem;
  PowerSgd* power = nullptr;
  absl::StatusOr<std::unique_ptr<DataParallel>> created = nullptr;
  std::unique_ptr<DataParallel> ddp;
};

TEST(PowerSgdTest, WithFullRankIsAnAllReduceUpToRounding) {
  for (const int world : {1, 2, 3, 5}) {
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Training run(comm, {.rank = 100, .min_compression_rate = 0}, /*noise=*/1.0f);
      EK_RETURN_IF_ERROR(run.created.status());
      for (int batch = 0; batch < 4; ++batch) {
        EK_RETURN_IF_ERROR(run.problem.Step(*run.ddp, batch, 0.0f));
        for (int p = 0; p < 3; ++p) {
          for (int j = 0; j < kSizes[p]; ++j) {
            double mean = 0;
            for (int rank = 0; rank < world; ++rank)
              mean += run.problem.GradientAt(rank, batch, p, j) / world;
            // Below 2 in magnitude, 20 products of unit vectors deep.
            EXPECT_NEAR(run.problem.Gradient(p)[j], mean, 2e-5) << p << " " << j;
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(PowerSgdTest, SendsLess) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Training run(comm, {.rank = 1, .min_compression_rate = 1.5});
    EK_RETURN_IF_ERROR(run.created.status());
    int64_t elements = 0;
    for (const Collective& what : run.ddp->reducer().schedule().entries) elements += what.count;
    EXPECT_EQ(elements, (8 + 6) + 5 + (20 + 30) + 3);  // The last: a flag per parameter.
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PowerSgdTest, WithoutErrorFeedbackWhatIsNotSentIsLost) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Training run(comm, {.use_error_feedback = false, .warm_start = false});
    EK_RETURN_IF_ERROR(run.created.status());
    EK_RETURN_IF_ERROR(run.problem.Step(*run.ddp, 0, 0.0f));
    EXPECT_TRUE(run.power->error(2).empty());
    const std::vector<float> first = run.problem.Gradient(2);
    EK_RETURN_IF_ERROR(run.problem.Step(*run.ddp, 0, 0.0f));
    EXPECT_NE(run.problem.Gradient(2), first);  // Another Q.
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PowerSgdTest, BeginsWithPlainReductions) {
  for (const int world : {1, 3}) {
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Training run(comm, {.start_step = 3}, /*noise=*/1.0f);
      EK_RETURN_IF_ERROR(run.created.status());
      Quadratic plain(kSizes, comm.rank(), /*noise=*/1.0f);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &plain.params(), {}, kOptions));
      for (int batch = 0; batch < 6; ++batch) {
        EK_RETURN_IF_ERROR(run.problem.Step(*run.ddp, batch, 0.0f));
        EK_RETURN_IF_ERROR(plain.Step(*ddp, batch, 0.0f));
        for (int p = 0; p < 3; ++p) {
          EXPECT_EQ(run.problem.Gradient(p) == plain.Gradient(p), batch < 3 || p == 1)
              << p << " " << batch;
        }
      }
      EXPECT_EQ(run.power->steps(), 6);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// An exhausted rank's Q follows the others', through the end of the plain reductions too, and its
// error waits.
TEST(PowerSgdTest, ADryRankKeepsItsErrorAndHasTheOthersQ) {
  for (const int world : {2, 3, 5}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    std::vector<uint64_t> hashes(world), later_hashes(world);
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Training run(comm, {.start_step = 2}, /*noise=*/1.0f);
      EK_RETURN_IF_ERROR(run.created.status());
      run.ddp->SetOptimizerState({});
      const auto loop = [&](int inputs) {
        return RunJoined({run.ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
          for (int batch = 0; batch < inputs; ++batch)
            EK_RETURN_IF_ERROR(run.problem.Step(*run.ddp, batch, 0.0f));
          return absl::OkStatus();
        });
      };
      EK_RETURN_IF_ERROR(loop(4));
      const std::vector<float> error(run.power->error(2).begin(), run.power->error(2).end());
      EXPECT_EQ(error.size(), kSizes[2]);
      EK_RETURN_IF_ERROR(loop(comm.rank() == 0 ? 5 : 0));
      const std::vector<float> kept(run.power->error(2).begin(), run.power->error(2).end());
      EXPECT_EQ(kept == error, comm.rank() != 0);
      EXPECT_EQ(run.power->steps(), 9);
      hashes[comm.rank()] = run.power->SharedHash();
      EK_RETURN_IF_ERROR(loop(3));
      EXPECT_NE(run.power->SharedHash(), hashes[comm.rank()]);
      later_hashes[comm.rank()] = run.power->SharedHash();
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(hashes, testing::Each(hashes[0]));
    EXPECT_THAT(later_hashes, testing::Each(later_hashes[0]));
  }
}

TEST(PowerSgdTest, GoesOnFromASavedState) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    Training whole(comm, {.start_step = 2}), first(comm, {.start_step = 2}),
        second(comm, {.start_step = 2});
    EK_RETURN_IF_ERROR(second.created.status());
    for (int batch = 0; batch < 8; ++batch)
      EK_RETURN_IF_ERROR(whole.problem.Step(*whole.ddp, batch, 0.1f));
    for (int batch = 0; batch < 4; ++batch)
      EK_RETURN_IF_ERROR(first.problem.Step(*first.ddp, batch, 0.1f));
    const std::string saved = first.power->Save();
    EK_RETURN_IF_ERROR(second.power->Load(saved));
    EXPECT_EQ(second.power->Save(), saved);
    for (int p = 0; p < 3; ++p) {
      std::copy(first.problem.values()[p].begin(), first.problem.values()[p].end(),
                second.problem.values()[p].begin());
    }
    for (int batch = 4; batch < 8; ++batch)
      EK_RETURN_IF_ERROR(second.problem.Step(*second.ddp, batch, 0.1f));
    EXPECT_EQ(second.problem.values(), whole.problem.values());

    EXPECT_EQ(second.power->Load(saved.substr(1)).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(second.power->Load(saved.substr(0, saved.size() - 1)).code(),
              absl::StatusCode::kInvalidArgument);
    PowerSgd other({.shapes = kShapes, .rank = 2});
    const absl::Status refused = other.Load(saved);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("rank 1"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PowerSgdTest, RefusesShapesThatDoNotFit) {
  const struct {
    PowerSgdOptions options;
    std::string says;
  } cases[] = {
      {{.shapes = {MatrixOf({8, 6})}}, "parameter 2 is out of range for 1 shapes"},
      {{.shapes = {MatrixOf({8, 6}), MatrixOf({5}), MatrixOf({20, 31})}},
       "parameter 2 has 600 elements"},
      {{.rank = 0}, "PowerSgdOptions::rank is 0, but must be at least 1"},
  };
  for (const auto& [options, says] : cases) {
    const absl::Status status =
        RunTestRanks(2, [&, &options = options](Communicator& comm) -> absl::Status {
          return Training(comm, options).created.status();
        });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(says));
  }
}

}  // namespace
}  // namespace evenkeel
