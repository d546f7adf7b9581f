#include "evenkeel/join/steps/step_log.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr char kEntry[] = "an entry of the step log";

absl::Status Gap(int rank, const StepEntry& entry, int64_t expected) {
  const absl::string_view what = entry.kind == StepEntry::Kind::kCall ? "call " : "entry ";
  return absl::InternalError(absl::StrCat("rank ", rank, " received ", what, entry.number,
                                          " of rank ", entry.rank, " in step ", entry.step,
                                          " without ", what, expected));
}

}  // namespace

// Sender ------------------------------------------------------------------------------------------

void StepLog::SetLoop(int64_t steps) {
  absl::MutexLock lock(&mutex_);
  loop_began_ = steps;
  log_.clear();
  pending_.clear();
  entries_.clear();
  // Reports from a later loop, which began on other ranks first, stay.
  for (std::optional<Position>& position : exhausted_) {
    if (!position.has_value() || position->step >= steps) continue;
    position.reset();
    --exhausted_count_;
  }
}

std::vector<int> StepLog::Receivers(const StepEntry& entry) const {
  std::vector<int> receivers;
  if (exhausted_count_ == 0) return receivers;
  const bool is_call = entry.kind == StepEntry::Kind::kCall;
  for (int rank = 0; rank < static_cast<int>(exhausted_.size()); ++rank) {
    if (rank == rank_) continue;
    const std::optional<Position>& position = exhausted_[rank];
    const bool lacks = position.has_value() &&
                       (is_call ? position->calls <= entry.number : position->step < entry.step);
    if (lacks) {
      receivers.push_back(rank);
    } else if (rank < rank_ && !(is_call && position.has_value())) {
      return {};
    }
  }
  return receivers;
}

void StepLog::Add(int64_t step, StepEntry::Kind kind, absl::string_view participant,
                  absl::string_view payload) {
  absl::MutexLock lock(&mutex_);
  const bool is_call = kind == StepEntry::Kind::kCall;
  const bool may_be_lacked_later = is_call || step > answered_;
  if (!may_be_lacked_later && exhausted_count_ == 0) return;
  if (!is_call && std::exchange(step_, step) != step) next_in_step_ = 0;
  StepEntry entry{.kind = kind,
                  .rank = rank_,
                  .step = step,
                  .number = is_call ? calls_++ : next_in_step_++,
                  .participant = std::string(participant),
                  .payload = std::string(payload)};
  const std::vector<int> receivers = Receivers(entry);
  if (!receivers.empty()) channel_->Send(receivers, internal::ToBytes(entry));
  if (may_be_lacked_later) log_.push_back(std::move(entry));
}

int64_t StepLog::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

void StepLog::BecomeExhausted(int64_t step) {
  channel_->Notify(internal::ToBytes(StepEntry{
      .kind = StepEntry::Kind::kExhausted, .rank = rank_, .step = step, .number = calls()}));
}

void StepLog::Learn(absl::Span<const std::pair<int, Position>> news) {
  std::vector<std::vector<int>> sent;
  for (const StepEntry& entry : log_) sent.push_back(Receivers(entry));
  for (const auto& [rank, position] : news) {
    if (!exhausted_[rank].has_value()) ++exhausted_count_;
    exhausted_[rank] = position;
  }
  for (size_t i = 0; i < log_.size(); ++i) {
    const std::vector<int> receivers = Receivers(log_[i]);
    std::vector<int> added;
    std::ranges::set_difference(receivers, sent[i], std::back_inserter(added));
    if (!added.empty()) channel_->Send(added, internal::ToBytes(log_[i]));
  }
}

absl::Status StepLog::OnNotice(int from, absl::string_view notice) {
  EK_ASSIGN_OR_RETURN(const StepEntry entry, internal::FromBytes<StepEntry>(notice, kEntry));
  absl::MutexLock lock(&mutex_);
  if (entry.kind != StepEntry::Kind::kExhausted || from < 0 ||
      from >= static_cast<int>(exhausted_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", from, " sent a notice that is not ", "the end of its input"));
  }
  if (entry.step >= loop_began_) Learn({{from, {.step = entry.step, .calls = entry.number}}});
  return absl::OkStatus();
}

void StepLog::OnAnswer(int64_t step, int leader, int64_t calls_of_all,
                       absl::Span<const std::pair<int, int64_t>> exhausted) {
  absl::MutexLock lock(&mutex_);
  std::vector<std::pair<int, Position>> news;
  for (const auto& [rank, calls] : exhausted) {
    // The answer can overtake the notice, over a tree.
    if (rank != rank_ && !exhausted_[rank].has_value())
      news.push_back({rank, {.step = step - 1, .calls = calls}});
  }
  if (!news.empty()) Learn(news);
  answered_ = step;
  std::erase_if(log_, [&](const StepEntry& entry) {
    return entry.kind == StepEntry::Kind::kCall ? entry.number < calls_of_all : entry.step <= step;
  });
  if (leader >= 0) {
    last_leader_ = leader;
  } else if (last_leader_ == rank_) {  // No rank enters the step that readers wait for.
    std::vector<int> all(exhausted_.size());
    std::iota(all.begin(), all.end(), 0);
    channel_->Send(all, internal::ToBytes(StepEntry{.rank = rank_, .step = step}));
  }
}

// Reader ------------------------------------------------------------------------------------------

absl::Status StepLog::Read(const ControlChannel::From& from) {
  EK_ASSIGN_OR_RETURN(const std::string bytes, channel_->Receive(from));
  EK_ASSIGN_OR_RETURN(StepEntry entry, internal::FromBytes<StepEntry>(bytes, kEntry));
  if (entry.kind == StepEntry::Kind::kExhausted)
    return absl::InvalidArgumentError(absl::StrCat("rank ", entry.rank, " sent a notice to read"));
  if (entry.kind == StepEntry::Kind::kCall) {
    const int64_t first = calls(), expected = first + static_cast<int64_t>(pending_.size());
    if (entry.number < first) return absl::OkStatus();
    if (entry.number > expected) return Gap(rank_, entry, expected);
    if (entry.number == expected)
      pending_.push_back({.step = entry.step, .text = std::move(entry.payload)});
  }
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

bool StepLog::HasBegun(int64_t step) const {
  return std::ranges::any_of(entries_, [&](const StepEntry& entry) {
    return entry.kind != StepEntry::Kind::kCall && entry.step == step;
  });
}

std::string StepLog::TakeCall() {
  std::string call = std::move(pending_.front().text);
  pending_.pop_front();
  absl::MutexLock lock(&mutex_);
  ++calls_;
  return call;
}

absl::StatusOr<std::optional<std::string>> StepLog::NextCall(int64_t step,
                                                             const ControlChannel::From& from,
                                                             Call call) {
  std::erase_if(entries_, [&](const StepEntry& entry) { return entry.step < step; });
  while (true) {
    const bool is_due = call == Call::kDue;
    if (!pending_.empty() && (is_due || pending_.front().step < step)) return TakeCall();
    if (!is_due && HasBegun(step)) return std::nullopt;
    EK_RETURN_IF_ERROR(Read(from));
  }
}

absl::StatusOr<StepEntry> StepLog::NextIn(int64_t step, const ControlChannel::From& from) {
  if (std::exchange(read_step_, step) != step) next_to_read_ = 0;
  while (true) {
    const auto found = std::ranges::find_if(entries_, [&](const StepEntry& entry) {
      return entry.step == step && entry.rank == from.rank;
    });
    if (found == entries_.end()) {
      EK_RETURN_IF_ERROR(Read(from));
      continue;
    }
    StepEntry entry = std::move(*found);
    entries_.erase(found);
    const bool is_call = entry.kind == StepEntry::Kind::kCall;
    const int64_t expected = is_call ? calls() : next_to_read_;
    if (entry.number < expected) continue;  // A duplicate, or a call that was shadowed before.
    if (entry.number > expected) return Gap(rank_, entry, expected);
    if (is_call) {
      entry.payload = TakeCall();
    } else {
      ++next_to_read_;
    }
    return entry;
  }
}

}  // namespace evenkeel
