#include "evenkeel/bucket/stats.h"

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Json = nlohmann::ordered_json;

absl::Time At(int us) { return absl::UnixEpoch() + absl::Microseconds(us); }

TEST(DurationsTest, CommunicationIsWhatTheLinkDoesAndExposedWhatBackwardDoesNotHide) {
  StepTimes step{.begin = At(0),
                 .first_gradient = At(100),
                 .last_gradient = At(400),
                 .end = At(560),
                 .gradients = 3};
  step.buckets.push_back({.launched = At(110), .reduced = At(210)});
  step.buckets.push_back({.launched = At(150), .reduced = At(310)});  // The link is free at 210.
  step.buckets.push_back({.launched = At(390), .reduced = At(550)});
  const StepDurations took = Durations(step);
  EXPECT_EQ(took.to_first_gradient, absl::Microseconds(100));
  EXPECT_EQ(took.backward, absl::Microseconds(300));
  EXPECT_EQ(took.communication, absl::Microseconds(100 + 100 + 160));
  EXPECT_EQ(took.overlapped, absl::Microseconds(100 + 100 + 10));
  EXPECT_EQ(took.exposed, absl::Microseconds(160));
  EXPECT_EQ(Durations(StepTimes()).communication, absl::ZeroDuration());
}

TEST(StepAveragesTest, TheFirstTenStepsAndThenEveryNth) {
  const StepAverages averages(100);
  std::vector<int> measured;
  for (int step = 0; step < 350; ++step) {
    if (averages.IsMeasured(step)) measured.push_back(step);
  }
  EXPECT_THAT(measured, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 200, 300));
}

TEST(StepAveragesTest, MeansAreOfAllThatWereAdded) {
  StepAverages averages(1);
  for (int us : {10, 20, 60})
    averages.Add({.backward = absl::Microseconds(us), .exposed = absl::Microseconds(2 * us)});
  EXPECT_EQ(averages.means().measured_steps, 3);
  EXPECT_DOUBLE_EQ(averages.means().backward_us, 30);
  EXPECT_DOUBLE_EQ(averages.means().exposed_us, 60);
}

TEST(ToJsonTest, FieldsKeepTheirOrderAndTheirUnits) {
  ReducerStats stats;
  stats.name = "a \"name\"";
  stats.caps = {Bytes{8}, kNoCap};
  stats.buckets = {{.bytes = 12, .limit = kNoCap, .params = {2, 0}}};
  stats.tuning.link_bytes_per_second = std::numeric_limits<double>::infinity();
  const Json json = Json::parse(ToJson(stats));
  EXPECT_EQ(json["name"], stats.name);
  EXPECT_EQ(json["caps_bytes"], Json::parse("[8,null]"));
  EXPECT_EQ(json["buckets"], Json::parse(R"([{"bytes":12,"limit_bytes":null,"params":[2,0]}])"));
  EXPECT_TRUE(json["tuning"]["link_bytes_per_second"].is_null());
  EXPECT_EQ(json.dump(), ToJson(stats));  // One line, and each field once.
  std::vector<std::string> names;
  for (const auto& [name, value] : json.items()) names.push_back(name);
  EXPECT_EQ(names.front(), "name");
  EXPECT_EQ(names.back(), "tuning");
}

// Statistics of a running reducer -----------------------------------------------------------------

const std::vector<int> kSizes = {3, 5, 1, 8, 2};

absl::Status Step(DataParallel& ddp, ToyModel& model, int rank, int batch) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(
      model.Backward(rank, batch, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

class ReducerStatsTest : public testing::TestWithParam<int> {};

TEST_P(ReducerStatsTest, SayWhatItIsMadeOfAndWhatHasHappened) {
  const absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    DataParallelOptions options;
    options.reducer = {
        .caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = true, .stats_every = 4};
    options.trainability.warn_on_change = false;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options));
    ReducerStats stats = ddp->reducer().stats();
    EXPECT_EQ(stats.steps, 0);
    EXPECT_EQ(stats.buckets.size(), 1u);
    EXPECT_THAT(stats.ready_order, ElementsAre());

    for (int step = 0; step < 21; ++step) {
      if (step == 15) model.params().SetTrainable(3, false);
      EK_RETURN_IF_ERROR(Step(*ddp, model, comm.rank(), step));
      EXPECT_EQ(ddp->reducer().last_step().is_measured, step < 10 || step % 4 == 0) << step;
    }
    stats = ddp->reducer().stats();
    EXPECT_EQ(stats.name, ddp->join_name());
    EXPECT_EQ(stats.backend, comm.backend_name());
    EXPECT_EQ(stats.rank, comm.rank());
    EXPECT_EQ(stats.world_size, comm.world_size());
    EXPECT_EQ(stats.parameters, 5);
    EXPECT_EQ(stats.parameter_bytes, 19 * 4);
    EXPECT_TRUE(stats.gradient_as_bucket_view);
    EXPECT_FALSE(stats.static_graph);
    EXPECT_EQ(stats.generation, 3u);  // The order, the mask, the order.
    EXPECT_EQ(stats.trained_parameters, 4);
    EXPECT_EQ(stats.mask_hash, model.params().mask().Hash());
    EXPECT_TRUE(stats.order_is_final);
    EXPECT_THAT(stats.ready_order, ElementsAre(4, 2, 1, 0, 3));
    EXPECT_THAT(stats.buckets.front().params, ElementsAre(4));
    EXPECT_EQ(stats.buckets.front().bytes, 8);
    EXPECT_EQ(stats.buckets.front().limit, Bytes{8});
    EXPECT_EQ(stats.steps, 21);
    EXPECT_EQ(stats.shadowed_steps, 0);
    EXPECT_EQ(stats.rebuilds, 2);
    EXPECT_EQ(stats.refreshes, 1);
    EXPECT_EQ(stats.imports, 0);
    EXPECT_EQ(stats.last_error, "");
    EXPECT_EQ(stats.means.measured_steps, 13);  // 0 to 9, 12, 16 and 20.
    EXPECT_GT(stats.means.to_first_gradient_us, 0);
    EXPECT_GT(stats.means.communication_us, 0);
    EXPECT_GT(stats.means.exposed_us, 0);
    EXPECT_GE(stats.means.communication_us, stats.means.overlapped_us);
    EXPECT_FALSE(stats.tuning.is_on);
    EXPECT_EQ(Json::parse(ToJson(stats))["steps"], 21);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ReducerStatsTest, ShadowedStepsAndErrorsAreCounted) {
  std::atomic<int> failing_ranks = 0;
  const absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    ddp->SetOptimizerState({});
    const bool is_last = comm.rank() == comm.world_size() - 1;
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < (is_last ? 7 : 2); ++step)
        EK_RETURN_IF_ERROR(Step(*ddp, model, comm.rank(), step));
      return absl::OkStatus();
    }));
    ReducerStats stats = ddp->reducer().stats();
    EXPECT_EQ(stats.steps, 7) << "rank " << comm.rank();
    EXPECT_EQ(stats.shadowed_steps, is_last ? 0 : 5);
    EXPECT_EQ(stats.is_joined, !is_last);
    EXPECT_EQ(stats.means.measured_steps, is_last ? 7 : 2);

    const absl::Status began = ddp->BeginStep();
    if (!began.ok()) return began;  // Another rank's error came first.
    ++failing_ranks;
    const absl::Status finished = ddp->FinishStep();
    EXPECT_THAT(std::string(finished.message()), HasSubstr("without a gradient"));
    EXPECT_EQ(ddp->reducer().stats().last_error, finished.message());
    return finished;
  });
  EXPECT_GE(failing_ranks, 1) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("without a gradient"));
}

TEST_P(ReducerStatsTest, ThatTheGraphIsStaticInFactIsSaid) {
  const absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.find_unused = true}}));
    auto step = [&](int batch, std::vector<int> used) -> absl::Status {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int p : used) {
        EK_RETURN_IF_ERROR(
            model.BackwardOf(p, comm.rank(), batch, [&](int i) { return ddp->GradientReady(i); }));
      }
      return ddp->FinishStep();
    };
    EK_RETURN_IF_ERROR(step(0, {4, 3, 1}));
    EXPECT_FALSE(ddp->reducer().stats().static_graph_would_do);
    for (int batch = 1; batch < 4; ++batch) EK_RETURN_IF_ERROR(step(batch, {4, 3, 1}));
    EXPECT_TRUE(ddp->reducer().stats().static_graph_would_do);
    EK_RETURN_IF_ERROR(step(4, {4, 3, 1, 0}));
    EXPECT_FALSE(ddp->reducer().stats().static_graph_would_do);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ReducerStatsTest, IntervalsBelowOneAreRefusedOnAllRanks) {
  const absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    return DataParallel::Create(&comm, &model.params(), {},
                                {.reducer = {.stats_every = comm.rank() == 0 ? 0 : 1}})
        .status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("stats_every (0)"));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReducerStatsTest, testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace evenkeel
