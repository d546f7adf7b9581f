#include "evenkeel/comm/rendezvous/tcp_store.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/key_value.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/greet.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/version.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kSoon =
    absl::Seconds(20);  // For what takes milliseconds when the machine is free.

std::unique_ptr<TcpStoreServer> Serve(TcpStoreServerOptions options = {}) {
  options.secret = "secret";
  return TcpStoreServer::Create(options).value();
}

TcpStoreOptions ClientOf(const TcpStoreServer& server, int rank, int world_size) {
  return {.addresses = {server.address()},
          .secret = "secret",
          .rank = rank,
          .world_size = world_size,
          .host_rank = 0,
          .timeout = kSoon};
}

// A rank's end of the control plane, and what it has been told.
class Member {
 public:
  Member(const TcpStoreServer& server, int rank, int world_size, std::string group = "world")
      : channel_(rank, world_size,
                 TcpControlLink::Connect(ClientOf(server, rank, world_size), {group}).value()) {
    channel_.SetHandlers(
        [this](int culprit, const absl::Status& why) {
          absl::MutexLock lock(&mutex_);
          culprit_ = culprit;
          failure_ = why;
        },
        [this](int from, absl::string_view topic, absl::string_view payload) {
          absl::MutexLock lock(&mutex_);
          notices_.push_back(absl::StrCat(from, " ", topic, " ", payload));
        });
  }

  ControlChannel& operator*() { return channel_; }
  ControlChannel* operator->() { return &channel_; }
  absl::Status WaitForFailure() {
    absl::MutexLock lock(&mutex_);
    const auto failed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !failure_.ok(); };
    mutex_.AwaitWithTimeout(absl::Condition(&failed), kSoon);
    return failure_;
  }
  std::string WaitForNotice() {
    absl::MutexLock lock(&mutex_);
    const auto noticed = [this]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !notices_.empty(); };
    return mutex_.AwaitWithTimeout(absl::Condition(&noticed), kSoon) ? notices_[0] : "";
  }
  int culprit() {
    absl::MutexLock lock(&mutex_);
    return culprit_;
  }

 private:
  absl::Mutex mutex_;
  int culprit_ ABSL_GUARDED_BY(mutex_) = -2;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> notices_ ABSL_GUARDED_BY(mutex_);
  ControlChannel channel_;
};

// Open files of this process.
size_t OpenFiles() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

internal::UniqueFd Stranger(const TcpStoreServer& server) {
  return internal::ConnectTo(internal::HostPort::Parse(server.address()).value(),
                             SteadyNow() + kSoon)
      .value();
}

bool IsCutOff(const internal::UniqueFd& fd) {
  std::string bytes;
  const absl::Time deadline = SteadyNow() + kSoon;
  while (SteadyNow() < deadline) {
    if (!internal::WaitFor(fd, POLLIN, deadline).ok()) return false;
    if (internal::ReceiveSome(fd, bytes).is_over) return true;
  }
  return false;
}

// A server that greets one client, and its first link, and replies to nothing more.
void GreetAndFallSilent(const internal::UniqueFd& listener) {
  ASSERT_TRUE(internal::WaitFor(listener, POLLIN, SteadyNow() + kSoon).ok());
  const internal::UniqueFd fd = internal::AcceptFrom(listener).value();
  const internal::Challenge challenge{.nonce = std::string(internal::kNonceSize, 'n')};
  const auto send = [&](const std::string& payload) {
    ASSERT_TRUE(internal::SendAll(fd, internal::Frame(payload), SteadyNow() + kSoon).ok());
  };
  internal::FrameParser parser(internal::kMaxFrame);
  std::string bytes;
  const auto receive = [&]() -> std::string {
    while (true) {
      if (std::optional<std::string> frame = parser.Next().value()) return *frame;
      bytes.clear();
      if (!internal::WaitFor(fd, POLLIN, SteadyNow() + kSoon).ok() ||
          internal::ReceiveSome(fd, bytes).is_over)
        return "";
      parser.Append(bytes);
    }
  };
  send(challenge.Serialize());
  const internal::Hello hello = internal::Hello::Parse(receive()).value();
  internal::Verdict verdict{.host = "rank 0"};
  verdict.proof = internal::ProofOf("secret", challenge, hello, verdict);
  send(verdict.Serialize());
  if (hello.kind == internal::Hello::Kind::kLinks) {
    const std::string link = receive();
    absl::string_view rest = link;
    send(internal::OnLink(internal::TakeLink(&rest).value(), verdict.Serialize()));
  }
  while (internal::WaitFor(fd, POLLIN, SteadyNow() + kSoon).ok() &&
         !internal::ReceiveSome(fd, bytes).is_over) {
  }
}

TEST(TcpStoreServerTest, ListensOnTheGivenAddressOnly) {
  const std::unique_ptr<TcpStoreServer> server = Serve({.address = "127.0.0.1:0"});
  EXPECT_GT(server->port(), 0);
  EXPECT_EQ(server->address(), absl::StrCat("127.0.0.1:", server->port()));
  // The whole of 127/8 is this host; a server on all interfaces would answer here.
  EXPECT_FALSE(internal::ConnectTo({"127.0.0.2", server->port()}, SteadyNow() + kSoon).ok());
}

TEST(TcpStoreServerTest, RefusesWhatItCannotDo) {
  EXPECT_TRUE(absl::IsInvalidArgument(TcpStoreServer::Create({}).status())) << "no secret";
  EXPECT_TRUE(
      absl::IsInvalidArgument(TcpStoreServer::Create({.address = "here", .secret = "s"}).status()));
  const std::unique_ptr<TcpStoreServer> server = Serve();
  const absl::Status taken =
      TcpStoreServer::Create({.address = server->address(), .secret = "s"}).status();
  EXPECT_TRUE(absl::IsUnavailable(taken));
  EXPECT_THAT(std::string(taken.message()), HasSubstr(server->address()));
}

TEST(TcpStoreTest, RefusesAWrongSecretOnBothSides) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  TcpStoreOptions options = ClientOf(*server, 1, 2);
  options.secret = "another";
  options.timeout = absl::Milliseconds(200);
  const absl::Status status = TcpStore::Connect(options).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(server->address()), HasSubstr("rank 1"), HasSubstr("EVENKEEL_SECRET"),
                    testing::Not(HasSubstr("another"))));
  EXPECT_TRUE(absl::IsPermissionDenied(TcpControlLink::Connect(options).status()));
}

TEST(TcpStoreTest, RefusesAWrongWorldSize) {
  const std::unique_ptr<TcpStoreServer> server = Serve({.world_size = 4});
  EXPECT_TRUE(TcpStore::Connect(ClientOf(*server, 1, 4)).ok());
  const absl::Status status = TcpStore::Connect(ClientOf(*server, 1, 3)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("3 ranks"), HasSubstr("has 4")));
  EXPECT_TRUE(absl::IsInvalidArgument(TcpStore::Connect(ClientOf(*server, 4, 4)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TcpStore::Connect(ClientOf(*server, -1, 4)).status()));
}

TEST(TcpStoreTest, ARankComesToAGroupOnce) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  {
    const auto link = TcpControlLink::Connect(ClientOf(*server, 1, 2));
    ASSERT_TRUE(link.ok()) << link.status();
    const absl::Status twice = TcpControlLink::Connect(ClientOf(*server, 1, 2)).status();
    EXPECT_THAT(std::string(twice.message()), HasSubstr("two processes claim to be rank 1"));
    const absl::Status larger = TcpControlLink::Connect(ClientOf(*server, 0, 3)).status();
    EXPECT_THAT(std::string(larger.message()), HasSubstr("3 ranks, the other ranks have 2"));
    EXPECT_TRUE(TcpControlLink::Connect(ClientOf(*server, 1, 2), {"another group"}).ok());
  }
  absl::Status back = absl::OkStatus();
  const absl::Time deadline =
      SteadyNow() + kSoon;  // The server may need a moment to see that it has gone.
  do {
    back = TcpControlLink::Connect(ClientOf(*server, 1, 2)).status();
  } while (absl::IsInvalidArgument(back) && SteadyNow() < deadline);
  EXPECT_TRUE(absl::IsFailedPrecondition(back)) << back;
}

TEST(TcpStoreTest, AnotherJobsServerIsNotTaken) {
  const std::unique_ptr<TcpStoreServer> other = Serve({.job = "other"}),
                                        mine = Serve({.job = "mine"});
  TcpStoreOptions options = ClientOf(*other, 0, 1);
  options.job = "mine";
  options.timeout = absl::Milliseconds(50);
  const absl::Status status = TcpStore::Connect(options).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(other->address()), HasSubstr("the job other")));
  options.addresses.push_back(mine->address());
  options.timeout = kSoon;
  EXPECT_TRUE(TcpStore::Connect(options).ok());
}

TEST(TcpStoreTest, TriesAgainUntilTheServerIsThere) {
  const int port = Serve()->port();  // Free now, most likely still in a moment.
  TcpStoreOptions options{
      .addresses = {absl::StrCat("127.0.0.1:", port)}, .secret = "secret", .timeout = kSoon};
  std::unique_ptr<TcpStoreServer> server;
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(30));
    server = Serve({.address = options.addresses[0]});
  });
  const absl::Status status = TcpStore::Connect(options).status();
  late.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TcpStoreTest, SaysWhereItFoundNobody) {
  const absl::Status status = TcpStore::Connect({.addresses = {"127.0.0.1:1"},
                                                 .secret = "secret",
                                                 .rank = 3,
                                                 .world_size = 4,
                                                 .timeout = absl::Milliseconds(30)})
                                  .status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 3"), HasSubstr("127.0.0.1:1"), HasSubstr("refused")));
}

TEST(TcpStoreTest, SaysWhoHasGoneWithTheServer) {
  std::unique_ptr<TcpStoreServer> server = Serve({.linger = absl::ZeroDuration()});
  const std::string address = server->address();
  const std::unique_ptr<TcpStore> store = TcpStore::Connect(ClientOf(*server, 1, 2)).value();
  Member member(*server, 1, 2);
  std::thread killer([&] { server = nullptr; });
  const absl::Status status = store->Get("never", kSoon).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(address), HasSubstr("rank 0, which hosts it, is gone")));
  EXPECT_EQ(member.WaitForFailure().message(), status.message());
  EXPECT_EQ(FailureInfoOf(member.WaitForFailure()),
            (FailureInfo{.kind = FailureKind::kRankLost, .ranks = {0}}));
  EXPECT_EQ(member.culprit(), -1);
  killer.join();
}

TEST(TcpControlLinkTest, CarriesWhatAControlChannelDoes) {
  constexpr int kWorld = 3;
  const std::unique_ptr<TcpStoreServer> server = Serve();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      Member member(*server, rank, kWorld);
      for (int step = 0; step < 100; ++step) {
        const auto parts = member->Exchange("step", absl::StrCat(rank, ":", step), kSoon);
        ASSERT_TRUE(parts.ok()) << parts.status();
        for (int r = 0; r < kWorld; ++r) EXPECT_EQ((*parts)[r], absl::StrCat(r, ":", step));
      }
      if (rank == 1) member->Put("plan", std::string(1 << 20, 'p'));
      EXPECT_EQ(member->Get("plan", kSoon).value().size(), size_t{1} << 20);
      member->Send((rank + 1) % kWorld, "ring", absl::StrCat("from ", rank));
      EXPECT_EQ(member->Receive("ring", kSoon).value(),
                absl::StrCat("from ", (rank + kWorld - 1) % kWorld));
      if (rank == 2) {
        member->Notify("hear", "this");
      } else {
        EXPECT_EQ(member.WaitForNotice(), "2 hear this");
      }
      EXPECT_TRUE(member->Exchange("end", "", kSoon).ok());
      member->Leave();
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(TcpControlLinkTest, AllLearnOfALostRankAtOnce) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  Member a(*server, 0, 3), b(*server, 1, 3);
  auto c = std::make_unique<Member>(*server, 2, 3);
  const absl::Time start = SteadyNow();
  c = nullptr;  // Without Leave().
  for (Member* member : {&a, &b}) {
    EXPECT_THAT(std::string(member->WaitForFailure().message()), HasSubstr("rank 2"));
    EXPECT_EQ(member->culprit(), 2);
  }
  EXPECT_LT(SteadyNow() - start, absl::Seconds(5));
}

TEST(TcpControlLinkTest, WhoComesLateLearnsOfTheFailureBefore) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  { Member first(*server, 0, 2); }
  Member late(*server, 1, 2);
  EXPECT_THAT(std::string(late.WaitForFailure().message()), HasSubstr("rank 0"));
}

TEST(TcpControlLinkTest, AGroupsNameCanBeUsedAgainWhenAllHaveLeft) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  for (int round = 0; round < 3; ++round) {
    Member a(*server, 0, 1);
    EXPECT_TRUE(a->Exchange("x", "", kSoon).ok());
    a->Leave();
  }
}

TEST(TcpControlLinkTest, ASilentRankIsLostForTheOthersAndLearnsIt) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  Member a(*server, 0, 3), b(*server, 1, 3), silent(*server, 2, 3);
  internal::RankStatus report;
  report.doing = "runs, 1 s after #3 barrier";
  silent->Beat(report.Serialize(), absl::Milliseconds(300));
  const absl::Time start = SteadyNow();
  // Ranks that have promised nothing may be silent.
  for (Member* member : {&a, &b}) {
    EXPECT_EQ(member->WaitForFailure().message(),
              "rank 2 is silent: no heartbeat for 300ms; at its last heartbeat it runs, 1 s after "
              "#3 barrier");
    EXPECT_EQ(member->culprit(), 2);
  }
  EXPECT_GE(SteadyNow() - start, absl::Milliseconds(300));
  EXPECT_THAT(std::string(silent.WaitForFailure().message()),
              HasSubstr("rank 2 sent no heartbeat for 300ms"));
  std::thread peer(
      [&] { EXPECT_THAT(b->Regroup(kSoon).value().ranks, testing::ElementsAre(0, 1)); });
  EXPECT_THAT(a->Regroup(kSoon).value().ranks, testing::ElementsAre(0, 1));
  peer.join();
  const absl::Status lost = silent->Regroup(kSoon).status();
  EXPECT_THAT(std::string(lost.message()), HasSubstr("the others have declared it lost"));
}

TEST(TcpControlLinkTest, WhoGivesASignOfLifeIsNotSilent) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  Member member(*server, 0, 2), other(*server, 1, 2);
  const absl::Time start = SteadyNow();
  while (SteadyNow() < start + absl::Milliseconds(1300)) {
    member->Beat("", absl::Seconds(1));
    EXPECT_LT(member->link().Silence(), absl::Seconds(1));
    absl::SleepFor(absl::Milliseconds(50));
  }
  member->Beat("", absl::ZeroDuration());  // Promises nothing any more.
  absl::SleepFor(absl::Milliseconds(1200));
  other->Put("still", "here");
  EXPECT_EQ(member->Get("still", kSoon).value(), "here");
}

// A host that is stopped between the challenge and the verdict: the group from which another one is
// made fails meanwhile.
TEST(TcpControlLinkTest, AnErrorOfTheOriginEndsTheWaitForASilentHub) {
  absl::StatusOr<internal::UniqueFd> listener = internal::ListenOn({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok());
  const internal::HostPort address = internal::LocalAddress(*listener).value();
  internal::UniqueFd accepted;
  std::thread hub([&] {
    ASSERT_TRUE(internal::WaitFor(*listener, POLLIN, SteadyNow() + kSoon).ok());
    accepted = internal::AcceptFrom(*listener).value();
    const internal::Challenge challenge{.nonce = std::string(internal::kNonceSize, 'n')};
    ASSERT_TRUE(
        internal::SendAll(accepted, internal::Frame(challenge.Serialize()), SteadyNow() + kSoon)
            .ok());
  });
  const absl::Time start = SteadyNow();
  const auto origin = [&] {
    return SteadyNow() < start + absl::Milliseconds(300) ? absl::OkStatus()
                                                         : absl::UnavailableError("rank 0 is lost");
  };
  const absl::Status status =
      TcpControlLink::Connect(
          {.addresses = {address.ToString()}, .secret = "secret", .timeout = absl::Minutes(1)},
          {.rank = 1, .world_size = 2, .origin = {.status = origin}})
          .status();
  hub.join();
  EXPECT_EQ(status, absl::UnavailableError("rank 0 is lost"));
  EXPECT_LT(SteadyNow() - start, absl::Seconds(20));
}

// The network does not reach the hub's host any more, and patience with it has grown to 8 seconds.
TEST(TcpControlLinkTest, AnErrorOfTheOriginEndsTheWaitForAConnection) {
  absl::StatusOr<internal::UniqueFd> listener = internal::ListenOn({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok());
  const internal::HostPort address = internal::LocalAddress(*listener).value();
  ASSERT_EQ(listen(listener->get(), /*backlog=*/0), 0);
  const internal::UniqueFd first = internal::ConnectTo(address, SteadyNow() + kSoon).value();
  ASSERT_TRUE(absl::IsDeadlineExceeded(
      internal::ConnectTo(address, SteadyNow() + absl::Milliseconds(50)).status()));
  const absl::Time start = SteadyNow();
  const auto origin = [&] {
    return SteadyNow() < start + absl::Seconds(5.5) ? absl::OkStatus()
                                                    : absl::UnavailableError("rank 0 is lost");
  };
  EXPECT_EQ(
      TcpControlLink::Connect(
          {.addresses = {address.ToString()}, .secret = "secret", .timeout = absl::Minutes(1)},
          {.rank = 1, .world_size = 2, .origin = {.status = origin}})
          .status(),
      absl::UnavailableError("rank 0 is lost"));
  EXPECT_LT(SteadyNow() - start, absl::Seconds(10));
}

// A hub that can't answer: it is what a hub does that is stopped.
TEST(TcpControlLinkTest, NoticesThatTheHubIsSilent) {
  absl::StatusOr<internal::UniqueFd> listener = internal::ListenOn({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok());
  const internal::HostPort address = internal::LocalAddress(*listener).value();
  std::thread hub([&] { GreetAndFallSilent(*listener); });
  {
    ControlChannel channel(1, 2,
                           TcpControlLink::Connect({.addresses = {address.ToString()},
                                                    .secret = "secret",
                                                    .rank = 1,
                                                    .world_size = 2,
                                                    .timeout = kSoon})
                               .value());
    absl::SleepFor(absl::Milliseconds(600));
    EXPECT_EQ(channel.link().Silence(), absl::ZeroDuration()) << "it owes no answer";
    channel.Beat("", absl::Seconds(5));
    constexpr absl::Duration kSilence = absl::Milliseconds(300);
    const absl::Time start = SteadyNow();
    while (channel.link().Silence() < kSilence && SteadyNow() < start + kSoon) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_GE(channel.link().Silence(), kSilence);
    EXPECT_GE(SteadyNow() - start, kSilence);
  }
  hub.join();
}

// A server replies at once; the reply to a link that was opened may arrive while Open() still runs.
TEST(TcpControlLinkTest, AReplyThatComesAtOnceEndsTheWaitForIt) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  std::vector<std::unique_ptr<ControlLink>> links;
  for (int i = 0; i < 100; ++i) {
    links.push_back(TcpControlLink::Connect(ClientOf(*server, /*rank=*/0, /*world_size=*/2),
                                            {.name = absl::StrCat("group ", i)})
                        .value());
  }
  absl::SleepFor(absl::Milliseconds(600));
  for (size_t i = 0; i < links.size(); ++i) {
    EXPECT_EQ(links[i]->Silence(), absl::ZeroDuration()) << "link " << i;
  }
}

// The groups of a process share a connection, and no more: each ends alone.
TEST(TcpControlLinkTest, LinksThatShareAConnectionEndAlone) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  const auto open = [&](const std::string& group, int rank) {
    TcpStoreOptions options = ClientOf(*server, rank, 2);
    options.shares_connection = true;
    return TcpControlLink::Connect(options, {.name = group}).value();
  };
  open("first", 0);  // A wait may open a file of the clock's, once.
  const size_t files = OpenFiles();
  auto lost = std::make_unique<ControlChannel>(0, 2, open("lost", 0));
  const size_t first = OpenFiles();
  EXPECT_GT(first, files);
  ControlChannel sees(1, 2, open("lost", 1)), left(0, 2, open("left", 0));
  std::vector<std::unique_ptr<ControlChannel>> many;
  for (int i = 0; i < 100; ++i) {
    const std::string name = absl::StrCat("group ", i % 10);
    for (int rank = 0; rank < 2; ++rank)
      many.push_back(std::make_unique<ControlChannel>(rank, 2, open(name, rank)));
    many[0]->Put("key", name);
    EXPECT_EQ(many[1]->Get("key", kSoon).value(), name);
    for (const auto& channel : many) channel->Leave();
    many.clear();
  }
  EXPECT_EQ(OpenFiles(), first);
  // One without a word, one with it, and the connection lives.
  internal::Notification ended;
  sees.SetHandlers(
      [&](int culprit, const absl::Status&) {
        EXPECT_EQ(culprit, 0);
        ended.Notify();
      },
      [](int, absl::string_view, absl::string_view) {});
  lost = nullptr;
  EXPECT_TRUE(ended.WaitUntil(SteadyNow() + kSoon));
  ControlChannel right(1, 2, open("left", 1));
  left.Put("still", "here");
  EXPECT_EQ(right.Get("still", kSoon).value(), "here");
  // Nor does a message that no frame holds end the others.
  ControlChannel long_winded(0, 2, open("long", 0));
  internal::Notification refused;
  long_winded.SetHandlers(
      [&](int, const absl::Status& why) {
        EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
        refused.Notify();
      },
      [](int, absl::string_view, absl::string_view) {});
  long_winded.Put("long", std::string(internal::kMaxFrame, 'x'));
  EXPECT_TRUE(refused.WaitUntil(SteadyNow() + kSoon));
  left.Put("after", "all");
  EXPECT_EQ(right.Get("after", kSoon).value(), "all");
  left.Leave();
  right.Leave();
}

TEST(TcpControlLinkTest, AGroupHasOneListOfMembers) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  const auto open = [&](std::vector<int> members, std::string id, int rank) {
    return TcpControlLink::Connect(
        ClientOf(*server, rank, 2),
        {.name = "g", .id = std::move(id), .members = std::move(members)});
  };
  const auto first = open({0, 3}, "", 0);
  ASSERT_TRUE(first.ok()) << first.status();
  for (const std::vector<int>& others : {std::vector<int>{0, 2}, {3, 0}, {}}) {
    const absl::Status status = open(others, "", 1).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 1 gives the members of the group g as"),
                      HasSubstr(", the other ranks as 0,3: ")));
  }
  EXPECT_TRUE(open({0, 2}, "another", 1).ok()) << "a group of the same name";
  EXPECT_TRUE(open({0, 3}, "", 1).ok());
}

TEST(TcpControlLinkTest, WhatAllRanksSayIsSaidOnce) {
  constexpr int kWorld = 4;
  const std::unique_ptr<TcpStoreServer> server = Serve();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      Member member(*server, rank, kWorld);
      const std::string same(1000, 's'), other = rank == 2 ? "other" : same;
      EXPECT_EQ(member->Exchange("same", same, kSoon).value(),
                std::vector<std::string>(kWorld, same));
      const int64_t bytes = member->link().Counters().bytes_received;
      EXPECT_LT(bytes, 1200);
      EXPECT_EQ(member->Exchange("other", other, kSoon).value(),
                (std::vector<std::string>{same, same, "other", same}));
      EXPECT_LT(member->link().Counters().bytes_received - bytes, 2200);
      member->Leave();
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(TcpControlLinkTest, CountsWhatItCarries) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  Member a(*server, 0, 2), b(*server, 1, 2);
  constexpr int kSteps = 50;
  std::thread peer([&] {
    for (int step = 0; step < kSteps; ++step) EXPECT_TRUE(b->Exchange("step", "same", kSoon).ok());
  });
  for (int step = 0; step < kSteps; ++step) {
    a->Beat("", absl::Seconds(100));  // Does not count.
    EXPECT_TRUE(a->Exchange("step", "same", kSoon).ok());
  }
  peer.join();
  const ControlCounters counters = a->link().Counters();
  EXPECT_EQ(counters.messages_sent, kSteps);
  EXPECT_EQ(counters.messages_received, kSteps);
  EXPECT_GT(counters.bytes_sent, kSteps * 8);
  EXPECT_LT(counters.bytes_received, kSteps * 100);
  EXPECT_GT(counters.cpu_time, absl::ZeroDuration());
  EXPECT_LT(counters.cpu_time, kSoon);
  a->Leave();
  b->Leave();
}

TEST(TcpControlLinkTest, ADeadlockEndsOnAllRanks) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  Member a(*server, 0, 2), b(*server, 1, 2);
  std::vector<std::thread> threads;
  // Each waits for what the other one would only do afterwards.
  threads.emplace_back([&] { EXPECT_FALSE(a->Get("plan", kSoon).ok()); });
  threads.emplace_back([&] { EXPECT_FALSE(b->Exchange("step", "", kSoon).ok()); });
  const auto beat = [](Member& member) {
    internal::RankStatus report;
    report.received = member->received();
    const internal::Waits::Snapshot now = member->waits()->Now();
    report.everyone_waits = now.everyone_waits;
    for (const internal::Waits::Seen& seen : now.waits) report.waits.push_back(seen.wait);
    member->Beat(report.Serialize(), absl::ZeroDuration());
  };
  const absl::Time start = SteadyNow();
  while (a.culprit() == -2 && SteadyNow() < start + kSoon) {
    beat(a);
    beat(b);
    absl::SleepFor(absl::Milliseconds(20));
  }
  for (Member* member : {&a, &b}) {
    EXPECT_EQ(member->WaitForFailure().message(),
              absl::StrCat(
                  "rank 0 waits in the value \"plan\"; rank 1 waits in \"step\" #0 until all ranks "
                  "have reached it: they cannot go on: the ranks disagree (",
                  internal::kCallsAdvice, "; ", internal::kJoinAdvice, ")"));
    (*member)->Close(member->WaitForFailure());
  }
  for (std::thread& thread : threads) thread.join();
}

// Groups over a tree ------------------------------------------------------------------------------

// All ranks of a group over a tree of fanout 2, on a thread each.
void RunTree(int world_size,
             const std::function<void(int rank, std::unique_ptr<ControlChannel>& channel)>& body) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      TcpStoreOptions options = ClientOf(*server, rank, world_size);
      options.fanout = 2;
      auto channel = std::make_unique<ControlChannel>(rank, world_size,
                                                      TcpControlLink::Connect(options).value());
      ControlChannel* raw = channel.get();
      channel->SetHandlers([raw](int, const absl::Status& why) { raw->Close(why); },
                           [](int, absl::string_view, absl::string_view) {});
      body(rank, channel);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(TcpTreeTest, GivesEveryRanksPartToEveryRankInTwoMessagesPerEdge) {
  constexpr int kSteps = 30;
  for (const int world_size : {1, 2, 3, 5, 8, 13}) {
    SCOPED_TRACE(world_size);
    const internal::TreeShape shape{.world_size = world_size, .fanout = 2};
    std::barrier together(world_size);  // So that nobody's next message is counted.
    RunTree(world_size, [&](int rank, std::unique_ptr<ControlChannel>& channel) {
      // By then everybody has met its parent.
      EXPECT_TRUE(channel->Exchange("begin", "", kSoon).ok());
      const ControlCounters before = channel->link().Counters();
      together.arrive_and_wait();
      for (int step = 0; step < kSteps; ++step) {
        const auto parts = channel->Exchange("step", absl::StrCat(rank, ":", step), kSoon);
        EXPECT_TRUE(parts.ok()) << parts.status();
        std::vector<std::string> expected;
        for (int r = 0; r < world_size; ++r) expected.push_back(absl::StrCat(r, ":", step));
        EXPECT_EQ(parts.value_or(std::vector<std::string>()), expected);
      }
      const ControlCounters after = channel->link().Counters();
      const auto edges = static_cast<int64_t>(1 + shape.ChildrenOf(rank).size());
      EXPECT_EQ(after.messages_sent - before.messages_sent, kSteps * edges);
      EXPECT_EQ(after.messages_received - before.messages_received, kSteps * edges);
      together.arrive_and_wait();
      channel->Leave();
    });
  }
}

TEST(TcpTreeTest, AllLearnOfALostRankWhereverItStands) {
  for (const int lost : {0, 2, 12}) {
    SCOPED_TRACE(lost);
    std::barrier together(13);  // A failure may overtake an answer that comes down the tree.
    RunTree(13, [&](int rank, std::unique_ptr<ControlChannel>& channel) {
      EXPECT_TRUE(channel->Exchange("begin", "", kSoon).ok());
      together.arrive_and_wait();
      if (rank == lost) {
        channel = nullptr;  // Without Leave().
        return;
      }
      const absl::Time start = SteadyNow();
      const absl::Status status = channel->Exchange("step", "", kSoon).status();
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("rank ", lost)));
      EXPECT_LT(SteadyNow() - start, absl::Seconds(5));
    });
  }
}

TEST(TcpTreeTest, WhoLeavesTooEarlyIsNamed) {
  for (const int gone : {1, 4, 9}) {
    SCOPED_TRACE(gone);
    std::barrier together(10);
    RunTree(10, [&](int rank, std::unique_ptr<ControlChannel>& channel) {
      EXPECT_TRUE(channel->Exchange("begin", "", kSoon).ok());
      together.arrive_and_wait();
      if (rank == gone) return channel->Leave();
      const absl::Status status = channel->Exchange("step", "", kSoon).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(status) || absl::IsUnavailable(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("rank ", gone)));
    });
  }
}

TEST(TcpTreeTest, WhoIsMissingIsExact) {
  absl::Notification has_asked;
  RunTree(8, [&](int rank, std::unique_ptr<ControlChannel>& channel) {
    if (rank == 3 || rank == 6) {
      has_asked.WaitForNotification();
      EXPECT_TRUE(channel->Exchange("step", "", kSoon).ok());
    } else {
      absl::Notification done;
      channel->Exchange("step", "", [&](const auto& parts) {
        EXPECT_TRUE(parts.ok());
        done.Notify();
      });
      if (rank == 5) {
        // The others may still be on their way here.
        const absl::Time start = SteadyNow();
        while (channel->WhoIsMissing("step", 0).text != "ranks 3,6" &&
               SteadyNow() < start + kSoon) {
        }
        EXPECT_EQ(channel->WhoIsMissing("step", 0).text, "ranks 3,6");
        has_asked.Notify();
      }
      EXPECT_TRUE(done.WaitForNotificationWithTimeout(kSoon));
    }
    channel->Leave();
  });
}

TEST(TcpTreeTest, ANewGroupOfThoseThatAreLeftHasATreeToo) {
  std::barrier together(8);
  RunTree(8, [&](int rank, std::unique_ptr<ControlChannel>& channel) {
    EXPECT_TRUE(channel->Exchange("begin", "", kSoon).ok());
    together.arrive_and_wait();
    if (rank == 1) {
      channel = nullptr;
      return;
    }
    EXPECT_FALSE(channel->Exchange("step", "", kSoon).ok());
    const auto survivors = channel->Regroup(kSoon);
    ASSERT_TRUE(survivors.ok()) << survivors.status();
    EXPECT_THAT(survivors->ranks, testing::ElementsAre(0, 2, 3, 4, 5, 6, 7));
    const int seat = rank == 0 ? 0 : rank - 1;
    auto link = channel->link().Open("next", seat, 7, kSoon, {});
    ASSERT_TRUE(link.ok()) << link.status();
    ControlChannel next(seat, 7, *std::move(link));
    EXPECT_EQ(next.Exchange("x", absl::StrCat(seat), kSoon).value().size(), 7u);
    next.Leave();
  });
}

TEST(TcpObserverTest, SeesTheRanksOfEachGroup) {
  const std::unique_ptr<TcpStoreServer> server = Serve({.world_size = 3});
  const auto observer = TcpObserver::Connect(ClientOf(*server, 0, 1)).value();
  EXPECT_EQ(observer->Status(kSoon).value(), "[]");
  Member first(*server, 0, 3), second(*server, 1, 3);
  first->Beat(
      internal::RankStatus{.doing = "runs \"well\"", .waited_ms = 7, .details = R"({"step":3})"}
          .Serialize(),
      absl::Seconds(60));
  first->Exchange("shapes", "", [](const auto&) {});
  second->Beat(
      internal::RankStatus{.waits = {{.kind = internal::Wait::Kind::kExchange, .topic = "shapes"}}}
          .Serialize(),
      absl::Seconds(60));
  std::string status;
  const auto has_come = [&] {
    status = observer->Status(kSoon).value();
    return absl::StrContains(status, "\"waits_for\":[1,2]") && absl::StrContains(status, "well");
  };
  const absl::Time deadline = SteadyNow() + kSoon;
  while (!has_come() && SteadyNow() < deadline) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_THAT(status, HasSubstr(R"("group":"world","error":"")"));
  EXPECT_THAT(status, HasSubstr(R"("state":"connected","doing":"runs \"well\"","waited_ms":7)"));
  EXPECT_THAT(status, HasSubstr(R"("steps":{"step":3})"));
  EXPECT_THAT(status, HasSubstr(R"("state":"not connected")"));
}

TEST(TcpObserverTest, SeesWhyAGroupHasEnded) {
  const std::unique_ptr<TcpStoreServer> server = Serve({.world_size = 2});
  Member first(*server, 0, 2);
  { const Member second(*server, 1, 2); }
  ASSERT_FALSE(first.WaitForFailure().ok());
  const auto observer = TcpObserver::Connect(ClientOf(*server, 0, 1)).value();
  const std::string status = observer->Status(kSoon).value();
  EXPECT_THAT(status, HasSubstr("\"error\":\"rank 1 "));
  EXPECT_THAT(status, HasSubstr("\"state\":\"lost\""));
}

// An observer's connection, without a thread that reads.
internal::Greeted GreetAsObserver(const TcpStoreServer& server) {
  const internal::Hello hello{.kind = internal::Hello::Kind::kObserver};
  return internal::Greet(
             [&] {
               return std::vector<internal::HostPort>{
                   internal::HostPort::Parse(server.address()).value()};
             },
             hello, {.secret = "secret"}, SteadyNow() + kSoon)
      .value();
}

TEST(TcpObserverTest, NeedsTheSecretAndCanOnlyAsk) {
  const std::unique_ptr<TcpStoreServer> server = Serve({.world_size = 2});
  TcpStoreOptions wrong = ClientOf(*server, 0, 1);
  wrong.secret = "another";
  wrong.timeout = absl::Milliseconds(200);
  const absl::Status refused = TcpObserver::Connect(wrong).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("and the observer: the secrets differ"));

  // One that sends more than that is disconnected.
  const internal::Greeted greeted = GreetAsObserver(*server);
  internal::StoreRequest request{.op = internal::StoreRequest::Op::kSet, .key = "key"};
  const std::string frame = internal::Frame(request.Serialize());
  ASSERT_TRUE(internal::SendAll(greeted.fd, frame, SteadyNow() + kSoon).ok());
  std::string bytes;
  bool is_over = false;
  while (!is_over && internal::WaitFor(greeted.fd, POLLIN, SteadyNow() + kSoon).ok())
    is_over = internal::ReceiveSome(greeted.fd, bytes).is_over;
  EXPECT_TRUE(is_over);
  EXPECT_EQ(bytes, "");
  EXPECT_FALSE(TcpStore::Connect(ClientOf(*server, 0, 2)).value()->Check("key").value());
}

TEST(TcpObserverTest, ManyDoNotDelayTheRanks) {
  const std::unique_ptr<TcpStoreServer> server = Serve({.world_size = 2});
  Member first(*server, 0, 2), second(*server, 1, 2);
  std::vector<std::unique_ptr<TcpObserver>> observers;
  for (int i = 0; i < 200; ++i)
    observers.push_back(TcpObserver::Connect(ClientOf(*server, 0, 1)).value());
  for (const auto& observer : observers) EXPECT_TRUE(observer->Status(kSoon).ok());

  // One that asks and never reads is disconnected.
  const internal::Greeted greeted = GreetAsObserver(*server);
  std::string requests;
  for (int i = 0; i < 1000; ++i) requests += internal::Frame("");
  bool is_over = false;
  const absl::Time deadline = SteadyNow() + kSoon;
  while (!is_over && SteadyNow() < deadline)
    is_over = !internal::SendAll(greeted.fd, requests, SteadyNow() + absl::Seconds(1)).ok();
  EXPECT_TRUE(is_over);

  std::thread other([&] { EXPECT_TRUE(second->Exchange("meet", "", kSoon).ok()); });
  EXPECT_TRUE(first->Exchange("meet", "", kSoon).ok());
  other.join();
}

TEST(TcpObserverTest, GetsTheLastStateAndThenThatTheServerHasEnded) {
  std::unique_ptr<TcpStoreServer> server = Serve({.world_size = 2});
  auto first = std::make_unique<Member>(*server, 0, 2);
  const auto observer = TcpObserver::Connect(ClientOf(*server, 0, 1)).value();
  EXPECT_TRUE(observer->Status(kSoon).ok());
  { const Member second(*server, 1, 2); }
  ASSERT_FALSE(first->WaitForFailure().ok());
  first = nullptr;
  server = nullptr;
  EXPECT_THAT(observer->Status(kSoon).value_or(""),
              testing::ContainsRegex(R"("error":"rank 1 .*"state":"connected".*"state":"lost")"));
  const absl::Status gone = observer->Status(kSoon).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kOutOfRange) << gone;
  EXPECT_THAT(std::string(gone.message()), HasSubstr("is gone"));
}

TEST(TcpObserverTest, SaysThatTheServersProcessHangs) {
  absl::StatusOr<internal::UniqueFd> listener = internal::ListenOn({"127.0.0.1", 0});
  ASSERT_TRUE(listener.ok());
  const internal::HostPort address = internal::LocalAddress(*listener).value();
  std::thread hub([&] { GreetAndFallSilent(*listener); });
  {
    const auto observer =
        TcpObserver::Connect(
            {.addresses = {address.ToString()}, .secret = "secret", .timeout = kSoon})
            .value();
    const absl::Status hangs = observer->Status(absl::Milliseconds(100)).status();
    EXPECT_EQ(hangs.code(), absl::StatusCode::kDeadlineExceeded) << hangs;
    EXPECT_THAT(
        std::string(hangs.message()),
        AllOf(HasSubstr(absl::StrCat("the store at ", address.ToString(), ", hosted by rank 0")),
              HasSubstr("its process hangs")));
  }
  hub.join();
}

TEST(TcpStoreServerTest, AHostThatEndsLetsTheOthersLeaveFirst) {
  std::unique_ptr<TcpStoreServer> server = Serve({.linger = absl::Minutes(10)});
  auto other = std::make_unique<Member>(*server, 1, 2);
  {
    Member host(*server, 0, 2);
    host->Leave();
  }
  std::thread ending([&] { server = nullptr; });
  absl::SleepFor(
      absl::Milliseconds(50));  // Not needed for the outcome: gives a wrong server time to cut off.
  (*other)->Put("still", "served");
  EXPECT_EQ((*other)->Get("still", kSoon).value(), "served");
  (*other)->Leave();
  other = nullptr;
  ending.join();
}

// The bytes that both sides of a connection have sent.
struct Recorded {
  std::string by_client, by_server;
};

// Stands between clients and a server, passes on all that they say, and keeps it.
class RecordingProxy {
 public:
  explicit RecordingProxy(const TcpStoreServer& server)
      : server_(internal::HostPort::Parse(server.address()).value()),
        listener_(internal::ListenOn({"127.0.0.1", 0}).value()),
        wake_(internal::WakeUp::Create().value()),
        thread_([this] { Run(); }) {}
  ~RecordingProxy() { Stop(); }

  std::string address() const { return internal::LocalAddress(listener_)->ToString(); }
  // One per connection, in their order.
  std::vector<Recorded> Stop() {
    if (!thread_.joinable()) return {};
    wake_.Signal();
    thread_.join();
    std::vector<Recorded> recorded;
    for (Pair& pair : pairs_) recorded.push_back(pair.said);
    return recorded;
  }

 private:
  struct Pair {
    internal::UniqueFd client, server;
    Recorded said;
    bool is_over = false;
  };

  void Run() {
    while (true) {
      std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Pair& pair : pairs_) {
        entries.push_back({pair.is_over ? -1 : pair.client.get(), POLLIN, 0});
        entries.push_back({pair.is_over ? -1 : pair.server.get(), POLLIN, 0});
      }
      poll(entries.data(), entries.size(), -1);
      if (entries[0].revents != 0) return;
      for (Pair& pair : pairs_) {
        if (pair.is_over) continue;
        pair.is_over = !Pass(pair.client, pair.server, pair.said.by_client) ||
                       !Pass(pair.server, pair.client, pair.said.by_server);
        if (pair.is_over) pair = {.said = std::move(pair.said), .is_over = true};
      }
      internal::UniqueFd client = internal::AcceptFrom(listener_).value();
      if (!client) continue;
      pairs_.push_back(
          {std::move(client), internal::ConnectTo(server_, SteadyNow() + kSoon).value()});
    }
  }
  static bool Pass(const internal::UniqueFd& from, const internal::UniqueFd& to,
                   std::string& said) {
    std::string bytes;
    const bool is_over = internal::ReceiveSome(from, bytes).is_over;
    said += bytes;
    return internal::SendAll(to, bytes, SteadyNow() + kSoon).ok() && !is_over;
  }

  const internal::HostPort server_;
  const internal::UniqueFd listener_;
  const internal::WakeUp wake_;
  std::vector<Pair> pairs_;
  std::thread thread_;
};

// The secret in the forms in which it could slip into what is sent.
std::vector<std::string> FormsOf(const std::string& secret) {
  return {secret,
          absl::BytesToHexString(secret),
          absl::Base64Escape(secret),
          std::string(secret.rbegin(), secret.rend()),
          secret.substr(0, 8),
          secret.substr(secret.size() - 8)};
}

TEST(HandshakeTest, TheSecretIsNeverSent) {
  const std::string secret = "correct horse battery staple";
  const std::unique_ptr<TcpStoreServer> server =
      TcpStoreServer::Create({.job = "job", .secret = secret}).value();
  RecordingProxy proxy(*server);
  TcpStoreOptions options{.addresses = {proxy.address()},
                          .job = "job",
                          .secret = secret,
                          .rank = 0,
                          .world_size = 2,
                          .timeout = kSoon};
  {
    const auto store = TcpStore::Connect(options);
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_TRUE((*store)->Set("said to the store", "value").ok());
    EXPECT_TRUE(TcpControlLink::Connect(options).ok());
  }
  options.rank = 2;  // Refused.
  EXPECT_FALSE(TcpStore::Connect(options).ok());
  options.rank = 0;
  options.secret = "wrong horse battery staples";
  options.timeout = absl::Milliseconds(100);  // It tries more than once.
  EXPECT_TRUE(absl::IsPermissionDenied(TcpStore::Connect(options).status()));

  const std::vector<Recorded> recorded = proxy.Stop();
  ASSERT_GE(recorded.size(), 4u);
  EXPECT_THAT(recorded[0].by_client, HasSubstr("said to the store")) << "the proxy does not record";
  for (const Recorded& said : recorded) {
    EXPECT_FALSE(said.by_client.empty());
    EXPECT_FALSE(said.by_server.empty());
    for (const std::string& form : FormsOf(secret)) {
      EXPECT_THAT(said.by_client, testing::Not(HasSubstr(form)));
      EXPECT_THAT(said.by_server, testing::Not(HasSubstr(form)));
    }
    for (const std::string& form : FormsOf(options.secret))
      EXPECT_THAT(said.by_client, testing::Not(HasSubstr(form)));
  }
  EXPECT_NE(recorded[0].by_server.substr(0, 200), recorded[1].by_server.substr(0, 200))
      << "a nonce came twice";
}

// All that a stranger sends, and what the server says to it until it cuts off.
std::string AnswerTo(const TcpStoreServer& server, absl::string_view bytes) {
  const internal::UniqueFd fd = Stranger(server);
  std::string answer;
  const absl::Time deadline = SteadyNow() + kSoon;
  if (!internal::SendAll(fd, bytes, deadline).ok()) return answer;
  while (internal::WaitFor(fd, POLLIN, deadline).ok() &&
         !internal::ReceiveSome(fd, answer).is_over) {
  }
  return answer;
}

TEST(HandshakeTest, APlayedBackHandshakeIsRefused) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  RecordingProxy proxy(*server);
  TcpStoreOptions options = ClientOf(*server, 0, 2);
  options.addresses = {proxy.address()};
  ASSERT_TRUE(TcpStore::Connect(options).value()->Set("key", "set by rank 0").ok());
  const std::vector<Recorded> recorded = proxy.Stop();
  ASSERT_EQ(recorded.size(), 1u);
  ASSERT_THAT(recorded[0].by_client, HasSubstr("set by rank 0"));

  const std::unique_ptr<TcpStore> store = TcpStore::Connect(ClientOf(*server, 1, 2)).value();
  ASSERT_TRUE(store->Set("key", "changed since").ok());
  EXPECT_THAT(AnswerTo(*server, recorded[0].by_client), HasSubstr("the secrets differ"));
  // Nor can what the server has said be used as a proof.
  EXPECT_THAT(AnswerTo(*server, recorded[0].by_server), testing::Not(HasSubstr("set by rank 0")));
  EXPECT_EQ(store->Get("key", kSoon).value(), "changed since");
}

// A server that sends a challenge and `more` to those who connect, or to the first.
class Impostor {
 public:
  explicit Impostor(const internal::Challenge& challenge, absl::string_view more = "",
                    bool only_first = false)
      : says_(absl::StrCat(internal::Frame(challenge.Serialize()), more)),
        only_first_(only_first),
        thread_([this] { Run(); }) {}
  ~Impostor() {
    stop_.Signal();
    thread_.join();
  }
  std::string address() const { return internal::LocalAddress(listener_)->ToString(); }
  int connections() const { return connections_; }

 private:
  void Run() {
    std::vector<internal::UniqueFd> connections;
    while (true) {
      pollfd entries[] = {{stop_.fd(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      poll(entries, 2, -1);
      if (entries[0].revents != 0) return;
      connections.push_back(internal::AcceptFrom(listener_).value());
      ++connections_;
      if (only_first_ && connections.size() > 1) continue;
      (void)internal::SendAll(connections.back(), says_, SteadyNow() + kSoon);
    }
  }

  const std::string says_;
  const bool only_first_;
  std::atomic<int> connections_ = 0;
  const internal::UniqueFd listener_ = internal::ListenOn({"127.0.0.1", 0}).value();
  const internal::WakeUp stop_ = internal::WakeUp::Create().value();
  std::thread thread_;
};

internal::Challenge ChallengeOf(uint32_t version, absl::string_view build, absl::string_view job) {
  return {.version = version,
          .build = std::string(build),
          .job = std::string(job),
          .nonce = std::string(internal::kNonceSize, 'n')};
}

absl::Status ConnectTo(const std::vector<std::string>& addresses, absl::Duration timeout) {
  return TcpStore::Connect({.addresses = addresses,
                            .job = "job",
                            .secret = "secret",
                            .rank = 1,
                            .world_size = 2,
                            .timeout = timeout})
      .status();
}

std::string ConnectToABuild(uint32_t version, absl::string_view build, absl::string_view job,
                            bool only_first = false) {
  const Impostor other(ChallengeOf(version, build, job), "", only_first);
  return ConnectTo({other.address()}, absl::Seconds(1)).ToString();
}

TEST(HandshakeTest, AStoreOfAnotherBuildIsRefused) {
  const std::string ours =
      absl::StrCat("rank 1 runs evenkeel ", kBuild, " (protocol ", internal::kProtocolVersion, ")");
  EXPECT_THAT(ConnectToABuild(internal::kProtocolVersion, "0.0.1", "job"),
              AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("the store runs evenkeel 0.0.1"),
                    HasSubstr(ours)));
  EXPECT_THAT(ConnectToABuild(99, kBuild, "job"),
              AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("(protocol 99)"), HasSubstr(ours)));
  EXPECT_THAT(ConnectToABuild(99, "0.9.9", "other"),
              AllOf(HasSubstr("DEADLINE_EXCEEDED"), HasSubstr("the job other")));
}

TEST(HandshakeTest, AnAttemptThatTheDeadlineCutsShortHidesNoReason) {
  EXPECT_THAT(ConnectToABuild(99, "0.9.9", "other", /*only_first=*/true),
              AllOf(HasSubstr("DEADLINE_EXCEEDED"), HasSubstr("the job other")));
}

// It lets every rank in, and hopes that one says something worth knowing.
TEST(HandshakeTest, AStoreThatDoesNotKnowTheSecretIsFoundOut) {
  const internal::Verdict verdict{.host = "rank 0",
                                  .proof = std::string(internal::kDigestSize, 'p')};
  const Impostor impostor(ChallengeOf(internal::kProtocolVersion, kBuild, "job"),
                          internal::Frame(verdict.Serialize()));
  const absl::Time start = SteadyNow();
  const absl::Status status = ConnectTo({impostor.address()}, kSoon);
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("it does not have the job's secret"));
  EXPECT_GE(SteadyNow() - start, absl::Seconds(5));  // The store may come.
}

// Any user of the host may listen on a known port before the store does.
TEST(HandshakeTest, ARefusalWithoutProofDoesNotKeepARankFromItsStore) {
  const internal::Verdict refusal{.status = absl::InvalidArgumentError("go away"),
                                  .host = "rank 0",
                                  .proof = std::string(internal::kDigestSize, 'p')};
  const Impostor refuses(ChallengeOf(internal::kProtocolVersion, kBuild, "job"),
                         internal::Frame(refusal.Serialize()));
  const Impostor is_newer(ChallengeOf(99, kBuild, "job"));
  const std::unique_ptr<TcpStoreServer> server = Serve({.job = "job"});
  for (const Impostor* const first : {&refuses, &is_newer})
    EXPECT_EQ(ConnectTo({first->address(), server->address()}, kSoon), absl::OkStatus());
}

// It sends no verdict. A slow store looks the same, and has the rank's hello: so it gets no second
// one, also not at another of its addresses.
TEST(HandshakeTest, AChallengeWithoutAVerdictDoesNotKeepARankFromItsStore) {
  const Impostor hangs(ChallengeOf(internal::kProtocolVersion, kBuild, "job"));
  const std::unique_ptr<TcpStoreServer> server = Serve({.job = "job"});
  EXPECT_EQ(ConnectTo({hangs.address(), server->address()}, kSoon), absl::OkStatus());
  const std::string alias =
      absl::StrCat("localhost:", internal::HostPort::Parse(hangs.address())->port);
  const absl::Status alone = ConnectTo({hangs.address(), alias}, absl::Seconds(3));
  EXPECT_TRUE(absl::IsDeadlineExceeded(alone)) << alone;
  EXPECT_THAT(std::string(alone.message()), HasSubstr("has sent a challenge and no verdict"));
  EXPECT_EQ(hangs.connections(), 3) << "one of the first rank; the name is resolved once";
}

TEST(HandshakeTest, ARankOfAnotherBuildIsRefused) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  const std::string nonce(internal::kNonceSize, 'n'), proof(internal::kDigestSize, 'p');
  const internal::Hello older{.build = "0.0.1", .world_size = 2, .nonce = nonce, .proof = proof};
  EXPECT_THAT(AnswerTo(*server, internal::Frame(older.Serialize())),
              AllOf(HasSubstr("the rank runs evenkeel 0.0.1"),
                    HasSubstr(absl::StrCat("the store runs evenkeel ", kBuild))));
  const internal::Hello newer{.version = 99, .world_size = 2, .nonce = nonce, .proof = proof};
  EXPECT_THAT(AnswerTo(*server, internal::Frame(newer.Serialize())), HasSubstr("(protocol 99)"));
}

// A live group, and strangers that connect and say nothing, or nonsense, or half of something.
TEST(TcpStoreServerTest, StrangersDisturbNobody) {
  const std::unique_ptr<TcpStoreServer> server =
      Serve({.greeting_timeout = absl::Milliseconds(200)});
  Member a(*server, 0, 2), b(*server, 1, 2);
  constexpr int kSeed = 99;
  std::mt19937 random(kSeed);
  std::vector<internal::UniqueFd> strangers;
  for (int round = 0; round < 100; ++round) {
    strangers.push_back(Stranger(*server));
    std::string bytes(random() % 3000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    switch (round % 5) {
      case 0:
        bytes.clear();  // Half-open.
        break;
      case 1:
        bytes = internal::Frame(bytes);
        break;
      case 2:
        bytes = internal::Frame(bytes.substr(0, 100)).substr(0, 50);
        break;
      case 3:
        bytes = std::string(4, '\xff');  // Announces four gigabytes.
        break;
      case 4:
        break;
    }
    (void)internal::SendAll(strangers.back(), bytes, SteadyNow() + kSoon);
    std::thread peer([&] { EXPECT_TRUE(b->Exchange("live", "b", kSoon).ok()); });
    EXPECT_TRUE(a->Exchange("live", "a", kSoon).ok());
    peer.join();
  }
  for (const internal::UniqueFd& stranger : strangers) EXPECT_TRUE(IsCutOff(stranger));
  a->Leave();
  b->Leave();
}

// A rank that hosts the store needs files for other things, too: whether strangers are silent, send
// nonsense, or are refused.
TEST(TcpStoreServerTest, StrangersDoNotUseUpTheFiles) {
  const std::string in_vain = internal::Frame(
      internal::Hello{.nonce = std::string(internal::kNonceSize, 'n'), .proof = "none"}
          .Serialize());
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  constexpr size_t kFiles = 400, kStrangers = 220;
  rlimit few = before;
  few.rlim_cur = kFiles;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (const std::string& says : {std::string(), internal::Frame("nonsense"), in_vain}) {
    SCOPED_TRACE(says.size());
    // Time alone cuts off none of them here.
    const std::unique_ptr<TcpStoreServer> server = Serve({.greeting_timeout = absl::Minutes(10)});
    const size_t files = OpenFiles();
    std::vector<internal::UniqueFd> strangers;  // This process has their other ends, too.
    for (size_t i = 0; i < kStrangers; ++i) {
      strangers.push_back(Stranger(*server));
      EXPECT_TRUE(internal::SendAll(strangers.back(), says, SteadyNow() + kSoon).ok());
    }
    // The server has dealt with all of them when it has dealt with the last connection.
    EXPECT_TRUE(TcpStore::Connect(ClientOf(*server, 0, 1)).ok());
    EXPECT_LE(OpenFiles(), files + kStrangers + kFiles / 4 + 4);
    EXPECT_TRUE(IsCutOff(strangers[0]));
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// The usual limit is 1024 files, and each rank needs two of the store's process.
TEST(TcpStoreServerTest, TakesTheFilesThatItsRanksNeed) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit usual = before;
  usual.rlim_cur = 1024;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);
  const auto limit = [] {
    rlimit files = {};
    getrlimit(RLIMIT_NOFILE, &files);
    return files.rlim_cur;
  };
  EXPECT_NE(Serve({.world_size = 16}), nullptr);
  EXPECT_EQ(limit(), 1024u) << "a small job changes nothing";
  EXPECT_NE(Serve({.world_size = 1000}), nullptr);
  EXPECT_GE(limit(), 2 * 1000u);
  const int too_many = static_cast<int>(before.rlim_max / 2 + 1);
  const absl::Status refused =
      TcpStoreServer::Create({.secret = "secret", .world_size = too_many}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr(absl::StrCat("a job of ", too_many, " ranks")),
                    HasSubstr("raise the hard limit of open files")));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// The standard error of this process while it lives.
class CapturedStderr {
 public:
  CapturedStderr() : before_(dup(2)) {
    int ends[2] = {};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_ = internal::UniqueFd(ends[0]);
    const internal::UniqueFd write(ends[1]);
    dup2(write.get(), 2);
  }
  ~CapturedStderr() { dup2(before_.get(), 2); }
  // Returns what has been written, once there is something.
  std::string Wait() const {
    std::string text(4096, '\0');
    if (!internal::WaitFor(read_, POLLIN, SteadyNow() + kSoon).ok()) return "";
    text.resize(std::max<ssize_t>(read(read_.get(), text.data(), text.size()), 0));
    return text;
  }

 private:
  const internal::UniqueFd before_;
  internal::UniqueFd read_;
};

TEST(TcpStoreServerTest, ReportsThatFilesAreMissingAndGoesOn) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const std::unique_ptr<TcpStoreServer> server = Serve();
  const CapturedStderr warnings;
  rlimit one_more = before;
  one_more.rlim_cur = internal::UniqueFd(dup(0)).get() + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &one_more), 0);
  const internal::UniqueFd stranger = Stranger(*server);  // Takes the last one, on this end.
  const std::string warning = warnings.Wait();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(warning, HasSubstr("rank 0 cannot accept the connection of a rank: accept: Too many "
                                 "open files: the limit of the process is"));
  EXPECT_THAT(warning, HasSubstr("; it retries, and the rank waits"));
  EXPECT_TRUE(internal::WaitFor(stranger, POLLIN, SteadyNow() + kSoon).ok()) << "a challenge";
}

TEST(TcpStoreTest, WaitsForFilesThatOtherThreadsGiveBack) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const std::unique_ptr<TcpStoreServer> server = Serve();
  rlimit none = before;
  none.rlim_cur = internal::UniqueFd(dup(0)).get();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  TcpStoreOptions late = ClientOf(*server, 0, 1);
  late.timeout = absl::Milliseconds(100);
  const absl::Status in_vain = TcpStore::Connect(late).status();
  std::thread other([&] {
    absl::SleepFor(absl::Milliseconds(300));
    setrlimit(RLIMIT_NOFILE, &before);
  });
  const absl::Status in_time = TcpStore::Connect(ClientOf(*server, 0, 1)).status();
  other.join();
  EXPECT_THAT(std::string(in_vain.message()), HasSubstr("socket: Too many open files"));
  EXPECT_TRUE(in_time.ok()) << in_time;
}

TEST(TcpStoreServerTest, WithoutFilesRanksAreRefusedWithTheLimit) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  constexpr absl::Duration kPatience = absl::Milliseconds(200);
  const std::unique_ptr<TcpStoreServer> server = Serve({.refuse_after = kPatience});
  ASSERT_TRUE(TcpStore::Connect(ClientOf(*server, 0, 1)).ok());  // The server runs.
  constexpr int kLast = 30;
  std::vector<internal::UniqueFd> others;
  while (others.empty() || others.back().get() < kLast) others.emplace_back(dup(0));
  others.pop_back();  // For the client.
  rlimit one_more = before;
  one_more.rlim_cur = kLast + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &one_more), 0);
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = TcpStore::Connect(ClientOf(*server, 0, 1)).status();
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("the limit of the process is ", one_more.rlim_cur)));
  }
  // Once no rank has waited for a while, the next one is waited for as long as the first.
  absl::Duration waited;
  for (const absl::Time end = SteadyNow() + kSoon; waited < kPatience && SteadyNow() < end;) {
    absl::SleepFor(kPatience);
    const absl::Time start = SteadyNow();
    EXPECT_FALSE(TcpStore::Connect(ClientOf(*server, 0, 1)).ok());
    waited = SteadyNow() - start;
  }
  EXPECT_GE(waited, kPatience);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(TcpStore::Connect(ClientOf(*server, 0, 1)).ok());
}

TEST(TcpStoreServerTest, ASlowReaderHoldsUpNobody) {
  const std::unique_ptr<TcpStoreServer> server = Serve();
  const std::unique_ptr<TcpStore> store = TcpStore::Connect(ClientOf(*server, 0, 1)).value();
  ASSERT_TRUE(store->Set("large", std::string(8 << 20, 'x')).ok());
  // A rank of the job that is sent much and reads nothing: its link is never started.
  const auto deaf = TcpControlLink::Connect(ClientOf(*server, 0, 2), {"g"}).value();
  Member talker(*server, 1, 2, "g");
  for (int i = 0; i < 20; ++i) talker->Send(0, "flood", std::string(1 << 20, 'f'));
  talker->Put("last", "done");
  EXPECT_EQ(talker->Get("last", kSoon).value(), "done");
  EXPECT_EQ(store->Get("large", kSoon).value().size(), size_t{8} << 20);
}

}  // namespace
}  // namespace evenkeel
