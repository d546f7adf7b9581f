#include "evenkeel/comm/control/tcp_edges.h"

#include <algorithm>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/control/link_meter.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/seats.h"
#include "evenkeel/comm/control/server_loop.h"
#include "evenkeel/comm/net/connection.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The time for the hub to detect that the parent's process has died.
constexpr absl::Duration kGrace = absl::Milliseconds(500);
// For a connection to authenticate; and for queued messages to be sent.
constexpr absl::Duration kGreeting = absl::Seconds(10), kLinger = absl::Seconds(1);

// A parent's children.
class EdgeSeats : public ControlSeats {
 public:
  EdgeSeats(SendFunction send, const TcpEdgesOptions& options,
            std::function<void(int, ToHub, size_t)> receive)
      : send_(std::move(send)), options_(options), receive_(std::move(receive)) {
    for (const int child : options.shape.ChildrenOf(options.rank)) seats_[child];
  }

  absl::Status Check(const Hello& hello) const override {
    const auto seat = seats_.find(hello.rank);
    if (hello.group != options_.group || hello.world_size != options_.shape.world_size ||
        seat == seats_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", hello.rank, " of ", hello.world_size, " of the group ", hello.group,
                       " is not a child of rank ", options_.rank, " of ", options_.shape.world_size,
                       " of ", options_.group));
    }
    if (!seat->second.has_come) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("rank ", hello.rank, " is connected already"));
  }
  void Join(PeerId peer, const Hello& hello) override {
    seats_[hello.rank] = {.has_come = true, .peer = peer};
    ranks_[peer] = hello.rank;
  }
  absl::Status OnFrame(PeerId peer, absl::string_view frame) override {
    EK_ASSIGN_OR_RETURN(ToHub message, ParseControlMessage<ToHub>(frame));
    receive_(ranks_.at(peer), std::move(message), frame.size() + kFrameHeader);
    return absl::OkStatus();
  }
  // The hub detects whether it is lost.
  void OnDisconnect(PeerId peer) override { ranks_.erase(peer); }
  void SendWaiting() override {
    absl::MutexLock lock(&mutex_);
    for (auto& [child, payloads] : waiting_) {
      const Seat& seat = seats_[child];
      if (!seat.has_come) continue;
      for (const std::string& payload : payloads) send_(seat.peer, payload);
      payloads.clear();
    }
  }

  // From any thread; the caller wakes the loop afterwards.
  void Queue(int child, std::string payload) {
    absl::MutexLock lock(&mutex_);
    waiting_[child].push_back(std::move(payload));
  }

 private:
  struct Seat {
    bool has_come = false;
    PeerId peer = 0;
  };

  const SendFunction send_;
  const TcpEdgesOptions options_;
  const std::function<void(int, ToHub, size_t)> receive_;
  std::map<int, Seat> seats_;  // By child.
  std::map<PeerId, int> ranks_;
  absl::Mutex mutex_;
  std::map<int, std::vector<std::string>> waiting_ ABSL_GUARDED_BY(mutex_);  // By child.
};

class TcpEdges : public TreeEdges {
 public:
  static absl::StatusOr<std::unique_ptr<TcpEdges>> Create(const TcpEdgesOptions& options);
  ~TcpEdges() override { Stop(); }

  void Start(std::function<void(int, ToHub)> from_child, std::function<void(ToRank)> from_parent,
             std::function<void(int, const absl::Status&)> lost) override {
    from_child_ = std::move(from_child);
    from_parent_ = std::move(from_parent);
    lost_ = std::move(lost);
    if (loop_ == nullptr) return;
    absl::StatusOr<std::thread> serving =
        StartThread("exchanges of the ranks", [this] { loop_->Run(); });
    if (serving.ok()) serving_ = *std::move(serving);
    if (!serving.ok()) lost_(kHub, serving.status());
  }
  bool HasAddress() const override { return true; }
  std::string Address() const override { return address_; }
  void AttachParent(const std::string& address) override {
    absl::Status started;
    {
      absl::MutexLock lock(&mutex_);
      if (is_stopping_ || connecting_.joinable()) return;
      absl::StatusOr<std::thread> connecting =
          StartThread("exchanges of the ranks", [this, address] { ConnectToParent(address); });
      if (connecting.ok()) connecting_ = *std::move(connecting);
      started = connecting.status();
    }
    if (!started.ok()) lost_(kHub, started);
  }
  void SendToParent(const ToHub& message) override {
    const std::string payload = Serialize(message);
    up_.Sent(message, payload.size() + kFrameHeader);
    absl::MutexLock lock(&mutex_);
    if (to_parent_ != nullptr) return to_parent_->Send(payload);
    for_parent_.push_back(payload);
  }
  void SendToChildren(absl::Span<const int> to, const ToRank& message) override {
    const std::string payload = Serialize(message);
    for (const int child : to) {
      down_.Sent(message, payload.size() + kFrameHeader);
      seats_->Queue(child, payload);
    }
    loop_->Wake();
  }
  void Stop() override {
    std::thread connecting;
    {
      absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
      connecting.swap(connecting_);
    }
    if (connecting.joinable()) connecting.join();
    Connection* to_parent = nullptr;  // It is not replaced any more.
    {
      absl::MutexLock lock(&mutex_);
      to_parent = to_parent_.get();
    }
    if (to_parent != nullptr) to_parent->Close(kLinger);
    if (!serving_.joinable()) return;
    loop_->Stop();
    serving_.join();
  }
  ControlCounters Counters() const override { return up_.Read() + down_.Read(); }

 private:
  explicit TcpEdges(const TcpEdgesOptions& options)
      : options_(options), parent_(options.shape.ParentOf(options.rank)) {}

  // On a thread of its own.
  void ConnectToParent(const std::string& address) {
    const auto cancelled = [&] {
      absl::MutexLock lock(&mutex_);
      return is_stopping_ ? absl::CancelledError("the link is stopped") : absl::OkStatus();
    };
    const auto find = [&]() -> absl::StatusOr<std::vector<HostPort>> {
      EK_RETURN_IF_ERROR(cancelled());
      EK_ASSIGN_OR_RETURN(HostPort place, HostPort::Parse(address));
      return std::vector<HostPort>{std::move(place)};
    };
    absl::StatusOr<Greeted> greeted =
        Greet(find,
              {.kind = Hello::Kind::kControl,
               .group = options_.group,
               .rank = options_.rank,
               .world_size = options_.shape.world_size},
              options_.job, SteadyNow() + options_.timeout, cancelled);
    if (!greeted.ok()) return OnParentLost(greeted.status());
    absl::StatusOr<std::unique_ptr<Connection>> connection =
        Connection::Create(*std::move(greeted));
    if (!connection.ok()) return OnParentLost(connection.status());
    absl::Status started;
    {
      absl::MutexLock lock(&mutex_);
      to_parent_ = *std::move(connection);
      started = to_parent_->Start(
          [this](const std::string& frame) {
            up_.OnLinksThread();
            absl::StatusOr<ToRank> message = ParseControlMessage<ToRank>(frame);
            if (!message.ok()) return;
            up_.Received(*message, frame.size() + kFrameHeader);
            from_parent_(*std::move(message));
          },
          [this](const absl::Status&) {
            OnParentLost(absl::UnavailableError(
                absl::StrCat("rank ", parent_, " is gone, or the network is cut")));
          });
      for (const std::string& payload : std::exchange(for_parent_, {})) to_parent_->Send(payload);
    }
    if (!started.ok()) OnParentLost(started);
  }

  // On a thread of its own: gives the hub kGrace to report the parent first.
  void OnParentLost(const absl::Status& why) {
    {
      absl::MutexLock lock(&mutex_);
      if (AwaitFor(mutex_, absl::Condition(&is_stopping_), kGrace)) return;
    }
    lost_(parent_, why);
  }

  const TcpEdgesOptions options_;
  const int parent_;
  std::string address_;
  std::function<void(int, ToHub)> from_child_;
  std::function<void(ToRank)> from_parent_;
  std::function<void(int, const absl::Status&)> lost_;
  LinkMeter up_, down_;

  absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Connection> to_parent_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> for_parent_ ABSL_GUARDED_BY(mutex_);  // Kept until it is connected.
  std::thread connecting_ ABSL_GUARDED_BY(mutex_);

  EdgeSeats* seats_ = nullptr;  // Owned by the loop; null: no children.
  std::unique_ptr<ServerLoop> loop_;
  std::thread serving_;
};

absl::StatusOr<std::unique_ptr<TcpEdges>> TcpEdges::Create(const TcpEdgesOptions& options) {
  auto edges = absl::WrapUnique(new TcpEdges(options));
  if (options.shape.ChildrenOf(options.rank).empty()) return edges;
  EK_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn({options.host, 0}));
  EK_ASSIGN_OR_RETURN(const HostPort local, LocalAddress(listener));
  edges->address_ = HostPort{options.host, local.port}.ToString();
  EK_ASSIGN_OR_RETURN(
      edges->loop_,
      ServerLoop::Create(std::move(listener),
                         ServerOptions{.job = options.job,
                                       .host = absl::StrCat("rank ", options.rank),
                                       .has_store = false,
                                       .greeting_timeout = kGreeting,
                                       .linger = absl::ZeroDuration()},
                         [&options, raw = edges.get()](ControlSeats::SendFunction send) {
                           auto seats = std::make_unique<EdgeSeats>(
                               std::move(send), options,
                               [raw](int child, ToHub message, size_t bytes) {
                                 raw->down_.OnLinksThread();
                                 raw->down_.Received(message, bytes);
                                 raw->from_child_(child, std::move(message));
                               });
                           raw->seats_ = seats.get();
                           return seats;
                         }));
  return edges;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TreeEdges>> CreateTcpEdges(const TcpEdgesOptions& options) {
  return TcpEdges::Create(options);
}

}  // namespace evenkeel::internal
