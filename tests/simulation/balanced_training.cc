#include "evenkeel/tests/simulation/balanced_training.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"

namespace evenkeel::simulation {
namespace {

using Kind = RankSpeed::Kind;
constexpr int kKinds = 4;

// Of virtual time, at the speed of a rank that is not slow: a run may take some ten times as long.
constexpr Nanos kMostComputing = 6 * kSecond;
// A steady training has so many reductions: three windows of about ten, then the best shares.
constexpr int kSteadyReductions = 40;
constexpr Nanos kShortestSteadyStep = 80 * kMillisecond, kLongestStep = 200 * kMillisecond;
constexpr Nanos kMostStall = kSecond;
// The part of the best throughput that a steady training must reach, unless its computing takes
// longer than planned by more than kMostDisturbance. With fixed costs it is less: a rank's fixed
// cost is unknown until it has had another size, and no shares are tried for that alone.
constexpr double kLeastThroughput = 0.95, kLeastWithFixedCosts = 0.9, kMostDisturbance = 0.01;

float ValueOf(int64_t sample) { return static_cast<float>(1 + sample % 7); }

Nanos UsualTimeOf(const RankSpeed& rank, int64_t samples) {
  return rank.per_step + rank.per_sample * samples;
}

// Returns the time that the rank takes for `samples` in a step that begins now.
Nanos TimeOf(const RankSpeed& rank, int64_t samples, Nanos now, Draws& draws) {
  double factor = 1;
  Nanos stall = 0;
  if (rank.kind == Kind::kNoisy) factor = 0.5 + draws.Fraction();
  if (rank.kind == Kind::kStalls && draws.OneIn(10)) stall = std::min(rank.period, kMostStall);
  if (rank.kind == Kind::kComesAndGoes && now / rank.period % 2 == 1) factor = rank.factor;
  return static_cast<Nanos>(factor * static_cast<double>(UsualTimeOf(rank, samples))) + stall;
}

}  // namespace

BalancedTraining DrawBalanced(Draws& draws, int world_size) {
  BalancedTraining training{.seed = draws.Next(), .is_steady = draws.OneIn(3)};
  const int64_t even = draws.Magnitude(3, 25);
  training.batch = even * world_size + draws.Below(world_size);
  training.quantum = draws.OneIn(2) ? 0 : 1 + draws.Below(3);
  if (!draws.OneIn(3)) training.rest = 1 + draws.Below(static_cast<int>(training.batch) - 1);
  training.accumulated = 1 + draws.Below(training.is_steady ? 2 : 3);
  const Nanos step =
      draws.Magnitude(training.is_steady ? kShortestSteadyStep : 2 * kMillisecond, kLongestStep);
  int64_t batches = kSteadyReductions * training.accumulated;
  if (!training.is_steady) {
    training.epochs = 1 + draws.Below(3);
    batches = std::min(draws.Magnitude(4, 60), kMostComputing / step);
  }
  training.batches = static_cast<int>(std::max<int64_t>(batches / training.epochs, 1));
  const bool has_one_speed = draws.OneIn(4);
  for (int rank = 0; rank < world_size; ++rank) {
    const double slowness = has_one_speed ? 1 : 1 + 2 * draws.Fraction();
    const double fixed = draws.OneIn(3) ? 0.3 * draws.Fraction() : 0;
    const auto time = static_cast<double>(step / training.accumulated) * slowness;
    training.ranks.push_back(
        {.kind = training.is_steady ? Kind::kConstant : static_cast<Kind>(draws.Below(kKinds)),
         .per_sample = static_cast<Nanos>((1 - fixed) * time / static_cast<double>(even)),
         .per_step = static_cast<Nanos>(fixed * time),
         .factor = 1.5 + 1.5 * draws.Fraction(),
         .period = draws.Magnitude(step, 30 * step)});
  }
  return training;
}

std::string Describe(const BalancedTraining& training) {
  return absl::StrCat(
      "balances ", training.epochs, " x ", training.batches, " batches of ", training.batch,
      training.rest > 0 ? absl::StrCat(" and one of ", training.rest) : "", ", quantum ",
      training.quantum, ", ", training.accumulated, " per reduction; us per sample ",
      absl::StrJoin(training.ranks, ",", [](std::string* out, const RankSpeed& rank) {
        constexpr const char* kTexts[kKinds] = {"", " noisy", " stalls", " comes and goes"};
        absl::StrAppend(out, rank.per_sample / kMicrosecond, kTexts[static_cast<int>(rank.kind)]);
      }));
}

// A rank's gradient: an element for each place of a batch, and one for the number of samples.
class BalancedRun::Model {
 public:
  Model(const BalancedTraining& training, Rank& rank, int index)
      : training_(training),
        rank_(rank),
        speed_(training.ranks[index]),
        draws_(training.seed + index),
        values_(training.batch + 1),
        grads_(training.batch + 1) {
    const absl::Span<float> values = absl::MakeSpan(values_), grads = absl::MakeSpan(grads_);
    params_.Add("samples", TensorView(values.first(training.batch)),
                TensorView(grads.first(training.batch)));
    params_.Add("count", TensorView(values.last(1)), TensorView(grads.last(1)));
  }

  absl::Status Init(Communicator* comm) {
    EK_ASSIGN_OR_RETURN(
        ddp_, DataParallel::Create(comm, &params_, {}, {.reducer = {.caps = {Bytes{8}}}}));
    ddp_->SetOptimizerState({});
    return absl::OkStatus();
  }

  absl::Status RunEpoch(Balance& balance, Nanos& awake_since) {
    const auto loop = [&](JoinScope& scope) -> absl::Status {
      for (int64_t batch = 0; batch < training_.all_batches(); ++batch) {
        EK_ASSIGN_OR_RETURN(const Share mine,
                            balance.Next(batch * training_.batch, training_.samples(batch)));
        rank_.steps.push_back({mine, balance.shares()});
        if (mine.count == 0) break;
        EK_RETURN_IF_ERROR(scope.AddSamples(mine.count));
        EK_RETURN_IF_ERROR(Step(batch, mine, awake_since));
      }
      return absl::OkStatus();
    };
    EK_RETURN_IF_ERROR(RunJoined({ddp_.get()}, {.divide_by = DivideBy::kSamples}, loop));
    Check(training_.all_batches() - 1);  // Also where this rank was exhausted.
    return absl::OkStatus();
  }

 private:
  absl::Status Step(int64_t batch, const Share& mine, Nanos& awake_since) {
    World& world = *World::Get();
    const bool reduces =
        (batch + 1) % training_.accumulated == 0 || batch + 1 == training_.all_batches();
    if (batch % training_.accumulated == 0) {
      params_.ClearGradients();
      grads_.assign(grads_.size(), 0.0f);
    }
    const Nanos begin = world.now();
    const Nanos planned = TimeOf(speed_, mine.count, begin, draws_);
    EK_RETURN_IF_ERROR(ddp_->BeginStep(reduces ? StepMode::kSync : StepMode::kAccumulate));
    absl::SleepFor(absl::Nanoseconds(planned));
    awake_since = world.now();
    for (int64_t i = mine.first; i < mine.first + mine.count; ++i)
      grads_[i - batch * training_.batch] += ValueOf(i);
    grads_.back() += static_cast<float>(mine.count);
    for (const int param : {1, 0}) {
      params_.SetGradState(param, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp_->GradientReady(param));
    }
    rank_.planned += planned;
    rank_.took += world.now() - begin;
    EK_RETURN_IF_ERROR(ddp_->FinishStep());
    if (reduces) Check(batch);
    return absl::OkStatus();
  }

  // Checks the gradients that the reduction after this batch has left.
  void Check(int64_t last) {
    const int64_t size = training_.batch;
    std::vector<float> sums(size + 1);
    for (int64_t batch = last - last % training_.accumulated; batch <= last; ++batch) {
      const int64_t samples = training_.samples(batch);
      for (int64_t i = 0; i < samples; ++i) sums[i] += ValueOf(batch * size + i);
      sums.back() += static_cast<float>(samples);
    }
    for (int64_t i = 0; i <= size; ++i) {
      const float sum = grads_[i] * sums.back();
      if (std::abs(sum - sums[i]) <= 0.1f || !rank_.wrong.empty()) continue;
      rank_.wrong = absl::StrCat("has the sum ", sum, " instead of ", sums[i], " at place ", i,
                                 " after batch ", last);
    }
  }

  const BalancedTraining& training_;
  Rank& rank_;
  const RankSpeed& speed_;
  Draws draws_;
  std::vector<float> values_, grads_;
  ParameterSet params_;
  std::unique_ptr<DataParallel> ddp_;
};

absl::Status BalancedRun::Train(Communicator& comm, Nanos& awake_since) {
  Rank& rank = ranks_[comm.rank()];
  Model model(training_, rank, comm.rank());
  EK_RETURN_IF_ERROR(model.Init(&comm));
  EK_ASSIGN_OR_RETURN(
      const std::unique_ptr<Balance> balance,
      Balance::Create(&comm, {.batch = training_.batch, .quantum = training_.quantum}));
  rank.sizes = balance->sizes();
  for (int epoch = 0; epoch < training_.epochs; ++epoch)
    EK_RETURN_IF_ERROR(model.RunEpoch(*balance, awake_since));
  return absl::OkStatus();
}

std::string BalancedRun::WrongIn(size_t step) const {
  const auto batch = static_cast<int64_t>(step) % training_.all_batches();
  int64_t next = batch * training_.batch;
  const int64_t end = next + training_.samples(batch);
  const std::vector<int64_t>* shares = nullptr;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].steps.size() <= step) {
      next = -1;  // A part is not known, because a rank is lost.
      continue;
    }
    const Step& seen = ranks_[r].steps[step];
    if (shares == nullptr) shares = &seen.shares;
    if (seen.shares != *shares)
      return absl::StrCat("rank ", r, " has the shares ", absl::StrJoin(seen.shares, ","),
                          " in step ", step, ", another one ", absl::StrJoin(*shares, ","));
    if (next >= 0 && seen.mine.first != next)
      return absl::StrCat("rank ", r, " begins at ", seen.mine.first, " instead of ", next,
                          " in step ", step);
    if (next >= 0) next += seen.mine.count;
  }
  if (next < 0 || next == end) return "";
  return absl::StrCat("the ranks' parts end at ", next, " instead of ", end, " in step ", step);
}

// Sizes differ by quanta, so any sizes with enough samples can be reduced to those of a batch.
std::string BalancedRun::TooSlow() const {
  const std::vector<int64_t>& shares = ranks_[0].steps.back().shares;
  Nanos longest = 0;
  for (size_t r = 0; r < ranks_.size(); ++r)
    longest = std::max(longest, UsualTimeOf(training_.ranks[r], shares[r]));
  const bool has_fixed_costs =
      std::ranges::any_of(training_.ranks, [](const RankSpeed& rank) { return rank.per_step > 0; });
  const double least = has_fixed_costs ? kLeastWithFixedCosts : kLeastThroughput;
  const auto limit = static_cast<Nanos>(least * static_cast<double>(longest));
  int64_t samples = 0;  // That the ranks can compute in this time.
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    const auto late = static_cast<double>(rank.took - rank.planned);
    if (late > kMostDisturbance * static_cast<double>(rank.planned)) return "";
    const auto end = std::partition_point(rank.sizes.begin(), rank.sizes.end(), [&](int64_t size) {
      return UsualTimeOf(training_.ranks[r], size) <= limit;
    });
    if (end == rank.sizes.begin()) return "";
    samples += *(end - 1);
  }
  if (samples < training_.batch) return "";
  return absl::StrCat("the last shares, ", absl::StrJoin(shares, ","), ", take ",
                      absl::FormatDuration(absl::Nanoseconds(longest)), ", and other ones ",
                      absl::FormatDuration(absl::Nanoseconds(limit)), " at most");
}

std::string BalancedRun::Wrong(bool is_complete) const {
  size_t steps = 0;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].wrong.empty()) return absl::StrCat("rank ", r, " ", ranks_[r].wrong);
    steps = std::max(steps, ranks_[r].steps.size());
  }
  for (size_t step = 0; step < steps; ++step) {
    if (std::string text = WrongIn(step); !text.empty()) return text;
  }
  return is_complete && training_.is_steady ? TooSlow() : "";
}

}  // namespace evenkeel::simulation
