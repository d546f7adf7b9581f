#include "evenkeel/comm/tcp/backend.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/collectives.h"
#include "evenkeel/comm/tcp/message.h"
#include "evenkeel/comm/tcp/transport.h"

namespace evenkeel::internal {
namespace {

// The time that a broken connection or a missed deadline waits for the control plane to report the
// cause. It usually takes milliseconds, and up to 2.5 seconds if the other end is a rank that
// receives nothing (ControlGroups).
constexpr absl::Duration kPatience = absl::Seconds(3);

}  // namespace

// One thread, for the collectives of a channel, which it runs one after the other, or for the
// channel's messages to or from one rank, which are all under way at a time.
class TcpBackend::Lane {
 public:
  explicit Lane(TcpBackend* backend)
      : backend_(backend),
        collectives_(backend->transport_, backend->rank_, backend->world_size_,
                     backend->generation_, backend->names_) {}
  // The group has ended, so nothing takes long.
  ~Lane() {
    {
      absl::MutexLock lock(&mutex_);
      is_closing_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::Status StartIt() {
    EK_ASSIGN_OR_RETURN(thread_, StartThread("a channel over TCP", [this] { Run(); }));
    return absl::OkStatus();
  }
  void Push(Operation operation, std::shared_ptr<WorkState> work) {
    absl::MutexLock lock(&mutex_);
    queue_.push_back({std::move(operation), std::move(work)});
  }

 private:
  struct Entry {
    Operation operation;
    std::shared_ptr<WorkState> work;
  };

  struct UnderWay {
    std::unique_ptr<TcpMessage> message;
    std::shared_ptr<WorkState> work;
  };
  using Messages = std::map<int64_t, UnderWay>;  // By number.

  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_closing_ || !queue_.empty() || !news_.empty();
  }

  void Run() {
    while (true) {
      absl::Time wake_at = absl::InfiniteFuture();
      for (const auto& [number, one] : messages_) wake_at = std::min(wake_at, DeadlineOf(one));
      std::deque<Entry> issued;
      std::vector<int64_t> news;
      bool is_closing = false;
      {
        absl::MutexLock lock(&mutex_);
        AwaitUntil(mutex_, absl::Condition(this, &Lane::HasNews), wake_at);
        issued.swap(queue_);
        news.swap(news_);
        is_closing = is_closing_;
      }
      for (Entry& entry : issued) {
        if (IsPair(entry.operation.what.kind)) {
          Begin(std::move(entry));
        } else {
          entry.work->Finish(Execute(entry.operation));
        }
      }
      for (const int64_t number : news) LookAt(messages_.find(number));
      if (is_closing || SteadyNow() >= wake_at) {
        for (auto at = messages_.begin(); at != messages_.end();) LookAt(at++);
      }
      if (is_closing && messages_.empty() && issued.empty()) return;
    }
  }

  void Begin(Entry entry) {
    if (const absl::Status ended = backend_->Enter(); !ended.ok()) return entry.work->Finish(ended);
    const int64_t number = next_message_++;
    auto message = std::make_unique<TcpMessage>(std::move(entry.operation), *backend_->transport_,
                                                backend_->rank_, backend_->generation_,
                                                backend_->names_, [this, number] {
                                                  absl::MutexLock lock(&mutex_);
                                                  news_.push_back(number);
                                                });
    messages_.emplace(number, UnderWay{std::move(message), std::move(entry.work)});
    backend_->Leave();
  }

  // Ends the message if it has arrived or failed.
  void LookAt(Messages::iterator at) {
    if (at == messages_.end()) return;  // It has ended.
    std::optional<absl::Status> result = backend_->Enter();
    if (result->ok()) {
      result = at->second.message->Result();
      backend_->Leave();
    }
    if (!result.has_value()) {
      if (SteadyNow() < DeadlineOf(at->second)) return;
      result = absl::DeadlineExceededError("");
    }
    const Operation operation = at->second.message->operation();
    const std::shared_ptr<WorkState> work = std::move(at->second.work);
    messages_.erase(at);  // Before its buffers are the user's again.
    work->Finish(Explained(*result, operation));
  }

  static absl::Time DeadlineOf(const UnderWay& one) {
    return one.message->operation().deadline + kTcpSlack;
  }

  absl::Status Execute(const Operation& operation) {
    EK_RETURN_IF_ERROR(backend_->Enter());
    const absl::Status status = collectives_.Run(operation);
    backend_->Leave();
    return Explained(status, operation);
  }

  absl::Status Explained(const absl::Status& status, const Operation& operation) const {
    if (status.ok()) return status;
    const bool is_late = SteadyNow() >= operation.deadline &&
                         (absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status));
    const absl::Status seen = backend_->names_.AtOperation(
        is_late ? absl::DeadlineExceededError("the operation missed its deadline") : status,
        backend_->rank_, operation.sequence, operation.what);
    // Another rank may be about to report a more precise cause of a deadline or a broken
    // connection.
    return backend_->FirstCause(
        seen, is_late || absl::IsUnavailable(status) ? kPatience : absl::ZeroDuration());
  }

  TcpBackend* const backend_;
  TcpCollectives collectives_;
  absl::Mutex mutex_;
  std::deque<Entry> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<int64_t> news_ ABSL_GUARDED_BY(mutex_);  // Messages of which a part has ended.
  bool is_closing_ ABSL_GUARDED_BY(mutex_) = false;
  // The thread's.
  Messages messages_;
  int64_t next_message_ = 0;
  std::thread thread_;
};

TcpBackend::TcpBackend(int rank, int world_size, std::string group, const RankNames& names,
                       WarnFunction warn)
    : rank_(rank),
      world_size_(world_size),
      group_(std::move(group)),
      names_(names),
      warn_(std::move(warn)),
      generation_(StableHash(0, group_)) {}

TcpBackend::~TcpBackend() {
  Abort(absl::CancelledError("the communicator is gone"));
  std::map<LaneKey, std::unique_ptr<Lane>> lanes;
  {
    absl::MutexLock lock(&mutex_);
    lanes.swap(lanes_);
  }
  lanes.clear();
  transport_ = nullptr;  // Its thread calls SetEnded().
}

absl::StatusOr<std::string> TcpBackend::Listen(
    const std::string& bind_address, std::string key,
    std::function<void(const absl::Status& why)> on_lost) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<PeerMeeting> meeting,
                      PeerMeeting::OverTcp(rank_, {group_, world_size_, std::move(key), names_},
                                           bind_address, {.warn = warn_}));
  absl::MutexLock lock(&mutex_);
  on_lost_ = std::move(on_lost);
  meeting_ = std::move(meeting);
  return meeting_->address();
}

absl::Status TcpBackend::Connect(const std::vector<std::string>& addresses,
                                 absl::Duration timeout) {
  EK_RETURN_IF_ERROR(Enter());
  const absl::Status status = Meet(addresses, SteadyNow() + timeout);
  Leave();
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    return ended_;
  }
  // A missing rank may be lost; the control plane then has the cause.
  return FirstCause(
      Annotate(status, absl::StrCat("rank ", names_[rank_], " could not connect to all others")),
      absl::IsPermissionDenied(status) || absl::IsResourceExhausted(status) ? absl::ZeroDuration()
                                                                            : kPatience);
}

absl::Status TcpBackend::Meet(const std::vector<std::string>& addresses, absl::Time deadline) {
  const auto end = [this](const absl::Status& why) {
    SetEnded(why);
    on_lost_(why);
  };
  EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting_->Run(addresses, deadline));
  EK_ASSIGN_OR_RETURN(std::shared_ptr<TcpTransport> transport,
                      TcpTransport::Create(rank_, std::move(connections),
                                           {.names = names_, .warn = warn_, .on_lost = end}));
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  transport_ = std::move(transport);
  return absl::OkStatus();
}

void TcpBackend::Start(Operation operation, std::shared_ptr<WorkState> work) {
  LaneKey key(operation.channel, CollectiveKind::kBarrier, -1);
  if (IsPair(operation.what.kind))
    key = {operation.channel, operation.what.kind, operation.what.root};
  absl::Status started;
  {
    absl::MutexLock lock(&mutex_);
    std::unique_ptr<Lane>& lane = lanes_[key];
    if (lane == nullptr) {
      lane = std::make_unique<Lane>(this);
      started = lane->StartIt();
    }
    if (started.ok()) return lane->Push(std::move(operation), std::move(work));
    lanes_.erase(key);
  }
  work->Finish(started);
}

void TcpBackend::Abort(const absl::Status& why) {
  const auto nobody_inside = [this]()
                                 ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return inside_ == 0; };
  PeerMeeting* meeting = nullptr;
  SetEnded(why);
  {
    std::shared_ptr<TcpTransport> transport;
    {
      absl::MutexLock lock(&mutex_);
      meeting = meeting_.get();
      transport = transport_;
    }
    if (meeting != nullptr) meeting->Cancel(why);
    if (transport != nullptr) transport->Abort(why);
  }
  // A lane that computes at the moment returns with its next call of the transport.
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&nobody_inside));
}

void TcpBackend::Flush(absl::Time deadline) {
  std::shared_ptr<TcpTransport> transport;
  {
    absl::MutexLock lock(&mutex_);
    transport = transport_;
  }
  if (transport != nullptr) transport->Flush(deadline);
}

absl::Status TcpBackend::Enter() {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) ++inside_;
  return ended_;
}

void TcpBackend::Leave() {
  absl::MutexLock lock(&mutex_);
  --inside_;
}

void TcpBackend::SetEnded(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (ended_.ok()) ended_ = why;
}

absl::Status TcpBackend::FirstCause(const absl::Status& seen, absl::Duration patience) {
  const auto has_ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !ended_.ok(); };
  absl::MutexLock lock(&mutex_);
  return AwaitFor(mutex_, absl::Condition(&has_ended), patience) ? ended_ : seen;
}

}  // namespace evenkeel::internal
