#include "evenkeel/comm/tcp/transport.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/wire.h"

namespace evenkeel::internal {
namespace {

using Kind = MessageHeader::Kind;

// The bytes of headers and small messages read at once, and those of a body that may come along.
constexpr size_t kInputBytes = 64 << 10;
static_assert(kInputBytes >= MessageHeader::kSize + kMaxSmall);
// The bytes read from one connection before the others have their turn.
constexpr size_t kTurnBytes = 4 << 20;
// The largest number of messages that one system call writes.
constexpr int kMostAtOnce = 8;
constexpr uint64_t kWakeTag = std::numeric_limits<uint64_t>::max();

bool IsTemporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

struct TcpTransport::Connection {
  explicit Connection(const DeliveryLimits& limits) : delivery(limits) {}

  int peer = -1;
  UniqueFd fd;
  DeliveryWatch delivery;  // The loop's.
  absl::Status status;     // Not OK: it has ended.

  bool is_writing = false;  // Some thread is in Write().
  bool is_full = false;     // The socket takes nothing at the moment.
  size_t written = 0;       // Bytes of the oldest outgoing message, with its header.

  bool is_reading = false;              // The loop is in a system call.
  std::unique_ptr<PostedReceive> body;  // Being received into its place; null: a header comes next.
  size_t body_done = 0;                 // Bytes of it received.
  std::array<char, kInputBytes> input;  // Headers, small messages, the beginnings of bodies.
  size_t input_begin = 0, input_end = 0;  // The part not parsed yet.
  size_t to_body = 0;                     // How much of what is read now goes to the body, at most.
};

TcpTransport::Pending::Pending(std::shared_ptr<TcpTransport> transport)
    : transport_(std::move(transport)), operation_(std::make_unique<OperationState>()) {}

TcpTransport::Pending& TcpTransport::Pending::operator=(Pending&& other) noexcept {
  Forget();
  transport_ = std::move(other.transport_);
  operation_ = std::move(other.operation_);
  is_send_ = other.is_send_;
  return *this;
}

TcpTransport::Pending::~Pending() { Forget(); }

void TcpTransport::Pending::Forget() {
  if (operation_ == nullptr) return;
  TcpTransport& t = *transport_;
  absl::MutexLock lock(&t.mutex_);
  if (operation_->is_done) return;
  t.AwaitUnused(operation_.get());
  for (const auto& connection : t.connections_) {
    if (connection != nullptr && connection->body != nullptr &&
        connection->body->operation == operation_.get()) {
      connection->body->operation = nullptr;
    }
  }
  for (const int peer : t.messages_.Forget(operation_.get())) {
    t.Lose(*t.connections_[peer], absl::UnavailableError(absl::StrCat(
                                      "rank ", t.names_[t.rank_], " gave up a message to rank ",
                                      t.names_[peer], " before it had arrived")));
  }
}

bool TcpTransport::Pending::HasEnded() const {
  if (operation_ == nullptr) return true;
  TcpTransport& t = *transport_;
  absl::MutexLock lock(&t.mutex_);
  return HasEnded(t);
}

bool TcpTransport::Pending::HasEnded(const TcpTransport& t) const {
  return operation_->is_done || !operation_->error.ok() || !t.ended_.ok();
}

absl::Status TcpTransport::Pending::Wait(absl::Time deadline) {
  if (operation_ == nullptr) return absl::OkStatus();
  TcpTransport& t = *transport_;
  OperationState& operation = *operation_;
  absl::MutexLock lock(&t.mutex_);
  if (!HasEnded(t)) {
    t.waiters_.push_back(&operation);
    bool is_late = false;
    while (!HasEnded(t) && !is_late) is_late = WaitUntil(operation.changed, t.mutex_, deadline);
    t.waiters_.erase(std::find(t.waiters_.begin(), t.waiters_.end(), &operation));
  }
  if (!t.ended_.ok()) return t.ended_;
  if (operation.is_done) return absl::OkStatus();
  if (!operation.error.ok()) return operation.error;
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", t.names_[t.rank_], " waited until its deadline, but ",
                   is_send_ ? "its message was not acknowledged" : "nothing was received"));
}

TcpTransport::Pending TcpTransport::Send(int to, uint64_t slot, const void* data, size_t bytes,
                                         OnEnd on_end) {
  Pending pending(shared_from_this());
  pending.is_send_ = true;
  pending.operation_->on_end = std::move(on_end);
  absl::MutexLock lock(&mutex_);
  pending.operation_->error = CheckUsable(to);
  if (!pending.operation_->error.ok()) {
    pending.operation_->Notify();
    return pending;
  }
  messages_.Send(pending.operation_.get(), to, slot, static_cast<const char*>(data), bytes);
  Write(*connections_[to]);
  return pending;
}

TcpTransport::Pending TcpTransport::Receive(int from, uint64_t slot, void* data, size_t bytes,
                                            OnEnd on_end) {
  Pending pending(shared_from_this());
  pending.operation_->on_end = std::move(on_end);
  absl::Status& error = pending.operation_->error;
  absl::MutexLock lock(&mutex_);
  error = CheckUsable(from);
  if (!error.ok()) {
    pending.operation_->Notify();
    return pending;
  }
  error = messages_.Receive({.operation = pending.operation_.get(),
                             .from = from,
                             .slot = slot,
                             .data = static_cast<char*>(data),
                             .bytes = bytes});
  if (error.ok()) {
    Write(*connections_[from]);
  } else {
    End(error);
    pending.operation_->Notify();
  }
  return pending;
}

absl::StatusOr<std::shared_ptr<TcpTransport>> TcpTransport::Create(
    int rank, std::vector<UniqueFd> connections, TcpTransportOptions options) {
  EK_ASSIGN_OR_RETURN(Poller poller, Poller::Create());
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  EK_RETURN_IF_ERROR(poller.Add(wake.fd(), kWakeTag, EPOLLIN));
  for (size_t peer = 0; peer < connections.size(); ++peer) {
    if (connections[peer]) EK_RETURN_IF_ERROR(poller.Add(connections[peer].get(), peer, EPOLLIN));
  }
  std::shared_ptr<TcpTransport> transport(new TcpTransport(
      rank, std::move(connections), std::move(options), std::move(poller), std::move(wake)));
  EK_ASSIGN_OR_RETURN(transport->thread_, StartThread("connections over TCP",
                                                      [raw = transport.get()] { raw->Loop(); }));
  return transport;
}

TcpTransport::TcpTransport(int rank, std::vector<UniqueFd> connections, TcpTransportOptions options,
                           Poller poller, WakeUp wake)
    : rank_(rank),
      options_(std::move(options)),
      poller_(std::move(poller)),
      wake_(std::move(wake)),
      messages_(rank, static_cast<int>(connections.size()), names_),
      connections_(connections.size()) {
  for (int peer = 0; peer < static_cast<int>(connections.size()); ++peer) {
    if (!connections[peer]) continue;
    connections_[peer] = std::make_unique<Connection>(options_.delivery);
    connections_[peer]->peer = peer;
    connections_[peer]->fd = std::move(connections[peer]);
  }
}

TcpTransport::~TcpTransport() {
  {
    absl::MutexLock lock(&mutex_);
    End(absl::CancelledError(absl::StrCat("rank ", names_[rank_], " has closed its connections")));
    is_closing_ = true;
  }
  wake_.Signal();
  if (thread_.joinable()) thread_.join();
}

void TcpTransport::Flush(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  ++waiting_for_calls_;
  for (const auto& connection : connections_) {
    if (connection == nullptr) continue;
    bool is_late = false;
    while (!is_late && connection->status.ok() &&
           (connection->is_writing || !messages_.outgoing(connection->peer).empty())) {
      is_late = WaitUntil(call_over_, mutex_, deadline);
    }
  }
  --waiting_for_calls_;
}

void TcpTransport::Abort(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  End(why);
  AwaitUnused(nullptr);
}

absl::Status TcpTransport::CheckUsable(int peer) const {
  EK_RETURN_IF_ERROR(ended_);
  if (peer < 0 || peer >= static_cast<int>(connections_.size()) || connections_[peer] == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", names_[rank_], " has no connection to rank ", names_[peer]));
  }
  return connections_[peer]->status;
}

void TcpTransport::Lose(Connection& connection, const absl::Status& why) {
  if (!connection.status.ok()) return;
  connection.status = why;
  poller_.Forget(connection.fd.get());
  shutdown(connection.fd.get(), SHUT_RDWR);
  messages_.Fail(connection.peer, why);
  if (!connection.is_writing) messages_.FailOutgoing(connection.peer, why);  // Else Write() does.
  if (connection.body != nullptr && connection.body->operation != nullptr) {
    OperationState& operation = *connection.body->operation;
    if (operation.error.ok()) operation.error = why;
    operation.Notify();
  }
}

void TcpTransport::End(const absl::Status& why) {
  if (!ended_.ok()) return;
  ended_ = why;
  for (const auto& connection : connections_) {
    if (connection != nullptr) Lose(*connection, why);
  }
  for (OperationState* waiter : waiters_) waiter->changed.SignalAll();
}

bool TcpTransport::IsInUse(const OperationState* operation) {
  for (const auto& connection : connections_) {
    if (connection == nullptr) continue;
    if (connection->is_reading) {
      if (connection->body != nullptr &&
          (operation == nullptr || connection->body->operation == operation))
        return true;
    }
    if (connection->is_writing) {
      if (operation == nullptr) return true;
      for (const OutgoingMessage& message : messages_.outgoing(connection->peer)) {
        if (message.operation == operation) return true;
      }
    }
  }
  return false;
}

void TcpTransport::AwaitUnused(const OperationState* operation) {
  ++waiting_for_calls_;
  while (IsInUse(operation)) call_over_.Wait(&mutex_);
  --waiting_for_calls_;
}

void TcpTransport::Watch(Connection& connection, bool for_room) {
  poller_.Change(connection.fd.get(), connection.peer, EPOLLIN | (for_room ? EPOLLOUT : 0u));
}

// One thread at a time; what others add meanwhile is written by it. A connection that can't be
// written to is left to Read(): what has come before its end still counts.
void TcpTransport::Write(Connection& connection) {
  std::deque<OutgoingMessage>& messages = messages_.outgoing(connection.peer);
  if (connection.is_writing || connection.is_full || messages.empty()) return;
  connection.is_writing = true;
  while (!messages.empty() && connection.status.ok() && !connection.is_full) {
    std::array<iovec, 2 * kMostAtOnce> parts;
    size_t count = 0, skip = connection.written, offered = 0;
    for (size_t i = 0; i < messages.size() && i < kMostAtOnce; ++i) {
      for (const auto& [data, bytes] :
           {std::pair<const char*, size_t>(messages[i].header.data(), MessageHeader::kSize),
            std::pair<const char*, size_t>(messages[i].data, messages[i].bytes)}) {
        const size_t skipped = std::min(skip, bytes);
        skip -= skipped;
        if (skipped == bytes) continue;
        parts[count++] = {const_cast<char*>(data) + skipped, bytes - skipped};
        offered += bytes - skipped;
      }
    }
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    mutex_.Unlock();
    const ssize_t sent = sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int error = sent < 0 ? errno : 0;
    mutex_.Lock();
    if (sent < 0 && error == EINTR) continue;
    const bool is_lost = !connection.status.ok();
    if (!is_lost && (sent < 0 || static_cast<size_t>(sent) < offered)) {
      connection.is_full = true;
      if (sent >= 0 || IsTemporary(error)) Watch(connection, true);
    }
    // Also if the connection has ended meanwhile: the peer may have read all, and left.
    connection.written += std::max<ssize_t>(sent, 0);
    while (!messages.empty() &&
           connection.written >= MessageHeader::kSize + messages.front().bytes) {
      connection.written -= MessageHeader::kSize + messages.front().bytes;
      messages_.FinishWrite(connection.peer);
    }
    if (is_lost) messages_.FailOutgoing(connection.peer, connection.status);
  }
  connection.is_writing = false;
  if (waiting_for_calls_ > 0) call_over_.SignalAll();
}

void TcpTransport::Loop() {
  absl::Time looked = SteadyNow();
  while (true) {
    for (const epoll_event& event : poller_.Wait(looked + options_.delivery.look)) {
      if (event.data.u64 != kWakeTag) {
        OnEvents(*connections_[event.data.u64], event.events);
        continue;
      }
      wake_.Clear();
      absl::MutexLock lock(&mutex_);
      if (is_closing_) return;
    }
    const absl::Time now = SteadyNow();
    if (now - looked < options_.delivery.look) continue;
    LookAfterDelivery(now - looked);
    looked = now;
  }
}

void TcpTransport::LookAfterDelivery(absl::Duration elapsed) {
  for (const auto& connection : connections_) {
    if (connection == nullptr) continue;
    {
      absl::MutexLock lock(&mutex_);
      if (!connection->status.ok()) continue;
    }
    const std::optional<Delivery> now = ReadDelivery(connection->fd);
    if (!now.has_value()) continue;
    const DeliveryWatch::Found found = connection->delivery.Look(*now, elapsed);
    if (found == DeliveryWatch::Found::kNothing) continue;
    const std::string text = absl::StrCat(
        "rank ", names_[connection->peer], " has acknowledged nothing from rank ", names_[rank_],
        " for ",
        absl::FormatDuration(absl::Trunc(connection->delivery.overdue(), absl::Seconds(1))), " (",
        now->waiting,
        " bytes wait): the network between them loses all that their connection carries");
    if (found == DeliveryWatch::Found::kLate) {
      Warn(options_.warn, absl::StrCat(text, "; at ", absl::FormatDuration(options_.delivery.end),
                                       " the group ends"));
      continue;
    }
    const absl::Status why = absl::UnavailableError(text);
    if (options_.on_lost != nullptr) options_.on_lost(why);
    absl::MutexLock lock(&mutex_);
    return End(why);
  }
}

void TcpTransport::OnEvents(Connection& connection, uint32_t events) {
  absl::MutexLock lock(&mutex_);
  if (!connection.status.ok()) return;
  if ((events & EPOLLOUT) != 0 && connection.is_full) {
    connection.is_full = false;
    Watch(connection, false);
    Write(connection);
  }
  if ((events & ~EPOLLOUT) != 0) Read(connection);
}

// Only the loop's thread comes here.
void TcpTransport::Read(Connection& connection) {
  static constexpr size_t kDropBytes = 64 << 10;
  static thread_local char dropped[kDropBytes];
  size_t total = 0;
  while (connection.status.ok() && total < kTurnBytes) {
    std::array<iovec, 2> parts;
    int count = 0;
    bool is_whole = true;  // The body's buffer takes all that is missing of it.
    connection.to_body = 0;
    if (connection.body != nullptr) {
      PostedReceive& body = *connection.body;
      connection.to_body = body.bytes - connection.body_done;
      if (body.operation == nullptr && connection.to_body > kDropBytes) {
        connection.to_body = kDropBytes;
        is_whole = false;
      }
      parts[count++] = {body.operation == nullptr ? dropped : body.data + connection.body_done,
                        connection.to_body};
    }
    char* const input = connection.input.data();
    if (connection.input_begin > 0) {
      std::memmove(input, input + connection.input_begin,
                   connection.input_end - connection.input_begin);
      connection.input_end -= std::exchange(connection.input_begin, 0);
    }
    if (is_whole)
      parts[count++] = {input + connection.input_end, kInputBytes - connection.input_end};

    connection.is_reading = true;
    mutex_.Unlock();
    const ssize_t got = readv(connection.fd.get(), parts.data(), count);
    const int error = got < 0 ? errno : 0;
    mutex_.Lock();
    connection.is_reading = false;
    if (waiting_for_calls_ > 0) call_over_.SignalAll();
    if (!connection.status.ok()) return;
    if (got < 0 && error == EINTR) continue;
    if (got < 0 && IsTemporary(error)) return;
    if (got <= 0) {
      const bool is_closed = got == 0 || error == ECONNRESET || error == EPIPE;
      errno = error;
      return Lose(connection, absl::UnavailableError(absl::StrCat(
                                  "rank ", names_[connection.peer], is_closed ? " closed" : " lost",
                                  " its connection to rank ", names_[rank_],
                                  is_closed ? "" : absl::StrCat(" (", ErrnoText("read"), ")"))));
    }
    const absl::Status status = Take(connection, static_cast<size_t>(got));
    if (!status.ok()) return End(status);
    Write(connection);  // The replies that it requests.
    total += static_cast<size_t>(got);
    size_t offered = 0;
    for (int i = 0; i < count; ++i) offered += parts[i].iov_len;
    if (static_cast<size_t>(got) < offered) return;
  }
}

absl::Status TcpTransport::Take(Connection& connection, size_t bytes) {
  const size_t to_body = std::min(bytes, connection.to_body);
  connection.body_done += to_body;
  connection.input_end += bytes - to_body;
  if (connection.body != nullptr && connection.body_done == connection.body->bytes)
    FinishBody(connection);
  return TakeHeaders(connection);
}

absl::Status TcpTransport::TakeHeaders(Connection& connection) {
  while (connection.body == nullptr &&
         connection.input_end - connection.input_begin >= MessageHeader::kSize) {
    const char* const at = connection.input.data() + connection.input_begin;
    const char* const rest = at + MessageHeader::kSize;
    const size_t available = connection.input_end - connection.input_begin - MessageHeader::kSize;
    const absl::StatusOr<MessageHeader> header = MessageHeader::Parse(at);
    if (!header.ok()) {
      return Annotate(header.status(), absl::StrCat("rank ", names_[connection.peer],
                                                    " sent something to rank ", names_[rank_]));
    }
    size_t used = 0;
    switch (header->kind) {
      case Kind::kSmall:
        if (available < header->bytes) return absl::OkStatus();
        used = header->bytes;
        EK_RETURN_IF_ERROR(
            messages_.OnSmall(connection.peer, header->slot, absl::string_view(rest, used)));
        break;
      case Kind::kBody:
      case Kind::kDirect: {
        EK_ASSIGN_OR_RETURN(connection.body, messages_.OnBody(connection.peer, *header));
        used = std::min<size_t>(available, header->bytes);
        if (connection.body->operation != nullptr && used > 0)
          std::memcpy(connection.body->data, rest, used);
        connection.body_done = used;
        if (used == header->bytes) FinishBody(connection);
        break;
      }
      default:
        EK_RETURN_IF_ERROR(messages_.OnHeader(connection.peer, *header));
    }
    connection.input_begin += MessageHeader::kSize + used;
  }
  return absl::OkStatus();
}

void TcpTransport::FinishBody(Connection& connection) {
  MessageTable::FinishReceive(*connection.body);
  connection.body = nullptr;
  connection.body_done = 0;
}

}  // namespace evenkeel::internal
