// Receives from any rank.
//
// No backend knows them. The first receive for a tag asks all ranks for announcements, and from
// then on each send with that tag announces the number of those so far, over the control plane. So
// the receiver knows from which ranks messages come that no receive has taken yet. The oldest
// receive from any rank takes the first of these: it becomes a receive from that rank, which the
// backend gets. Since numbers of sends and receives only grow, it makes no difference which of a
// message's announcement and a receive from its named rank comes first.
//
// A deadlock is judged right: an announcement leaves before its sender reports that it waits, and
// has been handled here before this rank reports that it has received it
// (comm/control/rank_status.h).

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
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
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// Instead of the number of sends in a notice: the sender of the notice asks for announcements.
constexpr int64_t kAsks = -1;

std::string Notice(const Channel& channel, int64_t tag, int64_t sends) {
  return internal::ByteWriter().Bytes(channel.name()).I64(tag).I64(sends).Take();
}

}  // namespace

struct Channel::AnySource {
  struct Open {  // A receive that has met no message.
    Operation operation;
    int64_t number = 0;  // In the flight record.
    std::shared_ptr<WorkState> work;
    int* from = nullptr;
  };
  struct Met {  // One that has: its work ends with that of the receive from `sender`.
    std::shared_ptr<WorkState> work, from_sender;
    int* from = nullptr;
    int sender = -1;
  };
  struct Tag {                         // One that this rank has asked for.
    std::map<int, int64_t> announced;  // Sends, by sender.
    // The senders of announced messages that no receive has taken, in order. Empty, or `open` is.
    std::deque<int> untaken;
    std::deque<Open> open;
  };

  std::map<int64_t, Tag> tags;
  std::set<std::pair<int, int64_t>> askers;  // The ranks that have asked this one, with the tags.

  std::vector<Met> Meet(Channel& channel, Tag& tag) ABSL_EXCLUSIVE_LOCKS_REQUIRED(channel.mutex_) {
    Communicator& comm = *channel.communicator_;
    std::vector<Met> met;
    for (; !tag.open.empty() && !tag.untaken.empty(); tag.untaken.pop_front()) {
      Open receive = std::move(tag.open.front());
      tag.open.pop_front();
      const int sender = tag.untaken.front();
      Operation& operation = receive.operation;
      operation.what.root = sender;
      operation.sequence =
          channel.pair_positions_[{sender, CollectiveKind::kRecv, operation.what.tag}]++;
      comm.flight_.Meet(receive.number, sender, operation.sequence);
      // Not the caller's work, since backends add to a work before it is handed out.
      auto from_sender = std::make_shared<WorkState>(operation.deadline, nullptr);
      comm.backend_->Start(std::move(operation), from_sender);
      met.push_back({std::move(receive.work), std::move(from_sender), receive.from, sender});
    }
    return met;
  }

  // Runs callbacks of users if a receive has ended by now.
  static void Link(const std::vector<Met>& all) {
    for (const Met& met : all) {
      met.from_sender->OnDone([met](const absl::Status& status) {
        if (status.ok()) *met.from = met.sender;
        met.work->Finish(status);
      });
    }
  }
};

void Channel::ReceiveFromAny(Operation operation, int64_t number, std::shared_ptr<WorkState> work,
                             int* from) {
  // Under the lock: an end of the group that is not seen here comes before EndAnySource().
  if (absl::Status ended = communicator_->status(); !ended.ok())
    return work->Finish(std::move(ended));
  if (any_ == nullptr) any_ = std::make_shared<AnySource>();
  const int64_t id = operation.what.tag;
  const auto [at, is_new] = any_->tags.try_emplace(id);
  if (is_new) communicator_->control_->Notify(kAnySource, Notice(*this, id, kAsks));
  at->second.open.push_back({std::move(operation), number, std::move(work), from});
  AnySource::Link(any_->Meet(*this, at->second));  // It has no callbacks yet.
}

void Channel::OnPair(const Collective& what) {
  if (what.kind == CollectiveKind::kSend) {
    if (!any_->askers.contains({what.root, what.tag})) return;
    const int64_t sends = pair_positions_[{what.root, what.kind, what.tag}];
    communicator_->control_->Notify(what.root, kAnySource, Notice(*this, what.tag, sends));
  } else if (const auto tag = any_->tags.find(what.tag); tag != any_->tags.end()) {
    std::deque<int>& untaken = tag->second.untaken;
    const auto taken = std::find(untaken.begin(), untaken.end(), what.root);
    if (taken != untaken.end()) untaken.erase(taken);
  }
}

void Channel::OnAnnouncement(int from, int64_t tag, int64_t sends) {
  const auto count = [&](CollectiveKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto at = pair_positions_.find({from, kind, tag});
    return at == pair_positions_.end() ? 0 : at->second;
  };
  std::vector<AnySource::Met> met;
  {
    absl::MutexLock lock(&mutex_);
    if (any_ == nullptr) any_ = std::make_shared<AnySource>();
    if (sends == kAsks) {
      any_->askers.emplace(from, tag);
      if (const int64_t sent = count(CollectiveKind::kSend); sent > 0)
        communicator_->control_->Notify(from, kAnySource, Notice(*this, tag, sent));
      return;
    }
    const auto asked = any_->tags.find(tag);
    if (asked == any_->tags.end()) return;
    int64_t& announced = asked->second.announced[from];
    const int64_t known = std::max(announced, count(CollectiveKind::kRecv));
    for (int64_t i = known; i < sends; ++i) asked->second.untaken.push_back(from);
    announced = std::max(announced, sends);
    met = any_->Meet(*this, asked->second);
  }
  AnySource::Link(met);
}

void Channel::EndAnySource(const absl::Status& why) {
  std::vector<std::shared_ptr<WorkState>> works;
  {
    absl::MutexLock lock(&mutex_);
    if (any_ == nullptr) return;
    for (auto& [id, tag] : any_->tags) {
      for (AnySource::Open& receive : tag.open) works.push_back(std::move(receive.work));
      tag.open.clear();
    }
  }
  for (const auto& work : works) work->Finish(why);
}

void Communicator::OnAnySourceNotice(int from, absl::string_view notice) {
  internal::ByteReader reader(notice);
  const absl::StatusOr<Channel*> channel = OpenChannel(reader.Bytes());
  const int64_t tag = reader.I64(), sends = reader.I64();
  absl::Status read = reader.Finish("announcement of a send");
  read.Update(channel.status());
  if (read.ok()) return (*channel)->OnAnnouncement(from, tag, sends);
  OnBackendFailure(Annotate(read, absl::StrCat("rank ", from)));
}

}  // namespace evenkeel
