// Over TCP, ranks find each other, and no other process is admitted, whatever it sends to their
// listeners.

#include "evenkeel/comm/net/peer_meeting.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_line.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(30);

PeerGroup GroupOf(int world_size) {
  return {.name = "world", .world_size = world_size, .key = "the key"};
}

// The meetings of all ranks of a group, each run on a thread of its own.
class Meetings {
 public:
  explicit Meetings(int world_size, const std::function<PeerGroup(int)>& group_of,
                    PeerMeetingOptions options = {}) {
    for (int rank = 0; rank < world_size; ++rank) {
      meetings_.push_back(PeerMeeting::OverTcp(rank, group_of(rank), "127.0.0.1", options).value());
      addresses_.push_back(meetings_.back()->address());
    }
    results_.assign(world_size, absl::UnknownError("not run"));
    connections_.resize(world_size);
  }
  explicit Meetings(int world_size, PeerMeetingOptions options = {})
      : Meetings(
            world_size, [&](int) { return GroupOf(world_size); }, options) {}
  ~Meetings() { Join(); }

  void Start(int rank, absl::Duration timeout = kSoon) {
    threads_.emplace_back([this, rank, timeout] {
      auto connections = meetings_[rank]->Run(addresses_, absl::Now() + timeout);
      results_[rank] = connections.status();
      if (connections.ok()) connections_[rank] = *std::move(connections);
    });
  }
  void StartAll() {
    for (size_t rank = 0; rank < meetings_.size(); ++rank) Start(static_cast<int>(rank));
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  PeerMeeting& operator[](int rank) { return *meetings_[rank]; }
  HostPort address(int rank) { return HostPort::Parse(addresses_[rank]).value(); }
  void set_address(int rank, std::string address) { addresses_[rank] = std::move(address); }
  const absl::Status& result(int rank) const { return results_[rank]; }

  // Whether each rank talks with each other one.
  void ExpectConnected() {
    Join();
    const int world_size = static_cast<int>(meetings_.size());
    for (int a = 0; a < world_size; ++a) {
      ASSERT_TRUE(results_[a].ok()) << results_[a];
      EXPECT_FALSE(connections_[a][a]);
      for (int b = 0; b < world_size; ++b) {
        if (a == b) continue;
        ASSERT_TRUE(SendAll(connections_[a][b], absl::StrCat(a, ">", b), absl::Now() + kSoon).ok());
      }
    }
    for (int a = 0; a < world_size; ++a) {
      for (int b = 0; b < world_size; ++b) {
        if (a == b) continue;
        ASSERT_TRUE(WaitFor(connections_[b][a], POLLIN, absl::Now() + kSoon).ok());
        std::string got;
        ReceiveSome(connections_[b][a], got);
        EXPECT_EQ(got, absl::StrCat(a, ">", b));
      }
    }
  }

 private:
  std::vector<std::unique_ptr<PeerMeeting>> meetings_;
  std::vector<std::string> addresses_;
  std::vector<std::thread> threads_;
  std::vector<absl::Status> results_;
  std::vector<std::vector<UniqueFd>> connections_;
};

// Somebody who calls a listener and says what the test wants.
class Caller {
 public:
  explicit Caller(const HostPort& address) { line_.fd = *ConnectTo(address, absl::Now() + kSoon); }

  absl::StatusOr<std::string> Hear() {
    while (true) {
      EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, line_.Hear());
      if (frame) return *std::move(frame);
      EK_RETURN_IF_ERROR(WaitFor(line_.fd, POLLIN, absl::Now() + kSoon));
    }
  }
  void Say(absl::string_view payload) { SayRaw(Frame(payload)); }
  void SayRaw(absl::string_view bytes) {
    SendAll(line_.fd, bytes, absl::Now() + kSoon).IgnoreError();
  }
  PeerChallenge Challenge() { return PeerChallenge::Parse(Hear().value()).value(); }
  absl::Status Verdict() {
    EK_ASSIGN_OR_RETURN(const std::string frame, Hear());
    EK_ASSIGN_OR_RETURN(const PeerVerdict verdict, PeerVerdict::Parse(frame));
    return verdict.status;
  }
  // Until the other side hangs up.
  void AwaitEnd() {
    while (Hear().ok()) {
    }
  }

 private:
  PeerLine line_;
};

PeerHello HelloOf(const PeerGroup& group, int rank, int lower, const PeerChallenge& challenge) {
  PeerHello hello{.rank = rank, .nonce = RandomBytes(kPeerNonceSize).value()};
  hello.proof = HelloProof(group, lower, challenge, hello);
  return hello;
}

TEST(TcpMeetingTest, ConnectsEachRankWithEachOther) {
  for (const int world_size : {1, 2, 3, 8}) {
    SCOPED_TRACE(world_size);
    Meetings meetings(world_size);
    meetings.StartAll();
    meetings.ExpectConnected();
  }
}

TEST(TcpMeetingTest, NobodyListensForNobody) {
  Meetings meetings(2);
  EXPECT_TRUE(ConnectTo(meetings.address(0), absl::Now() + kSoon).ok());
  EXPECT_TRUE(absl::IsUnavailable(ConnectTo(meetings.address(1), absl::Now() + kSoon).status()))
      << "the last rank";
  meetings.StartAll();
  meetings.ExpectConnected();
  EXPECT_TRUE(absl::IsUnavailable(ConnectTo(meetings.address(0), absl::Now() + kSoon).status()));
}

TEST(TcpMeetingTest, NamesTheRanksThatDoNotCome) {
  Meetings meetings(4);
  meetings.Start(1, absl::Milliseconds(200));
  meetings.Start(3, absl::Milliseconds(200));
  meetings.Join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(meetings.result(1))) << meetings.result(1);
  EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("ranks 0,2 to connect"));
  EXPECT_THAT(std::string(meetings.result(3).message()), HasSubstr("ranks 0,2 to connect"));
}

TEST(TcpMeetingTest, CancelEndsIt) {
  Meetings meetings(2);
  meetings.Start(0);
  meetings[0].Cancel(absl::CancelledError("enough"));
  meetings.Join();
  EXPECT_EQ(meetings.result(0), absl::CancelledError("enough"));
}

TEST(TcpMeetingTest, RefusesAnAddressThatIsNotHere) {
  const absl::Status status = PeerMeeting::OverTcp(0, GroupOf(2), "192.0.2.1").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST(TcpMeetingTest, RefusesWhatIsNoAddress) {
  for (const std::string& address : {std::string("10.0.0.7"), std::string("no number:5"),
                                     std::string("somewhere:5"), std::string()}) {
    Meetings meetings(2);
    meetings.set_address(0, address);
    meetings.Start(1);
    meetings.Join();
    EXPECT_TRUE(absl::IsInvalidArgument(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("rank 0"));
  }
  const absl::Status few = PeerMeeting::OverTcp(0, GroupOf(2), "127.0.0.1")
                               .value()
                               ->Run({}, absl::Now() + kSoon)
                               .status();
  EXPECT_TRUE(absl::IsInvalidArgument(few)) << few;
}

TEST(TcpMeetingTest, ALackOfDescriptorsIsAnObstacle) {
  Meetings meetings(2);
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  meetings.Start(1, absl::Milliseconds(200));
  meetings.Join();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsDeadlineExceeded(meetings.result(1))) << meetings.result(1);
  EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("rank 0: socket"));
}

// The strangers come first, and stay.
TEST(TcpMeetingTest, StrangersWithRandomBytesAndHalfOpenConnectionsDisturbNobody) {
  std::mt19937_64 random(20);
  Meetings meetings(3);
  std::vector<std::unique_ptr<Caller>> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(std::make_unique<Caller>(meetings.address(i % 2)));
    std::string bytes(random() % 4000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 4 == 1) bytes = Frame(bytes.substr(0, 1500));
    if (i % 4 == 2) bytes = bytes.substr(0, 3);
    if (i % 4 == 3) bytes.clear();
    if (!bytes.empty()) strangers.back()->SayRaw(bytes);
  }
  meetings.StartAll();
  std::thread more([&] {
    for (int i = 0; i < 50; ++i) {
      absl::StatusOr<UniqueFd> fd = ConnectTo(meetings.address(i % 2), absl::Now() + kSoon);
      if (!fd.ok()) return;  // All have met.
      SendAll(*fd, std::string(i, 'x'), absl::Now() + kSoon).IgnoreError();
    }
  });
  meetings.ExpectConnected();
  more.join();
}

TEST(TcpMeetingTest, ACallerThatSaysNothingIsLetGoAtItsDeadline) {
  Meetings meetings(2, {.greeting_timeout = absl::Milliseconds(50)});
  meetings.Start(0);
  Caller silent(meetings.address(0));
  silent.AwaitEnd();
  meetings.Start(1);
  meetings.ExpectConnected();
}

TEST(TcpMeetingTest, AWrongKeyIsASentenceAtOnce) {
  Meetings meetings(2, [](int rank) { return PeerGroup{"world", 2, absl::StrCat("key ", rank)}; });
  const absl::Time start = absl::Now();
  meetings.Start(1);
  meetings.Start(0, absl::Milliseconds(500));
  meetings.Join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
  EXPECT_THAT(std::string(meetings.result(1).message()),
              HasSubstr("rank 1 and rank 0: their keys"));
  EXPECT_TRUE(absl::IsDeadlineExceeded(meetings.result(0))) << meetings.result(0);
  EXPECT_THAT(std::string(meetings.result(0).message()), HasSubstr("rank 1 to connect"));
  EXPECT_THAT(std::string(meetings.result(0).message()), HasSubstr("did not prove"));
}

TEST(TcpMeetingTest, OnlyTheGroupsHigherRanksComeInAndEachOnce) {
  Meetings meetings(4);
  meetings.Start(1);
  const auto call = [&](const PeerGroup& group, int rank, int lower = 1) {
    Caller caller(meetings.address(1));
    caller.Say(HelloOf(group, rank, lower, caller.Challenge()).Serialize());
    return caller.Verdict();
  };
  PeerGroup other = GroupOf(4);
  other.name = "another";
  EXPECT_TRUE(absl::IsPermissionDenied(call(other, 2)));
  EXPECT_TRUE(absl::IsPermissionDenied(call(GroupOf(5), 2)));
  EXPECT_TRUE(absl::IsPermissionDenied(call(GroupOf(4), 2, /*lower=*/0)))
      << "meant for another rank";
  for (const int rank : {-1, 0, 1, 4})
    EXPECT_TRUE(absl::IsInvalidArgument(call(GroupOf(4), rank))) << rank;

  Caller good(meetings.address(1));
  const PeerHello hello = HelloOf(GroupOf(4), 3, 1, good.Challenge());
  good.Say(hello.Serialize());
  EXPECT_TRUE(good.Verdict().ok());
  EXPECT_TRUE(absl::IsAlreadyExists(call(GroupOf(4), 3)));
  Caller replay(meetings.address(1));
  replay.Challenge();
  replay.Say(hello.Serialize());
  EXPECT_TRUE(absl::IsPermissionDenied(replay.Verdict()));
  meetings[1].Cancel(absl::CancelledError(""));
}

// A hello that was overheard is of no use in another meeting of the same group.
TEST(TcpMeetingTest, AReplayedHelloIsRefusedAndTheRealRankStillComes) {
  std::string overheard;
  {
    Meetings meetings(2);
    meetings.Start(0);
    Caller rank1(meetings.address(0));
    overheard = HelloOf(GroupOf(2), 1, 0, rank1.Challenge()).Serialize();
    rank1.Say(overheard);
    EXPECT_TRUE(rank1.Verdict().ok());
  }
  Meetings meetings(2);
  meetings.Start(0);
  Caller replay(meetings.address(0));
  replay.Challenge();
  replay.Say(overheard);
  EXPECT_TRUE(absl::IsPermissionDenied(replay.Verdict()));
  meetings.Start(1);
  meetings.ExpectConnected();
}

// Who listens where a rank should be, but does not know the key: it can't prove anything, not even
// by sending back what it is sent.
TEST(TcpMeetingTest, AListenerWithoutTheKeyIsFoundOut) {
  for (const bool mirrors : {false, true}) {
    Meetings meetings(2);
    const UniqueFd listener = ListenOn({"127.0.0.1", 0}).value();
    meetings.set_address(0, LocalAddress(listener).value().ToString());
    meetings.Start(1);
    ASSERT_TRUE(WaitFor(listener, POLLIN, absl::Now() + kSoon).ok());
    PeerLine line;
    line.fd = AcceptFrom(listener).value();
    line.Say(PeerChallenge{.nonce = std::string(kPeerNonceSize, 'n')}.Serialize());
    std::optional<std::string> frame;
    while (!frame) {
      ASSERT_TRUE(line.Flush().ok());
      ASSERT_TRUE(WaitFor(line.fd, POLLIN, absl::Now() + kSoon).ok());
      frame = line.Hear().value();
    }
    const PeerHello hello = PeerHello::Parse(*frame).value();
    line.Say(
        PeerVerdict{.proof = mirrors ? hello.proof : std::string(kDigestSize, 'p')}.Serialize());
    ASSERT_TRUE(line.Flush().ok());
    meetings.Join();
    EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("is not rank 0"));
  }
}

// A caller whose connection is cut before it is answered comes again.
TEST(TcpMeetingTest, ACallIsTriedAgain) {
  Meetings meetings(2);
  const UniqueFd listener = ListenOn({"127.0.0.1", 0}).value();
  meetings.set_address(0, LocalAddress(listener).value().ToString());
  meetings.Start(1);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(WaitFor(listener, POLLIN, absl::Now() + kSoon).ok());
    ASSERT_TRUE(AcceptFrom(listener).ok());
  }
  meetings[1].Cancel(absl::CancelledError("seen enough"));
  meetings.Join();
  EXPECT_TRUE(absl::IsCancelled(meetings.result(1)));
}

TEST(TcpGreetingTest, ProofsDependOnEverything) {
  const PeerChallenge challenge{.nonce = std::string(kPeerNonceSize, 'c')};
  const PeerHello hello{.rank = 2, .nonce = std::string(kPeerNonceSize, 'h')};
  const PeerGroup group = GroupOf(4);
  const std::string proof = HelloProof(group, 1, challenge, hello);
  EXPECT_EQ(proof, HelloProof(group, 1, challenge, hello));
  EXPECT_NE(proof, VerdictProof(group, 1, challenge, hello)) << "the directions must differ";
  EXPECT_NE(proof, HelloProof(group, 0, challenge, hello));
  EXPECT_NE(proof, HelloProof({"World", 4, "the key"}, 1, challenge, hello));
  EXPECT_NE(proof, HelloProof({"world", 5, "the key"}, 1, challenge, hello));
  EXPECT_NE(proof, HelloProof({"world", 4, "a key"}, 1, challenge, hello));
  PeerHello other = hello;
  other.rank = 3;
  EXPECT_NE(proof, HelloProof(group, 1, challenge, other));
  other = hello;
  other.nonce[5] ^= 1;
  EXPECT_NE(proof, HelloProof(group, 1, challenge, other));
  EXPECT_NE(proof, HelloProof(group, 1, {.nonce = std::string(kPeerNonceSize, 'd')}, hello));
}

// Random bytes, and good messages with a few bytes changed, cut or added. What is accepted must be
// a message: it comes back as the same bytes.
TEST(TcpGreetingTest, NoBytesDoHarm) {
  struct Format {
    std::string good;
    std::function<absl::StatusOr<std::string>(absl::string_view)> parse_and_serialize;
  };
  const auto again = [](const auto& parsed) -> absl::StatusOr<std::string> {
    if (!parsed.ok()) return parsed.status();
    return parsed->Serialize();
  };
  const std::string nonce(kPeerNonceSize, 'n'), proof(kDigestSize, 'p');
  const std::vector<Format> formats = {
      {PeerChallenge{nonce}.Serialize(),
       [&](absl::string_view b) { return again(PeerChallenge::Parse(b)); }},
      {PeerHello{7, nonce, proof}.Serialize(),
       [&](absl::string_view b) { return again(PeerHello::Parse(b)); }},
      {PeerVerdict{.proof = proof}.Serialize(),
       [&](absl::string_view b) { return again(PeerVerdict::Parse(b)); }},
      {PeerVerdict{.status = absl::PermissionDeniedError("no")}.Serialize(),
       [&](absl::string_view b) { return again(PeerVerdict::Parse(b)); }},
  };
  std::mt19937_64 random(21);
  for (const Format& format : formats) {
    ASSERT_EQ(format.parse_and_serialize(format.good).value(), format.good);
    for (int i = 0; i < 20000; ++i) {
      std::string bytes = format.good;
      if (i % 10 == 0) bytes.resize(random() % 200);
      for (int changes = random() % 4; changes > 0 && !bytes.empty(); --changes) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
      if (i % 3 == 1) bytes.resize(random() % (bytes.size() + 1));
      if (i % 3 == 2) bytes.append(random() % 5, static_cast<char>(random()));
      const absl::StatusOr<std::string> parsed = format.parse_and_serialize(bytes);
      if (parsed.ok()) {
        ASSERT_EQ(*parsed, bytes);
      } else {
        ASSERT_TRUE(absl::IsInvalidArgument(parsed.status()));
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::internal
