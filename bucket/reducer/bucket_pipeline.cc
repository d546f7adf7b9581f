#include "evenkeel/bucket/reducer/bucket_pipeline.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

BucketPipeline::BucketPipeline(std::shared_ptr<const PlanInForce> plan,
                               std::vector<bool> contributes, bool waits_for_skips,
                               internal::WorkerThread* worker,
                               std::shared_ptr<internal::Waits> waits)
    : plan_(std::move(plan)),
      contributes_(std::move(contributes)),
      worker_(worker),
      waits_(std::move(waits)),
      has_skips_(!waits_for_skips),
      ready_(plan_->buckets.size()),
      begun_(plan_->buckets.size()),
      reduced_(plan_->buckets.size()),
      works_(plan_->channels.size()),
      times_(plan_->buckets.size()) {}

void BucketPipeline::BucketReady(int bucket, const Ready& ready) {
  absl::MutexLock lock(&mutex_);
  ready_[bucket] = ready;
  last_packed_ = ready.packed;
  times_[bucket].ready = SteadyNow();
  GoOn();
}

void BucketPipeline::Open(double scale) {
  absl::MutexLock lock(&mutex_);
  if (has_scale_ || closed_) return;
  has_scale_ = true;
  scale_ = scale;
  GoOn();
}

void BucketPipeline::Skip(std::vector<bool> skipped) {
  absl::MutexLock lock(&mutex_);
  if (has_skips_ || closed_) return;
  has_skips_ = true;
  skipped_ = std::move(skipped);
  GoOn();
}

void BucketPipeline::WaitForSkips() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&has_skips_));
}

void BucketPipeline::MeasureEnds() {
  absl::MutexLock lock(&mutex_);
  measures_ends_ = true;
  absl::MutexLock ends(&ends_mutex_);
  ends_.assign(plan_->buckets.size(), absl::InfiniteFuture());
}

// The next action ---------------------------------------------------------------------------------

BucketPipeline::Turn BucketPipeline::NextTurn() const {
  if (!IsOpen()) return {};
  const size_t reduced = fates_.size();
  if (reduced < works_.back().size() && works_.back()[reduced].IsDone()) {
    const int bucket = static_cast<int>(reduced);
    return {Turn::Kind::kReduced,  bucket, rounds(), IsSkipped(bucket), ready_[bucket]->has_all,
            works_.back()[reduced]};
  }
  // Later rounds first: their buckets are needed sooner.
  for (int round = rounds() - 1; round > 0; --round) {
    const int bucket = static_cast<int>(works_[round].size());
    if (works_[round].size() < works_[round - 1].size() && works_[round - 1][bucket].IsDone()) {
      return {Turn::Kind::kRound,       bucket, round, IsSkipped(bucket), ready_[bucket]->has_all,
              works_[round - 1][bucket]};
    }
  }
  return NextLaunch();
}

BucketPipeline::Turn BucketPipeline::NextLaunch() const {
  if (!IsOpen()) return {};
  const int bucket = static_cast<int>(works_[0].size());
  if (bucket < size()) {
    if (!ready_[bucket].has_value()) return {};
    return {Turn::Kind::kRound, bucket, 0, IsSkipped(bucket), ready_[bucket]->has_all};
  }
  if (plan_->used.count == 0 || used_.has_value()) return {};
  return {Turn::Kind::kUsed};
}

absl::StatusOr<Work> BucketPipeline::Launch(const Turn& turn, double scale, Event* before) const {
  if (turn.kind == Turn::Kind::kUsed) {
    return plan_->channels[0]->Issue(plan_->used, {plan_->used_data}, {plan_->used_data},
                                     {.after_event = *before});
  }
  if (turn.is_skipped) return Work();
  if (turn.before.has_value()) EK_RETURN_IF_ERROR(turn.before->Wait());
  return Issue(turn.bucket, turn.round, StepOf(turn.bucket, turn.has_all, scale), before);
}

absl::StatusOr<Work> BucketPipeline::Issue(int bucket, int round, ReductionStep step,
                                           Event* before) const {
  const PlanInForce::Bucket& planned = plan_->buckets[bucket];
  const bool has_streams = !plan_->streams.empty();
  if (has_streams) {
    step.stream = plan_->streams[round];
    EK_RETURN_IF_ERROR(plan_->runtime->Wait(step.stream, *before));
  }
  absl::StatusOr<RoundBuffers> buffers = plan_->reduction->BeginRound(planned.info, round, step);
  if (!buffers.ok())
    return Annotate(buffers.status(), absl::StrCat("bucket ", bucket, ", round ", round));
  if (has_streams) {
    EK_ASSIGN_OR_RETURN(*before, plan_->runtime->Record(step.stream));
  }
  return plan_->channels[round]->Issue(
      planned.rounds[round], std::move(buffers->in), std::move(buffers->out),
      {.scale = buffers->scale, .contributes = contributes_[bucket], .after_event = *before});
}

absl::StatusOr<GradFate> BucketPipeline::Reduced(int bucket, ReductionStep step, const Work& work,
                                                 const Event& before, Event* reduced) const {
  const bool has_streams = !plan_->streams.empty();
  if (has_streams) {
    step.stream = plan_->streams.back();
    EK_RETURN_IF_ERROR(plan_->runtime->Wait(step.stream, before));
    EK_RETURN_IF_ERROR(work.OrderBefore(step.stream));
  } else if (plan_->runtime == nullptr) {
    EK_RETURN_IF_ERROR(work.Wait());  // It has ended.
  }
  absl::StatusOr<GradFate> fate = plan_->reduction->OnReduced(plan_->buckets[bucket].info, step);
  if (!fate.ok()) return Annotate(fate.status(), absl::StrCat("bucket ", bucket));
  if (has_streams) {
    EK_ASSIGN_OR_RETURN(*reduced, plan_->runtime->Record(step.stream));
  }
  return fate;
}

void BucketPipeline::NoteLaunched(const Turn& turn, const Work& work) {
  const bool is_used = turn.kind == Turn::Kind::kUsed;
  if (is_used) {
    used_ = work;
  } else {
    works_[turn.round].push_back(work);
  }
  const bool is_last_bucket = is_used || turn.bucket == size() - 1;
  const bool used_follows = !is_used && turn.round == 0 && plan_->used.count > 0;
  if (is_last_bucket && !used_follows)
    comparisons_.push_back(plan_->channels[turn.round]->CompareIssued());
}

void BucketPipeline::NoteTime(const Turn& turn) {
  if (turn.kind != Turn::Kind::kRound || turn.round > 0 || turn.is_skipped) return;
  times_[turn.bucket].launched = SteadyNow();
  times_[turn.bucket].gradients_at_launch = gradients_;
}

bool BucketPipeline::IsFinished() const {
  return static_cast<int>(fates_.size()) == size() && (plan_->used.count == 0 || used_.has_value());
}

// Without a worker --------------------------------------------------------------------------------

void BucketPipeline::LaunchReady() {
  for (Turn turn = NextLaunch(); turn.kind != Turn::Kind::kNothing; turn = NextLaunch()) {
    NoteTime(turn);
    const bool is_used = turn.kind == Turn::Kind::kUsed;
    if (!is_used) begun_[turn.bucket] = ready_[turn.bucket]->packed;
    const absl::StatusOr<Work> work =
        Launch(turn, scale_, is_used ? &last_packed_ : &begun_[turn.bucket]);
    if (!work.ok()) {
      failed_ = work.status();
      continue;
    }
    NoteLaunched(turn, *work);
    if (measures_ends_ && !is_used) NoteEndOf(turn, *work);
  }
}

void BucketPipeline::NoteEndOf(const Turn& turn, const Work& work) {
  work.OnDone([self = shared_from_this(), bucket = turn.bucket](const absl::Status&) {
    absl::MutexLock ends(&self->ends_mutex_);
    self->ends_[bucket] = SteadyNow();
  });
}

absl::Status BucketPipeline::FinishHere() {
  absl::Status first;
  std::vector<Work> works;
  double scale = 1.0;
  std::vector<bool> skipped, has_all;
  {
    absl::MutexLock lock(&mutex_);
    first = failed_;
    works = works_[0];
    scale = scale_;
    skipped = skipped_;
    for (size_t b = 0; b < works.size(); ++b) has_all.push_back(ready_[b]->has_all);
  }
  if (static_cast<int>(works.size()) < size()) {
    first.Update(absl::InternalError(absl::StrCat("bucket ", works.size(), " was never launched")));
  }
  for (size_t b = 0; b < works.size();
       ++b) {  // All of them, also after a failure: they use the buckets' memory.
    first.Update(works[b].Wait());
    absl::MutexLock lock(&mutex_);
    times_[b].reduced = SteadyNow();
    if (!measures_ends_) continue;
    absl::MutexLock ends(&ends_mutex_);  // Whoever waits may be told before the time is taken.
    times_[b].reduced = std::min(times_[b].reduced, ends_[b]);
  }
  first.Update(WaitForTheLast());
  for (int b = 0; first.ok() && b < size(); ++b) {
    absl::StatusOr<GradFate> fate = GradFate::kNone;
    if (skipped.empty() || !skipped[b])
      fate = Reduced(b, StepOf(b, has_all[b], scale), works[b], Event(), nullptr);
    first.Update(fate.status());
    if (!fate.ok()) break;
    absl::MutexLock lock(&mutex_);
    fates_.push_back(*fate);
  }
  return first;
}

// On a device -------------------------------------------------------------------------------------

// Without the lock: OrderBefore() may wait until the other ranks have issued the same, and the
// thread that brings word of that may be about to Open() or Skip().
absl::Status BucketPipeline::FinishOnDevice() {
  struct OnItsWay {
    Work work;
    Event before;
    ReductionStep step;
    bool is_skipped = false;
  };
  std::vector<OnItsWay> buckets;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(failed_);
    const size_t launched = works_[0].size();
    if (static_cast<int>(launched) < size() || (plan_->used.count > 0 && !used_.has_value())) {
      return absl::InternalError(absl::StrCat("bucket ", launched, " was never launched"));
    }
    for (int b = 0; b < size(); ++b) {
      buckets.push_back(
          {works_[0][b], begun_[b], StepOf(b, ready_[b]->has_all, scale_), IsSkipped(b)});
    }
  }
  for (int round = 1; round < rounds(); ++round) {
    for (int b = 0; b < size(); ++b) {
      if (!buckets[b].is_skipped) {
        EK_RETURN_IF_ERROR(buckets[b].work.OrderBefore(plan_->streams[round]));
        EK_ASSIGN_OR_RETURN(buckets[b].work, Issue(b, round, buckets[b].step, &buckets[b].before));
      }
      absl::MutexLock lock(&mutex_);
      NoteLaunched({Turn::Kind::kRound, b, round}, buckets[b].work);
    }
  }
  for (int b = 0; b < size(); ++b) {
    Event reduced;
    GradFate fate = GradFate::kNone;
    if (!buckets[b].is_skipped) {
      EK_ASSIGN_OR_RETURN(
          fate, Reduced(b, buckets[b].step, buckets[b].work, buckets[b].before, &reduced));
    }
    absl::MutexLock lock(&mutex_);
    reduced_[b] = std::move(reduced);
    fates_.push_back(fate);
    times_[b].reduced = SteadyNow();  // No thread waits for the device's end of it.
  }
  return WaitForTheLast();
}

absl::Status BucketPipeline::FollowBucket(int bucket, StreamRef stream) const {
  Work work;
  Event reduced;
  {
    absl::MutexLock lock(&mutex_);
    work = works_.back()[bucket];
    reduced = reduced_[bucket];
  }
  EK_RETURN_IF_ERROR(work.OrderBefore(stream));
  return plan_->runtime->Wait(stream, reduced);
}

absl::Status BucketPipeline::FollowUsed(StreamRef stream) const {
  std::optional<Work> used;
  {
    absl::MutexLock lock(&mutex_);
    used = used_;
  }
  return used.has_value() ? used->OrderBefore(stream) : absl::OkStatus();
}

std::vector<Work> BucketPipeline::works() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Work> works;
  for (const std::vector<Work>& round : works_)
    works.insert(works.end(), round.begin(), round.end());
  if (used_.has_value()) works.push_back(*used_);
  return works;
}

bool BucketPipeline::has_all(int bucket) const {
  absl::MutexLock lock(&mutex_);
  return ready_[bucket]->has_all;
}

// With a worker -----------------------------------------------------------------------------------

void BucketPipeline::Wake() {
  if (woken_ || closed_) return;
  woken_ = true;
  // Meanwhile the rank can go on, whatever its own thread waits for.
  auto account = std::make_shared<internal::Waits::Callbacks>(waits_);
  const absl::Status posted =
      worker_->Post([self = shared_from_this(), account = std::move(account)] { self->Advance(); });
  if (posted.ok()) return;
  woken_ = false;
  failed_.Update(posted);
}

void BucketPipeline::Advance() {
  absl::MutexLock lock(&mutex_);
  woken_ = false;
  advancing_ = true;
  for (Turn turn = NextTurn(); turn.kind != Turn::Kind::kNothing; turn = NextTurn()) {
    const double scale = scale_;
    if (turn.kind == Turn::Kind::kReduced) {
      mutex_.Unlock();
      absl::StatusOr<GradFate> fate = GradFate::kNone;
      if (!turn.is_skipped) {
        fate = Reduced(turn.bucket, StepOf(turn.bucket, turn.has_all, scale), *turn.before, Event(),
                       nullptr);
      }
      mutex_.Lock();
      if (fate.ok()) {
        times_[turn.bucket].reduced = SteadyNow();
        fates_.push_back(*fate);
      } else {
        failed_.Update(fate.status());
      }
      continue;
    }
    NoteTime(turn);
    mutex_.Unlock();
    Event none;  // On the CPU.
    const absl::StatusOr<Work> work = Launch(turn, scale, &none);
    mutex_.Lock();
    if (!work.ok()) {
      failed_.Update(work.status());
      continue;
    }
    NoteLaunched(turn, *work);
    ++in_flight_;
    mutex_.Unlock();
    work->OnDone([self = shared_from_this()](const absl::Status&) {
      absl::MutexLock done(&self->mutex_);
      --self->in_flight_;
      self->Wake();
    });
    mutex_.Lock();
  }
  advancing_ = false;
}

std::optional<Work> BucketPipeline::OldestInFlight() const {
  for (int round = rounds() - 1; round >= 0; --round) {
    const size_t next = round + 1 < rounds() ? works_[round + 1].size() : fates_.size();
    if (next < works_[round].size() && !works_[round][next].IsDone()) return works_[round][next];
  }
  if (used_.has_value() && !used_->IsDone()) return used_;
  return std::nullopt;
}

// The thread that finishes the step waits in the group's operations where it can: so it is known
// what it waits for.
absl::Status BucketPipeline::WaitForWorker() {
  absl::MutexLock lock(&mutex_);
  while (failed_.ok() && !IsFinished()) {
    const std::optional<Work> work = OldestInFlight();
    if (work.has_value()) {
      mutex_.Unlock();
      (void)work->Wait();  // The worker sees how it ended.
      mutex_.Lock();
      continue;
    }
    if (!woken_ && !advancing_ && in_flight_ == 0) {
      return absl::InternalError(absl::StrCat("bucket ", works_[0].size(), " was never launched"));
    }
    const auto has_news = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (!failed_.ok() || IsFinished()) return true;
      return !woken_ && !advancing_ && (in_flight_ == 0 || OldestInFlight().has_value());
    };
    mutex_.Await(absl::Condition(&has_news));
  }
  return failed_;
}

// -------------------------------------------------------------------------------------------------

absl::Status BucketPipeline::Wait() {
  if (plan_->runtime != nullptr) return FinishOnDevice();
  if (worker_ == nullptr) return FinishHere();
  absl::Status first = WaitForWorker();
  first.Update(WaitForTheLast());
  return first;
}

absl::Status BucketPipeline::WaitForTheLast() {
  std::vector<Work> last;
  {
    absl::MutexLock lock(&mutex_);
    last = comparisons_;
    if (used_.has_value() && plan_->runtime == nullptr) last.push_back(*used_);
  }
  absl::Status first;
  for (const Work& work : last) first.Update(work.Wait());
  return first;
}

void BucketPipeline::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  const auto is_idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !advancing_; };
  mutex_.Await(absl::Condition(&is_idle));
}

GradFate BucketPipeline::fate(int bucket) const {
  absl::MutexLock lock(&mutex_);
  return fates_[bucket];
}

std::vector<BucketTimes> BucketPipeline::times() const {
  absl::MutexLock lock(&mutex_);
  return times_;
}

}  // namespace evenkeel
