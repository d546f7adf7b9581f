#include "evenkeel/comm/internal/gloo_transport.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/gloo_transport_wire.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

using gloo::transport::UnboundBuffer;
using Kind = MessageHeader::Kind;

// What is read at once of headers and small messages, and what of a body may come along with them.
constexpr size_t kInputBytes = 64 << 10;
static_assert(kInputBytes >= MessageHeader::kSize + kMaxSmall);
// What is read from one connection before the others have their turn.
constexpr size_t kTurnBytes = 4 << 20;
// How many messages one system call writes.
constexpr int kMostAtOnce = 8;
// Of waits that bring none.
constexpr std::chrono::seconds kDefaultTimeout(30);
constexpr uint64_t kWakeTag = std::numeric_limits<uint64_t>::max();

[[noreturn]] void Throw(absl::Status status) { throw StatusError(std::move(status)); }

bool IsTemporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

struct GlooTransport::Connection {
  explicit Connection(const DeliveryLimits& limits) : delivery(limits) {}

  int peer = -1;
  UniqueFd fd;
  DeliveryWatch delivery;  // The loop's.
  absl::Status status;  // Not OK: it has ended.

  bool is_writing = false;  // Some thread is in Write().
  bool is_full = false;     // The socket takes nothing at the moment.
  size_t written = 0;       // Of the oldest outgoing message, header included.

  bool is_reading = false;                // The loop is in a system call.
  std::unique_ptr<PostedReceive> body;    // What is being received into its place; null: a header comes next.
  size_t body_done = 0;                   // Of its bytes.
  std::array<char, kInputBytes> input;    // Headers, small messages, the beginnings of bodies.
  size_t input_begin = 0, input_end = 0;  // What of it is not understood yet.
  size_t to_body = 0;                     // How much of what is read now goes to the body, at most.
};

class GlooTransport::Pair : public gloo::transport::Pair {
 public:
  const gloo::transport::Address& address() const override { Refuse(); }
  void connect(const std::vector<char>&) override { Refuse(); }
  void close() override { Refuse(); }
  void setSync(bool, bool) override { Refuse(); }
  std::unique_ptr<gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override { Refuse(); }
  std::unique_ptr<gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override { Refuse(); }
  void send(UnboundBuffer*, uint64_t, size_t, size_t) override { Refuse(); }
  void recv(UnboundBuffer*, uint64_t, size_t, size_t) override { Refuse(); }

 private:
  [[noreturn]] static void Refuse() { Throw(absl::UnimplementedError("this transport has unbound buffers only")); }
};

class GlooTransport::Buffer : public UnboundBuffer {
 public:
  Buffer(std::shared_ptr<GlooTransport> transport, void* data, size_t size)
      : UnboundBuffer(data, size), transport_(std::move(transport)) {}

  ~Buffer() override {
    GlooTransport& t = *transport_;
    absl::MutexLock lock(&t.mutex_);
    if (state_.sending == 0 && state_.receiving == 0) return;
    t.AwaitUnused(&state_);
    for (const auto& connection : t.connections_) {
      if (connection != nullptr && connection->body != nullptr && connection->body->buffer == &state_) {
        connection->body->buffer = nullptr;
      }
    }
    for (const int peer : t.messages_.Forget(&state_)) {
      t.Lose(*t.connections_[peer],
             absl::UnavailableError(absl::StrCat("rank ", t.names_[t.rank], " gave up a message to rank ",
                                                 t.names_[peer], " that was under way")));
    }
  }

  void send(int to, uint64_t slot, size_t offset, size_t bytes) override {
    bytes = Length(offset, bytes);
    GlooTransport& t = *transport_;
    absl::MutexLock lock(&t.mutex_);
    Connection& connection = t.Usable(to);
    t.messages_.Send(&state_, to, slot, static_cast<const char*>(ptr) + offset, bytes);
    t.Write(connection);
  }

  void recv(int from, uint64_t slot, size_t offset, size_t bytes) override { Receive({from}, slot, offset, bytes); }
  void recv(std::vector<int> from, uint64_t slot, size_t offset, size_t bytes) override {
    Receive(absl::InlinedVector<int, 1>(from.begin(), from.end()), slot, offset, bytes);
  }

  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    return Wait(rank, timeout, state_.sent, state_.is_send_aborted, "what it sends was not taken");
  }
  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    return Wait(rank, timeout, state_.received, state_.is_receive_aborted, "nothing has come");
  }
  void abortWaitSend() override { AbortWait(state_.is_send_aborted); }
  void abortWaitRecv() override { AbortWait(state_.is_receive_aborted); }

 private:
  size_t Length(size_t offset, size_t bytes) const {
    if (offset <= size && bytes == kUnspecifiedByteCount) return size - offset;
    if (offset > size || bytes > size - offset) {
      Throw(absl::InvalidArgumentError(
          absl::StrCat(bytes, " bytes at ", offset, " are not in a buffer of ", size, " bytes")));
    }
    return bytes;
  }

  void Receive(absl::InlinedVector<int, 1> from, uint64_t slot, size_t offset, size_t bytes) {
    bytes = Length(offset, bytes);
    GlooTransport& t = *transport_;
    absl::MutexLock lock(&t.mutex_);
    for (const int peer : from) t.Usable(peer);
    const absl::Status status = t.messages_.Receive(
        {.buffer = &state_, .from = from, .slot = slot, .data = static_cast<char*>(ptr) + offset, .bytes = bytes});
    if (!status.ok()) {
      t.End(status);
      Throw(status);
    }
    for (const int peer : from) t.Write(*t.connections_[peer]);
  }

  bool Wait(int* rank, std::chrono::milliseconds timeout, absl::InlinedVector<int, 2>& done, bool& is_aborted,
            absl::string_view obstacle) {
    GlooTransport& t = *transport_;
    if (timeout == gloo::transport::kUnsetTimeout) timeout = t.getTimeout();
    absl::MutexLock lock(&t.mutex_);
    if (done.empty() || !t.ended_.ok()) {
      const absl::Time deadline = absl::Now() + absl::FromChrono(timeout);
      t.waiters_.push_back(&state_);
      bool is_late = false;
      while (done.empty() && !is_late && !is_aborted && state_.error.ok() && t.ended_.ok()) {
        is_late = state_.changed.WaitWithDeadline(&t.mutex_, deadline);
      }
      t.waiters_.erase(std::find(t.waiters_.begin(), t.waiters_.end(), &state_));
    }
    if (!t.ended_.ok()) Throw(t.ended_);
    if (std::exchange(is_aborted, false)) return false;
    if (!done.empty()) {
      if (rank != nullptr) *rank = done.front();
      done.erase(done.begin());
      return true;
    }
    if (!state_.error.ok()) Throw(state_.error);
    Throw(absl::DeadlineExceededError(
        absl::StrCat("rank ", t.names_[t.rank], " waited ", timeout.count(), "ms, but ", obstacle)));
  }

  void AbortWait(bool& is_aborted) {
    absl::MutexLock lock(&transport_->mutex_);
    is_aborted = true;
    state_.changed.SignalAll();
  }

  const std::shared_ptr<GlooTransport> transport_;
  BufferState state_;  // Guarded by the transport's mutex.
};

absl::StatusOr<std::shared_ptr<GlooTransport>> GlooTransport::Create(int rank, std::vector<UniqueFd> connections,
                                                                     GlooTransportOptions options) {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return absl::ResourceExhaustedError(ErrnoText("epoll_create"));
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  epoll_event event = {.events = EPOLLIN, .data = {.u64 = kWakeTag}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.fd(), &event) != 0) {
    return absl::ResourceExhaustedError(ErrnoText("epoll_ctl"));
  }
  for (size_t peer = 0; peer < connections.size(); ++peer) {
    if (!connections[peer]) continue;
    event = {.events = EPOLLIN, .data = {.u64 = peer}};
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, connections[peer].get(), &event) != 0) {
      return absl::ResourceExhaustedError(ErrnoText("epoll_ctl"));
    }
  }
  return std::shared_ptr<GlooTransport>(
      new GlooTransport(rank, std::move(connections), std::move(options), std::move(epoll), std::move(wake)));
}

GlooTransport::GlooTransport(int rank, std::vector<UniqueFd> connections, GlooTransportOptions options, UniqueFd epoll,
                             WakeUp wake)
    : gloo::transport::Context(rank, static_cast<int>(connections.size())),
      options_(std::move(options)),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)),
      messages_(rank, size, names_),
      connections_(size) {
  setTimeout(kDefaultTimeout);
  pairs_.resize(size);
  for (int peer = 0; peer < size; ++peer) {
    if (!connections[peer]) continue;
    pairs_[peer] = std::make_unique<Pair>();
    connections_[peer] = std::make_unique<Connection>(options_.delivery);
    connections_[peer]->peer = peer;
    connections_[peer]->fd = std::move(connections[peer]);
  }
  thread_ = std::thread([this] { Loop(); });
}

GlooTransport::~GlooTransport() {
  {
    absl::MutexLock lock(&mutex_);
    End(absl::CancelledError(absl::StrCat("rank ", names_[rank], " has closed its connections")));
    is_closing_ = true;
  }
  wake_.Signal();
  thread_.join();
}

std::unique_ptr<UnboundBuffer> GlooTransport::createUnboundBuffer(void* data, size_t bytes) {
  return std::make_unique<Buffer>(shared_from_this(), data, bytes);
}

void GlooTransport::Abort(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  End(why);
  AwaitUnused(nullptr);
}

GlooTransport::Connection& GlooTransport::Usable(int peer) {
  if (!ended_.ok()) Throw(ended_);
  if (peer < 0 || peer >= size || connections_[peer] == nullptr) {
    Throw(absl::InvalidArgumentError(absl::StrCat("rank ", names_[rank], " has no connection to rank ", names_[peer])));
  }
  if (!connections_[peer]->status.ok()) Throw(connections_[peer]->status);
  return *connections_[peer];
}

void GlooTransport::Lose(Connection& connection, const absl::Status& why) {
  if (!connection.status.ok()) return;
  connection.status = why;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd.get(), nullptr);
  shutdown(connection.fd.get(), SHUT_RDWR);
  messages_.Fail(connection.peer, why);
  if (connection.body != nullptr && connection.body->buffer != nullptr) {
    BufferState& buffer = *connection.body->buffer;
    if (buffer.error.ok()) buffer.error = why;
    buffer.changed.SignalAll();
  }
}

void GlooTransport::End(const absl::Status& why) {
  if (!ended_.ok()) return;
  ended_ = why;
  for (const auto& connection : connections_) {
    if (connection != nullptr) Lose(*connection, why);
  }
  for (BufferState* waiter : waiters_) waiter->changed.SignalAll();
}

bool GlooTransport::IsInUse(const BufferState* buffer) {
  for (const auto& connection : connections_) {
    if (connection == nullptr) continue;
    if (connection->is_reading) {
      if (connection->body != nullptr && (buffer == nullptr || connection->body->buffer == buffer)) return true;
    }
    if (connection->is_writing) {
      if (buffer == nullptr) return true;
      for (const OutgoingMessage& message : messages_.outgoing(connection->peer)) {
        if (message.buffer == buffer) return true;
      }
    }
  }
  return false;
}

void GlooTransport::AwaitUnused(const BufferState* buffer) {
  ++waiting_for_calls_;
  while (IsInUse(buffer)) call_over_.Wait(&mutex_);
  --waiting_for_calls_;
}

void GlooTransport::Watch(Connection& connection, bool for_room) {
  epoll_event event = {.events = EPOLLIN | (for_room ? EPOLLOUT : 0u),
                       .data = {.u64 = static_cast<uint64_t>(connection.peer)}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
}

// One thread at a time; what others add meanwhile is written by it. A connection that can't be written to is left to
// Read(): what has come before its end still counts.
void GlooTransport::Write(Connection& connection) {
  std::deque<OutgoingMessage>& messages = messages_.outgoing(connection.peer);
  if (connection.is_writing || connection.is_full || messages.empty()) return;
  connection.is_writing = true;
  while (!messages.empty() && connection.status.ok() && !connection.is_full) {
    std::array<iovec, 2 * kMostAtOnce> parts;
    size_t count = 0, skip = connection.written, offered = 0;
    for (size_t i = 0; i < messages.size() && i < kMostAtOnce; ++i) {
      for (const auto& [data, bytes] : {std::pair<const char*, size_t>(messages[i].header.data(), MessageHeader::kSize),
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
    if (!connection.status.ok()) break;
    if (sent < 0 || static_cast<size_t>(sent) < offered) {
      connection.is_full = true;
      if (sent >= 0 || IsTemporary(error)) Watch(connection, true);
    }
    connection.written += std::max<ssize_t>(sent, 0);
    while (!messages.empty() && connection.written >= MessageHeader::kSize + messages.front().bytes) {
      connection.written -= MessageHeader::kSize + messages.front().bytes;
      messages_.FinishWrite(connection.peer);
    }
  }
  connection.is_writing = false;
  if (waiting_for_calls_ > 0) call_over_.SignalAll();
}

void GlooTransport::Loop() {
  std::array<epoll_event, 64> events;
  absl::Time looked = absl::Now();
  while (true) {
    const int timeout = PollTimeout(looked + options_.delivery.look);
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), timeout);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 != kWakeTag) {
        OnEvents(*connections_[events[i].data.u64], events[i].events);
        continue;
      }
      wake_.Clear();
      absl::MutexLock lock(&mutex_);
      if (is_closing_) return;
    }
    const absl::Time now = absl::Now();
    if (now - looked < options_.delivery.look) continue;
    LookAfterDelivery(now - looked);
    looked = now;
  }
}

void GlooTransport::LookAfterDelivery(absl::Duration elapsed) {
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
    const std::string text =
        absl::StrCat("rank ", names_[connection->peer], " has acknowledged nothing from rank ", names_[rank], " for ",
                     absl::FormatDuration(absl::Trunc(connection->delivery.overdue(), absl::Seconds(1))), " (",
                     now->waiting, " bytes wait): the network between them loses all that their connection carries");
    if (found == DeliveryWatch::Found::kLate) {
      Warn(options_.warn, absl::StrCat(text, "; at ", absl::FormatDuration(options_.delivery.end), " the group ends"));
      continue;
    }
    const absl::Status why = absl::UnavailableError(text);
    if (options_.on_lost != nullptr) options_.on_lost(why);
    absl::MutexLock lock(&mutex_);
    return End(why);
  }
}

void GlooTransport::OnEvents(Connection& connection, uint32_t events) {
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
void GlooTransport::Read(Connection& connection) {
  static constexpr size_t kDropBytes = 64 << 10;
  static thread_local char dropped[kDropBytes];
  size_t total = 0;
  while (connection.status.ok() && total < kTurnBytes) {
    std::array<iovec, 2> parts;
    int count = 0;
    bool is_whole = true;  // What is offered for the body is all that is missing of it.
    connection.to_body = 0;
    if (connection.body != nullptr) {
      PostedReceive& body = *connection.body;
      connection.to_body = body.bytes - connection.body_done;
      if (body.buffer == nullptr && connection.to_body > kDropBytes) {
        connection.to_body = kDropBytes;
        is_whole = false;
      }
      parts[count++] = {body.buffer == nullptr ? dropped : body.data + connection.body_done, connection.to_body};
    }
    char* const input = connection.input.data();
    if (connection.input_begin > 0) {
      std::memmove(input, input + connection.input_begin, connection.input_end - connection.input_begin);
      connection.input_end -= std::exchange(connection.input_begin, 0);
    }
    if (is_whole) parts[count++] = {input + connection.input_end, kInputBytes - connection.input_end};

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
      return Lose(connection,
                  absl::UnavailableError(absl::StrCat("rank ", names_[connection.peer], is_closed ? " closed" : " lost",
                                                      " its connection to rank ", names_[rank],
                                                      is_closed ? "" : absl::StrCat(" (", ErrnoText("read"), ")"))));
    }
    const absl::Status status = Take(connection, static_cast<size_t>(got));
    if (!status.ok()) return End(status);
    Write(connection);  // What it asks for.
    total += static_cast<size_t>(got);
    size_t offered = 0;
    for (int i = 0; i < count; ++i) offered += parts[i].iov_len;
    if (static_cast<size_t>(got) < offered) return;
  }
}

absl::Status GlooTransport::Take(Connection& connection, size_t bytes) {
  const size_t to_body = std::min(bytes, connection.to_body);
  connection.body_done += to_body;
  connection.input_end += bytes - to_body;
  if (connection.body != nullptr && connection.body_done == connection.body->bytes) FinishBody(connection);
  return TakeHeaders(connection);
}

absl::Status GlooTransport::TakeHeaders(Connection& connection) {
  while (connection.body == nullptr && connection.input_end - connection.input_begin >= MessageHeader::kSize) {
    const char* const at = connection.input.data() + connection.input_begin;
    const char* const rest = at + MessageHeader::kSize;
    const size_t available = connection.input_end - connection.input_begin - MessageHeader::kSize;
    const absl::StatusOr<MessageHeader> header = MessageHeader::Parse(at);
    if (!header.ok()) {
      return Annotate(header.status(),
                      absl::StrCat("rank ", names_[connection.peer], " sent something to rank ", names_[rank]));
    }
    size_t used = 0;
    switch (header->kind) {
      case Kind::kSmall:
        if (available < header->bytes) return absl::OkStatus();
        used = header->bytes;
        EK_RETURN_IF_ERROR(messages_.OnSmall(connection.peer, header->slot, absl::string_view(rest, used)));
        break;
      case Kind::kBody:
      case Kind::kDirect: {
        EK_ASSIGN_OR_RETURN(connection.body, messages_.OnBody(connection.peer, *header));
        used = std::min<size_t>(available, header->bytes);
        if (connection.body->buffer != nullptr && used > 0) std::memcpy(connection.body->data, rest, used);
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

void GlooTransport::FinishBody(Connection& connection) {
  MessageTable::FinishReceive(*connection.body, connection.peer);
  connection.body = nullptr;
  connection.body_done = 0;
}

}  // namespace evenkeel::internal
