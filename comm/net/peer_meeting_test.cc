// Ranks find each other. Over TCP, no other process is admitted, whatever it sends to their
// listeners; within a host: peer_meeting_on_host_test.cc.

#include "evenkeel/comm/net/peer_meeting.h"

#include <poll.h>

#include <cstdint>
#include <filesystem>
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
#include "evenkeel/comm/testing/peer_meetings.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

int64_t OpenFiles() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

PeerMeetings::Make OverTcpWith(const PeerMeetingOptions& options) {
  return [options](int rank, PeerGroup group) {
    return PeerMeeting::OverTcp(rank, std::move(group), "127.0.0.1", options);
  };
}

PeerHello HelloOf(const PeerGroup& group, int rank, int lower, const PeerChallenge& challenge) {
  PeerHello hello{.rank = rank, .nonce = RandomBytes(kPeerNonceSize).value()};
  hello.proof = HelloProof(group, lower, challenge, hello);
  return hello;
}

// The kinds of meetings, and texts that are no addresses of that kind.
struct Kind {
  const char* name;
  PeerMeetings::Make make;
  std::vector<std::string> no_addresses;
};

class PeerMeetingTest : public testing::TestWithParam<Kind> {
 protected:
  const PeerMeetings::Make& make() const { return GetParam().make; }
};

INSTANTIATE_TEST_SUITE_P(
    Kinds, PeerMeetingTest,
    testing::Values(
        Kind{"Tcp", PeerMeetings::OverTcp, {"10.0.0.7", "no number:5", "somewhere:5", ""}},
        Kind{"OnHost", PeerMeetings::OnThisHost, {"10.0.0.7:5", "", std::string(200, 'a')}}),
    [](const testing::TestParamInfo<Kind>& kind) { return kind.param.name; });

TEST_P(PeerMeetingTest, ConnectsEachRankWithEachOther) {
  const int64_t before = OpenFiles();
  for (const int world_size : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(world_size);
    PeerMeetings meetings(make(), world_size);
    meetings.StartAll();
    meetings.ExpectConnected();
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST_P(PeerMeetingTest, NobodyListensForNobody) {
  PeerMeetings meetings(make(), 2);
  EXPECT_TRUE(TestCaller(meetings.address(0)).is_connected());
  EXPECT_FALSE(TestCaller(meetings.address(1)).is_connected()) << "the last rank";
  meetings.StartAll();
  meetings.ExpectConnected();
  EXPECT_FALSE(TestCaller(meetings.address(0)).is_connected());
}

TEST_P(PeerMeetingTest, NamesTheRanksThatDoNotCome) {
  const int64_t before = OpenFiles();
  {
    PeerMeetings meetings(make(), 4);
    meetings.Start(1, absl::Milliseconds(200));
    meetings.Start(3, absl::Milliseconds(200));
    meetings.Join();
    for (const int rank : {1, 3}) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(meetings.result(rank))) << meetings.result(rank);
      EXPECT_THAT(std::string(meetings.result(rank).message()), HasSubstr("ranks 0,2 to connect"));
    }
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST_P(PeerMeetingTest, CancelEndsIt) {
  PeerMeetings meetings(make(), 2);
  meetings.Start(0);
  meetings[0].Cancel(absl::CancelledError("enough"));
  meetings[0].Cancel(absl::CancelledError("too late"));
  meetings.Join();
  EXPECT_EQ(meetings.result(0), absl::CancelledError("enough"));
}

TEST_P(PeerMeetingTest, RefusesWhatIsNoAddress) {
  for (const std::string& address : GetParam().no_addresses) {
    PeerMeetings meetings(make(), 2);
    meetings.set_address(0, address);
    meetings.Start(1);
    meetings.Join();
    EXPECT_TRUE(absl::IsInvalidArgument(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("rank 0"));
  }
  const absl::Status few = make()(0, GroupOf(2)).value()->Run({}, absl::Now() + kSoon).status();
  EXPECT_TRUE(absl::IsInvalidArgument(few)) << few;
}

TEST(TcpMeetingTest, RefusesAnAddressThatIsNotHere) {
  const absl::Status status = PeerMeeting::OverTcp(0, GroupOf(2), "192.0.2.1").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST(TcpMeetingTest, ALackOfDescriptorsIsAnObstacle) {
  struct Case {
    int rank;
    std::string obstacle;
  };
  for (const Case& each : {Case{0, "rank 1 to connect"}, Case{1, "rank 0: socket"}}) {
    SCOPED_TRACE(each.rank);
    PeerMeetings meetings(PeerMeetings::OverTcp, 2);
    const TestCaller waits_for_rank_0(meetings.address(0));
    {
      const NoDescriptors none;
      meetings.Start(each.rank, absl::Milliseconds(200));
      meetings.Join();
    }
    EXPECT_TRUE(absl::IsDeadlineExceeded(meetings.result(each.rank))) << meetings.result(each.rank);
    EXPECT_THAT(std::string(meetings.result(each.rank).message()), HasSubstr(each.obstacle));
  }
}

// One rank at a time: the first one to give up frees descriptors.
TEST(TcpMeetingTest, ALackOfDescriptorsIsAnErrorWhenPatienceEnds) {
  ExpectALastingLackEndsIt(OverTcpWith({.descriptor_patience = absl::Milliseconds(50)}));
}

// The strangers come first, and stay.
TEST(TcpMeetingTest, StrangersWithRandomBytesAndHalfOpenConnectionsDisturbNobody) {
  std::mt19937_64 random(20);
  PeerMeetings meetings(PeerMeetings::OverTcp, 3);
  std::vector<std::unique_ptr<TestCaller>> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(std::make_unique<TestCaller>(meetings.address(i % 2)));
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
      absl::StatusOr<UniqueFd> fd =
          ConnectTo(HostPort::Parse(meetings[i % 2].address()).value(), absl::Now() + kSoon);
      if (!fd.ok()) return;  // All have met.
      SendAll(*fd, std::string(i, 'x'), absl::Now() + kSoon).IgnoreError();
    }
  });
  meetings.ExpectConnected();
  more.join();
}

TEST(TcpMeetingTest, ACallerThatSaysNothingIsLetGoAtItsDeadline) {
  PeerMeetings meetings(OverTcpWith({.greeting_timeout = absl::Milliseconds(50)}), 2);
  meetings.Start(0);
  TestCaller silent(meetings.address(0));
  silent.AwaitEnd();
  meetings.Start(1);
  meetings.ExpectConnected();
}

TEST(TcpMeetingTest, AWrongKeyIsASentenceAtOnce) {
  PeerMeetings meetings(PeerMeetings::OverTcp, 2, [](int rank) {
    return PeerGroup{"world", 2, absl::StrCat("key ", rank)};
  });
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
  PeerMeetings meetings(PeerMeetings::OverTcp, 4);
  meetings.Start(1);
  const auto call = [&](const PeerGroup& group, int rank, int lower = 1) {
    TestCaller caller(meetings.address(1));
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

  TestCaller good(meetings.address(1));
  const PeerHello hello = HelloOf(GroupOf(4), 3, 1, good.Challenge());
  good.Say(hello.Serialize());
  EXPECT_TRUE(good.Verdict().ok());
  EXPECT_TRUE(absl::IsAlreadyExists(call(GroupOf(4), 3)));
  TestCaller replay(meetings.address(1));
  replay.Challenge();
  replay.Say(hello.Serialize());
  EXPECT_TRUE(absl::IsPermissionDenied(replay.Verdict()));
  meetings[1].Cancel(absl::CancelledError(""));
}

// A hello that was overheard is of no use in another meeting of the same group.
TEST(TcpMeetingTest, AReplayedHelloIsRefusedAndTheRealRankStillComes) {
  std::string overheard;
  {
    PeerMeetings meetings(PeerMeetings::OverTcp, 2);
    meetings.Start(0);
    TestCaller rank1(meetings.address(0));
    overheard = HelloOf(GroupOf(2), 1, 0, rank1.Challenge()).Serialize();
    rank1.Say(overheard);
    EXPECT_TRUE(rank1.Verdict().ok());
  }
  PeerMeetings meetings(PeerMeetings::OverTcp, 2);
  meetings.Start(0);
  TestCaller replay(meetings.address(0));
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
    PeerMeetings meetings(PeerMeetings::OverTcp, 2);
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
  PeerMeetings meetings(PeerMeetings::OverTcp, 2);
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
