// Updating in backward gives, bit for bit, what Step() after FinishStep() gives: weights, moments
// and step counts.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/update_rule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 7, 1, 5, 2};
const UpdateRule kRules[] = {Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01},
                             Adam{.learning_rate = 0.05}, AdamW{.learning_rate = 0.05}};

const OptimizerOptions kInBackward{.placement = Replicated{.update_in_backward = true}};

enum class Where { kStep, kBackward, kPartInBackward };

struct Scenario {
  UpdateRule rule;
  Where where = Where::kStep;
  bool views = false;
  bool compressed = false;
  std::vector<int> inputs;  // By rank; empty: six each.
};

struct Outcome {
  std::vector<std::vector<float>> values;
  OptimizerState state;
  int64_t steps = 0;
};

class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Create(Communicator& comm,
                                                          const Scenario& scenario) {
    auto training = std::make_unique<Training>(scenario, comm.rank());
    EK_ASSIGN_OR_RETURN(
        training->optimizer_,
        Optimizer::Create(
            comm, training->model_.params(), scenario.rule,
            {.placement = Replicated{.update_in_backward = scenario.where != Where::kStep}}));
    std::unique_ptr<BucketReduction> reduction;
    if (scenario.compressed) reduction = std::make_unique<CompressedReduction>(DType::kBFloat16);
    if (scenario.where != Where::kStep) {
      ReductionOptions options{.inner = std::move(reduction)};
      if (scenario.where == Where::kPartInBackward) options.params = {1, 3, 4};
      EK_ASSIGN_OR_RETURN(reduction, training->optimizer_->TakeReduction(std::move(options)));
    }
    EK_ASSIGN_OR_RETURN(
        training->ddp_,
        DataParallel::Create(
            &comm, &training->model_.params(), training->model_.buffers(),
            {.reducer = {.caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = scenario.views}},
            std::move(reduction)));
    return training;
  }
  Training(const Scenario& scenario, int rank) : scenario_(scenario), rank_(rank), model_(kSizes) {}

  absl::Status Run() {
    const int inputs = scenario_.inputs.empty() ? 6 : scenario_.inputs[rank_];
    return RunJoined({ddp_.get(), optimizer_.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int batch = 0; batch < inputs; ++batch) EK_RETURN_IF_ERROR(Step(batch));
      return absl::OkStatus();
    });
  }

  absl::Status Step(int batch) {
    ParameterSet& params = model_.params();
    params.SetTrainable(2, batch != 3);  // Frozen in one step.
    const bool accumulates = batch == 1;
    if (batch != 2) params.ClearGradients();
    EK_RETURN_IF_ERROR(
        optimizer_->SetLearningRate(0.1 / (1 + batch)));  // Exhausted ranks are told.
    EK_RETURN_IF_ERROR(ddp_->BeginStep(accumulates ? StepMode::kAccumulate : StepMode::kSync));
    model_.Forward(rank_, batch);
    for (int p = params.size() - 1; p >= 0; --p) {
      if (p == 4 &&
          batch == 4) {  // No rank has a gradient of it: neither decay nor momentum may move it.
        EK_RETURN_IF_ERROR(ddp_->NoGradient(p));
      } else {
        EK_RETURN_IF_ERROR(model_.BackwardOf(
            p, rank_, batch, [&](int param) { return ddp_->GradientReady(param); }));
      }
    }
    EK_RETURN_IF_ERROR(ddp_->FinishStep());
    if (accumulates) return absl::OkStatus();
    if (scenario_.where != Where::kBackward) EK_RETURN_IF_ERROR(optimizer_->Step());
    for (int p = 0; p < params.size(); ++p) {
      const bool is_done =
          scenario_.where == Where::kBackward ||
          (scenario_.where == Where::kPartInBackward && (p == 1 || p == 3 || p == 4));
      EXPECT_TRUE(!is_done || params.grad_state(p) == GradState::kNone) << p;
    }
    return absl::OkStatus();
  }

  Outcome outcome() const {
    return {model_.values(), optimizer_->state(), optimizer_->steps_finished()};
  }

 private:
  const Scenario scenario_;
  const int rank_;
  ToyModel model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
};

absl::StatusOr<std::vector<Outcome>> Train(int world, const Scenario& scenario) {
  std::vector<Outcome> outcomes(world);
  EK_RETURN_IF_ERROR(RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto training, Training::Create(comm, scenario));
    EK_RETURN_IF_ERROR(training->Run());
    outcomes[comm.rank()] = training->outcome();
    return absl::OkStatus();
  }));
  return outcomes;
}

void ExpectSameAsStep(int world, Scenario scenario) {
  const Where where = scenario.where;
  scenario.where = Where::kStep;
  const auto expected = Train(world, scenario);
  scenario.where = where;
  const auto actual = Train(world, scenario);
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(actual.ok()) << actual.status();
  for (int rank = 0; rank < world; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_EQ((*actual)[rank].values, (*expected)[0].values);
    EXPECT_TRUE((*actual)[rank].state == (*expected)[0].state);
    EXPECT_EQ((*actual)[rank].steps, (*expected)[rank].steps);
  }
}

TEST(InBackwardTest, GivesWhatStepGives) {
  for (const int world : {1, 2, 3, 5}) {
    for (const UpdateRule& rule : kRules) {
      for (const bool views : {false, true}) {
        for (const Where where : {Where::kBackward, Where::kPartInBackward}) {
          SCOPED_TRACE(absl::StrCat(world, " ranks, ", ToString(rule), views ? ", views" : "", " ",
                                    static_cast<int>(where)));
          ExpectSameAsStep(world, {.rule = rule, .where = where, .views = views});
        }
      }
    }
  }
}

TEST(InBackwardTest, DryRanksUpdateLikewise) {
  const std::vector<std::vector<int>> inputs = {
      {6, 0}, {0, 5}, {2, 6, 4}, {6, 2, 0}, {1, 6, 3, 0, 5}};
  for (const std::vector<int>& by_rank : inputs) {
    for (const UpdateRule& rule : kRules) {
      for (const Where where : {Where::kBackward, Where::kPartInBackward}) {
        ExpectSameAsStep(static_cast<int>(by_rank.size()),
                         {.rule = rule, .where = where, .inputs = by_rank});
      }
    }
  }
}

TEST(InBackwardTest, TakesAnotherReductionInside) {
  ExpectSameAsStep(3, {.rule = kRules[2], .where = Where::kBackward, .compressed = true});
  ExpectSameAsStep(
      3, {.rule = kRules[2], .where = Where::kBackward, .compressed = true, .inputs = {1, 5, 0}});
}

// Says when the first bucket of a step has been through all that `inner` does with it.
class Observed : public AllReduceBuckets {
 public:
  explicit Observed(std::unique_ptr<BucketReduction> inner) : inner_(std::move(inner)) {}
  bool HasThread() const override { return true; }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    return inner_->OnPlan(buckets);
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override {
    absl::StatusOr<GradFate> fate = inner_->OnReduced(bucket, step);
    if (bucket.index == 0 && bucket.bucket_count > 1) first_is_done.Notify();
    return fate;
  }
  absl::Status OnStepEnd() override { return inner_->OnStepEnd(); }

  absl::Notification first_is_done;

 private:
  const std::unique_ptr<BucketReduction> inner_;
};

TEST(InBackwardTest, UpdatesWhileBackwardRuns) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(),
                                                          Sgd{.learning_rate = 0.1}, kInBackward));
    EK_ASSIGN_OR_RETURN(auto in_backward, optimizer->TakeReduction());
    auto owned = std::make_unique<Observed>(std::move(in_backward));
    Observed& observed = *owned;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                       {.reducer = {.caps = {Bytes{8}, Bytes{24}}}},
                                                       std::move(owned)));
    const auto announce = [&](int param) { return ddp->GradientReady(param); };
    EK_RETURN_IF_ERROR(
        ddp->BeginStep());  // In one bucket, whose order of gradients makes the next plan.
    EK_RETURN_IF_ERROR(model.Backward(comm.rank(), 0, announce));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    model.params().ClearGradients();
    const std::vector<float> before = model.values()[4];
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    for (int p = 4; p >= 1; --p) EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), 1, announce));
    EXPECT_TRUE(observed.first_is_done.WaitForNotificationWithTimeout(absl::Seconds(30)));
    EXPECT_NE(model.values()[4], before);
    EK_RETURN_IF_ERROR(model.BackwardOf(0, comm.rank(), 1, announce));
    return ddp->FinishStep();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(InBackwardTest, LeavesTheParametersOfOtherOptimizersToThem) {
  for (const int world : {1, 3}) {
    const absl::Status status = RunTestRanks(world, [](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes), plain(kSizes);
      const std::vector<ParameterGroup> first = {{.params = {0, 1, 2}, .rule = AdamW{}}};
      const std::vector<ParameterGroup> second = {{.params = {3, 4}, .rule = Sgd{}}};
      EK_ASSIGN_OR_RETURN(auto early, Optimizer::Create(comm, model.params(), first, kInBackward));
      EK_ASSIGN_OR_RETURN(auto late, Optimizer::Create(comm, model.params(), second));
      EK_ASSIGN_OR_RETURN(auto in_backward, early->TakeReduction());
      EK_ASSIGN_OR_RETURN(
          auto ddp, DataParallel::Create(&comm, &model.params(), {}, {}, std::move(in_backward)));
      EK_ASSIGN_OR_RETURN(auto plain_ddp, DataParallel::Create(&comm, &plain.params(), {}));
      EK_ASSIGN_OR_RETURN(auto plain_first, Optimizer::Create(comm, plain.params(), first));
      EK_ASSIGN_OR_RETURN(auto plain_second, Optimizer::Create(comm, plain.params(), second));
      for (int batch = 0; batch < 4; ++batch) {
        for (auto* parts : {&model, &plain}) {
          DataParallel& reducer = parts == &model ? *ddp : *plain_ddp;
          parts->params().ClearGradients();
          EK_RETURN_IF_ERROR(reducer.BeginStep());
          EK_RETURN_IF_ERROR(parts->Backward(
              comm.rank(), batch, [&](int param) { return reducer.GradientReady(param); }));
          EK_RETURN_IF_ERROR(reducer.FinishStep());
        }
        EK_RETURN_IF_ERROR(late->Step());
        EK_RETURN_IF_ERROR(plain_first->Step());
        EK_RETURN_IF_ERROR(plain_second->Step());
      }
      EXPECT_EQ(model.values(), plain.values());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(InBackwardTest, AStateThatIsLoadedReplacesThatOfAStepWithoutEnd) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto optimizer,
                        Optimizer::Create(comm, model.params(), AdamW{}, kInBackward));
    EK_ASSIGN_OR_RETURN(auto reduction, optimizer->TakeReduction({.params = {3, 4}}));
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, {}, std::move(reduction)));
    const auto backward = [&](int batch) -> absl::Status {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(
          model.Backward(comm.rank(), batch, [&](int param) { return ddp->GradientReady(param); }));
      return ddp->FinishStep();
    };
    EK_RETURN_IF_ERROR(backward(0));
    EK_RETURN_IF_ERROR(optimizer->Step());
    const std::string folder = absl::StrCat(testing::TempDir(), "/whole");
    EK_RETURN_IF_ERROR(optimizer->Save(folder));
    const OptimizerState whole = optimizer->state();
    for (const bool is_file : {false, true}) {
      EK_RETURN_IF_ERROR(backward(1));
      EXPECT_THAT(std::string(optimizer->Save(folder).message()),
                  HasSubstr("in the middle of an update"));
      EK_RETURN_IF_ERROR(is_file ? optimizer->Load(folder) : optimizer->LoadState(whole));
      EK_RETURN_IF_ERROR(optimizer->Save(folder));
      EK_RETURN_IF_ERROR(optimizer->Step());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Its used flags come from the reducer, after the updates would have been due.
class FlagsComeLate : public AllReduceBuckets {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {{.kind = CollectiveKind::kAllReduce,
             .dtype = bucket.data.dtype,
             .count = bucket.data.count}};
  }
  UsedFlags used_flags() const override { return UsedFlags::kSeparate; }
};

TEST(InBackwardTest, RefusesWhatItCanNotDo) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto optimizer,
                        Optimizer::Create(comm, model.params(), AdamW{}, kInBackward));
    for (const std::vector<int>& params : std::vector<std::vector<int>>{{9}, {-1}, {2, 2}}) {
      const absl::Status refused = optimizer->TakeReduction({.params = params}).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    }
    EK_ASSIGN_OR_RETURN(auto late,
                        optimizer->TakeReduction({.inner = std::make_unique<FlagsComeLate>()}));
    const absl::Status refused =
        DataParallel::Create(&comm, &model.params(), {}, {}, std::move(late)).status();
    EXPECT_THAT(std::string(refused.message()), HasSubstr("kSeparate"));
    EXPECT_EQ(optimizer->TakeReduction().status().code(), absl::StatusCode::kFailedPrecondition);

    const absl::Status stepped = optimizer->Step();
    EXPECT_EQ(stepped.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(stepped.message()),
                HasSubstr("all parameters were updated in backward"));
    EK_ASSIGN_OR_RETURN(auto partly, Optimizer::Create(comm, model.params(), AdamW{}, kInBackward));
    EK_RETURN_IF_ERROR(partly->TakeReduction({.params = {1}}).status());
    const StepOptions refused_of_a_part[] = {{.grad_scale = 0.5},
                                             {.skip = true},
                                             {.clip = ClipOptions{.max_norm = 1.0}},
                                             {.skip_nonfinite = true}};
    for (const StepOptions& options : refused_of_a_part) {
      const absl::Status stepped_partly = partly->Step(options);
      EXPECT_EQ(stepped_partly.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(stepped_partly.message()), HasSubstr("clipping"));
    }
    for (Optimizer* updates_in_backward : {optimizer.get(), partly.get()}) {
      EXPECT_EQ(updates_in_backward->CheckGradients().status().code(),
                absl::StatusCode::kFailedPrecondition);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
