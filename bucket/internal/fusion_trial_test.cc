#include "evenkeel/bucket/internal/fusion_trial.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/plan_state.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr int kSteps = 3;

// Steps that take so long from the first gradient on.
StepTimes Taking(int us) {
  return {.begin = absl::UnixEpoch(),
          .first_gradient = absl::UnixEpoch() + absl::Microseconds(50),
          .last_gradient = absl::UnixEpoch() + absl::Microseconds(51),
          .end = absl::UnixEpoch() + absl::Microseconds(50 + us),
          .gradients = 2};
}

// What a trial chooses where the ranks' flat and coalesced steps take so long; -1: the rank has no inputs.
MeasuredFusion ChoiceFor(const std::vector<std::pair<int, int>>& ranks) {
  MeasuredFusion chosen = MeasuredFusion::kUnknown;
  const absl::Status status = RunRanks(static_cast<int>(ranks.size()), [&](Communicator& comm) -> absl::Status {
    const auto [flat_us, coalesced_us] = ranks[comm.rank()];
    FusionTrial trial("trial", kSteps, /*waits_for_caps=*/false);
    PlanState state{.mask = TrainableMask(2)};
    trial.OnPlan(state);
    for (int step = 0; step < 10; ++step) trial.EndStep(nullptr);
    EXPECT_FALSE(trial.next().has_value());  // There is no order yet.
    state.order_final = true;
    for (const int us : {flat_us, coalesced_us}) {
      trial.OnPlan(state);
      const StepTimes first = Taking(1), times = Taking(us);
      for (int step = 0; step <= kSteps; ++step) {
        EXPECT_FALSE(trial.next().has_value());
        EXPECT_FALSE(trial.IsDue());
        trial.EndStep(us < 0 ? nullptr : step == 0 ? &first : &times);
      }
      AdoptFusion(state, MeasuredFusion::kTrying);
    }
    EXPECT_TRUE(trial.IsDue());
    EK_RETURN_IF_ERROR(trial.Choose(comm));
    EXPECT_FALSE(trial.IsDue());
    if (comm.rank() == 0) chosen = trial.next().value_or(MeasuredFusion::kUnknown);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return chosen;
}

TEST(FusionTrialTest, TheOneThatIsClearlyFasterOnTheSlowestRankIsChosen) {
  EXPECT_EQ(ChoiceFor({{100, 80}}), MeasuredFusion::kCoalesced);
  EXPECT_EQ(ChoiceFor({{80, 100}}), MeasuredFusion::kFlat);
  EXPECT_EQ(ChoiceFor({{100, 99}}), MeasuredFusion::kFlat);
  EXPECT_EQ(ChoiceFor({{100, 90}, {50, 95}}), MeasuredFusion::kCoalesced);
  EXPECT_EQ(ChoiceFor({{100, 20}, {50, 120}, {10, 10}}), MeasuredFusion::kFlat);
}

TEST(FusionTrialTest, RanksThatLackOneOfTheTwoAreNotHeard) {
  EXPECT_EQ(ChoiceFor({{100, 80}, {-1, 300}, {1, -1}}), MeasuredFusion::kCoalesced);
  EXPECT_EQ(ChoiceFor({{100, -1}, {-1, 80}}), MeasuredFusion::kFlat);
}

// On ranks that train ----------------------------------------------------------------------------------------------

const std::vector<int> kSizes = {3, 5, 0, 8, 2};

class MeasuredFusionTest : public testing::TestWithParam<int> {
 protected:
  static DataParallelOptions Options() {
    return {.reducer = {.caps = {Bytes{8}, Bytes{24}}, .fusion = Fusion::kMeasured, .tuning_steps = kSteps}};
  }

  // Each rank runs `steps_of(rank)` steps, whose gradients are those of flat buckets; then all have chosen the same.
  void Run(const DataParallelOptions& options, absl::FunctionRef<int(int rank, int world)> steps_of) {
    absl::Mutex mutex;
    std::vector<PlanState> plans;
    const absl::Status status = RunRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes), reference(kSizes);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options));
      EK_ASSIGN_OR_RETURN(
          auto flat, DataParallel::Create(&comm, &reference.params(), {}, {.reducer = {.caps = options.reducer.caps}}));
      ddp->SetOptimizerState({});
      flat->SetOptimizerState({});
      bool has_tried = false;
      auto step = [&](DataParallel& of, ToyModel& with, int batch) -> absl::Status {
        with.params().ClearGradients();
        EK_RETURN_IF_ERROR(of.BeginStep());
        EK_RETURN_IF_ERROR(with.Backward(comm.rank(), batch, [&](int param) { return of.GradientReady(param); }));
        return of.FinishStep();
      };
      EK_RETURN_IF_ERROR(RunJoined({ddp.get(), flat.get()}, {}, [&](JoinScope&) -> absl::Status {
        for (int batch = 0; batch < steps_of(comm.rank(), comm.world_size()); ++batch) {
          EK_RETURN_IF_ERROR(step(*ddp, model, batch));
          EK_RETURN_IF_ERROR(step(*flat, reference, batch));
          has_tried = has_tried || ddp->reducer().stats().coalesced;
          for (int p = 0; p < static_cast<int>(kSizes.size()); ++p) {
            EXPECT_EQ(model.Gradient(p), reference.Gradient(p)) << "p" << p << ", step " << batch;
          }
        }
        EXPECT_TRUE(has_tried || comm.rank() + 1 < comm.world_size());
        return absl::OkStatus();
      }));
      EXPECT_THAT(ddp->reducer().plan_state().fusion, AnyOf(MeasuredFusion::kFlat, MeasuredFusion::kCoalesced));
      EXPECT_TRUE(ddp->reducer().stats().fusion.is_done);
      absl::MutexLock lock(&mutex);
      plans.push_back(ddp->reducer().plan_state());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    for (const PlanState& plan : plans) EXPECT_EQ(plan, plans.front());
  }
};

// One step for the order, each way one more than is counted, and one to adopt what was chosen.
constexpr int kWhole = 1 + 2 * (kSteps + 1) + 1;

TEST_P(MeasuredFusionTest, BothWaysAreTriedAndAllRanksKeepTheSame) {
  Run(Options(), [](int, int) { return kWhole; });
}

TEST_P(MeasuredFusionTest, RanksThatRunDryFollow) {
  for (const int short_loop : {0, 2, kSteps + 3, kWhole - 1}) {
    Run(Options(), [&](int rank, int world) { return rank + 1 == world ? kWhole + 1 : short_loop; });
  }
}

TEST_P(MeasuredFusionTest, CapsAreTunedBefore) {
  DataParallelOptions options = Options();
  options.reducer.tune = true;
  Run(options, [](int, int) { return kWhole + kSteps; });
}

TEST_P(MeasuredFusionTest, ViewsHaveNothingToMeasure) {
  DataParallelOptions options = Options();
  options.reducer.gradient_as_bucket_view = true;
  const absl::Status status = RunRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    return DataParallel::Create(&comm, &model.params(), {}, options).status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no views"));
}

INSTANTIATE_TEST_SUITE_P(Worlds, MeasuredFusionTest, testing::Values(1, 2, 3, 5, 8));

}  // namespace
}  // namespace evenkeel
