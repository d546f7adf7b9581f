#include "evenkeel/comm/rendezvous/tcp_store.h"

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/key_value.h"
#include "evenkeel/comm/control/link_meter.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/tcp_edges.h"
#include "evenkeel/comm/control/tree_link.h"
#include "evenkeel/comm/net/connection.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/greet.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/rendezvous/shared_connection.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using internal::Connection;
using internal::Hello;
using internal::HostPort;
using internal::SharedConnection;
using internal::StoreReply;
using internal::StoreRequest;
using Op = StoreRequest::Op;

// Enough time to send what is queued, and short enough if the server hangs.
constexpr absl::Duration kLinger = absl::Seconds(1);

absl::StatusOr<std::vector<HostPort>> ParseAddresses(const std::vector<std::string>& addresses) {
  std::vector<HostPort> parsed;
  for (const std::string& address : addresses) {
    EK_ASSIGN_OR_RETURN(HostPort one, HostPort::Parse(address));
    parsed.push_back(std::move(one));
  }
  return parsed;
}

absl::StatusOr<std::vector<HostPort>> FindServer(const TcpStoreOptions& options) {
  if (options.published == nullptr) return ParseAddresses(options.addresses);
  const absl::StatusOr<std::string> address =
      options.published->Get(kAddressKey, absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(address.status())) return std::vector<HostPort>();
  EK_RETURN_IF_ERROR(address.status());
  return ParseAddresses({*address});
}

absl::StatusOr<std::unique_ptr<Connection>> ConnectAs(
    const TcpStoreOptions& options, const Hello& hello,
    absl::Duration timeout = absl::InfiniteDuration(),
    const internal::Cancelled& cancelled = nullptr) {
  if (options.secret.empty())
    return absl::InvalidArgumentError("a client of the job's store needs the job's secret");
  EK_ASSIGN_OR_RETURN(internal::Greeted greeted,
                      Greet([&options] { return FindServer(options); }, hello,
                            {options.job, options.secret, options.host},
                            SteadyNow() + std::min(options.timeout, timeout), cancelled));
  return Connection::Create(std::move(greeted));
}

}  // namespace

// TcpStore ----------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Connect(const TcpStoreOptions& options) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                      ConnectAs(options, {.kind = Hello::Kind::kStore,
                                          .rank = options.rank,
                                          .world_size = options.world_size}));
  return absl::WrapUnique(new TcpStore(std::move(connection), options.timeout));
}

TcpStore::TcpStore(std::unique_ptr<Connection> connection, absl::Duration timeout)
    : timeout_(timeout), connection_(std::move(connection)) {
  OnLost(connection_->Start([this](const std::string& frame) { OnFrame(frame); },
                            [this](const absl::Status& why) { OnLost(why); }));
}

TcpStore::~TcpStore() { connection_->Close(kLinger); }

absl::Status TcpStore::Set(absl::string_view key, absl::string_view value) {
  return Call(key, {.op = Op::kSet, .value = std::string(value)}, timeout_).status();
}

absl::StatusOr<std::string> TcpStore::Get(absl::string_view key, absl::Duration timeout) {
  EK_ASSIGN_OR_RETURN(StoreReply reply, Call(key, {.op = Op::kGet}, timeout));
  return std::move(reply.value);
}

absl::StatusOr<std::string> TcpStore::GetOrSet(absl::string_view key, absl::string_view value) {
  EK_ASSIGN_OR_RETURN(StoreReply reply,
                      Call(key, {.op = Op::kGetOrSet, .value = std::string(value)}, timeout_));
  return std::move(reply.value);
}

absl::StatusOr<int64_t> TcpStore::Add(absl::string_view key, int64_t amount) {
  EK_ASSIGN_OR_RETURN(const StoreReply reply,
                      Call(key, {.op = Op::kAdd, .amount = amount}, timeout_));
  return reply.number;
}

absl::StatusOr<bool> TcpStore::Check(absl::string_view key) {
  EK_ASSIGN_OR_RETURN(const StoreReply reply, Call(key, {.op = Op::kCheck}, timeout_));
  return reply.number != 0;
}

absl::StatusOr<bool> TcpStore::Delete(absl::string_view key) {
  EK_ASSIGN_OR_RETURN(const StoreReply reply, Call(key, {.op = Op::kDelete}, timeout_));
  return reply.number != 0;
}

absl::StatusOr<StoreReply> TcpStore::Call(absl::string_view key, StoreRequest request,
                                          absl::Duration timeout) {
  request.key = std::string(key);
  {
    absl::MutexLock lock(&mutex_);
    request.id = next_id_++;
    pending_[request.id] = nullptr;
  }
  connection_->Send(request.Serialize());
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<StoreReply>& reply = pending_[request.id];
  const auto is_over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return reply != nullptr || !lost_.ok();
  };
  AwaitFor(mutex_, absl::Condition(&is_over), timeout);
  absl::StatusOr<StoreReply> result =
      lost_.ok()
          ? absl::DeadlineExceededError(absl::StrCat("no value \"", key, "\" in the store within ",
                                                     absl::FormatDuration(timeout)))
          : lost_;
  if (reply != nullptr) {
    result = std::move(*reply);
    if (!result->status.ok()) result = absl::Status(result->status);
  }
  pending_.erase(request.id);
  return result;
}

void TcpStore::OnFrame(absl::string_view frame) {
  absl::StatusOr<StoreReply> reply = StoreReply::Parse(frame);
  if (!reply.ok()) return OnLost(reply.status());
  absl::MutexLock lock(&mutex_);
  const auto pending = pending_.find(reply->id);
  if (pending != pending_.end())
    pending->second = std::make_unique<StoreReply>(*std::move(reply));  // Else it is too late.
}

void TcpStore::OnLost(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (lost_.ok()) lost_ = why;
}

// TcpObserver -------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<TcpObserver>> TcpObserver::Connect(const TcpStoreOptions& options) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                      ConnectAs(options, {.kind = Hello::Kind::kObserver}));
  return absl::WrapUnique(new TcpObserver(std::move(connection)));
}

TcpObserver::TcpObserver(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)) {
  const auto has_ended = std::make_shared<bool>(false);  // For the connection's thread.
  const auto on_lost = [this, has_ended](const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    lost_ = *has_ended ? absl::OutOfRangeError(why.message()) : why;
  };
  const absl::Status started = connection_->Start(
      [this, has_ended](std::string frame) {
        *has_ended = frame.empty();
        if (*has_ended) return;
        absl::MutexLock lock(&mutex_);
        ++answered_;
        answer_ = std::move(frame);
      },
      on_lost);
  if (!started.ok()) on_lost(started);
}

TcpObserver::~TcpObserver() { connection_->Close(absl::ZeroDuration()); }

absl::StatusOr<std::string> TcpObserver::Status(absl::Duration timeout) {
  int64_t mine = 0;
  bool asks = false;
  {
    absl::MutexLock lock(&mutex_);
    asks = asked_ == answered_;  // Else the reply that is due is new enough.
    if (asks) ++asked_;
    mine = asked_;
  }
  if (asks) connection_->Send("");
  absl::MutexLock lock(&mutex_);
  const auto is_over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return answered_ >= mine || !lost_.ok();
  };
  if (!AwaitFor(mutex_, absl::Condition(&is_over), timeout)) {
    return absl::DeadlineExceededError(absl::StrCat(ServerName(), " does not reply within ",
                                                    absl::FormatDuration(timeout),
                                                    ": its process hangs, or the network is down"));
  }
  if (answered_ < mine) return lost_;
  asked_ = answered_;  // A server that ends sends its last state unasked.
  return answer_;
}

std::string TcpObserver::ServerName() const { return connection_->ServerName(); }

// TcpControlLink ----------------------------------------------------------------------------------

namespace {

// A rank's connection to the hub.
class DirectLink : public ControlLink {
 public:
  // `host_rank` is the rank of the hub's host in the group, -1 if it is not known.
  DirectLink(const TcpStoreOptions& options, std::string id, int host_rank,
             std::unique_ptr<SharedConnection::Link> link, std::shared_ptr<void> keep)
      : keep_(std::move(keep)),
        options_(options),
        id_(std::move(id)),
        host_rank_(host_rank),
        link_(std::move(link)) {}
  ~DirectLink() override { Stop(); }

  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override {
    auto on_frame = [this, receive = std::move(receive)](const std::string& frame) {
      meter_.OnLinksThread();
      absl::StatusOr<ToRank> message = internal::ParseControlMessage<ToRank>(frame);
      if (!message.ok()) return;  // The server sends no other frames.
      meter_.Received(*message, frame.size() + internal::kFrameHeader);
      receive(*std::move(message));
    };
    link_->Start(std::move(on_frame), std::move(lost));
  }
  void Send(ToHub message) override {
    const std::string payload = internal::Serialize(message);
    meter_.Sent(message, payload.size() + internal::kFrameHeader);
    if (IsBeat(message)) link_->ExpectAnswer();
    link_->Send(payload);
  }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank,
                                                    int world_size, absl::Duration timeout,
                                                    const Origin& origin) override {
    return TcpControlLink::Connect(options_,
                                   {.name = std::string(group),
                                    .id = id_,
                                    .members = origin.members,
                                    .rank = rank,
                                    .world_size = world_size,
                                    .timeout = timeout,
                                    .origin = origin},
                                   keep_);
  }
  std::string Key(absl::string_view purpose) const override {
    // The handshake's proofs are hashes under the same secret, of text with another beginning.
    return internal::HmacSha256(options_.secret,
                                absl::StrCat("evenkeel key\n", id_, "\n", purpose));
  }
  absl::Duration Silence() const override { return link_->Silence(); }
  int HubRank() const override { return host_rank_; }
  ControlCounters Counters() const override { return meter_.Read(); }
  void Stop() override { link_->Close(); }

 private:
  const std::shared_ptr<void> keep_;  // First, so that it goes last.
  const TcpStoreOptions options_;
  const std::string id_;
  const int host_rank_;
  internal::LinkMeter meter_;
  const std::unique_ptr<SharedConnection::Link> link_;  // Last, because its thread uses the rest.
};

absl::StatusOr<std::shared_ptr<SharedConnection>> ConnectFor(const TcpStoreOptions& options,
                                                             const Hello& hello,
                                                             const GroupSeat& seat) {
  const auto connect = [&] {
    return ConnectAs(
        options, {.kind = Hello::Kind::kLinks, .rank = hello.rank, .world_size = hello.world_size},
        seat.timeout, seat.origin.status);
  };
  if (options.shares_connection) {
    return SharedConnection::OfProcess(
        absl::StrCat(absl::StrJoin(options.addresses, ","), "\n", options.secret), connect);
  }
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection, connect());
  return std::make_shared<SharedConnection>(std::move(connection));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpControlLink>> TcpControlLink::Connect(
    const TcpStoreOptions& options, const GroupSeat& seat, std::shared_ptr<void> keep) {
  if (options.fanout < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("fanout is ", options.fanout, ", expected at least 1"));
  const int rank = seat.rank < 0 ? options.rank : seat.rank;
  const internal::TreeShape shape{
      .world_size = seat.world_size < 0 ? options.world_size : seat.world_size,
      .fanout = options.fanout};
  if (seat.name.size() > internal::kMaxName) {
    return absl::InvalidArgumentError(absl::StrCat("the group's name has ", seat.name.size(),
                                                   " bytes, at most ", internal::kMaxName,
                                                   " are allowed"));
  }
  const absl::Time deadline = SteadyNow() + std::min(options.timeout, seat.timeout);
  const Hello hello{.kind = Hello::Kind::kControl,
                    .group = seat.name,
                    .id = seat.id,
                    .members = internal::MembersText(seat.members),
                    .rank = rank,
                    .world_size = shape.world_size,
                    .incarnation = seat.incarnation};
  EK_ASSIGN_OR_RETURN(const std::shared_ptr<SharedConnection> connection,
                      ConnectFor(options, hello, seat));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<SharedConnection::Link> opened,
                      connection->Open(hello, deadline, seat.origin.status));
  const std::string local_host = opened->local_address().host;
  // A group of some ranks has numbers of its own for them.
  const int host_rank = seat.world_size < 0 ? options.host_rank : seat.origin.hub_rank;
  std::unique_ptr<ControlLink> link =
      std::make_unique<DirectLink>(options, seat.id, host_rank, std::move(opened), std::move(keep));
  if (!shape.is_star() && seat.incarnation == 0) {
    EK_ASSIGN_OR_RETURN(
        std::unique_ptr<internal::TreeEdges> edges,
        internal::CreateTcpEdges({.job = {options.job, options.secret},
                                  .group = seat.name,
                                  .rank = rank,
                                  .shape = shape,
                                  .host = local_host,
                                  .timeout = std::min(options.timeout, seat.timeout)}));
    link = std::make_unique<internal::TreeLink>(shape, rank, std::move(link), std::move(edges));
  }
  return absl::WrapUnique(new TcpControlLink(std::move(link), local_host));
}

TcpControlLink::TcpControlLink(std::unique_ptr<ControlLink> link, std::string local_host)
    : local_host_(std::move(local_host)), link_(std::move(link)) {}

}  // namespace evenkeel
