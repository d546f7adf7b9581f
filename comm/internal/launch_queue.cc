#include "evenkeel/comm/internal/launch_queue.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/waits.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// What rank 0 says of an operation that it launches.
struct Announcement {
  uint64_t channel = 0;
  int64_t sequence = 0;
  uint64_t hash = 0;
  std::string text;
};

std::string Serialize(const Announcement& a) {
  return absl::StrCat(a.channel, "\t", a.sequence, "\t", a.hash, "\t", a.text);
}

absl::StatusOr<Announcement> Parse(absl::string_view bytes) {
  const std::vector<absl::string_view> fields = absl::StrSplit(bytes, absl::MaxSplits('\t', 3));
  Announcement a;
  if (fields.size() != 4 || !absl::SimpleAtoi(fields[0], &a.channel) || !absl::SimpleAtoi(fields[1], &a.sequence) ||
      !absl::SimpleAtoi(fields[2], &a.hash)) {
    return absl::InternalError(absl::StrCat("can't read what rank 0 launches: \"", bytes, "\""));
  }
  a.text = std::string(fields[3]);
  return a;
}

}  // namespace

LaunchQueue::LaunchQueue(ControlChannel& control, absl::string_view topic)
    : control_(control), topic_(absl::StrCat("launch order of ", topic)), thread_([this] { Run(); }) {}

LaunchQueue::~LaunchQueue() {
  Abort(absl::CancelledError("the launch queue is gone"));
  thread_.join();
}

void LaunchQueue::Push(const Collective& what, uint64_t channel, int64_t sequence, Launch launch) {
  absl::Status ended;
  {
    absl::MutexLock lock(&mutex_);
    ended = ended_;
    if (ended.ok()) entries_.push_back({what, channel, sequence, std::move(launch)});
  }
  if (!ended.ok()) launch(ended);
}

void LaunchQueue::Abort(const absl::Status& why) {
  std::deque<Entry> entries;
  absl::Status first;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_.ok()) ended_ = why;
    first = ended_;
    entries.swap(entries_);
  }
  for (Entry& entry : entries) entry.launch(first);
}

void LaunchQueue::Run() {
  ThisThreadIsTheLibrarys();
  while (true) {
    absl::StatusOr<Entry> next = control_.rank() == 0 ? NextOfRankZero() : NextAsRankZeroSays();
    if (!next.ok()) return Abort(next.status());
    next->launch(absl::OkStatus());
  }
}

absl::StatusOr<LaunchQueue::Entry> LaunchQueue::NextOfRankZero() {
  EK_ASSIGN_OR_RETURN(Entry entry, Take([](const Entry&) { return true; }));
  const std::string word = Serialize({entry.channel, entry.sequence, HashOf(entry.what), ToString(entry.what)});
  for (int rank = 1; rank < control_.world_size(); ++rank) control_.Send(rank, topic_, word);
  return entry;
}

absl::StatusOr<LaunchQueue::Entry> LaunchQueue::NextAsRankZeroSays() {
  EK_ASSIGN_OR_RETURN(const std::string word, control_.Receive(topic_, absl::InfiniteDuration()));
  EK_ASSIGN_OR_RETURN(const Announcement said, Parse(word));
  EK_ASSIGN_OR_RETURN(Entry entry,
                      Take([&](const Entry& e) { return e.channel == said.channel && e.sequence == said.sequence; }));
  if (HashOf(entry.what) == said.hash) return entry;
  const absl::Status disagree = absl::FailedPreconditionError(
      absl::StrCat("rank ", control_.rank(), " is at #", said.sequence, " ", ToString(entry.what), "; rank 0 is at #",
                   said.sequence, " ", said.text, ": the ranks disagree"));
  entry.launch(disagree);
  return disagree;
}

absl::StatusOr<LaunchQueue::Entry> LaunchQueue::Take(const std::function<bool(const Entry&)>& wanted) {
  absl::MutexLock lock(&mutex_);
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::any_of(entries_.begin(), entries_.end(), wanted) || !ended_.ok();
  };
  mutex_.Await(absl::Condition(&ready));
  if (!ended_.ok()) return ended_;
  const auto found = std::find_if(entries_.begin(), entries_.end(), wanted);
  Entry entry = std::move(*found);
  entries_.erase(found);
  return entry;
}

}  // namespace evenkeel::internal
