#include "evenkeel/comm/group/any_source.h"

#include <atomic>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/control/announced_messages.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr char kAskForSends[] = "any source: ask";  // Topics of notices.
constexpr char kAnnounceSends[] = "any source: sends";

std::string Notice(const ChannelRecord& channel, int64_t tag) {
  return ByteWriter().Bytes(channel.name).I64(tag).Take();
}

std::string Notice(const ChannelRecord& channel, int64_t tag, int64_t sends) {
  return ByteWriter().Bytes(channel.name).I64(tag).I64(sends).Take();
}

// A receive from any rank whose sender is known. Ends the caller's work when the backend has ended
// the receive and the thread that started it has released the channel's lock: callbacks of users
// may need that lock.
class Matched {
 public:
  explicit Matched(std::shared_ptr<WorkState> work) : work_(std::move(work)) {}

  void End(const absl::Status& status) {
    status_ = status;
    Down();
  }
  void Release() { Down(); }
  // Ends the work because the group has ended; the backend does nothing more.
  void Abort(const absl::Status& why) { work_->Finish(why); }

 private:
  void Down() {
    if (left_.fetch_sub(1) == 1) work_->Finish(status_);
  }

  const std::shared_ptr<WorkState> work_;
  std::atomic<int> left_ = 2;
  absl::Status status_;  // Constant after End().
};

}  // namespace

struct AnySource {
  struct Open {  // A receive that has no message yet.
    Operation operation;
    int64_t number = 0;  // In the flight record.
    std::shared_ptr<WorkState> work;
    int* from = nullptr;
  };
  struct Tag {  // Asked for by this rank. Match() leaves messages or open receives, never both.
    AnnouncedMessages messages;
    std::list<Open> open;
  };

  std::map<int64_t, Tag> tags;
  std::set<std::pair<int, int64_t>> askers;  // The ranks that have asked this one, with the tags.
  std::vector<std::shared_ptr<Matched>> unreleased;

  // Assigns announced messages to open receives, and starts these. The caller releases them.
  std::vector<std::shared_ptr<Matched>> Match(ChannelRecord& channel, Tag& tag, Backend& backend,
                                              FlightRecorder& flight)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(channel.mutex) {
    std::vector<std::shared_ptr<Matched>> all;
    while (!tag.open.empty()) {
      const std::optional<int> sender = tag.messages.TakeFirst();
      if (!sender.has_value()) break;
      Open receive = std::move(tag.open.front());
      tag.open.pop_front();
      Operation& operation = receive.operation;
      operation.what.root = *sender;
      operation.sequence =
          channel.pair_positions[{*sender, CollectiveKind::kRecv, operation.what.tag}]++;
      flight.SetPeer(receive.number, *sender, operation.sequence);
      *receive.from = *sender;  // Before End(), so not after Abort() has returned.
      all.push_back(std::make_shared<Matched>(std::move(receive.work)));
      // Not the caller's work, since backends may change a work only before the caller has it. The
      // callback is set before the start, so that the backend ends the work on a thread of its own.
      auto from_sender = std::make_shared<WorkState>(operation.deadline, nullptr);
      from_sender->OnDone(
          [matched = all.back()](const absl::Status& status) { matched->End(status); });
      backend.Start(std::move(operation), std::move(from_sender));
    }
    return all;
  }
};

namespace {

AnySource& AnyOf(ChannelRecord& channel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(channel.mutex) {
  if (channel.any == nullptr) channel.any = std::make_shared<AnySource>();
  return *channel.any;
}

}  // namespace

bool ReceivesFromAny::IsTopic(absl::string_view topic) {
  return topic == kAskForSends || topic == kAnnounceSends;
}

void ReceivesFromAny::Receive(ChannelRecord& channel, Operation operation, int64_t number,
                              std::shared_ptr<WorkState> work, int* from) {
  const int64_t id = operation.what.tag;
  AnySource& any = AnyOf(channel);
  const auto [at, is_new] = any.tags.try_emplace(id);
  if (is_new) control_.Notify(kAskForSends, Notice(channel, id));
  at->second.open.push_back({std::move(operation), number, std::move(work), from});
  // At most this receive: the caller does not have its work yet, so there is no callback.
  for (const auto& matched : any.Match(channel, at->second, backend_, flight_)) matched->Release();
}

void ReceivesFromAny::OnPair(const ChannelRecord& channel, const Collective& what, int64_t count) {
  if (what.kind == CollectiveKind::kSend) {
    if (channel.any->askers.contains({what.root, what.tag}))
      control_.Notify(what.root, kAnnounceSends, Notice(channel, what.tag, count));
  } else if (const auto tag = channel.any->tags.find(what.tag); tag != channel.any->tags.end()) {
    tag->second.messages.TakeFrom(what.root);
  }
}

void ReceivesFromAny::OnAsked(ChannelRecord& channel, int from, int64_t tag) {
  absl::MutexLock lock(&channel.mutex);
  AnyOf(channel).askers.emplace(from, tag);
  const auto sends = channel.pair_positions.find({from, CollectiveKind::kSend, tag});
  if (sends != channel.pair_positions.end())
    control_.Notify(from, kAnnounceSends, Notice(channel, tag, sends->second));
}

void ReceivesFromAny::OnAnnouncement(ChannelRecord& channel, int from, int64_t tag, int64_t sends) {
  std::vector<std::shared_ptr<Matched>> all;
  {
    absl::MutexLock lock(&channel.mutex);
    AnySource& any = AnyOf(channel);
    const auto asked = any.tags.find(tag);
    if (asked == any.tags.end()) return;
    const auto received = channel.pair_positions.find({from, CollectiveKind::kRecv, tag});
    asked->second.messages.Announce(
        from, sends, received == channel.pair_positions.end() ? 0 : received->second);
    all = any.unreleased = any.Match(channel, asked->second, backend_, flight_);
  }
  for (const auto& matched : all) matched->Release();
  absl::MutexLock lock(&channel.mutex);
  AnyOf(channel).unreleased.clear();
}

void ReceivesFromAny::End(const absl::Status& why) {
  for (ChannelRecord* const channel : channels_.all()) {
    std::vector<std::shared_ptr<WorkState>> works;
    std::vector<std::shared_ptr<Matched>> unreleased;
    {
      absl::MutexLock lock(&channel->mutex);
      if (channel->any == nullptr) continue;
      for (auto& [id, tag] : channel->any->tags) {
        for (AnySource::Open& receive : tag.open) works.push_back(std::move(receive.work));
        tag.open.clear();
      }
      unreleased.swap(channel->any->unreleased);
    }
    for (const auto& work : works) work->Finish(why);
    for (const auto& matched : unreleased) matched->Abort(why);
  }
}

absl::Status ReceivesFromAny::OnNotice(int from, absl::string_view topic,
                                       absl::string_view notice) {
  const bool is_announcement = topic == kAnnounceSends;
  ByteReader reader(notice);
  const absl::StatusOr<ChannelRecord*> channel = channels_.Open(reader.Bytes());
  const int64_t tag = reader.I64(), sends = is_announcement ? reader.I64() : 0;
  absl::Status read = reader.Finish(topic);
  read.Update(channel.status());
  if (read.ok() && (tag < 0 || (is_announcement && sends < 1))) {
    read = absl::InvalidArgumentError(
        absl::StrCat("notice \"", topic, "\" has the tag ", tag, " and ", sends, " sends"));
  }
  if (!read.ok()) return Annotate(read, absl::StrCat("rank ", from));
  if (is_announcement) {
    OnAnnouncement(**channel, from, tag, sends);
  } else {
    OnAsked(**channel, from, tag);
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
