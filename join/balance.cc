// The decision of a step is the same on all ranks, because it uses the answers up to the last step
// that reduced gradients, and no later one. Next() has waited for all of these answers; those of
// steps that only accumulate may arrive before or after Next(). So an answer is held until that of
// a reducing step arrives, on the control thread, and is used then: this rank has begun that step
// already, so its next call of Next() comes later.

#include "evenkeel/join/balance.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/share_planner.h"
#include "evenkeel/join/steps/step_agreement.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {
namespace {

std::vector<SharePlanner::RankInterval> RanksOf(const StepAnswer& answer,
                                                absl::Span<const int64_t> samples) {
  std::vector<SharePlanner::RankInterval> ranks;
  ranks.reserve(answer.world_size);
  for (int rank = 0; rank < answer.world_size; ++rank)
    ranks.push_back({.times = answer.record(rank).times, .samples = samples[rank]});
  return ranks;
}

std::string TextOf(const ShareChange& change) {
  return absl::StrCat(TextOfCounts(change.shares), " after ", change.reduction, " reductions");
}

std::vector<Fact> FactsOf(const BalanceOptions& options, const StepControl& steps) {
  std::vector<Fact> facts = {
      {"batch", absl::StrCat(options.batch)},
      {"quantum", absl::StrCat(options.quantum)},
      {"the steps before it", absl::StrCat(steps.records_sent())},
      {"the number of changes to repeat", absl::StrCat(options.repeat.size())},
  };
  for (size_t i = 0; i < options.repeat.size(); ++i) {
    const ShareChange& change = options.repeat[i];
    facts.push_back({absl::StrCat("change ", i, " to repeat"),
                     absl::StrCat(absl::StrJoin(change.shares, ","), " after ", change.reduction,
                                  " reductions")});
  }
  return facts;
}

absl::Status CheckOwn(const BalanceOptions& options, const StepControl& steps) {
  if (steps.has_observer()) {
    return absl::FailedPreconditionError(
        "the communicator has a Balance already: destroy it before another one is made");
  }
  const auto is_possible = [](int64_t samples) {
    return samples >= 0 && samples <= std::numeric_limits<int32_t>::max();
  };
  if (options.batch == 0 || !is_possible(options.batch) || !is_possible(options.quantum) ||
      !is_possible(options.least) || !is_possible(options.most)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "batch (", options.batch, ") must be at least 1, quantum (", options.quantum, "), least (",
        options.least, ") and most (", options.most, ") at least 0, and all of them below 2^31"));
  }
  return absl::OkStatus();
}

absl::Status CheckRepeat(absl::Span<const ShareChange> repeat, const ShareLimits& limits) {
  int64_t last = -1;
  for (const ShareChange& change : repeat) {
    const std::string text = absl::StrCat("the change to repeat, ", TextOf(change));
    if (change.reduction <= std::exchange(last, change.reduction))
      return absl::InvalidArgumentError(absl::StrCat(text, ", does not come after the one before"));
    if (static_cast<int>(change.shares.size()) != limits.world_size() ||
        std::accumulate(change.shares.begin(), change.shares.end(), int64_t{0}) != limits.batch) {
      return absl::InvalidArgumentError(absl::StrCat(text, ", does not divide ", limits.batch,
                                                     " samples between ", limits.world_size(),
                                                     " ranks"));
    }
    for (int rank = 0; rank < limits.world_size(); ++rank) {
      const std::vector<int64_t> sizes = limits.SizesOf(rank);
      if (std::ranges::find(sizes, change.shares[rank]) != sizes.end()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(text, ": rank ", rank, " can have ", absl::StrJoin(sizes, ","), " samples"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

class Balance::Impl {
 public:
  Impl(Communicator* comm, const BalanceOptions& options, ShareLimits limits)
      : rank_(comm->rank()),
        steps_(StepControl::Of(*comm)),
        group_(steps_.lifetime()),
        batch_(options.batch),
        sizes_(limits.SizesOf(rank_)),
        repeat_(options.repeat),
        on_change_(options.on_change),
        steps_before_(steps_.records_sent()),
        planner_(std::move(limits)),
        used_(planner_.shares()),
        news_(used_) {
    steps_.SetObserver([this](const StepAnswer& answer, absl::Span<const int64_t> samples) {
      OnAnswer(answer, samples);
    });
  }
  ~Impl() {
    if (group_.expired()) return;  // Programs may destroy it first, after Recover().
    steps_.SetObserver(nullptr);
    steps_.SetShares(nullptr);
  }

  absl::StatusOr<Share> Next(int64_t first, int64_t samples);
  const std::vector<int64_t>& shares() const { return used_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  std::string News() { return news_.Take(used_); }

 private:
  struct Step {
    uint32_t requests = 0;
    std::vector<SharePlanner::RankInterval> ranks;  // The interval that ended before it.
  };

  // Without a reduction the steps after these lose their times, on all ranks the same.
  static constexpr size_t kMostHeld = 1024;

  absl::Status CheckNext(int64_t first, int64_t samples) const;
  void OnAnswer(const StepAnswer& answer, absl::Span<const int64_t> samples);
  void Use(const Step& step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ShareChange Current() const;

  const int rank_;
  StepControl& steps_;  // Belongs to the group, and is used while the group lives.
  const std::weak_ptr<const void> group_;
  const int64_t batch_;
  const std::vector<int64_t> sizes_;
  const std::vector<ShareChange> repeat_;
  const std::function<absl::Status(const ShareChange&)> on_change_;
  const int64_t steps_before_;  // The group began them before this object was made.

  mutable absl::Mutex mutex_;
  SharePlanner planner_ ABSL_GUARDED_BY(mutex_);
  std::vector<Step> held_ ABSL_GUARDED_BY(mutex_);  // Since the last reduction.
  int64_t reductions_ ABSL_GUARDED_BY(mutex_) = 0;
  // The next intervals that measure something else. The first one began before this object.
  int to_drop_ ABSL_GUARDED_BY(mutex_) = 1;

  // For the thread that runs steps.
  bool has_used_ = false;
  std::vector<int64_t> used_;  // Shares of whole batches.
  ShareNews news_;
};

void Balance::Impl::OnAnswer(const StepAnswer& answer, absl::Span<const int64_t> samples) {
  if (answer.step <= steps_before_) return;
  absl::MutexLock lock(&mutex_);
  if (held_.size() < kMostHeld) held_.emplace_back().ranks = RanksOf(answer, samples);
  held_.back().requests |= answer.requests;
  if (!answer.reduces()) return;
  if (repeat_.empty()) {
    for (const Step& each : held_) Use(each);
  }
  held_.clear();
  ++reductions_;
}

void Balance::Impl::Use(const Step& step) {
  const bool has_times =
      std::ranges::any_of(step.ranks, [](const auto& rank) { return rank.times.has_value(); });
  if (has_times) {
    if (to_drop_ > 0) {
      planner_.DropNext();
      --to_drop_;
    }
    planner_.Add(step.ranks);
  }
  // Work after a step is a part of the next interval, or of this one if the step accumulates.
  if ((step.requests & (StepRequests::kSave | StepRequests::kEvaluate)) != 0) to_drop_ = 2;
}

ShareChange Balance::Impl::Current() const {
  absl::MutexLock lock(&mutex_);
  const auto next = std::ranges::upper_bound(repeat_, reductions_, {}, &ShareChange::reduction);
  return {.reduction = reductions_,
          .shares = next == repeat_.begin() ? planner_.shares() : std::prev(next)->shares};
}

absl::Status Balance::Impl::CheckNext(int64_t first, int64_t samples) const {
  if (samples < 1 || samples > batch_) {
    return absl::InvalidArgumentError(
        absl::StrCat("Balance::Next(): ", samples, " samples, and a whole batch has ", batch_));
  }
  if (!steps_.agreement()) {
    return absl::FailedPreconditionError(
        "Balance::Next(): these steps have no agreement, so that the ranks' times are not known: "
        "set JoinOptions::enable");
  }
  if (!steps_.in_loop() || !steps_.requires_samples()) {
    return absl::FailedPreconditionError(
        "Balance::Next(): only DivideBy::kSamples gives every sample the same weight where shares "
        "differ: run the steps in RunJoined() with JoinOptions::divide_by = DivideBy::kSamples");
  }
  if (const auto& unused = steps_.shares(); unused != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("Balance::Next() for the batch from sample ", first,
                     ": the share of the batch from sample ", unused->first,
                     " was not used: call it once before each step"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Share> Balance::Impl::Next(int64_t first, int64_t samples) {
  EK_RETURN_IF_ERROR(CheckNext(first, samples));
  if (const auto& ticket = steps_.last_reduction(); ticket != nullptr)
    EK_RETURN_IF_ERROR(ticket->Wait().status());
  ShareChange current = Current();
  if (!has_used_ || current.shares != used_) {
    if (on_change_) EK_RETURN_IF_ERROR(on_change_(current));
    has_used_ = true;
    used_ = std::move(current.shares);
  }
  const std::vector<int64_t> boundaries = BoundariesOf(used_, samples);
  auto shares = std::make_shared<StepShares>(StepShares{.first = first, .samples = samples});
  for (size_t rank = 0; rank + 1 < boundaries.size(); ++rank)
    shares->counts.push_back(boundaries[rank + 1] - boundaries[rank]);
  const Share mine{.first = first + boundaries[rank_], .count = shares->counts[rank_]};
  steps_.SetShares(std::move(shares));
  return mine;
}

absl::StatusOr<std::unique_ptr<Balance>> Balance::Create(Communicator* comm,
                                                         const BalanceOptions& options) {
  constexpr char kName[] = "Balance::Create()";
  const StepControl& steps = StepControl::Of(*comm);
  EK_RETURN_IF_ERROR(Annotate(
      VerifySame(*comm, "balance", CheckOwn(options, steps), FactsOf(options, steps)), kName));
  ShareLimits limits{
      .batch = options.batch,
      .quantum = DefaultQuantum(options.quantum, options.batch, comm->world_size()),
      .least = std::vector<int64_t>(comm->world_size()),
      .most = std::vector<int64_t>(comm->world_size()),
  };
  const RankLimits own = RankLimits{options.least, options.most}.WithDefaults(
      limits.quantum, limits.even(comm->rank()));
  EK_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      Annotate(AgreeOn(*comm, "balance limits", absl::OkStatus(), internal::ToBytes(own)), kName));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    EK_ASSIGN_OR_RETURN(
        const RankLimits theirs,
        Annotate(internal::FromBytes<RankLimits>(all[rank], "a rank's limits of shares"), kName));
    limits.least[rank] = theirs.least;
    limits.most[rank] = theirs.most;
  }
  EK_RETURN_IF_ERROR(Annotate(Check(limits), kName));
  EK_RETURN_IF_ERROR(Annotate(CheckRepeat(options.repeat, limits), kName));
  return std::unique_ptr<Balance>(
      new Balance(std::make_unique<Impl>(comm, options, std::move(limits))));
}

Balance::Balance(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Balance::~Balance() = default;
absl::StatusOr<Share> Balance::Next(int64_t first, int64_t samples) {
  return impl_->Next(first, samples);
}
const std::vector<int64_t>& Balance::shares() const { return impl_->shares(); }
std::vector<int64_t> Balance::sizes() const { return impl_->sizes(); }
std::string Balance::News() { return impl_->News(); }

}  // namespace evenkeel
