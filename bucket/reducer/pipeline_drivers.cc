// The three drivers of bucket_pipeline.h, one after the other.

#include <algorithm>
#include <utility>

#include "evenkeel/bucket/reducer/bucket_pipeline.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// Host --------------------------------------------------------------------------------------------

class HostPipeline final : public BucketPipeline {
 public:
  using BucketPipeline::BucketPipeline;

  absl::Status Wait() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void GoOn() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MeasureEnd(int bucket, const Work& work);

  // An operation may end while it is being issued, under the other lock.
  absl::Mutex ends_mutex_ ABSL_ACQUIRED_AFTER(mutex_);
  // The ends of first rounds, if they are measured.
  std::vector<absl::Time> ends_ ABSL_GUARDED_BY(ends_mutex_) =
      std::vector<absl::Time>(setup().measures_ends ? size() : 0, absl::InfiniteFuture());
};

void HostPipeline::GoOn() {
  for (std::optional<Turn> turn = NextLaunch(); turn.has_value(); turn = NextLaunch()) {
    NoteLaunch(*turn);
    const absl::StatusOr<Work> work = Launch(*turn);
    if (!work.ok()) return Fail(work.status());
    NoteLaunched(*turn, *work);
    if (setup().measures_ends && !turn->is_used_flags()) MeasureEnd(turn->bucket, *work);
  }
}

void HostPipeline::MeasureEnd(int bucket, const Work& work) {
  work.OnDone([self = shared_from_this(), this, bucket](const absl::Status&) {
    absl::MutexLock lock(&ends_mutex_);
    ends_[bucket] = SteadyNow();
  });
}

absl::Status HostPipeline::Wait() {
  absl::Status first;
  std::vector<Work> works;
  std::vector<Turn> turns;
  {
    absl::MutexLock lock(&mutex_);
    first = failed();
    works = launched(0);
    turns.reserve(works.size());
    if (static_cast<int>(works.size()) < size()) first.Update(NeverLaunched());
    for (size_t b = 0; b < works.size(); ++b)
      turns.push_back(TurnOf(static_cast<int>(b), rounds()));
  }
  // All of them, also after a failure: they use the buckets' memory.
  for (const Turn& turn : turns) {
    first.Update(works[turn.bucket].Wait());
    absl::MutexLock lock(&mutex_);
    absl::Time end = SteadyNow();
    if (setup().measures_ends) {
      absl::MutexLock ends(&ends_mutex_);  // A waiting thread may wake before the time is taken.
      end = std::min(end, ends_[turn.bucket]);
    }
    NoteEnd(turn.bucket, end);
  }
  first.Update(WaitForTheLast());
  EK_RETURN_IF_ERROR(first);
  for (const Turn& turn : turns) {
    EK_ASSIGN_OR_RETURN(Reduced reduced, Reduce(turn));
    absl::MutexLock lock(&mutex_);
    NoteReduced(std::move(reduced));
  }
  return absl::OkStatus();
}

// Device ------------------------------------------------------------------------------------------

class DevicePipeline final : public BucketPipeline {
 public:
  using BucketPipeline::BucketPipeline;

  absl::Status Wait() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void GoOn() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<Turn> turns_ ABSL_GUARDED_BY(mutex_);  // By bucket: its first round, once launched.
};

void DevicePipeline::GoOn() {
  for (std::optional<Turn> turn = NextLaunch(); turn.has_value(); turn = NextLaunch()) {
    NoteLaunch(*turn);
    const absl::StatusOr<Work> work = Launch(*turn);
    if (!work.ok()) return Fail(work.status());
    NoteLaunched(*turn, *work);
    if (!turn->is_used_flags()) turns_.push_back(*std::move(turn));
  }
}

// Without the lock: OrderBefore() may wait until the other ranks have issued the same, and the
// thread that receives their messages may be about to Open() or Skip().
absl::Status DevicePipeline::Wait() {
  std::vector<Turn> turns;
  std::vector<Work> works;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(failed());
    works = launched(0);
    if (static_cast<int>(works.size()) < size() || NeedsUsedFlags()) return NeverLaunched();
    turns = turns_;
  }
  for (int round = 1; round < rounds(); ++round) {
    for (Turn& turn : turns) {
      turn.round = round;
      Work& work = works[turn.bucket];
      if (!turn.is_skipped) {
        EK_RETURN_IF_ERROR(work.OrderBefore(setup().plan->streams[round]));
        EK_ASSIGN_OR_RETURN(work, Launch(turn));
      }
      absl::MutexLock lock(&mutex_);
      NoteLaunched(turn, work);
    }
  }
  const std::vector<StreamRef>& streams = setup().plan->streams;
  for (const Turn& turn : turns) {
    if (!turn.is_skipped && !streams.empty())
      EK_RETURN_IF_ERROR(works[turn.bucket].OrderBefore(streams.back()));
    EK_ASSIGN_OR_RETURN(Reduced reduced, Reduce(turn));
    absl::MutexLock lock(&mutex_);
    NoteReduced(std::move(reduced));
    NoteEnd(turn.bucket, SteadyNow());  // No thread waits for the device's end of it.
  }
  return WaitForTheLast();
}

// Worker ------------------------------------------------------------------------------------------

class WorkerPipeline final : public BucketPipeline {
 public:
  using BucketPipeline::BucketPipeline;

  absl::Status Wait() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Has the worker look for turns.
  void GoOn() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsIdle() const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !is_in_turns_; }

  // On the worker.
  void TakeTurns() ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<Turn> NextTurn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unlock while they run the turn. The round before it has ended: its Wait() returns at once.
  void TakeLaunch(Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeReduced(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Work> RoundBefore(const Turn& turn) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (turn.round == 0) return std::nullopt;
    return launched(turn.round - 1)[turn.bucket];
  }

  bool IsFinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(progress(rounds())) == size() && !NeedsUsedFlags();
  }
  bool IsResting() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !is_woken_ && !is_in_turns_;
  }
  std::optional<Work> OldestInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitForTurns() ABSL_LOCKS_EXCLUDED(mutex_);

  // The worker: resting -> woken -> in turns -> resting. It may be woken again in its turns.
  bool is_woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_in_turns_ ABSL_GUARDED_BY(mutex_) = false;
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;  // Works whose end wakes the worker.
};

void WorkerPipeline::GoOn() {
  if (is_woken_ || is_closed()) return;
  is_woken_ = true;
  // Meanwhile the rank can go on, whatever its own thread waits for.
  auto account = std::make_shared<internal::Waits::Callbacks>(setup().waits);
  const absl::Status posted = setup().worker->Post(
      [self = shared_from_this(), this, account = std::move(account)] { TakeTurns(); });
  if (posted.ok()) return;
  is_woken_ = false;
  Fail(posted);
}

void WorkerPipeline::TakeTurns() {
  absl::MutexLock lock(&mutex_);
  is_woken_ = false;
  is_in_turns_ = true;
  for (std::optional<Turn> turn = NextTurn(); turn.has_value(); turn = NextTurn()) {
    if (turn->round < rounds()) {
      TakeLaunch(*turn);
    } else {
      TakeReduced(*turn);
    }
  }
  is_in_turns_ = false;
}

std::optional<BucketPipeline::Turn> WorkerPipeline::NextTurn() const {
  if (!IsOpen()) return std::nullopt;
  // Later rounds first: their buckets are needed sooner.
  for (int round = rounds(); round > 0; --round) {
    const size_t bucket = progress(round);
    const std::vector<Work>& before = launched(round - 1);
    if (bucket < before.size() && before[bucket].IsDone())
      return TurnOf(static_cast<int>(bucket), round);
  }
  return NextLaunch();
}

void WorkerPipeline::TakeLaunch(Turn& turn) {
  NoteLaunch(turn);
  const std::optional<Work> before = RoundBefore(turn);
  mutex_.Unlock();
  const absl::Status ended = before.has_value() ? before->Wait() : absl::OkStatus();
  const absl::StatusOr<Work> work = ended.ok() ? Launch(turn) : ended;
  mutex_.Lock();
  if (!work.ok()) return Fail(work.status());
  NoteLaunched(turn, *work);
  ++in_flight_;
  mutex_.Unlock();
  work->OnDone([self = shared_from_this(), this](const absl::Status&) {
    absl::MutexLock lock(&mutex_);
    --in_flight_;
    GoOn();
  });
  mutex_.Lock();
}

void WorkerPipeline::TakeReduced(const Turn& turn) {
  const std::optional<Work> before = RoundBefore(turn);
  mutex_.Unlock();
  const absl::Status ended = before->Wait();
  absl::StatusOr<Reduced> reduced = ended.ok() ? Reduce(turn) : ended;
  mutex_.Lock();
  if (!reduced.ok()) return Fail(reduced.status());
  NoteEnd(turn.bucket, SteadyNow());
  NoteReduced(*std::move(reduced));
}

std::optional<Work> WorkerPipeline::OldestInFlight() const {
  for (int round = rounds() - 1; round >= 0; --round) {
    const size_t next = progress(round + 1);
    if (next < launched(round).size() && !launched(round)[next].IsDone())
      return launched(round)[next];
  }
  if (used_flags().has_value() && !used_flags()->IsDone()) return used_flags();
  return std::nullopt;
}

absl::Status WorkerPipeline::Wait() {
  absl::Status first = WaitForTurns();
  first.Update(WaitForTheLast());
  return first;
}

// The thread that finishes the step waits in the group's operations where it can, so that reports
// of its wait name them.
absl::Status WorkerPipeline::WaitForTurns() {
  absl::MutexLock lock(&mutex_);
  while (failed().ok() && !IsFinished()) {
    const std::optional<Work> work = OldestInFlight();
    if (work.has_value()) {
      mutex_.Unlock();
      (void)work->Wait();  // The worker sees how it ended.
      mutex_.Lock();
      continue;
    }
    if (IsResting() && in_flight_ == 0) return NeverLaunched();
    const auto has_news = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (!failed().ok() || IsFinished()) return true;
      return IsResting() && (in_flight_ == 0 || OldestInFlight().has_value());
    };
    mutex_.Await(absl::Condition(&has_news));
  }
  return failed();
}

}  // namespace

std::shared_ptr<BucketPipeline> BucketPipeline::Create(Setup setup) {
  if (setup.plan->runtime != nullptr) return std::make_shared<DevicePipeline>(std::move(setup));
  if (setup.worker != nullptr) return std::make_shared<WorkerPipeline>(std::move(setup));
  return std::make_shared<HostPipeline>(std::move(setup));
}

}  // namespace evenkeel
