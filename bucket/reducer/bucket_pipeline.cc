#include "evenkeel/bucket/reducer/bucket_pipeline.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

BucketPipeline::BucketPipeline(Setup setup)
    : setup_(std::move(setup)),
      plan_(*setup_.plan),
      has_skips_(!setup_.waits_for_skips),
      ready_(plan_.buckets.size()),
      works_(plan_.channels.size()),
      times_(plan_.buckets.size()) {
  reduced_.reserve(plan_.buckets.size());
}

void BucketPipeline::BucketReady(int bucket, const Ready& ready) {
  absl::MutexLock lock(&mutex_);
  ready_[bucket] = ready;
  last_ready_ = bucket;
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

void BucketPipeline::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  const auto is_idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return IsIdle(); };
  mutex_.Await(absl::Condition(&is_idle));
}

// Turns -------------------------------------------------------------------------------------------

BucketPipeline::Turn BucketPipeline::TurnOf(int bucket, int round) const {
  const Ready& ready = *ready_[bucket];
  return {.bucket = bucket,
          .round = round,
          .is_skipped = !skipped_.empty() && skipped_[bucket],
          .step = {.scale = scale_,
                   .contributes = setup_.contributes[bucket],
                   .has_all = ready.has_all},
          .input = ready.packed};
}

std::optional<BucketPipeline::Turn> BucketPipeline::NextLaunch() const {
  if (!IsOpen()) return std::nullopt;
  const int bucket = static_cast<int>(works_[0].size());
  if (bucket < size())
    return ready_[bucket].has_value() ? std::optional<Turn>(TurnOf(bucket, 0)) : std::nullopt;
  if (!NeedsUsedFlags()) return std::nullopt;
  return Turn{.input = ready_[last_ready_]->packed};
}

absl::StatusOr<Work> BucketPipeline::Launch(Turn& turn) const {
  Channel& channel = *plan_.channels[turn.round];
  if (turn.is_used_flags()) {
    return channel.Issue(plan_.used, {plan_.used_data}, {plan_.used_data},
                         {.after_event = turn.input});
  }
  if (turn.is_skipped) return Work();
  const PlanInForce::Bucket& bucket = plan_.buckets[turn.bucket];
  const bool has_streams = !plan_.streams.empty();
  if (has_streams) {
    turn.step.stream = plan_.streams[turn.round];
    EK_RETURN_IF_ERROR(plan_.runtime->Wait(turn.step.stream, turn.input));
  }
  absl::StatusOr<RoundBuffers> buffers =
      plan_.reduction->BeginRound(bucket.info, turn.round, turn.step);
  if (!buffers.ok()) {
    return Annotate(buffers.status(), absl::StrCat("bucket ", turn.bucket, ", round ", turn.round));
  }
  if (has_streams) {
    EK_ASSIGN_OR_RETURN(turn.input, plan_.runtime->Record(turn.step.stream));
  }
  return channel.Issue(
      bucket.rounds[turn.round], std::move(buffers->in), std::move(buffers->out),
      {.scale = buffers->scale, .contributes = turn.step.contributes, .after_event = turn.input});
}

absl::StatusOr<BucketPipeline::Reduced> BucketPipeline::Reduce(Turn turn) const {
  Reduced reduced;
  if (turn.is_skipped) return reduced;
  const bool has_streams = !plan_.streams.empty();
  if (has_streams) {
    turn.step.stream = plan_.streams.back();
    EK_RETURN_IF_ERROR(plan_.runtime->Wait(turn.step.stream, turn.input));
  }
  const absl::StatusOr<GradFate> fate =
      plan_.reduction->OnReduced(plan_.buckets[turn.bucket].info, turn.step);
  if (!fate.ok()) return Annotate(fate.status(), absl::StrCat("bucket ", turn.bucket));
  reduced.fate = *fate;
  if (has_streams) {
    EK_ASSIGN_OR_RETURN(reduced.end, plan_.runtime->Record(turn.step.stream));
  }
  return reduced;
}

void BucketPipeline::NoteLaunch(const Turn& turn) {
  if (turn.is_used_flags() || turn.round > 0 || turn.is_skipped) return;
  times_[turn.bucket].launched = SteadyNow();
  times_[turn.bucket].gradients_at_launch = gradients_;
}

void BucketPipeline::NoteLaunched(const Turn& turn, const Work& work) {
  if (turn.is_used_flags()) {
    used_ = work;
  } else {
    works_[turn.round].push_back(work);
  }
  const bool is_last = turn.is_used_flags() || turn.bucket == size() - 1;
  const bool used_follows = turn.round == 0 && NeedsUsedFlags();
  if (is_last && !used_follows) comparisons_.push_back(plan_.channels[turn.round]->CompareIssued());
}

absl::Status BucketPipeline::NeverLaunched() const {
  return absl::InternalError(absl::StrCat("bucket ", works_[0].size(), " was never launched"));
}

absl::Status BucketPipeline::WaitForTheLast() const {
  std::vector<Work> last;
  {
    absl::MutexLock lock(&mutex_);
    last = comparisons_;
    if (used_.has_value() && plan_.runtime == nullptr) last.push_back(*used_);
  }
  absl::Status first;
  for (const Work& work : last) first.Update(work.Wait());
  return first;
}

// After Wait() ------------------------------------------------------------------------------------

GradFate BucketPipeline::fate(int bucket) const {
  absl::MutexLock lock(&mutex_);
  return reduced_[bucket].fate;
}

bool BucketPipeline::has_all(int bucket) const {
  absl::MutexLock lock(&mutex_);
  return ready_[bucket]->has_all;
}

absl::Status BucketPipeline::FollowBucket(int bucket, StreamRef stream) const {
  Work work;
  Event end;
  {
    absl::MutexLock lock(&mutex_);
    work = works_.back()[bucket];
    end = reduced_[bucket].end;
  }
  EK_RETURN_IF_ERROR(work.OrderBefore(stream));
  return plan_.runtime->Wait(stream, end);
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

std::vector<BucketTimes> BucketPipeline::times() const {
  absl::MutexLock lock(&mutex_);
  return times_;
}

}  // namespace evenkeel
