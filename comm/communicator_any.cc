// Receives from any rank.
//
// Backends do not implement them. The first such receive for a tag asks all ranks for
// announcements. From then on each send with that tag announces, over the control plane, how many
// there have been. The receiver compares this number with the number of its own receives from the
// sender, and so finds the messages that no receive has taken yet
// (comm/control/announced_messages.h). The oldest receive from any rank takes the first of these:
// it becomes a receive from that rank, and is passed to the backend.
//
// The detection of deadlocks requires that a sender sends its announcement before it reports that
// it waits, and that the receiver handles the announcement before it reports that it has received
// it (comm/control/rank_status.h).

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/announced_messages.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

std::string Notice(const Channel& channel, int64_t tag) {
  return internal::ByteWriter().Bytes(channel.name()).I64(tag).Take();
}

std::string Notice(const Channel& channel, int64_t tag, int64_t sends) {
  return internal::ByteWriter().Bytes(channel.name()).I64(tag).I64(sends).Take();
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

struct Channel::AnySource {
  struct Open {  // A receive that has no message yet.
    Operation operation;
    int64_t number = 0;  // In the flight record.
    std::shared_ptr<WorkState> work;
    int* from = nullptr;
  };
  struct Tag {  // Asked for by this rank. Match() leaves messages or open receives, never both.
    internal::AnnouncedMessages messages;
    std::list<Open> open;
  };

  std::map<int64_t, Tag> tags;
  std::set<std::pair<int, int64_t>> askers;  // The ranks that have asked this one, with the tags.
  std::vector<std::shared_ptr<Matched>> unreleased;

  // Assigns announced messages to open receives, and starts these. The caller releases them.
  std::vector<std::shared_ptr<Matched>> Match(Channel& channel, Tag& tag)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(channel.mutex_) {
    Communicator& comm = *channel.communicator_;
    std::vector<std::shared_ptr<Matched>> all;
    while (!tag.open.empty()) {
      const std::optional<int> sender = tag.messages.TakeFirst();
      if (!sender.has_value()) break;
      Open receive = std::move(tag.open.front());
      tag.open.pop_front();
      Operation& operation = receive.operation;
      operation.what.root = *sender;
      operation.sequence =
          channel.pair_positions_[{*sender, CollectiveKind::kRecv, operation.what.tag}]++;
      comm.flight_.SetPeer(receive.number, *sender, operation.sequence);
      *receive.from = *sender;  // Before EndAnySource(), so not after Abort() has returned.
      all.push_back(std::make_shared<Matched>(std::move(receive.work)));
      // Not the caller's work, since backends may change a work only before the caller has it. The
      // callback is set before the start, so that the backend ends the work on a thread of its own.
      auto from_sender = std::make_shared<WorkState>(operation.deadline, nullptr);
      from_sender->OnDone(
          [matched = all.back()](const absl::Status& status) { matched->End(status); });
      comm.backend_->Start(std::move(operation), std::move(from_sender));
    }
    return all;
  }
};

void Channel::AnySourceDeleter::operator()(AnySource* any) const { delete any; }

Channel::AnySource& Channel::Any() {
  if (any_ == nullptr) any_.reset(new AnySource());
  return *any_;
}

void Channel::ReceiveFromAny(Operation operation, int64_t number, std::shared_ptr<WorkState> work,
                             int* from) {
  // Under the lock: if the group ends after this check, EndAnySource() follows, and finds the
  // receive.
  if (absl::Status ended = communicator_->status(); !ended.ok())
    return work->Finish(std::move(ended));
  const int64_t id = operation.what.tag;
  const auto [at, is_new] = Any().tags.try_emplace(id);
  if (is_new) communicator_->control_->Notify(kAskForSends, Notice(*this, id));
  at->second.open.push_back({std::move(operation), number, std::move(work), from});
  // At most this receive: the caller does not have its work yet, so there is no callback.
  for (const auto& matched : any_->Match(*this, at->second)) matched->Release();
}

void Channel::OnPair(const Collective& what, int64_t count) {
  if (what.kind == CollectiveKind::kSend) {
    if (any_->askers.contains({what.root, what.tag}))
      communicator_->control_->Notify(what.root, kAnnounceSends, Notice(*this, what.tag, count));
  } else if (const auto tag = any_->tags.find(what.tag); tag != any_->tags.end()) {
    tag->second.messages.TakeFrom(what.root);
  }
}

void Channel::OnAsked(int from, int64_t tag) {
  absl::MutexLock lock(&mutex_);
  Any().askers.emplace(from, tag);
  const auto sends = pair_positions_.find({from, CollectiveKind::kSend, tag});
  if (sends != pair_positions_.end())
    communicator_->control_->Notify(from, kAnnounceSends, Notice(*this, tag, sends->second));
}

void Channel::OnAnnouncement(int from, int64_t tag, int64_t sends) {
  std::vector<std::shared_ptr<Matched>> all;
  {
    absl::MutexLock lock(&mutex_);
    const auto asked = Any().tags.find(tag);
    if (asked == any_->tags.end()) return;
    const auto received = pair_positions_.find({from, CollectiveKind::kRecv, tag});
    asked->second.messages.Announce(from, sends,
                                    received == pair_positions_.end() ? 0 : received->second);
    all = any_->unreleased = any_->Match(*this, asked->second);
  }
  for (const auto& matched : all) matched->Release();
  absl::MutexLock lock(&mutex_);
  any_->unreleased.clear();
}

void Channel::EndAnySource(const absl::Status& why) {
  std::vector<std::shared_ptr<WorkState>> works;
  std::vector<std::shared_ptr<Matched>> unreleased;
  {
    absl::MutexLock lock(&mutex_);
    if (any_ == nullptr) return;
    for (auto& [id, tag] : any_->tags) {
      for (AnySource::Open& receive : tag.open) works.push_back(std::move(receive.work));
      tag.open.clear();
    }
    unreleased.swap(any_->unreleased);
  }
  for (const auto& work : works) work->Finish(why);
  for (const auto& matched : unreleased) matched->Abort(why);
}

void Communicator::OnAnySourceNotice(int from, absl::string_view topic, absl::string_view notice) {
  const bool is_announcement = topic == Channel::kAnnounceSends;
  internal::ByteReader reader(notice);
  const absl::StatusOr<Channel*> channel = OpenChannel(reader.Bytes());
  const int64_t tag = reader.I64(), sends = is_announcement ? reader.I64() : 0;
  absl::Status read = reader.Finish(topic);
  read.Update(channel.status());
  if (read.ok() && (tag < 0 || (is_announcement && sends < 1))) {
    read = absl::InvalidArgumentError(
        absl::StrCat("notice \"", topic, "\" has the tag ", tag, " and ", sends, " sends"));
  }
  if (!read.ok()) return OnBackendFailure(Annotate(read, absl::StrCat("rank ", from)));
  if (is_announcement) return (*channel)->OnAnnouncement(from, tag, sends);
  (*channel)->OnAsked(from, tag);
}

}  // namespace evenkeel
