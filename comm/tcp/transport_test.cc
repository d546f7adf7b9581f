#include "evenkeel/comm/tcp/transport.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/tcp/delivery.h"
#include "evenkeel/comm/tcp/wire.h"
#include "evenkeel/comm/testing/connections.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;
using Kind = MessageHeader::Kind;

constexpr absl::Duration kSoon = absl::Seconds(30);
constexpr absl::Duration kShort = absl::Milliseconds(50);

// Sizes on both sides of each limit.
constexpr size_t kSizes[] = {0,     1,     kMaxSmall - 1, kMaxSmall, kMaxSmall + 1,
                             65535, 65536, 65537,         8 << 20};

std::pair<UniqueFd, UniqueFd> Connection() {
  const UniqueFd listener = ListenOn({"127.0.0.1", 0}).value();
  UniqueFd one = ConnectTo(LocalAddress(listener).value(), SteadyNow() + absl::Seconds(30)).value();
  EXPECT_TRUE(WaitFor(listener, POLLIN, SteadyNow() + absl::Seconds(30)).ok());
  return {std::move(one), AcceptFrom(listener).value()};
}

using Transports = std::vector<std::shared_ptr<TcpTransport>>;

Transports Connected(int world_size) {
  std::vector<std::vector<UniqueFd>> connections(world_size);
  for (auto& of_rank : connections) of_rank.resize(world_size);
  for (int a = 0; a < world_size; ++a) {
    for (int b = 0; b < a; ++b) std::tie(connections[a][b], connections[b][a]) = Connection();
  }
  Transports transports;
  for (int rank = 0; rank < world_size; ++rank) {
    transports.push_back(TcpTransport::Create(rank, std::move(connections[rank])).value());
  }
  return transports;
}

// How a status leaves a test's body; see StatusOf().
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)) {}
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// Memory with its operations, which are waited for in the order in which they began.
class Piece {
 public:
  Piece(TcpTransport& transport, std::string bytes)
      : data(std::move(bytes)), transport_(&transport) {}
  Piece(TcpTransport& transport, size_t size) : Piece(transport, std::string(size, '?')) {}
  Piece* operator->() { return this; }

  void send(int to, uint64_t slot) { send(to, slot, 0, data.size()); }
  void send(int to, uint64_t slot, size_t offset, size_t bytes) {
    sends_.push_back(transport_->Send(to, slot, data.data() + offset, bytes));
  }
  void recv(int from, uint64_t slot) { recv(from, slot, 0, data.size()); }
  void recv(int from, uint64_t slot, size_t offset, size_t bytes) {
    receives_.push_back(transport_->Receive(from, slot, data.data() + offset, bytes));
  }
  void waitSend(absl::Duration timeout) { Wait(sends_, timeout); }
  void waitRecv(absl::Duration timeout) { Wait(receives_, timeout); }

  std::string data;

 private:
  static void Wait(std::deque<TcpTransport::Pending>& pending, absl::Duration timeout) {
    const absl::Status status = pending.front().Wait(SteadyNow() + timeout);
    if (!status.ok()) throw StatusError(status);
    pending.pop_front();
  }

  TcpTransport* transport_;
  std::deque<TcpTransport::Pending> sends_, receives_;
};

std::string RandomText(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text(size, '\0');
  for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
    const uint64_t bytes = random();
    std::memcpy(text.data() + at, &bytes, std::min(sizeof(bytes), size - at));
  }
  return text;
}

absl::Status StatusOf(const std::function<void()>& call) {
  try {
    call();
    return absl::OkStatus();
  } catch (const StatusError& error) {
    return error.status();
  }
}

// A peer that is a bare socket: rank 1 of 2, of which `transport` is rank 0.
struct RawPeer {
  RawPeer() {
    std::vector<UniqueFd> connections(2);
    std::tie(connections[1], fd) = Connection();
    transport = TcpTransport::Create(0, std::move(connections)).value();
  }
  void Say(absl::string_view bytes) {
    EXPECT_TRUE(SendAll(fd, bytes, SteadyNow() + absl::Seconds(30)).ok());
  }
  void Say(Kind kind, uint64_t slot, uint64_t bytes) {
    const auto header = MessageHeader{kind, slot, bytes}.Serialize();
    Say(absl::string_view(header.data(), header.size()));
  }
  std::string Hear(size_t size) {
    std::string got;
    while (got.size() < size) {
      EXPECT_TRUE(WaitFor(fd, POLLIN, SteadyNow() + absl::Seconds(30)).ok());
      if (ReceiveSome(fd, got).is_over) break;
    }
    return got;
  }

  UniqueFd fd;
  std::shared_ptr<TcpTransport> transport;
};

TEST(TcpTransportTest, EverySizeArrivesWhoeverComesFirst) {
  const Transports t = Connected(2);
  uint64_t slot = 0;
  for (const size_t size : kSizes) {
    for (const bool receives_first : {true, false}) {
      SCOPED_TRACE(absl::StrCat(size, " bytes, ", receives_first ? "recv" : "send", " first"));
      Piece sent(*t[0], RandomText(size, size)), received(*t[1], size);
      Piece go(*t[0], 1), gone(*t[1], 1);
      if (receives_first) received->recv(0, slot);
      sent->send(1, slot);
      if (!receives_first) {
        go->send(1, slot + 1);  // A later message has arrived, so the message has too.
        gone->recv(0, slot + 1);
        gone->waitRecv(kSoon);
        received->recv(0, slot);
      }
      received->waitRecv(kSoon);
      sent->waitSend(kSoon);
      EXPECT_TRUE(received.data == sent.data);
      if (!receives_first) go->waitSend(kSoon);
      slot += 2;
    }
  }
}

// Small and large messages of one slot, many at once, end in their order.
TEST(TcpTransportTest, MessagesOfASlotKeepTheirOrder) {
  const Transports t = Connected(2);
  constexpr int kCount = 400;
  std::mt19937_64 random(1);
  std::vector<size_t> sizes(kCount), offsets(kCount + 1);
  for (int i = 0; i < kCount; ++i) {
    sizes[i] = i % 3 == 0 ? random() % 100000 : random() % 5000;
    offsets[i + 1] = offsets[i] + sizes[i];
  }
  Piece sent(*t[0], RandomText(offsets[kCount], 2)), received(*t[1], offsets[kCount]);
  std::thread sender([&] {
    for (int i = 0; i < kCount; ++i) sent->send(1, 7, offsets[i], sizes[i]);
    for (int i = 0; i < kCount; ++i) sent->waitSend(kSoon);
  });
  constexpr int kAhead = 20;
  for (int i = 0; i < kCount + kAhead; ++i) {
    if (i < kCount) received->recv(0, 7, offsets[i], sizes[i]);
    if (i < kAhead) continue;
    received->waitRecv(kSoon);
    const size_t begin = offsets[i - kAhead], size = sizes[i - kAhead];
    ASSERT_EQ(std::memcmp(received.data.data() + begin, sent.data.data() + begin, size), 0)
        << i - kAhead;
  }
  sender.join();
}

TEST(TcpTransportTest, ManyThreadsShareTheConnections) {
  constexpr int kWorld = 3, kThreads = 4, kRounds = 60;
  const Transports t = Connected(kWorld);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, rank, thread] {
        std::mt19937_64 random(thread);  // The same sizes on all ranks.
        for (int round = 0; round < kRounds; ++round) {
          const size_t size = round % 5 == 0 ? random() % 1000000 : random() % 40000;
          const uint64_t slot = thread * 1000 + round % 7;
          const auto text = [&](int from) {
            return RandomText(size, slot * 100000 + round * 10 + from);
          };
          std::vector<std::unique_ptr<Piece>> received;
          Piece sent(*t[rank], text(rank));
          const int next = (rank + 1) % kWorld, previous = (rank + 2) % kWorld;
          if (round % 2 == 0) sent->send(next, slot), sent->send(previous, slot);
          for (const int from : {next, previous}) {
            received.push_back(std::make_unique<Piece>(*t[rank], size));
            (*received.back())->recv(from, slot);
          }
          if (round % 2 != 0) sent->send(next, slot), sent->send(previous, slot);
          for (const auto& piece : received) (*piece)->waitRecv(kSoon);
          sent->waitSend(kSoon);
          sent->waitSend(kSoon);
          wrong += received[0]->data != text(next);
          wrong += received[1]->data != text(previous);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Far more than the receiver keeps, on slots that nobody receives on yet: others go on.
TEST(TcpTransportTest, WhatNobodyReceivesHoldsUpNobody) {
  const Transports t = Connected(2);
  std::vector<std::unique_ptr<Piece>> waiting;
  for (int i = 0; i < 400; ++i) {
    waiting.push_back(std::make_unique<Piece>(*t[0], RandomText(i % 10 == 0 ? 1 << 20 : 10000, i)));
    (*waiting.back())->send(1, 1000 + i % 3);
  }
  for (const size_t size : kSizes) {
    Piece sent(*t[0], RandomText(size, 5)), received(*t[1], size);
    received->recv(0, 5);
    sent->send(1, 5);
    received->waitRecv(kSoon);
    sent->waitSend(kSoon);
    EXPECT_TRUE(received.data == sent.data);
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(StatusOf([&] {
    (*waiting[0])->waitSend(absl::Milliseconds(1));
  }))) << "no send ends before it has met its receive";
  for (int i = 0; i < 400; ++i) {
    Piece received(*t[1], waiting[i]->data.size());
    received->recv(0, 1000 + i % 3);
    received->waitRecv(kSoon);
    EXPECT_TRUE(received.data == waiting[i]->data) << i;
    (*waiting[i])->waitSend(kSoon);
  }
}

TEST(TcpTransportTest, TheRanksOfASlotAreKeptApart) {
  const Transports t = Connected(4);
  for (const size_t size : {size_t{10}, size_t{300000}}) {
    for (const bool receives_first : {true, false}) {
      std::vector<std::unique_ptr<Piece>> received;
      const auto receive = [&] {
        for (int from = 3; from > 0; --from) {
          received.push_back(std::make_unique<Piece>(*t[0], size));
          (*received.back())->recv(from, 9);
        }
      };
      if (receives_first) receive();
      std::vector<std::thread> threads;
      for (int rank = 1; rank < 4; ++rank) {
        threads.emplace_back([&, rank] {
          Piece sent(*t[rank], std::string(size, static_cast<char>('0' + rank)));
          sent->send(0, 9);
          sent->waitSend(kSoon);
        });
      }
      if (!receives_first) receive();
      for (size_t i = 0; i < received.size(); ++i) {
        (*received[i])->waitRecv(kSoon);
        EXPECT_TRUE(received[i]->data == std::string(size, static_cast<char>('3' - i)));
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

// The receive keeps its place in the order: its message is dropped, the next one arrives.
TEST(TcpTransportTest, AnOperationThatGoesWhileItReceives) {
  for (const size_t size : {size_t{10}, size_t{8} << 20}) {
    const Transports t = Connected(2);
    {
      Piece gone(*t[1], size);
      gone->recv(0, 3);
    }
    Piece first(*t[0], RandomText(size, 1)), second(*t[0], RandomText(size, 2)),
        received(*t[1], size);
    first->send(1, 3);
    second->send(1, 3);
    received->recv(0, 3);
    received->waitRecv(kSoon);
    first->waitSend(kSoon);
    second->waitSend(kSoon);
    EXPECT_TRUE(received.data == second.data);
  }
}

// Half of its message is there already.
TEST(TcpTransportTest, AnOperationThatGoesInTheMiddleOfItsMessage) {
  RawPeer peer;
  constexpr size_t kSize = 1 << 20;
  const std::string half(kSize / 2, 'x');
  {
    Piece gone(*peer.transport, kSize);
    gone->recv(1, 3);
    peer.Hear(MessageHeader::kSize);  // It asks.
    peer.Say(Kind::kDirect, 3, kSize);
    peer.Say(half);
  }
  peer.Say(half);
  Piece next(*peer.transport, 4);
  next->recv(1, 3);
  peer.Say(Kind::kSmall, 3, 4);
  peer.Say("next");
  next->waitRecv(kSoon);
  EXPECT_EQ(next.data, "next");
}

TEST(TcpTransportTest, AnOperationThatGoesWhileItSendsEndsTheConnection) {
  const Transports t = Connected(2);
  Piece received(*t[1], 1 << 20);
  {
    Piece gone(*t[0], 1 << 20);
    gone->send(1, 3);
  }
  const absl::Status status = StatusOf([&] {
    received->recv(0, 4);
    received->waitRecv(kSoon);
  });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(status.message(), "rank 0 closed its connection to rank 1");
  EXPECT_TRUE(absl::IsUnavailable(t[1]->Receive(0, 5, nullptr, 0).Wait(SteadyNow() + kSoon)));
}

TEST(TcpTransportTest, WaitsEndAtTheirTimeout) {
  const Transports t = Connected(2);
  Piece piece(*t[0], 100000);
  piece->recv(1, 1);
  piece->send(1, 2);
  for (const absl::Status& status :
       {StatusOf([&] { piece->waitRecv(kShort); }), StatusOf([&] { piece->waitSend(kShort); })}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 waited until its deadline"));
  }
}

TEST(TcpTransportTest, AbortEndsEveryWaitAtOnceAndTouchesNoMemoryAfterwards) {
  for (int round = 0; round < 20; ++round) {
    const Transports t = Connected(3);
    std::vector<std::thread> threads;
    std::vector<absl::Status> statuses(3);
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        statuses[rank] = StatusOf([&] {
          for (uint64_t slot = 0;;
               ++slot) {  // Freed in the middle of it: asan sees who still writes.
            Piece sent(*t[rank], (slot % 3 + 1) * 500000),
                received(*t[rank], (slot % 3 + 1) * 500000);
            received->recv((rank + 2) % 3, slot);
            sent->send((rank + 1) % 3, slot);
            received->waitRecv(kSoon);
            sent->waitSend(kSoon);
          }
        });
        t[rank]->Abort(statuses[rank]);  // So that who waits for this one learns it.
      });
    }
    Piece never(*t[0], 10);
    never->recv(1, uint64_t{1} << 60);
    std::thread waiter([&] {
      EXPECT_EQ(StatusOf([&] { never->waitRecv(kSoon); }), absl::CancelledError("enough"));
    });
    absl::SleepFor(absl::Milliseconds(round));  // Any moment will do.
    const absl::Time start = SteadyNow();
    t[0]->Abort(absl::CancelledError("enough"));
    waiter.join();
    threads[0].join();
    EXPECT_LT(SteadyNow() - start, absl::Seconds(2));
    for (const int rank : {1, 2}) threads[rank].join();
    EXPECT_EQ(statuses[0], absl::CancelledError("enough"));
    for (const int rank : {1, 2})
      EXPECT_TRUE(absl::IsUnavailable(statuses[rank])) << statuses[rank];
    EXPECT_EQ(StatusOf([&] {
                Piece late(*t[0], 10);
                late->recv(1, 1);
                late->waitRecv(kSoon);
              }),
              absl::CancelledError("enough"));
  }
}

TEST(TcpTransportTest, APeerThatGoesIsNamed) {
  RawPeer peer;
  constexpr size_t kSize = 1 << 20;
  Piece received(*peer.transport, kSize), sent(*peer.transport, 64 << 20);
  received->recv(1, 3);
  sent->send(1, 4);
  peer.Say(Kind::kAsk, 4, 0);
  peer.Hear(100000);
  peer.Say(Kind::kDirect, 3, kSize);
  peer.Say(std::string(kSize / 2, 'x'));
  peer.fd = UniqueFd();
  for (const absl::Status& status :
       {StatusOf([&] { received->waitRecv(kSoon); }), StatusOf([&] { sent->waitSend(kSoon); }),
        peer.transport->Send(1, 5, nullptr, 0).Wait(SteadyNow() + kSoon)}) {
    EXPECT_EQ(status, absl::UnavailableError("rank 1 closed its connection to rank 0"));
  }
}

// One rank's end is not another one's.
TEST(TcpTransportTest, OtherConnectionsGoOn) {
  Transports t = Connected(3);
  t[2] = nullptr;
  Piece lost(*t[0], 10);
  EXPECT_TRUE(absl::IsUnavailable(StatusOf([&] {
    lost->recv(2, 1);
    lost->waitRecv(kSoon);
  })));
  Piece sent(*t[0], RandomText(100000, 1)), received(*t[1], 100000);
  sent->send(1, 2);
  received->recv(0, 2);
  received->waitRecv(kSoon);
  sent->waitSend(kSoon);
  EXPECT_TRUE(received.data == sent.data);
}

TEST(TcpTransportTest, MessagesOfDifferentSizesAreAnErrorThatNamesBoth) {
  const std::pair<size_t, size_t> cases[] = {
      {10, 12}, {10, 100000}, {100000, 10}, {100000, 100001}, {0, 1}};
  for (const auto& [sent_bytes, received_bytes] : cases) {
    for (const bool receives_first : {true, false}) {
      SCOPED_TRACE(absl::StrCat(sent_bytes, " to ", received_bytes, receives_first));
      const Transports t = Connected(2);
      Piece sent(*t[0], sent_bytes), received(*t[1], received_bytes);
      if (receives_first) received->recv(0, 1);
      sent->send(1, 1);
      const absl::Status status = StatusOf([&] {
        if (!receives_first) received->recv(0, 1);
        received->waitRecv(kSoon);
      });
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_EQ(status.message(),
                absl::StrCat("rank 0 sent ", sent_bytes, " bytes where rank 1 expects ",
                             received_bytes, ": the ranks disagree"));
      // The other one learns it, too; what it sent may have been asked for, and gone.
      EXPECT_TRUE(absl::IsUnavailable(StatusOf([&] {
        Piece next(*t[0], 1);
        next->recv(1, 2);
        next->waitRecv(kSoon);
      })));
    }
  }
}

TEST(TcpTransportTest, WhatIsNoMessageEndsTheTransport) {
  const std::vector<std::pair<const char*, std::function<void(RawPeer&)>>> cases = {
      {"not the header of a message", [](RawPeer& peer) { peer.Say(std::string(100, 'x')); }},
      {"unknown kind 99", [](RawPeer& peer) { peer.Say(static_cast<Kind>(99), 1, 1); }},
      {"unknown kind 0", [](RawPeer& peer) { peer.Say(static_cast<Kind>(0), 1, 1); }},
      {"16385 unexpected bytes", [](RawPeer& peer) { peer.Say(Kind::kSmall, 1, kMaxSmall + 1); }},
      {"did not ask for", [](RawPeer& peer) { peer.Say(Kind::kBody, 1, 10); }},
      {"did not ask for", [](RawPeer& peer) { peer.Say(Kind::kDirect, 1, 10); }},
      {"did not ask for",
       [](RawPeer& peer) {
         peer.Hear(MessageHeader::kSize);
         peer.Say(Kind::kBody, 1000, 100000);
       }},
      {"did not send", [](RawPeer& peer) { peer.Say(Kind::kTaken, 1, 0); }},
      {"more unrequested data than the limit of 1048576 bytes",
       [](RawPeer& peer) {
         const std::string bytes(kMaxSmall, 'x');
         for (int i = 0; i < 64; ++i) {
           peer.Say(Kind::kSmall, i, bytes.size());
           peer.Say(bytes);
         }
       }},
  };
  for (const auto& [text, say] : cases) {
    SCOPED_TRACE(text);
    RawPeer peer;
    Piece received(*peer.transport, 100000);
    received->recv(1, 1000);
    say(peer);
    const absl::Status status = StatusOf([&] { received->waitRecv(kSoon); });
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  }
}

// Streams of good messages with a few bytes changed: what was posted ends, one way or the other.
TEST(TcpTransportTest, NoBytesDoHarm) {
  for (int seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    RawPeer peer;
    Piece small(*peer.transport, 100), large(*peer.transport, 50000), sent(*peer.transport, 50000);
    small->recv(1, 1);
    large->recv(1, 2);
    sent->send(1, 3);
    std::string stream;
    const auto add = [&](Kind kind, uint64_t slot, uint64_t bytes, bool with_bytes) {
      const auto header = MessageHeader{kind, slot, bytes}.Serialize();
      stream.append(header.data(), header.size());
      if (with_bytes) stream.append(bytes, 'x');
    };
    add(Kind::kSmall, 1, 100, true);
    add(Kind::kAnnounce, 7, 1 << 20, false);
    add(Kind::kAsk, 3, 0, false);
    add(Kind::kDirect, 2, 50000, true);
    for (int i = random() % 4; i > 0; --i) {
      // Mostly headers: a changed byte of a body is only another number.
      const size_t at = random() % 3 == 0 ? random() % stream.size() : random() % 220;
      stream[at] = static_cast<char>(random());
    }
    if (random() % 4 == 0) stream.resize(random() % stream.size());
    SendAll(peer.fd, stream, SteadyNow() + absl::Seconds(30)).IgnoreError();
    shutdown(peer.fd.get(), SHUT_WR);
    StatusOf([&] { small->waitRecv(kSoon); }).IgnoreError();
    StatusOf([&] { large->waitRecv(kSoon); }).IgnoreError();
    // The end of the stream comes last of all.
    Piece last(*peer.transport, 1);
    const absl::Status status = StatusOf([&] {
      last->recv(1, 99);
      last->waitRecv(kSoon);
    });
    EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsInvalidArgument(status) ||
                absl::IsFailedPrecondition(status))
        << status;
  }
}

// Data that a peer's kernel does not acknowledge --------------------------------------------------

constexpr DeliveryLimits kLimits = {
    .look = absl::Milliseconds(100), .warn = absl::Milliseconds(500), .end = absl::Seconds(3)};
// For tests that need not act before the end.
constexpr DeliveryLimits kShortLimits = {
    .look = absl::Milliseconds(50), .warn = absl::Milliseconds(250), .end = absl::Seconds(1)};

TEST(DeliveryWatchTest, CountsTheTimeWithoutProgressWhileOneIsDue) {
  using Found = DeliveryWatch::Found;
  struct Look {
    const char* what;
    Delivery now;
    absl::Duration elapsed;
    Found found;
  };
  const absl::Duration second = absl::Seconds(1);
  DeliveryWatch watch;
  for (const Look& look : std::vector<Look>{
           {"nothing was sent", {.acknowledged = 0}, absl::Minutes(10), Found::kNothing},
           {"sent since", {.is_due = true, .acknowledged = 10}, second, Found::kNothing},
           {"late, but this process was stopped",
            {.is_due = true, .acknowledged = 10},
            absl::Hours(1),
            Found::kNothing},
           {"4 s", {.is_due = true, .acknowledged = 10}, 2 * second, Found::kNothing},
           {"5 s", {.is_due = true, .acknowledged = 10}, second, Found::kLate},
           {"6 s", {.is_due = true, .acknowledged = 10}, second, Found::kNothing},
           {"a byte has arrived", {.is_due = true, .acknowledged = 11}, second, Found::kNothing},
           {"4 s later", {.is_due = true, .acknowledged = 11}, 2 * second, Found::kNothing},
           {"4 s later", {.is_due = true, .acknowledged = 11}, 2 * second, Found::kNothing},
           {"5 s later", {.is_due = true, .acknowledged = 11}, second, Found::kLate},
           {"all has arrived", {.acknowledged = 20}, second, Found::kNothing},
           {"nothing is due", {.acknowledged = 20}, absl::Hours(1), Found::kNothing},
           {"something is, since an unknown time",
            {.is_due = true, .acknowledged = 20},
            second,
            Found::kNothing},
       }) {
    EXPECT_EQ(watch.Look(look.now, look.elapsed), look.found) << look.what;
  }
  const Delivery stuck = {.is_due = true, .acknowledged = 20};
  for (int i = 1; i < 15; ++i) EXPECT_NE(watch.Look(stuck, second), Found::kLost) << i;
  EXPECT_EQ(watch.Look(stuck, second), Found::kLost);
}

struct Warnings {
  absl::Mutex mutex;
  std::vector<std::string> texts ABSL_GUARDED_BY(mutex);

  WarnFunction function() {
    return [this](const std::string& text) {
      absl::MutexLock lock(&mutex);
      texts.push_back(text);
    };
  }
  std::vector<std::string> Take() {
    absl::MutexLock lock(&mutex);
    return std::exchange(texts, {});
  }
};

// Ranks 0 and 1 of a transport that are ranks 4 and 6 of the group.
struct WatchedPair {
  explicit WatchedPair(const DeliveryLimits& limits) {
    std::vector<UniqueFd> ends[2];
    for (auto& of_rank : ends) of_rank.resize(2);
    std::tie(ends[0][1], ends[1][0]) = Connection();
    fds = {ends[0][1].get(), ends[1][0].get()};
    for (int rank : {0, 1}) {
      ranks.push_back(
          TcpTransport::Create(rank, std::move(ends[rank]),
                               {.names = RankNames({4, 6}),
                                .warn = warnings.function(),
                                .on_lost = [this](const absl::Status& why) { lost = why; },
                                .delivery = limits})
              .value());
    }
  }

  Warnings warnings;
  absl::Status lost;
  std::vector<int> fds;
  Transports ranks;
};

TEST(TcpTransportTest, AConnectionThatDeliversNothingIsWarnedOfAndThenEnds) {
  WatchedPair pair(kShortLimits);
  Piece sent(*pair.ranks[0], 100), received(*pair.ranks[1], 100);
  for (const int fd : pair.fds) DropIncoming(fd);
  const absl::Time start = SteadyNow();
  sent->send(1, 7);
  const absl::Status ended = StatusOf([&] { sent->waitSend(kSoon); });
  EXPECT_GE(SteadyNow() - start, kShortLimits.end);
  EXPECT_TRUE(absl::IsUnavailable(ended)) << ended;
  EXPECT_THAT(std::string(ended.message()),
              HasSubstr("rank 6 has acknowledged nothing from rank 4 for 1s (124 bytes wait)"));
  EXPECT_EQ(pair.lost, ended);
  EXPECT_THAT(pair.warnings.Take(),
              testing::ElementsAre(HasSubstr("rank 6 has acknowledged nothing from rank 4 for ")));
}

TEST(TcpTransportTest, AShortOutageIsWarnedOfAndTheConnectionGoesOn) {
  WatchedPair pair(kLimits);
  Piece sent(*pair.ranks[0], RandomText(1 << 20, 3)), received(*pair.ranks[1], 1 << 20);
  for (const int fd : pair.fds) DropIncoming(fd);
  received->recv(0, 7);
  sent->send(1, 7);
  std::vector<std::string> warned;
  for (const absl::Time deadline = SteadyNow() + absl::Seconds(30);
       warned.empty() && SteadyNow() < deadline;) {
    absl::SleepFor(kLimits.look);
    warned = pair.warnings.Take();
  }
  for (const int fd : pair.fds) StopDropping(fd);
  EXPECT_THAT(warned, testing::Contains(HasSubstr("has acknowledged nothing from ")));
  received->waitRecv(kSoon);
  sent->waitSend(kSoon);
  EXPECT_TRUE(received.data == sent.data);
}

// A rank that is stopped, or in a debugger: its kernel takes what fits, and acknowledges it.
TEST(TcpTransportTest, APeerThatReadsNothingIsNotLost) {
  std::vector<UniqueFd> connections(2);
  auto [ours, theirs] = Connection();
  connections[1] = std::move(ours);
  Warnings warnings;
  const auto transport =
      TcpTransport::Create(0, std::move(connections),
                           {.warn = warnings.function(), .delivery = kShortLimits})
          .value();
  Piece sent(*transport, size_t{32} << 20);
  const auto ask = MessageHeader{Kind::kAsk, 7, 0}.Serialize();
  ASSERT_TRUE(
      SendAll(theirs, absl::string_view(ask.data(), ask.size()), SteadyNow() + absl::Seconds(30))
          .ok());
  sent->send(1, 7);
  absl::SleepFor(kShortLimits.end + absl::Milliseconds(500));
  std::string got;
  while (got.size() < sent.data.size()) {
    ASSERT_TRUE(WaitFor(theirs, POLLIN, SteadyNow() + absl::Seconds(30)).ok());
    ASSERT_FALSE(ReceiveSome(theirs, got).is_over) << got.size();
  }
  sent->waitSend(kSoon);
}

TEST(TcpTransportTest, RefusesARankWithoutAConnection) {
  const Transports t = Connected(2);
  char data[10];
  const auto deadline = SteadyNow() + kSoon;
  EXPECT_TRUE(absl::IsInvalidArgument(t[0]->Send(0, 1, data, 10).Wait(deadline))) << "to itself";
  EXPECT_TRUE(absl::IsInvalidArgument(t[0]->Send(2, 1, data, 10).Wait(deadline)));
  EXPECT_TRUE(absl::IsInvalidArgument(t[0]->Receive(-1, 1, data, 10).Wait(deadline)));
}

}  // namespace
}  // namespace evenkeel::internal
