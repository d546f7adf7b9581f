#include "evenkeel/comm/rendezvous/shared_connection.h"

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/per_process.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Enough time to send what is queued, and short enough if the server hangs.
constexpr absl::Duration kLinger = absl::Seconds(1);
constexpr absl::Duration kGlance = absl::Milliseconds(100);  // Between two calls of `cancelled`.
// If the server has owed a reply for longer than the first, new links use a new connection; if for
// longer than the second, a link that is being opened fails.
constexpr absl::Duration kShortSilence = absl::Seconds(2), kMostSilence = absl::Seconds(10);

// The connections of a process, which a forked child has no right to. Never freed: groups may
// outlive static objects.
struct Connections {
  absl::Mutex mutex;
  std::map<std::string, std::weak_ptr<SharedConnection>> by_key ABSL_GUARDED_BY(mutex);
};

Connections& ConnectionsOfProcess() {
  static auto* of_process = new PerProcess<Connections>;
  return of_process->Get();
}

}  // namespace

SharedConnection::SharedConnection(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)) {
  const absl::Status started =
      connection_->Start([this](const std::string& frame) { OnFrame(frame); },
                         [this](const absl::Status& why) { OnLost(why); });
  if (!started.ok()) OnLost(started);
}

SharedConnection::~SharedConnection() { connection_->Close(kLinger); }

absl::StatusOr<std::shared_ptr<SharedConnection>> SharedConnection::OfProcess(
    const std::string& key,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Connection>>()> connect) {
  Connections& connections = ConnectionsOfProcess();
  std::shared_ptr<SharedConnection> known;
  {
    absl::MutexLock lock(&connections.mutex);
    const auto found = connections.by_key.find(key);
    if (found != connections.by_key.end()) known = found->second.lock();
  }
  if (known != nullptr && known->IsUsable()) return known;
  // Without the lock, because it may wait. If two threads connect at once, both succeed, and one of
  // the connections serves only its thread's group.
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection, connect());
  auto made = std::make_shared<SharedConnection>(std::move(connection));
  absl::MutexLock lock(&connections.mutex);
  std::erase_if(connections.by_key, [](const auto& entry) { return entry.second.expired(); });
  connections.by_key[key] = made;
  return made;
}

absl::StatusOr<std::unique_ptr<SharedConnection::Link>> SharedConnection::Open(
    Hello hello, absl::Time deadline, const Cancelled& cancelled) {
  // The connection has proved the secret.
  hello.nonce.assign(kNonceSize, '\0');
  hello.proof.assign(kDigestSize, '\0');
  auto end = std::make_shared<End>();
  uint32_t number = 0;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(lost_);
    number = next_++;
    ends_[number] = end;
  }
  // From here on its destructor closes it on the server, too.
  auto link = absl::WrapUnique(new Link(shared_from_this(), number, end));
  connection_->ExpectAnswer();
  connection_->Send(OnLink(number, hello.Serialize()));
  EK_ASSIGN_OR_RETURN(const std::string answer, AwaitVerdict(*end, hello, deadline, cancelled));
  EK_ASSIGN_OR_RETURN(const Verdict verdict, Verdict::Parse(answer));
  EK_RETURN_IF_ERROR(Annotate(
      verdict.status,
      absl::StrCat("the store at ", connection_->server().ToString(), " and rank ", hello.rank)));
  return link;
}

absl::StatusOr<std::string> SharedConnection::AwaitVerdict(End& end, const Hello& hello,
                                                           absl::Time deadline,
                                                           const Cancelled& cancelled) const {
  const auto is_over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(end.deliver) {
    return end.verdict.has_value() || !end.lost.ok();
  };
  const absl::Time start = SteadyNow();
  while (true) {
    {
      absl::MutexLock lock(&end.deliver);
      AwaitFor(end.deliver, absl::Condition(&is_over), std::min(deadline - SteadyNow(), kGlance));
      if (end.verdict.has_value()) return *end.verdict;
      EK_RETURN_IF_ERROR(end.lost);
    }
    if (cancelled != nullptr) EK_RETURN_IF_ERROR(cancelled());  // Unlocked: it may read a store.
    const absl::Time now = SteadyNow();
    if (now < deadline && connection_->Silence() < kMostSilence) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", hello.rank, " received no reply from ", connection_->ServerName(),
                     " within ", absl::FormatDuration(absl::Trunc(now - start, kGlance)),
                     ": its process hangs, or the network is down"));
  }
}

void SharedConnection::OnFrame(absl::string_view frame) {
  const std::optional<uint32_t> number = TakeLink(&frame);
  if (!number.has_value()) return;  // The server sends no such frames.
  std::shared_ptr<End> end;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = ends_.find(*number);
    if (found == ends_.end()) return;
    end = found->second;
  }
  if (frame.empty()) return Lose(*end, connection_->GoneStatus());
  absl::MutexLock lock(&end->deliver);
  if (end->is_closed) return;
  if (!end->verdict.has_value()) {
    end->verdict = std::string(frame);
  } else if (end->on_frame == nullptr) {
    end->early.emplace_back(frame);
  } else {
    end->on_frame(std::string(frame));
  }
}

void SharedConnection::OnLost(const absl::Status& why) {
  std::map<uint32_t, std::shared_ptr<End>> ends;
  {
    absl::MutexLock lock(&mutex_);
    lost_ = why;
    ends = ends_;
  }
  for (const auto& [number, end] : ends) Lose(*end, why);
}

void SharedConnection::Lose(End& end, const absl::Status& why) {
  absl::MutexLock lock(&end.deliver);
  if (end.is_closed || !end.lost.ok()) return;
  end.lost = why;
  if (end.on_lost != nullptr) end.on_lost(why);
}

bool SharedConnection::IsUsable() const {
  absl::MutexLock lock(&mutex_);
  return lost_.ok() && connection_->Silence() < kShortSilence;
}

void SharedConnection::Link::Start(std::function<void(std::string)> on_frame,
                                   std::function<void(absl::Status)> on_lost) {
  connection_->connection_->Post(
      [end = end_, on_frame = std::move(on_frame), on_lost = std::move(on_lost)] {
        absl::MutexLock lock(&end->deliver);
        if (end->is_closed) return;
        end->on_frame = on_frame;
        end->on_lost = on_lost;
        for (std::string& frame : std::exchange(end->early, {})) end->on_frame(std::move(frame));
        if (!end->lost.ok()) end->on_lost(end->lost);
      });
}

void SharedConnection::Link::Send(absl::string_view payload) {
  if (payload.size() <= kMaxFrame) return connection_->connection_->Send(OnLink(number_, payload));
  // The connection would end, and with it other groups.
  const absl::Status why = absl::ResourceExhaustedError(absl::StrCat(
      "cannot send a control message of ", payload.size(), " bytes: the limit is ", kMaxFrame));
  connection_->connection_->Post([end = end_, why] { Lose(*end, why); });
}

void SharedConnection::Link::Close() {
  {
    absl::MutexLock lock(&end_->deliver);
    if (std::exchange(end_->is_closed, true)) return;
  }
  Send("");
  absl::MutexLock lock(&connection_->mutex_);
  connection_->ends_.erase(number_);
}

}  // namespace evenkeel::internal
