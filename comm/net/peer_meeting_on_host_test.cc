// Within a host, ranks find each other, and no other process is admitted, whatever it sends to
// their listeners.

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
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
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/peer_address.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/net/peer_reception.h"
#include "evenkeel/comm/net/socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(30);

int64_t OpenFiles() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

// While it lives, the process can open no file. All files that it has open stay usable; poll()
// needs a limit that is not below the number of its entries.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const UniqueFd lowest_free(open("/dev/null", O_RDONLY | O_CLOEXEC));
    const rlimit none = {.rlim_cur = static_cast<rlim_t>(lowest_free.get()),
                         .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptors() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_ = {};
};

PeerGroup GroupOf(int world_size) {
  return {.name = "world", .world_size = world_size, .key = "the key"};
}

// As the meeting names it in what it proves.
PeerGroup HereOnly(PeerGroup group) {
  group.name = "shared memory " + group.name;
  return group;
}

class Meetings {
 public:
  Meetings(int world_size, const std::function<PeerGroup(int)>& group_of) {
    for (int rank = 0; rank < world_size; ++rank) {
      meetings_.push_back(PeerMeeting::OnThisHost(rank, group_of(rank)).value());
      addresses_.push_back(meetings_.back()->address());
    }
    results_.assign(world_size, absl::UnknownError("not run"));
    connections_.resize(world_size);
  }
  explicit Meetings(int world_size)
      : Meetings(world_size, [&](int) { return GroupOf(world_size); }) {}
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
  PeerAddress address(int rank) const { return PeerAddress::ParseUnix(addresses_[rank]).value(); }
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

// Somebody who calls a listener and says what the test wants. Blocks.
class Caller {
 public:
  explicit Caller(const PeerAddress& address)
      : fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    is_connected_ =
        connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address.socket), address.size) == 0;
  }
  bool is_connected() const { return is_connected_; }
  void Say(absl::string_view text) { send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL); }
  // Returns the listener's next bytes; empty: it has hung up.
  std::string Hear() {
    char text[4096];
    const ssize_t got = recv(fd_.get(), text, sizeof(text), 0);
    return got > 0 ? std::string(text, got) : "";
  }
  absl::Status Verdict() {
    const absl::StatusOr<PeerVerdict> verdict = PeerVerdict::Parse(Hear());
    return verdict.ok() ? verdict->status : verdict.status();
  }

 private:
  UniqueFd fd_;
  bool is_connected_ = false;
};

UnixHello HelloOf(const PeerGroup& group, int rank, int lower, const std::string& nonce) {
  UnixHello message{.listener_nonce = nonce,
                    .hello = {.rank = rank, .nonce = RandomBytes(kPeerNonceSize).value()}};
  message.hello.proof = HelloProof(HereOnly(group), lower, {nonce}, message.hello);
  return message;
}

TEST(ShmMeetingTest, ConnectsEachRankWithEachOther) {
  const int64_t before = OpenFiles();
  for (const int world_size : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(world_size);
    Meetings meetings(world_size);
    meetings.StartAll();
    meetings.ExpectConnected();
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST(ShmMeetingTest, NobodyListensForNobody) {
  Meetings meetings(2);
  EXPECT_TRUE(Caller(meetings.address(0)).is_connected());
  EXPECT_FALSE(Caller(meetings.address(1)).is_connected()) << "the last rank";
  meetings.StartAll();
  meetings.ExpectConnected();
  EXPECT_FALSE(Caller(meetings.address(0)).is_connected());
}

TEST(ShmMeetingTest, NamesTheRanksThatDoNotCome) {
  const int64_t before = OpenFiles();
  {
    Meetings meetings(4);
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

TEST(ShmMeetingTest, AWrongKeyIsASentenceAtOnceOnBothSides) {
  Meetings meetings(2, [](int rank) { return PeerGroup{"world", 2, absl::StrCat("key ", rank)}; });
  meetings.StartAll();
  meetings.Join();
  EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(0))) << meetings.result(0);
  EXPECT_THAT(std::string(meetings.result(0).message()),
              HasSubstr("rank 0 and rank 1: their keys"));
  EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
  EXPECT_THAT(std::string(meetings.result(1).message()),
              HasSubstr("rank 1 and rank 0: their keys"));
}

TEST(ShmMeetingTest, CancelEndsIt) {
  Meetings meetings(2);
  meetings.Start(0);
  meetings[0].Cancel(absl::CancelledError("enough"));
  meetings[0].Cancel(absl::CancelledError("too late"));
  meetings.Join();
  EXPECT_EQ(meetings.result(0), absl::CancelledError("enough"));
}

TEST(ShmMeetingTest, RefusesWhatIsNoAddress) {
  for (const std::string& address :
       {std::string("10.0.0.7:5"), std::string(), std::string(200, 'a')}) {
    Meetings meetings(2);
    meetings.set_address(0, address);
    meetings.Start(1);
    meetings.Join();
    EXPECT_TRUE(absl::IsInvalidArgument(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("rank 0"));
  }
  const absl::Status few =
      PeerMeeting::OnThisHost(0, GroupOf(2)).value()->Run({}, absl::Now() + kSoon).status();
  EXPECT_TRUE(absl::IsInvalidArgument(few)) << few;
}

TEST(ShmMeetingTest, ALastingLackOfDescriptorsIsAnError) {
  Meetings meetings(2);
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  meetings.Start(1);
  meetings.Join();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(meetings.result(1))) << meetings.result(1);
  EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("socket"));
}

// The lack lasts when the last rank is admitted, and the meeting may still wait for lower ranks.
TEST(ShmMeetingTest, ALackOfDescriptorsEndsWithTheLastAdmission) {
  PeerListener listener = ListenOnThisHost().value();
  const PeerAddress address = listener.address;
  PeerReception reception(0, HereOnly(GroupOf(2)), std::move(listener), absl::InfiniteDuration());
  const absl::Time start = absl::Now();
  Caller rank1(address);
  EXPECT_TRUE(reception.Turn(start).ok());
  const Caller stranger(address);
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
  Meetings meetings(3);
  meetings.Start(0);
  meetings.Start(1);
  std::vector<std::unique_ptr<Caller>> strangers;
  for (int i = 0; i < 500; ++i) {
    strangers.push_back(std::make_unique<Caller>(meetings.address(i % 2)));
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
  for (const auto& stranger : strangers) EXPECT_EQ(stranger->Hear(), "") << "let go without a word";
}

TEST(ShmMeetingTest, OnlyTheGroupsHigherRanksComeInAndEachOnce) {
  Meetings meetings(4);
  meetings.Start(1);
  const PeerAddress address = meetings.address(1);
  const auto call = [&](int rank) {
    Caller caller(address);
    caller.Say(HelloOf(GroupOf(4), rank, 1, address.nonce).Serialize());
    return caller.Verdict();
  };
  for (const int rank : {-1, 0, 1, 4}) EXPECT_TRUE(absl::IsInvalidArgument(call(rank))) << rank;
  Caller good(address);
  const std::string hello = HelloOf(GroupOf(4), 3, 1, address.nonce).Serialize();
  good.Say(hello);
  EXPECT_TRUE(good.Verdict().ok());
  EXPECT_TRUE(absl::IsAlreadyExists(call(3)));
  Caller replay(address);
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
    Meetings meetings(4);
    meetings.Start(1);
    Caller caller(meetings.address(1));
    caller.Say(hello(meetings.address(1).nonce).Serialize());
    EXPECT_TRUE(absl::IsPermissionDenied(caller.Verdict()));
    meetings.Join();
    EXPECT_TRUE(absl::IsPermissionDenied(meetings.result(1))) << meetings.result(1);
    EXPECT_THAT(std::string(meetings.result(1).message()), HasSubstr("rank 1 and rank 2"));
  }
}

// Who listens where a rank should be, but does not know the key, can't prove anything, not even
// with what it was sent.
TEST(ShmMeetingTest, AListenerWithoutTheKeyIsFoundOut) {
  for (const bool mirrors : {false, true}) {
    Meetings meetings(2);
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
