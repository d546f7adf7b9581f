// Within a host, no other process is admitted, whatever it sends to the ranks' listeners.

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/peer_address.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_reception.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/testing/peer_meetings.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

// As the meeting names it in what it proves.
PeerGroup HereOnly(PeerGroup group) {
  group.name = "shared memory " + group.name;
  return group;
}

UnixHello HelloOf(const PeerGroup& group, int rank, int lower, const std::string& nonce) {
  UnixHello message{.listener_nonce = nonce,
                    .hello = {.rank = rank, .nonce = RandomBytes(kPeerNonceSize).value()}};
  message.hello.proof = HelloProof(HereOnly(group), lower, {nonce}, message.hello);
  return message;
}

TEST(ShmMeetingTest, AWrongKeyIsASentenceAtOnceOnBothSides) {
  PeerMeetings meetings(PeerMeetings::OnThisHost, 2, [](int rank) {
    return PeerGroup{"world", 2, absl::StrCat("key ", rank)};
  });
  meetings.StartAll();
  meetings.Join();
  EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(0))) << meetings.result(0);
  EXPECT_THAT(std::string(meetings.result(0).message()),
              HasSubstr("rank 0 and rank 1: their keys"));
  EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
  EXPECT_THAT(std::string(meetings.result(1).message()),
              HasSubstr("rank 1 and rank 0: their keys"));
}

TEST(ShmMeetingTest, ALastingLackOfDescriptorsIsAnError) {
  ExpectALastingLackEndsIt(PeerMeetings::OnThisHost);
}

// The lack lasts when the last rank is admitted, and the meeting may still wait for lower ranks.
TEST(ShmMeetingTest, ALackOfDescriptorsEndsWithTheLastAdmission) {
  PeerListener listener = ListenOnThisHost().value();
  const PeerAddress address = listener.address;
  PeerReception reception(0, HereOnly(GroupOf(2)), std::move(listener), absl::InfiniteDuration());
  const absl::Time start = absl::Now();
  TestCaller rank1(address);
  EXPECT_TRUE(reception.Turn(start).ok());
  const TestCaller stranger(address);
  {
    const NoDescriptors none;
    EXPECT_TRUE(reception.Turn(start).ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(reception.lack())) << reception.lack();
  rank1.Say(HelloOf(GroupOf(2), 1, 0, address.nonce).Serialize());
  EXPECT_TRUE(reception.Turn(start).ok());  // Accepts no caller yet.
  EXPECT_TRUE(reception.IsComplete());
  EXPECT_TRUE(reception.lack().ok()) << reception.lack();
  std::vector<pollfd> entries;
  absl::Time wake_at = absl::InfiniteFuture();
  reception.AddTo(entries, wake_at);
  EXPECT_EQ(wake_at, absl::InfiniteFuture());
  for (const pollfd& entry : entries) EXPECT_EQ(entry.fd, -1);
}

// The strangers come first, and stay: silent ones, nonsense, and one that knows all but the nonce.
TEST(ShmMeetingTest, StrangersDisturbNobody) {
  std::mt19937_64 random(20);
  PeerMeetings meetings(PeerMeetings::OnThisHost, 3);
  meetings.Start(0);
  meetings.Start(1);
  std::vector<std::unique_ptr<TestCaller>> strangers;
  for (int i = 0; i < 500; ++i) {
    strangers.push_back(std::make_unique<TestCaller>(meetings.address(i % 2)));
    std::string bytes(random() % 4000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 5 < 2) continue;
    if (i % 5 == 2)
      bytes = HelloOf(GroupOf(3), 2, i % 2, std::string(kPeerNonceSize, 'n')).Serialize();
    if (i % 5 == 3) bytes.resize(3);
    strangers.back()->Say(bytes);
  }
  meetings.Start(2);
  meetings.ExpectConnected();
  for (const auto& stranger : strangers)
    EXPECT_TRUE(absl::IsUnavailable(stranger->Hear().status())) << "let go without a word";
}

TEST(ShmMeetingTest, OnlyTheGroupsHigherRanksComeInAndEachOnce) {
  PeerMeetings meetings(PeerMeetings::OnThisHost, 4);
  meetings.Start(1);
  const PeerAddress address = meetings.address(1);
  const auto call = [&](int rank) {
    TestCaller caller(address);
    caller.Say(HelloOf(GroupOf(4), rank, 1, address.nonce).Serialize());
    return caller.Verdict();
  };
  for (const int rank : {-1, 0, 1, 4}) EXPECT_TRUE(absl::IsInvalidArgument(call(rank))) << rank;
  TestCaller good(address);
  const std::string hello = HelloOf(GroupOf(4), 3, 1, address.nonce).Serialize();
  good.Say(hello);
  EXPECT_TRUE(good.Verdict().ok());
  EXPECT_TRUE(absl::IsAlreadyExists(call(3)));
  TestCaller replay(address);
  replay.Say(hello);
  EXPECT_TRUE(absl::IsAlreadyExists(replay.Verdict()));
  meetings[1].Cancel(absl::CancelledError(""));
}

TEST(ShmMeetingTest, WhoKnowsTheAddressMustKnowAllTheRest) {
  PeerGroup other = GroupOf(4);
  other.name = "another";
  PeerGroup other_key = GroupOf(4);
  other_key.key = "another";
  const std::function<UnixHello(const std::string&)> hellos[] = {
      [&](const std::string& nonce) { return HelloOf(other, 2, 1, nonce); },
      [&](const std::string& nonce) { return HelloOf(other_key, 2, 1, nonce); },
      [&](const std::string& nonce) { return HelloOf(GroupOf(5), 2, 1, nonce); },
      [&](const std::string& nonce) {
        return HelloOf(GroupOf(4), 2, 0, nonce);
      },  // Meant for another rank.
      [&](const std::string& nonce) {
        UnixHello message = HelloOf(GroupOf(4), 3, 1, nonce);
        message.hello.rank = 2;
        return message;
      },
      [&](const std::string& nonce) {  // Over TCP.
        UnixHello message = HelloOf(GroupOf(4), 2, 1, nonce);
        message.hello.proof = HelloProof(GroupOf(4), 1, {nonce}, message.hello);
        return message;
      },
  };
  for (const auto& hello : hellos) {
    PeerMeetings meetings(PeerMeetings::OnThisHost, 4);
    meetings.Start(1);
    TestCaller caller(meetings.address(1));
    caller.Say(hello(meetings.address(1).nonce).Serialize());
    EXPECT_TRUE(absl::IsPermissionDenied(caller.Verdict()));
    meetings.Join();
    EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("rank 1 and rank 2"));
  }
}

// A process that listens in a rank's place without the key can't prove anything, not even with
// what it was sent.
TEST(ShmMeetingTest, AListenerWithoutTheKeyIsFoundOut) {
  for (const bool mirrors : {false, true}) {
    PeerMeetings meetings(PeerMeetings::OnThisHost, 2);
    UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    socklen_t size = sizeof(address.sun_family);
    ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    ASSERT_EQ(listen(listener.get(), 10), 0);
    size = sizeof(address);
    ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    const std::string name(address.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
    meetings.set_address(0, PeerAddress::OfUnix(name, meetings.address(0).nonce).text);
    meetings.Start(1);
    for (const bool says_nonsense :
         {true, false}) {  // To nonsense the rank hangs up, and calls again.
      const UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      char text[4096];
      const ssize_t got = recv(fd.get(), text, sizeof(text), 0);
      const UnixHello hello = UnixHello::Parse(absl::string_view(text, got)).value();
      std::string answer =
          PeerVerdict{.proof = mirrors ? hello.hello.proof : std::string(kDigestSize, 'p')}
              .Serialize();
      if (says_nonsense) answer = "hello";
      ASSERT_EQ(send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(answer.size()));
      if (says_nonsense) {
        EXPECT_EQ(recv(fd.get(), text, sizeof(text), 0), 0);
      }
    }
    meetings.Join();
    EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("is not rank 0"));
  }
}

// Accepted bytes must be a message: they serialize to the same bytes.
TEST(ShmMeetingTest, NoBytesDoHarm) {
  const std::string hello = HelloOf(GroupOf(2), 1, 0, std::string(kPeerNonceSize, 'n')).Serialize();
  const std::string address = PeerAddress::OfUnix("0001f", std::string(kPeerNonceSize, 'n')).text;
  ASSERT_EQ(UnixHello::Parse(hello).value().Serialize(), hello);
  ASSERT_EQ(PeerAddress::ParseUnix(address).value().text, address);
  std::mt19937_64 random(21);
  const auto change = [&](std::string bytes, int i) {
    for (int changes = random() % 4; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (i % 3 == 1) bytes.resize(random() % (bytes.size() + 1));
    if (i % 3 == 2) bytes.append(random() % 5, static_cast<char>(random()));
    return bytes;
  };
  for (int i = 0; i < 20000; ++i) {
    const std::string changed_hello = change(hello, i);
    if (const auto parsed = UnixHello::Parse(changed_hello); parsed.ok()) {
      ASSERT_EQ(parsed->Serialize(), changed_hello);
    } else {
      ASSERT_TRUE(absl::IsInvalidArgument(parsed.status()));
    }
    const std::string changed_address = change(address, i);
    if (const auto parsed = PeerAddress::ParseUnix(changed_address); parsed.ok()) {
      ASSERT_EQ(parsed->text, changed_address);
    } else {
      ASSERT_TRUE(absl::IsInvalidArgument(parsed.status()));
    }
  }
}

}  // namespace
}  // namespace evenkeel::internal
