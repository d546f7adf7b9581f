// A reducer that tunes itself: on all ranks alike, also where some have no inputs, and never
// wrongly.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::IsEmpty;
using testing::Not;

const std::vector<int> kSizes = {3, 500, 1, 800, 200, 7, 90, 1000};
constexpr int kRecorded = 3;

DataParallelOptions Options(std::vector<Bytes> caps = {Bytes{400}, Bytes{4000}}) {
  DataParallelOptions options;
  options.reducer.caps = std::move(caps);
  options.reducer.tune = true;
  options.reducer.tuning_steps = kRecorded;
  options.trainability.warn_on_change = false;
  return options;
}

class Replica {
 public:
  explicit Replica(Communicator& comm) : comm_(comm), model_(kSizes) {}

  absl::Status Wrap(DataParallelOptions options) {
    EK_ASSIGN_OR_RETURN(ddp_,
                        DataParallel::Create(&comm_, &model_.params(), {}, std::move(options)));
    ddp_->SetOptimizerState({});
    return absl::OkStatus();
  }

  // Each rank takes another time for each gradient, so their profiles differ.
  absl::Status Step(int batch) {
    model_.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep());
    EK_RETURN_IF_ERROR(model_.Backward(comm_.rank(), batch, [&](int param) {
      absl::SleepFor(absl::Microseconds(20 * ((param + 3 * comm_.rank()) % 7)));
      return ddp_->GradientReady(param);
    }));
    return ddp_->FinishStep();
  }
  absl::Status Steps(int begin, int end) {
    for (int step = begin; step < end; ++step) EK_RETURN_IF_ERROR(Step(step));
    return absl::OkStatus();
  }

  void ExpectGradientsOf(int batch) {
    for (int p = 0; p < static_cast<int>(kSizes.size()); ++p) {
      SCOPED_TRACE(absl::StrCat("rank ", comm_.rank(), ", p", p));
      if (!model_.params().trainable(p)) continue;
      const std::vector<float> gradient = model_.Gradient(p);
      for (int j = 0; j < kSizes[p]; ++j) {
        double sum = 0;
        for (int rank = 0; rank < comm_.world_size(); ++rank)
          sum += model_.GradientAt(p, j, rank, batch);
        ASSERT_NEAR(gradient[j], sum / comm_.world_size(), 1e-5);
      }
    }
  }

  ToyModel& model() { return model_; }
  DataParallel& ddp() { return *ddp_; }
  const PlanState& plan() const { return ddp_->reducer().plan_state(); }

 private:
  Communicator& comm_;
  ToyModel model_;
  std::unique_ptr<DataParallel> ddp_;
};

class TuningTest : public testing::TestWithParam<int> {
 protected:
  // Runs `body(comm, replica)` on all ranks, and expects that their plans are equal after it.
  void Run(DataParallelOptions options,
           absl::FunctionRef<absl::Status(Communicator&, Replica&)> body) {
    absl::Mutex mutex;
    std::vector<PlanState> plans;
    const absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
      Replica replica(comm);
      EK_RETURN_IF_ERROR(replica.Wrap(options));
      EK_RETURN_IF_ERROR(body(comm, replica));
      absl::MutexLock lock(&mutex);
      plans.push_back(replica.plan());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    for (const PlanState& plan : plans) EXPECT_EQ(plan, plans.front());
  }
};

TEST_P(TuningTest, AllRanksChooseTheSameCapsFromDifferentProfiles) {
  for (const bool views : {false, true}) {
    DataParallelOptions options = Options();
    options.reducer.gradient_as_bucket_view = views;
    Run(options, [&](Communicator&, Replica& replica) -> absl::Status {
      EK_RETURN_IF_ERROR(replica.Steps(0, 1 + kRecorded));  // The first step has no order yet.
      EXPECT_THAT(replica.plan().caps, IsEmpty());
      EXPECT_EQ(replica.ddp().reducer().generation(), 1u);
      for (int step = 1 + kRecorded; step < 3 + 2 * kRecorded; ++step) {
        EK_RETURN_IF_ERROR(replica.Step(step));
        replica.ExpectGradientsOf(step);
      }
      EXPECT_THAT(replica.plan().caps, Not(IsEmpty()));
      EXPECT_EQ(replica.ddp().reducer().generation(), 2u);
      const TuningStats tuning = replica.ddp().reducer().stats().tuning;
      EXPECT_TRUE(tuning.is_done);
      EXPECT_LE(tuning.predicted_after_us, tuning.predicted_before_us);
      EXPECT_GT(tuning.predicted_before_us, 0);
      EXPECT_GT(tuning.measured_before_us, 0);
      EXPECT_GT(tuning.measured_after_us, 0);
      EXPECT_EQ(tuning.measured_after_steps, kRecorded);
      return absl::OkStatus();
    });
  }
}

TEST_P(TuningTest, WhereThereIsOneBucketReductionsAreTried) {
  Run(Options({kNoCap}), [&](Communicator& comm, Replica& replica) -> absl::Status {
    EK_RETURN_IF_ERROR(replica.Steps(0, kRecorded));
    const int64_t issued = comm.flight().issued();
    EK_RETURN_IF_ERROR(replica.Step(kRecorded));
    EXPECT_EQ(comm.flight().issued() - issued,
              1 + 3 * 5);  // The bucket, and five tries of three sizes.
    EK_RETURN_IF_ERROR(replica.Steps(kRecorded + 1, kRecorded + 4));
    replica.ExpectGradientsOf(kRecorded + 3);
    EXPECT_EQ(comm.flight().issued() - issued,
              1 + 3 * 5 + 3 * static_cast<int64_t>(replica.ddp().reducer().plan().buckets.size()));
    EXPECT_GT(replica.ddp().reducer().stats().tuning.link_bytes_per_second, 0);
    return absl::OkStatus();
  });
}

// The others have inputs for none of the steps that are recorded, for some, or for all but the
// last.
TEST_P(TuningTest, RanksThatRunDryFollow) {
  for (const int short_loop : {0, 2, kRecorded, kRecorded + 1, kRecorded + 2}) {
    SCOPED_TRACE(short_loop);
    Run(Options(), [&](Communicator& comm, Replica& replica) -> absl::Status {
      const bool is_last = comm.rank() == comm.world_size() - 1;
      EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
        return replica.Steps(0, is_last ? kRecorded + 4 : short_loop);
      }));
      EXPECT_THAT(replica.plan().caps, Not(IsEmpty())) << "rank " << comm.rank();
      EK_RETURN_IF_ERROR(replica.Step(20));
      replica.ExpectGradientsOf(20);
      return absl::OkStatus();
    });
  }
}

// A loop ends, on some ranks early, in the middle of what is recorded; the next one goes on.
TEST_P(TuningTest, StepsAreCountedOverLoops) {
  Run(Options(), [&](Communicator& comm, Replica& replica) -> absl::Status {
    for (int epoch = 0; epoch < 4; ++epoch) {
      EK_RETURN_IF_ERROR(RunJoined({&replica.ddp()}, {}, [&](JoinScope&) -> absl::Status {
        return replica.Steps(10 * epoch, 10 * epoch + 1 + (comm.rank() + epoch) % 2);
      }));
    }
    EXPECT_THAT(replica.plan().caps, Not(IsEmpty()));
    return absl::OkStatus();
  });
}

TEST_P(TuningTest, AChangeOfWhatIsTrainedKeepsTheCaps) {
  Run(Options(), [&](Communicator&, Replica& replica) -> absl::Status {
    replica.model().params().SetTrainable(4, false);
    EK_RETURN_IF_ERROR(replica.Steps(0, kRecorded));
    replica.model().params().SetTrainable(4, true);  // In the middle: recorded anew.
    EK_RETURN_IF_ERROR(replica.Steps(kRecorded, 2 * kRecorded + 1));
    EXPECT_THAT(replica.plan().caps, IsEmpty());
    EK_RETURN_IF_ERROR(replica.Step(2 * kRecorded + 1));
    const std::vector<Bytes> caps = replica.plan().caps;
    EXPECT_THAT(caps, Not(IsEmpty()));
    replica.model().params().SetTrainable(1, false);
    EK_RETURN_IF_ERROR(replica.Steps(20, 20 + 2 * kRecorded));
    replica.ExpectGradientsOf(19 + 2 * kRecorded);
    EXPECT_EQ(replica.plan().caps, caps);
    return absl::OkStatus();
  });
}

TEST_P(TuningTest, AnImportedPlanIsNeitherRebuiltNorTuned) {
  std::string kept;
  Run(Options(), [&](Communicator& comm, Replica& replica) -> absl::Status {
    EK_RETURN_IF_ERROR(replica.Steps(0, 2 + kRecorded));
    if (comm.rank() == 0) kept = replica.ddp().ExportPlan();
    return absl::OkStatus();
  });
  Run(Options(), [&](Communicator&, Replica& replica) -> absl::Status {
    EK_RETURN_IF_ERROR(replica.ddp().ImportPlan(kept));
    const uint64_t generation = replica.ddp().reducer().generation();
    const BucketPlan plan = replica.ddp().reducer().plan();
    for (int step = 0; step < 3 + kRecorded; ++step) {
      EK_RETURN_IF_ERROR(replica.Step(step));
      replica.ExpectGradientsOf(step);
    }
    EXPECT_EQ(replica.ddp().reducer().generation(), generation);
    EXPECT_EQ(replica.ddp().reducer().plan(), plan);
    EXPECT_EQ(replica.ddp().reducer().stats().rebuilds, 0);
    EXPECT_FALSE(replica.ddp().ImportPlan("no plan").ok());
    EXPECT_FALSE(replica.ddp().ImportPlan(kept.substr(0, kept.size() - 4)).ok());
    EXPECT_EQ(replica.ddp().reducer().plan(), plan);
    return absl::OkStatus();
  });
}

TEST_P(TuningTest, ThePlanIsKeptInAnotherGroup) {
  Run(Options(), [&](Communicator& comm, Replica& replica) -> absl::Status {
    EK_RETURN_IF_ERROR(replica.Steps(0, 2 + kRecorded));
    const std::vector<Bytes> caps = replica.plan().caps;
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> next, comm.Split(0, comm.rank()));
    EK_RETURN_IF_ERROR(replica.ddp().ReplaceGroup(next.get()));
    EK_RETURN_IF_ERROR(replica.Steps(10, 12 + kRecorded));
    EXPECT_EQ(replica.plan().caps, caps);
    EK_RETURN_IF_ERROR(replica.ddp().ReplaceGroup(&comm));
    return next->Finalize();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, TuningTest, testing::Values(1, 2, 3, 5, 8));

}  // namespace
}  // namespace evenkeel
