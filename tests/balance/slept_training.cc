#include "evenkeel/tests/balance/slept_training.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/tests/stragglers/delayed_training.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rank_job.h"

namespace evenkeel {
namespace {

constexpr int kLayers = 2;
constexpr size_t kElements = 256;
constexpr int kMeasuredTurns = 8;

void Spend(double ms, bool computes) {
  if (!computes) return absl::SleepFor(absl::Milliseconds(ms));
  for (const absl::Duration end = CpuTime() + absl::Milliseconds(ms); CpuTime() < end;) {
  }
}

// The times of a workload's steps, without Balance's decisions.
class TrueCosts {
 public:
  TrueCosts(const Workload& workload, const std::vector<int64_t>& sizes, int world_size,
            double rest_ms)
      : workload_(workload), rest_ms_(rest_ms) {
    for (const bool is_slow : {false, true}) {
      const double begin = BeginOf(is_slow);
      best_ms_[is_slow] = MsOf(BestShares(workload, sizes, world_size, begin), begin);
    }
  }
  double MsOf(const std::vector<int64_t>& shares, double now_ms) const {
    return rest_ms_ + MeanStep(workload_, shares, BeginOf(workload_.is_slow_at(now_ms)));
  }
  double BestMs(double now_ms) const { return best_ms_[workload_.is_slow_at(now_ms)]; }
  double MeanBestMs() const {
    return workload_.period_ms == 0 ? best_ms_[1] : (best_ms_[0] + best_ms_[1]) / 2;
  }

 private:
  double BeginOf(bool is_slow) const { return is_slow ? workload_.period_ms / 2 : 0; }

  const Workload& workload_;
  const double rest_ms_;
  double best_ms_[2];  // By whether the last rank has its speed.
};

// Sets the time of the steps that had the time to settle, and the best one: of whole cycles.
void MeasureThroughput(const std::vector<SleptStep>& steps, const Workload& workload,
                       const TrueCosts& costs, Outcome& to) {
  const double settling_ms = std::max(kSettlingMs, workload.period_ms);
  const auto begin =
      std::find_if(steps.begin() + kSettlingSteps, steps.end(),
                   [&](const SleptStep& step) { return step.end_ms >= settling_ms; });
  if (begin == steps.end()) return;
  auto end = begin + (steps.end() - begin - 1) / Workload::kEvery * Workload::kEvery;
  if (workload.period_ms > 0) {
    const double limit_ms =
        begin->end_ms +
        workload.period_ms * std::floor((steps.back().end_ms - begin->end_ms) / workload.period_ms);
    end = std::find_if(begin, steps.end() - 1,
                       [&](const SleptStep& step) { return step.end_ms >= limit_ms; });
  }
  if (end == begin) return;
  double best_ms = 0, by_costs_ms = 0;
  for (auto step = begin; step != end; ++step) {
    best_ms += costs.BestMs(step->end_ms);
    by_costs_ms += costs.MsOf(step->shares, step->end_ms);
  }
  const double took_ms = end->end_ms - begin->end_ms;
  to.best_ms = best_ms / static_cast<double>(end - begin);
  to.balanced_ms = took_ms / static_cast<double>(end - begin);
  to.part_of_best = best_ms / took_ms;
  to.part_by_costs = best_ms / by_costs_ms;
}

void FindSettled(const std::vector<SleptStep>& steps, const TrueCosts& costs, int64_t even,
                 Outcome& to) {
  double begin_ms = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::vector<int64_t>& shares = steps[i].shares;
    if (i > 0 && shares != steps[i - 1].shares && to.settled_step >= 0) ++to.changes_after;
    if (to.settled_step < 0 &&
        kSettledPart * costs.MsOf(shares, begin_ms) <= costs.BestMs(begin_ms)) {
      to.settled_step = static_cast<int>(i);
      to.settled_s = begin_ms / 1000;
    }
    const bool is_uneven = std::ranges::any_of(
        shares, [&](int64_t share) { return std::abs(share - even) > to.quantum; });
    to.uneven_steps += is_uneven / static_cast<double>(steps.size());
    begin_ms = steps[i].end_ms;
  }
  to.last_shares = steps.back().shares;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SleptTraining>> SleptTraining::Create(Communicator* comm) {
  auto training = std::make_unique<SleptTraining>(comm);
  for (int layer = 0; layer < kLayers; ++layer) {
    training->values_.emplace_back(kElements, 0.5f);
    training->gradients_.emplace_back(kElements);
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    training->params_.Add(absl::StrCat("layer", layer), absl::MakeSpan(training->values_[layer]),
                          absl::MakeSpan(training->gradients_[layer]));
  }
  EK_ASSIGN_OR_RETURN(training->ddp_, DataParallel::Create(comm, &training->params_, {}));
  EK_ASSIGN_OR_RETURN(training->optimizer_, Optimizer::Create(*training->ddp_, Sgd{}));
  return training;
}

absl::StatusOr<std::vector<SleptStep>> SleptTraining::Run(const Workload& workload,
                                                          Balance* balance, int steps) {
  const int world_size = comm_->world_size();
  const int64_t batch = workload.even * world_size;
  const std::vector<int64_t> even(world_size, workload.even);
  SleptRank own(workload, comm_->rank(), world_size);
  std::vector<SleptStep> done;
  const auto loop = [&](JoinScope& scope) -> absl::Status {
    const absl::Time begin = absl::Now();
    const auto now_ms = [&] { return absl::ToDoubleMilliseconds(absl::Now() - begin); };
    for (int step = 0; step < steps; ++step) {
      Share mine = {.count = workload.even};
      if (balance != nullptr) {
        EK_ASSIGN_OR_RETURN(mine, balance->Next(step * batch, batch));
      }
      EK_RETURN_IF_ERROR(Step(scope, workload, own.Next(mine.count, now_ms()), mine.count));
      done.push_back({now_ms(), balance != nullptr ? balance->shares() : even});
    }
    return absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(
      RunJoined({ddp_.get(), optimizer_.get()}, {.divide_by = DivideBy::kSamples}, loop));
  return done;
}

absl::Status SleptTraining::Step(JoinScope& scope, const Workload& workload, const StepCost& cost,
                                 int64_t samples) {
  {
    const PhaseScope input(*comm_, StepPhase::kInput);
    Spend(cost.input_ms, /*computes=*/false);
  }
  EK_RETURN_IF_ERROR(scope.AddSamples(samples));
  params_.ClearGradients();
  EK_RETURN_IF_ERROR(ddp_->BeginStep());
  Spend(cost.computing_ms / 3, workload.computes);
  for (int layer = kLayers - 1; layer >= 0; --layer) {
    std::ranges::fill(gradients_[layer], static_cast<float>(samples));
    params_.SetGradState(layer, GradState::kLocal);
    if (layer == 0) Spend(cost.computing_ms * 2 / 3, workload.computes);
    EK_RETURN_IF_ERROR(ddp_->GradientReady(layer));
  }
  EK_RETURN_IF_ERROR(ddp_->FinishStep());
  EK_RETURN_IF_ERROR(optimizer_->Step());
  {
    const PhaseScope saving(*comm_, StepPhase::kSaving);
    Spend(cost.saving_ms, /*computes=*/false);
  }
  Spend(cost.outside_ms, /*computes=*/false);
  return absl::OkStatus();
}

absl::StatusOr<double> SleptTraining::MeasureRest() {
  const Workload equal = {.sample_ms = 0.5};
  EK_ASSIGN_OR_RETURN(const std::vector<SleptStep> steps, Run(equal, nullptr, 40));
  std::vector<double> rest_ms;
  for (size_t i = 1; i < steps.size(); ++i) {
    rest_ms.push_back(steps[i].end_ms - steps[i - 1].end_ms - MeanStep(equal, steps[i].shares, 0));
  }
  EK_ASSIGN_OR_RETURN(const Numbers slowest, LargestOf(*comm_, {MedianOf(rest_ms)}));
  return slowest[0];
}

// The mean of several turns: a quota or another process stops a rank in some of them.
absl::Status SleptTraining::MeasureComputing(const std::vector<int64_t>& sizes,
                                             Workload& workload) {
  SleptRank own(workload, comm_->rank(), comm_->world_size());
  Numbers means(sizes.size());
  EK_RETURN_IF_ERROR(comm_->Barrier());
  for (int turn = 0; turn < kMeasuredTurns; ++turn) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const absl::Time begin = absl::Now();
      Spend(own.Next(sizes[i], 0).computing_ms, /*computes=*/true);
      means[i] += absl::ToDoubleMilliseconds(absl::Now() - begin) / kMeasuredTurns;
    }
  }
  EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all, GatherNumbers(*comm_, means));
  for (const Numbers& of_rank : all) {
    auto& by_share = workload.measured_ms.emplace_back();
    for (size_t i = 0; i < sizes.size(); ++i) by_share[sizes[i]] = of_rank[i];
  }
  return absl::OkStatus();
}

absl::StatusOr<Outcome> SleptTraining::Try(const Workload& workload, const TryOptions& options) {
  const int world_size = comm_->world_size();
  Outcome outcome = {.batch = workload.even * world_size};
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<Balance> balance,
      Balance::Create(comm_, {.batch = outcome.batch, .on_change = options.on_change}));
  const std::vector<int64_t> sizes = balance->sizes();
  outcome.quantum = sizes[1] - sizes[0];
  Workload known = workload;
  if (workload.computes) EK_RETURN_IF_ERROR(MeasureComputing(sizes, known));
  const TrueCosts costs(known, sizes, world_size, options.rest_ms);
  const auto steps_of = [&](double seconds, int periods) {
    const double ms = std::max(1000 * seconds, periods * workload.period_ms);
    return 1 + Workload::kEvery *
                   static_cast<int>(std::ceil(ms / costs.MeanBestMs() / Workload::kEvery));
  };
  EK_ASSIGN_OR_RETURN(
      const std::vector<SleptStep> balanced,
      Run(workload, balance.get(), std::max(2 * kSettlingSteps, steps_of(options.balanced_s, 2))));
  MeasureThroughput(balanced, workload, costs, outcome);
  FindSettled(balanced, costs, workload.even, outcome);
  balance = nullptr;
  if (options.even_s == 0) return outcome;
  const int steps = steps_of(options.even_s, 1);
  EK_ASSIGN_OR_RETURN(const std::vector<SleptStep> even, Run(workload, nullptr, steps));
  outcome.even_ms = (even.back().end_ms - even.front().end_ms) / (steps - 1);
  return outcome;
}

}  // namespace evenkeel
