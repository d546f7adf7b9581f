#include "evenkeel/join/abi/step_monitor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/abi/connect.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/group_extension.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/lagged_shares.h"
#include "evenkeel/join/steps/phase_clock.h"
#include "evenkeel/join/steps/share_planner.h"
#include "evenkeel/join/steps/step_status.h"
#include "evenkeel/join/steps/straggler_detector.h"

namespace evenkeel::abi {
namespace {

static_assert(static_cast<int>(Phase::kSaving) == static_cast<int>(StepPhase::kSaving));
static_assert(static_cast<int>(Phase::kSaving) + 1 == kStepPhases);
static_assert(StepMonitor::kTimesPerRank == kStepPhases + 1);

constexpr absl::string_view kTimes = "step times", kText = "text";
constexpr std::chrono::milliseconds kBetweenMessages{250};
constexpr size_t kMaxAhead = 10'000;  // Steps of one rank that others do not have.

using NoticeHandler = std::function<void(int from, absl::string_view topic, absl::string_view)>;
using StatusFunction = std::function<std::string()>;

class Inbox final : public internal::GroupExtension {
 public:
  Inbox(Communicator* comm, NoticeHandler handle, StatusFunction status)
      : GroupExtension(comm), handle_(std::move(handle)), status_(std::move(status)) {}
  void OnNotice(int from, absl::string_view topic, absl::string_view notice) override {
    handle_(from, topic, notice);
  }
  // The ranks of a group without operations need not agree on any.
  int64_t position() const override { return 0; }
  bool is_exhausted() const override { return false; }
  std::string StatusJson() const override { return status_(); }

 private:
  const NoticeHandler handle_;
  const StatusFunction status_;
};

struct Step {
  int64_t number = 0;
  PhaseTimes times;
};

// Consecutive steps of one rank, as it sends them.
struct Steps {
  int64_t first = 0;  // The number of the first one.
  std::vector<PhaseTimes> times;

  static void VisitFields(auto& self, auto& visit) { visit(self.first, self.times); }
};

class MonitorOverCommunicator final : public StepMonitor {
 public:
  explicit MonitorOverCommunicator(std::unique_ptr<Communicator> comm)
      : rank_(comm->rank()),
        world_size_(comm->world_size()),
        detector_(world_size_),
        steps_of_(world_size_),
        comm_(std::move(comm)) {
    comm_->Extension<Inbox>([this](int from, absl::string_view topic,
                                   absl::string_view notice) { OnNotice(from, topic, notice); },
                            [this] { return StatusJson(); });
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  Phase Enter(Phase next) override {
    return static_cast<Phase>(clock_.Enter(static_cast<StepPhase>(next)));
  }
  void BeginBackward() override { clock_.BeginBackward(); }
  void BeginWait() override {
    if (ThisThread().empty()) waiting_since_ = absl::ToUnixNanos(SteadyNow());
    ThisThread().emplace_back();
  }
  void EndWait() override {
    if (!ThisThread().empty()) ThisThread().pop_back();
    if (ThisThread().empty()) waiting_since_ = 0;
  }

  void EndReduction() override {
    clock_.EndReduction();
    const std::optional<PhaseTimes> times = clock_.Take();
    std::string message;
    {
      absl::MutexLock lock(&mutex_);
      ++steps_;
      last_times_ = times;
      if (!times.has_value()) return;
      if (unsent_.times.empty()) unsent_.first = steps_;
      unsent_.times.push_back(*times);
      Add(rank_, {.number = steps_, .times = *times});
      const auto now = std::chrono::steady_clock::now();
      if (now < next_message_) return;
      next_message_ = now + kBetweenMessages;
      message = internal::ToBytes(std::exchange(unsent_, {}));
    }
    Notify(kTimes, std::move(message));
  }

  int64_t steps() const override {
    absl::MutexLock lock(&mutex_);
    return steps_;
  }

  std::string TakeNews() override {
    absl::MutexLock lock(&mutex_);
    return detector_.TakeNews() ? detector_.Recent().Stragglers() : "";
  }
  std::vector<Straggler> Stragglers() const override {
    absl::MutexLock lock(&mutex_);
    std::vector<Straggler> stragglers;
    for (const StragglerReport::Rank& rank : detector_.Recent().ranks) {
      if (!rank.is_straggler) continue;
      stragglers.push_back(
          {.rank = rank.rank, .cost = rank.cost, .phase = static_cast<Phase>(rank.phase)});
    }
    return stragglers;
  }
  std::string Table() const override {
    absl::MutexLock lock(&mutex_);
    return detector_.All().Table();
  }

  Failure BeginSharing(const Sharing& sharing) override {
    ShareLimits limits{.batch = sharing.batch,
                       .quantum = DefaultQuantum(sharing.quantum, sharing.batch, world_size_)};
    const absl::Status status = SetLimits(sharing, limits);
    if (!status.ok()) return FailureOf(status);
    absl::MutexLock lock(&mutex_);
    shares_ = std::make_unique<LaggedShares>(LaggedShares::Options{
        .limits = std::move(limits), .lag = sharing.lag, .steps_before = steps_});
    share_news_ = ShareNews(shares_->shares());
    return {};
  }

  Failure Divide(int64_t step, int64_t samples, std::vector<int64_t>* boundaries) override {
    absl::MutexLock lock(&mutex_);
    if (const absl::Status status = CheckDivide(step, samples); !status.ok())
      return FailureOf(status);
    *boundaries = shares_->Divide(step, samples);
    std::vector<int64_t>& counts = samples_[step];
    counts.resize(world_size_);
    for (int rank = 0; rank < world_size_; ++rank)
      counts[rank] += (*boundaries)[rank + 1] - (*boundaries)[rank];
    return {};
  }

  std::vector<int64_t> LastTimes() const override {
    absl::MutexLock lock(&mutex_);
    if (!last_times_.has_value()) return {};
    std::vector<int64_t> times(last_times_->busy_us.begin(), last_times_->busy_us.end());
    times.push_back(last_times_->waited_us);
    return times;
  }

  Failure AddTimes(int64_t step, const std::vector<int64_t>& times) override {
    const auto is_possible = [](int64_t us) {
      return us >= 0 && static_cast<uint64_t>(us) <= kMostMicroseconds;
    };
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = CheckShares(); !status.ok()) return FailureOf(status);
    if (std::ssize(times) != kTimesPerRank * world_size_ ||
        !std::ranges::all_of(times, is_possible)) {
      return FailureOf(absl::InvalidArgumentError(
          absl::StrCat("times of step ", step, ": ", times.size(), " numbers, and must be ",
                       kTimesPerRank, " for each of ", world_size_, " ranks, from 0 to 2^50")));
    }
    std::vector<PhaseTimes> of_ranks(world_size_);
    auto from = times.begin();
    for (PhaseTimes& of_rank : of_ranks) {
      std::copy_n(from, kStepPhases, of_rank.busy_us.begin());
      of_rank.waited_us = from[kStepPhases];
      from += kTimesPerRank;
    }
    shares_->Add(step, std::move(of_ranks));
    return {};
  }

  void RestartSharing() override {
    absl::MutexLock lock(&mutex_);
    if (shares_ != nullptr) shares_->RestartAt(steps_ + 1);
    samples_.erase(samples_.upper_bound(steps_), samples_.end());
  }
  std::vector<int64_t> Shares() const override {
    absl::MutexLock lock(&mutex_);
    return shares_ == nullptr ? std::vector<int64_t>() : shares_->shares();
  }
  std::string TakeShareNews() override {
    absl::MutexLock lock(&mutex_);
    return shares_ == nullptr ? "" : share_news_.Take(shares_->shares());
  }

  void Tell(const std::string& text) override { Notify(kText, text); }
  std::vector<Message> TakeMessages() override {
    absl::MutexLock lock(&mutex_);
    return std::exchange(messages_, {});
  }

  Failure failure() const override {
    const std::shared_ptr<Communicator> comm = Comm();
    return FailureOf(comm == nullptr ? left_ : comm->status());
  }
  void Abort(const std::string& why) override {
    if (const std::shared_ptr<Communicator> comm = Comm(); comm != nullptr)
      comm->Abort(absl::CancelledError(why));
  }
  void Leave() override {
    std::string message;
    std::shared_ptr<Communicator> comm;
    {
      absl::MutexLock lock(&mutex_);
      if (!unsent_.times.empty()) message = internal::ToBytes(std::exchange(unsent_, {}));
      comm.swap(comm_);
    }
    if (comm == nullptr) return;
    if (!message.empty()) comm->control().Notify(kTimes, std::move(message));
    comm->Leave().IgnoreError();  // It fails if the group has ended: failure() has said so.
  }

 private:
  static std::deque<internal::CountedWait>& ThisThread() {
    static thread_local std::deque<internal::CountedWait> waits;
    return waits;
  }

  // Null once this rank has left. The last user destroys it.
  std::shared_ptr<Communicator> Comm() const {
    absl::MutexLock lock(&mutex_);
    return comm_;
  }

  void Notify(absl::string_view topic, std::string message) {
    if (const std::shared_ptr<Communicator> comm = Comm(); comm != nullptr)
      comm->control().Notify(topic, std::move(message));
  }

  std::string StatusJson() const {
    const int64_t since = waiting_since_;
    absl::MutexLock lock(&mutex_);
    return ToJson(
        {.step = steps_,
         .phase = clock_.phase(),
         .waited_ms = since == 0 ? 0 : (absl::ToUnixNanos(SteadyNow()) - since) / 1'000'000},
        detector_.Recent(), rank_);
  }

  void OnNotice(int from, absl::string_view topic, absl::string_view notice) {
    absl::MutexLock lock(&mutex_);
    if (topic == kText) messages_.push_back({.from = from, .text = std::string(notice)});
    if (topic != kTimes) return;
    const absl::StatusOr<Steps> steps = internal::FromBytes<Steps>(notice, "step times");
    // The numbers of the steps behind the first one must not overflow.
    constexpr int64_t kMostFirst = std::numeric_limits<int64_t>::max() / 2;
    if (!steps.ok() || steps->first < 0 || steps->first > kMostFirst) return;
    for (size_t i = 0; i < steps->times.size(); ++i) {
      const auto number = steps->first + static_cast<int64_t>(i);
      Add(from, {.number = number, .times = steps->times[i]});
    }
  }

  absl::Status SetLimits(const Sharing& sharing, ShareLimits& limits) const {
    const size_t ranks = static_cast<size_t>(world_size_);
    if (sharing.least.size() != ranks || sharing.most.size() != ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("shares need a least and a most one for each of ", ranks, " ranks, got ",
                       sharing.least.size(), " and ", sharing.most.size()));
    }
    if (sharing.lag < 2)
      return absl::InvalidArgumentError(
          absl::StrCat("shares have a lag of ", sharing.lag, " steps, and must have 2 or more"));
    limits.least.resize(ranks);
    limits.most.resize(ranks);
    if (sharing.batch < world_size_ || limits.quantum < 1) return Check(limits);
    for (int rank = 0; rank < world_size_; ++rank) {
      const RankLimits own = RankLimits{sharing.least[rank], sharing.most[rank]}.WithDefaults(
          limits.quantum, limits.even(rank));
      limits.least[rank] = own.least;
      limits.most[rank] = own.most;
    }
    return Check(limits);
  }

  absl::Status CheckShares() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return shares_ != nullptr ? absl::OkStatus()
                              : absl::FailedPreconditionError(
                                    "BeginSharing() comes before the first batch is divided");
  }

  absl::Status CheckDivide(int64_t step, int64_t samples) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    EK_RETURN_IF_ERROR(CheckShares());
    const int64_t batch = shares_->batch();
    if (samples < 1 || samples > batch) {
      return absl::InvalidArgumentError(
          absl::StrCat("a batch has 1 to ", batch, " samples, got ", samples));
    }
    if (shares_->CanDivide(step)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "shares of step ", step, " use the times of step ", shares_->LastNeeded(step),
        ", and this rank has ended ", steps_,
        " steps, whose times are exchanged in the step behind them: load fewer batches "
        "ahead, or raise the lag"));
  }

  // Passes on each step that all ranks have.
  void Add(int from, const Step& step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    steps_of_[from].push_back(step);
    if (steps_of_[from].size() > kMaxAhead) steps_of_[from].pop_front();
    while (true) {
      int64_t newest = 0;
      for (const std::deque<Step>& steps : steps_of_) {
        if (steps.empty()) return;
        newest = std::max(newest, steps.front().number);
      }
      absl::InlinedVector<StragglerDetector::RankTimes, 8> times;
      const auto counted = samples_.find(newest);
      const std::vector<int64_t> samples =
          counted == samples_.end() ? std::vector<int64_t>() : counted->second;
      for (std::deque<Step>& steps : steps_of_) {
        if (steps.front().number == newest) {
          times.push_back({.times = steps.front().times,
                           .samples = samples.empty() ? 0 : samples[times.size()]});
        }
        if (steps.front().number < newest) steps.pop_front();  // Another rank has dropped it.
      }
      if (static_cast<int>(times.size()) < world_size_) continue;
      detector_.Add(times);
      samples_.erase(samples_.begin(), samples_.upper_bound(newest));
      for (std::deque<Step>& steps : steps_of_) steps.pop_front();
    }
  }

  const int rank_;
  const int world_size_;
  const absl::Status left_ = absl::FailedPreconditionError("this rank has left the group");
  PhaseClock clock_;
  std::atomic<int64_t> waiting_since_ = 0;  // The training thread's wait, if any; nanoseconds.
  mutable absl::Mutex mutex_;
  int64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  StragglerDetector detector_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::deque<Step>> steps_of_ ABSL_GUARDED_BY(mutex_);  // By rank, ascending.
  Steps unsent_ ABSL_GUARDED_BY(mutex_);
  std::optional<PhaseTimes> last_times_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<LaggedShares> shares_ ABSL_GUARDED_BY(mutex_);  // Null without BeginSharing().
  // The samples of steps that the detector has not seen, by step and rank.
  std::map<int64_t, std::vector<int64_t>> samples_ ABSL_GUARDED_BY(mutex_);
  ShareNews share_news_ ABSL_GUARDED_BY(mutex_){{}};
  std::chrono::steady_clock::time_point next_message_ ABSL_GUARDED_BY(mutex_);
  std::vector<Message> messages_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Communicator> comm_ ABSL_GUARDED_BY(mutex_);  // Destroyed first: it calls back.
};

}  // namespace

std::unique_ptr<StepMonitor> CreateStepMonitor(Store& store, const Options& options,
                                               Failure* failure) {
  Options alone = options;
  alone.backend = "none";
  absl::StatusOr<std::unique_ptr<Communicator>> comm = Connect(store, alone);
  *failure = FailureOf(comm.status());
  if (!comm.ok()) return nullptr;
  return std::make_unique<MonitorOverCommunicator>(*std::move(comm));
}

}  // namespace evenkeel::abi
