#include "evenkeel/join/steps/followed_calls.h"

#include <algorithm>
#include <utility>

#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"

namespace evenkeel {
namespace {

enum class Notice : uint8_t { kExhausted, kCall };

}  // namespace

void FollowedCalls::BeginLoop() {
  absl::MutexLock lock(&mutex_);
  ++loop_;
  leader_ = 0;
  exhausted_.erase(exhausted_.begin(), exhausted_.lower_bound(loop_));
}

void FollowedCalls::EndLoop() {
  absl::MutexLock lock(&mutex_);
  is_exhausted_ = false;
  log_.clear();
  first_ = position_;
  pending_.erase(pending_.begin(), pending_.lower_bound(position_));
}

int64_t FollowedCalls::Add(const std::string& call, int64_t step,
                           absl::FunctionRef<bool(int rank)> is_told) {
  int64_t number = 0;
  std::vector<std::string> notices;
  {
    absl::MutexLock lock(&mutex_);
    number = position_++;
    log_.push_back({.step = step, .text = call});
    bool is_asked_for = false;
    for (int rank = 0; rank < control_->world_size() && Leader() == control_->rank(); ++rank) {
      is_asked_for = is_asked_for || (IsExhausted(rank) && !is_told(rank));
    }
    if (is_asked_for) notices = NoticesFrom(number);
  }
  Send(std::move(notices));
  return number;
}

int64_t FollowedCalls::position() const {
  absl::MutexLock lock(&mutex_);
  return position_;
}

void FollowedCalls::Forget(int64_t before) {
  absl::MutexLock lock(&mutex_);
  for (; first_ < before && !log_.empty(); ++first_) log_.pop_front();
}

void FollowedCalls::BecomeExhausted() {
  internal::ByteWriter notice;
  {
    absl::MutexLock lock(&mutex_);
    is_exhausted_ = true;
    notice.U8(static_cast<uint8_t>(Notice::kExhausted)).I64(loop_).I64(position_).I64(0).Bytes("");
  }
  Send({notice.Take()});
}

bool FollowedCalls::HasNext(int64_t step) const {
  absl::MutexLock lock(&mutex_);
  return IsNext(step);
}

bool FollowedCalls::IsNext(int64_t step) const {
  const auto next = pending_.find(position_);
  return next != pending_.end() && next->second.step <= step;
}

void FollowedCalls::AwaitNext(int64_t step, absl::Time deadline) {
  const auto has_come = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return IsNext(step) || answered_ >= step;
  };
  absl::MutexLock lock(&mutex_);
  AwaitUntil(mutex_, absl::Condition(&has_come), deadline);
}

void FollowedCalls::Answered(int64_t step) {
  absl::MutexLock lock(&mutex_);
  answered_ = std::max(answered_, step);
}

std::string FollowedCalls::TakeNext() {
  absl::MutexLock lock(&mutex_);
  std::string call = std::move(pending_.at(position_).text);
  pending_.erase(position_++);
  return call;
}

bool FollowedCalls::Take(int64_t number) {
  absl::MutexLock lock(&mutex_);
  if (number != position_) return false;
  pending_.erase(position_++);
  return true;
}

bool FollowedCalls::IsExhausted(int rank) const {
  const auto ranks = exhausted_.find(loop_);
  return ranks != exhausted_.end() && ranks->second[rank];
}

int FollowedCalls::Leader() {
  while (leader_ < control_->world_size() && IsExhausted(leader_)) ++leader_;
  return leader_;
}

std::vector<std::string> FollowedCalls::NoticesFrom(int64_t number) const {
  std::vector<std::string> notices;
  const int64_t end =
      first_ + static_cast<int64_t>(log_.size());  // Calls that it has only followed are not there.
  for (number = std::max(number, first_); number < end; ++number) {
    notices.push_back(internal::ByteWriter()
                          .U8(static_cast<uint8_t>(Notice::kCall))
                          .I64(loop_)
                          .I64(number)
                          .I64(log_[number - first_].step)
                          .Bytes(log_[number - first_].text)
                          .Take());
  }
  return notices;
}

void FollowedCalls::Send(std::vector<std::string> notices) {
  for (std::string& notice : notices) control_->Notify(kTopic, std::move(notice));
}

void FollowedCalls::OnNotice(int from, absl::string_view notice) {
  internal::ByteReader reader(notice);
  const auto kind = static_cast<Notice>(reader.U8());
  const int64_t loop = reader.I64(), number = reader.I64(), step = reader.I64();
  const std::string call(reader.Bytes());
  if (!reader.Finish("a notice of a call").ok())
    return;  // Whoever is not told of it fails with a sentence.
  std::vector<std::string> notices;
  {
    absl::MutexLock lock(&mutex_);
    if (kind == Notice::kCall) {
      // This rank may not have noticed yet that its own loop has begun, but it is not exhausted
      // then, and needs none.
      if (is_exhausted_ && loop == loop_ && number >= position_)
        pending_[number] = {.step = step, .text = call};
      return;
    }
    const bool led_before = Leader() == control_->rank();
    std::vector<bool>& exhausted = exhausted_[loop];
    exhausted.resize(control_->world_size());
    exhausted[from] = true;
    if (loop != loop_ || (!is_exhausted_ && Leader() != control_->rank())) return;
    // The one who led before may have known less than this rank: what it had told to whom is not
    // known. Who is exhausted itself may have issued its last calls before it knew that it led:
    // where a call does not wait for the others.
    notices = NoticesFrom(led_before || is_exhausted_ ? number : first_);
  }
  Send(std::move(notices));
}

}  // namespace evenkeel
