#include "evenkeel/join/steps/step_log.h"

#include <algorithm>
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
                                          " without ", what, expected, " (internal error)"));
}

}  // namespace

// Sender ------------------------------------------------------------------------------------------

absl::StatusOr<StepEntry> StepLog::Parse(absl::string_view bytes) const {
  EK_ASSIGN_OR_RETURN(StepEntry entry, internal::FromBytes<StepEntry>(bytes, kEntry));
  const bool is_in_world = entry.rank >= 0 && entry.rank < world_size_;
  if (is_in_world && entry.step >= 0 && entry.number >= 0) return entry;
  return absl::InvalidArgumentError(absl::StrCat(
      "step log: received an entry with number ", entry.number, " in step ", entry.step,
      " of rank ", entry.rank, ", of ", world_size_, " ranks (internal error)"));
}

void StepLog::SetLoop(int64_t steps) {
  absl::MutexLock lock(&mutex_);
  loop_began_ = steps;
  log_.clear();
  entries_.clear();
  next_call_ = 0;
  // Reports from a later loop, which began on other ranks first, stay.
  std::erase_if(exhausted_, [&](const auto& one) { return one.second.step < steps; });
  lowest_ = 0;
  lower_step_ = 0;
  UpdateLowest();
}

void StepLog::UpdateLowest() {
  for (; lowest_ < rank_ && exhausted_.contains(lowest_); ++lowest_)
    lower_step_ = std::max(lower_step_, exhausted_.at(lowest_).step);
}

void StepLog::Send(const StepEntry& entry, const Positions& exhausted) {
  const bool is_call = entry.kind == StepEntry::Kind::kCall;
  if (lowest_ < rank_ || (!is_call && entry.step <= lower_step_)) return;
  std::vector<int> receivers;
  for (const auto& [rank, position] : exhausted) {
    if (is_call ? position.calls <= entry.number : position.step < entry.step)
      receivers.push_back(rank);
  }
  if (!receivers.empty()) channel_->Send(receivers, internal::ToBytes(entry));
}

void StepLog::Add(int64_t step, StepEntry::Kind kind, absl::string_view participant,
                  absl::string_view payload) {
  absl::MutexLock lock(&mutex_);
  const bool is_call = kind == StepEntry::Kind::kCall;
  const bool may_be_lacked_later = is_call || step > answered_;
  if (!may_be_lacked_later && exhausted_.empty()) return;
  if (!is_call && std::exchange(step_, step) != step) next_in_step_ = 0;
  StepEntry entry{.kind = kind,
                  .rank = rank_,
                  .step = step,
                  .number = is_call ? calls_++ : next_in_step_++,
                  .participant = std::string(participant),
                  .payload = std::string(payload)};
  Send(entry, exhausted_);
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

void StepLog::Learn(const Positions& news) {
  Positions added;
  for (const auto& [rank, position] : news) {
    if (exhausted_.insert_or_assign(rank, position).second) added.emplace(rank, position);
  }
  const bool has_sent = lowest_ == rank_;
  UpdateLowest();
  for (const StepEntry& entry : log_) Send(entry, has_sent ? added : exhausted_);
}

absl::Status StepLog::OnNotice(int from, absl::string_view notice) {
  EK_ASSIGN_OR_RETURN(const StepEntry entry, Parse(notice));
  if (entry.kind != StepEntry::Kind::kExhausted || from < 0 || from >= world_size_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step log: rank ", from, " sent an entry of kind ", static_cast<int>(entry.kind),
        " where only the end of its input is valid (internal error)"));
  }
  absl::MutexLock lock(&mutex_);
  if (entry.step >= loop_began_) Learn({{from, {.step = entry.step, .calls = entry.number}}});
  return absl::OkStatus();
}

void StepLog::OnAnswer(int64_t step, int leader, int64_t calls_of_all,
                       absl::Span<const std::pair<int, int64_t>> exhausted) {
  absl::MutexLock lock(&mutex_);
  Positions news;
  for (const auto& [rank, calls] : exhausted) {
    // The answer can overtake the notice, over a tree.
    if (rank != rank_ && !exhausted_.contains(rank))
      news.emplace(rank, Position{.step = step - 1, .calls = calls});
  }
  if (!news.empty()) Learn(news);
  answered_ = step;
  std::erase_if(log_, [&](const StepEntry& entry) {
    return entry.kind == StepEntry::Kind::kCall ? entry.number < calls_of_all : entry.step <= step;
  });
  if (leader >= 0) {
    last_leader_ = leader;
  } else if (last_leader_ == rank_) {  // No rank enters the step that readers wait for.
    std::vector<int> all(world_size_);
    std::iota(all.begin(), all.end(), 0);
    channel_->Send(all, internal::ToBytes(StepEntry{.rank = rank_, .step = step}));
  }
}

// Reader ------------------------------------------------------------------------------------------

absl::Status StepLog::Read(const ControlChannel::From& from) {
  EK_ASSIGN_OR_RETURN(const std::string bytes, channel_->Receive(from));
  EK_ASSIGN_OR_RETURN(StepEntry entry, Parse(bytes));
  if (entry.kind == StepEntry::Kind::kExhausted) {
    return absl::InvalidArgumentError(
        absl::StrCat("step log: rank ", entry.rank, " sent the end of its input ",
                     "where only an entry of its steps is valid (internal error)"));
  }
  if (entry.kind == StepEntry::Kind::kCall) {
    const int64_t first = calls(), expected = std::max(first, next_call_);
    if (entry.number < first) return absl::OkStatus();
    if (entry.number > expected) return Gap(rank_, entry, expected);
    // A duplicate has the place of the call in its sender's step.
    next_call_ = std::max(expected, entry.number + 1);
  }
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

bool StepLog::HasBegun(int64_t step) const {
  return std::ranges::any_of(entries_, [&](const StepEntry& entry) {
    return entry.kind != StepEntry::Kind::kCall && entry.step == step;
  });
}

void StepLog::CountCall() {
  absl::MutexLock lock(&mutex_);
  ++calls_;
}

absl::StatusOr<std::optional<std::string>> StepLog::NextCall(int64_t step,
                                                             const ControlChannel::From& from,
                                                             Call call) {
  const int64_t number = calls();
  const auto is_next = [&](const StepEntry& entry) {
    return entry.kind == StepEntry::Kind::kCall && entry.number == number;
  };
  std::erase_if(entries_, [&](const StepEntry& entry) {
    return entry.step < step && (entry.kind != StepEntry::Kind::kCall || entry.number < number);
  });
  while (true) {
    const bool is_due = call == Call::kDue;
    const auto next = std::ranges::find_if(entries_, is_next);
    if (next != entries_.end() && (is_due || next->step < step)) {
      CountCall();
      return std::move(next->payload);
    }
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
      CountCall();
    } else {
      ++next_to_read_;
    }
    return entry;
  }
}

}  // namespace evenkeel
