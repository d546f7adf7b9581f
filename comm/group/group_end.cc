#include "evenkeel/comm/group/group_end.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kHubGrace = absl::Seconds(2);
// How long peers wait for the reason of a rank whose destructors have ended the group. A transport
// that notices the end by itself waits for longer (comm/tcp/backend.cc).
constexpr absl::Duration kTimeForReason = absl::Seconds(2);

// The code of an error without a FailureInfo does not say which rank caused it.
FailureInfo KindAndNoRanks(const absl::Status& why) {
  if (absl::IsFailedPrecondition(why)) return {.kind = FailureKind::kDisagreement};
  if (absl::IsDeadlineExceeded(why)) return {.kind = FailureKind::kDeadline};
  return {};
}

}  // namespace

absl::Status GroupEnd::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

GroupEnd::State GroupEnd::state() const {
  absl::MutexLock lock(&mutex_);
  if (has_left_) return State::kLeft;
  return has_ended_ ? State::kEnded : State::kOpen;
}

bool GroupEnd::SetStatus(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (!status_.ok()) return false;
  status_ = why;
  return true;
}

void GroupEnd::Fail(const absl::Status& why, End end) {
  SetStatus(end == End::kFailure ? Informed(why, KindAndNoRanks(why)) : why);
  const absl::Status first = status();
  // Before the operations in flight end.
  if (end == End::kFailure && state() != State::kLeft) flight_.Keep();
  backend_.Abort(first);
  receives_from_any_.End(first);
  control_.Close(first);
  {
    absl::MutexLock lock(&mutex_);
    has_ended_ = true;
  }
  watchdog_.Wake();
}

void GroupEnd::Report(const absl::Status& why) {
  const std::optional<FailureInfo> info = FailureInfoOf(why);
  const bool is_hubs = info.has_value() && info->kind == FailureKind::kRankLost &&
                       (info->ranks.empty() || info->ranks == control_.HubLost().ranks);
  // The error of another group of this process comes before this group has been without messages
  // for as long: their heartbeats are not sent at the same time.
  const absl::Duration limit = std::max(watch_.silence / 2, watch_.silence - 2 * watch_.beat);
  const absl::Duration silence = absl::Trunc(control_.link().Silence(), absl::Milliseconds(1));
  const bool is_unheard = watch_.silence > absl::ZeroDuration() && silence > limit;
  control_.Fail(why, is_hubs && is_unheard ? silence : absl::ZeroDuration());
}

void GroupEnd::FailWithAll(const absl::Status& why) {
  Report(Informed(why, KindAndNoRanks(why)));
  Fail(why);
}

absl::Status GroupEnd::AsOthersSee(const absl::Status& why, absl::string_view did) const {
  const std::string code = absl::StatusCodeToString(why.code());
  return WithFailureInfo(
      absl::UnavailableError(absl::StrCat("rank ", rank(), " ", did, ": ",
                                          why.message().empty() ? code : why.message())),
      *FailureInfoOf(why));
}

void GroupEnd::Abort(const absl::Status& why, absl::string_view did) {
  if (why.ok()) return Abort(absl::CancelledError("aborted without a reason"), did);
  // The caller ends the group, whatever the code of its reason is.
  const absl::Status informed = Informed(why, {.ranks = {rank()}});
  bool is_first = false;
  {
    absl::MutexLock lock(&mutex_);
    is_first = status_.ok() || provisional_.has_value();
    if (is_first) status_ = informed;
    provisional_.reset();
  }
  if (is_first) Report(AsOthersSee(informed, did));
  // Also if another rank was first: afterwards nothing is in flight on this rank, with or without a
  // reply of the hub.
  Fail(informed);
}

void GroupEnd::AbortProvisionally(const absl::Status& why, absl::string_view did) {
  const absl::Status informed = Informed(why, {.ranks = {rank()}});
  const absl::Time now = SteadyNow();
  {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) {
      status_ = informed;
      const bool is_watched = watch_.beat < absl::InfiniteDuration();
      provisional_ = {.why = AsOthersSee(informed, did),
                      .report_at = now + (is_watched ? kTimeForReason : absl::ZeroDuration())};
    }
  }
  ReportProvisional(now);
  Fail(informed);  // Wakes the watchdog, which reports it in time.
}

absl::Duration GroupEnd::ReportProvisional(absl::Time now) {
  absl::Status why;
  {
    absl::MutexLock lock(&mutex_);
    if (!provisional_.has_value()) return absl::InfiniteDuration();
    if (now < provisional_->report_at) return provisional_->report_at - now;
    why = std::move(provisional_->why);
    provisional_.reset();
  }
  Report(why);
  return absl::InfiniteDuration();
}

void GroupEnd::OnDeadline(const Wait& wait, absl::Duration waited) {
  const absl::Status why = DeadlineStatus(wait, waited);
  OnBackendFailure(why);
  // The hub's message ends everything on this rank, as on the others. If the hub is silent, the
  // waiting thread must not be delayed for long.
  absl::MutexLock lock(&mutex_);
  if (AwaitFor(mutex_, absl::Condition(&has_ended_), kHubGrace)) return;
  mutex_.Unlock();
  Fail(why);
  mutex_.Lock();
}

void GroupEnd::OnBackendFailure(const absl::Status& why) {
  FailureInfo otherwise = KindAndNoRanks(why);
  if (otherwise.kind == FailureKind::kRankFailed) otherwise.ranks = {rank()};
  const absl::Status informed = Informed(why, otherwise);
  if (!SetStatus(informed)) return;
  // The hub sends it back to this rank, too, and Fail() then runs on the control thread: the caller
  // of this function may hold locks that the callbacks of ended operations need.
  const bool names_ranks = absl::IsFailedPrecondition(why) || FailureInfoOf(why).has_value();
  Report(names_ranks ? informed : Annotate(informed, absl::StrCat("rank ", rank())));
}

absl::Status GroupEnd::Informed(const absl::Status& why, const FailureInfo& otherwise) const {
  FailureInfo info = FailureInfoOf(why).value_or(otherwise);
  if (const int64_t step = extension_.position(); info.step < 0 && step > 0) info.step = step;
  return WithFailureInfo(why, info);
}

void GroupEnd::EndCleanly() {
  control_.Leave();
  {
    absl::MutexLock lock(&mutex_);
    has_left_ = true;
  }
  Fail(absl::FailedPreconditionError(absl::StrCat("rank ", rank(), " has left the group")),
       End::kClean);
}

absl::Status GroupEnd::DeadlineStatus(const Wait& wait, absl::Duration waited) const {
  const ControlChannel::Missing missing = control_.WhoIsMissing(wait);
  return MissedDeadline(
      absl::StrCat("rank ", rank(), " waited ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " in ",
                   wait.text, missing.text.empty() ? "" : " for ", missing.text),
      missing.ranks, wait.text, wait.sequence);
}

}  // namespace evenkeel::internal
