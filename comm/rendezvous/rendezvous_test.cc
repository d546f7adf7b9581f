// How the ranks of a job come together, and what each of them is told when they do not.

#include "evenkeel/comm/rendezvous/rendezvous.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/rendezvous/file_store.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::HostPort;
using internal::UniqueFd;
using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr absl::Duration kSoon =
    absl::Seconds(30);  // For what takes milliseconds when the machine is free.
constexpr absl::Duration kShort = absl::Seconds(1);  // A wait that must fail.
constexpr absl::Duration kLonger =
    absl::Milliseconds(6500);  // The same, with the log line after 5 s.

// Returns variables as torchrun or a person sets them on one host, with folders of this test alone.
Variables JobVariables(int world_size) {
  std::string pattern = testing::TempDir() + "/rendezvousXXXXXX";
  return {{"WORLD_SIZE", absl::StrCat(world_size)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
          {"TMPDIR", mkdtemp(pattern.data())}};
}

// Makes the group of all ranks, as a program does, and leaves.
absl::Status Meet(const Variables& variables, const FactoryOptions& options) {
  EK_ASSIGN_OR_RETURN(
      const Environment environment,
      ParseEnvironment(variables, {.user = static_cast<int>(geteuid()), .parent = 1}));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, options));
  return comm->Finalize();
}

struct Comer {
  int rank = 0;
  Variables own;  // Beside the common ones.
};

// Each comer in a thread of its own; what each is told.
std::vector<absl::Status> RunRanks(const Variables& common, const std::vector<Comer>& comers,
                                   absl::Duration timeout = kSoon) {
  std::vector<absl::Status> statuses(comers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < comers.size(); ++i) {
    threads.emplace_back([&, i] {
      Variables variables = common;
      variables["RANK"] = absl::StrCat(comers[i].rank);
      for (const auto& [name, value] : comers[i].own) variables[name] = value;
      statuses[i] = Meet(variables, {.connect_timeout = timeout});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

std::string Text(const absl::Status& status) { return status.ToString(); }

// A program that has nothing to do with us: takes connections, as any listener does, and says
// nothing.
class ForeignProgram {
 public:
  explicit ForeignProgram(const HostPort& address)
      : listener_(internal::ListenOn(address).value()),
        port_(internal::LocalAddress(listener_)->port) {}
  int port() const { return port_; }

 private:
  UniqueFd listener_;
  int port_;
};

// As torchrun sets them where its agent keeps the master port.
Variables TorchrunVariables(int world_size, const std::string& host, int port) {
  Variables variables = JobVariables(world_size);
  variables.insert({{"TORCHELASTIC_RUN_ID", "none"},
                    {"TORCHELASTIC_RESTART_COUNT", "0"},
                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                    {"MASTER_ADDR", host},
                    {"MASTER_PORT", absl::StrCat(port)}});
  return variables;
}

int FreePort() { return ForeignProgram({"127.0.0.1", 0}).port(); }

TEST(RendezvousTest, RanksOfOneHostMeetBesideTorchrunsAgent) {
  const ForeignProgram agent({"127.0.0.1", 0});
  EXPECT_THAT(RunRanks(TorchrunVariables(3, "127.0.0.1", agent.port()), {{0}, {1}, {2}}),
              Each(absl::OkStatus()));
}

// 127.0.0.2 stands for the name of rank 0's host, which Debian's /etc/hosts maps to 127.0.1.1
// there.
TEST(RendezvousTest, RanksOfRankZerosHostMeetAtItsAddressIfItsNameIsALoopbackAddress) {
  Variables common = JobVariables(3);
  common.insert({{"MASTER_ADDR", "127.0.0.2"},
                 {"MASTER_PORT", absl::StrCat(FreePort())},
                 {"EVENKEEL_ADDRESS", "127.0.0.1"}});
  EXPECT_THAT(RunRanks(common, {{0}, {1}, {2}}, kSoon), Each(absl::OkStatus()));
}

// An address of this host that is not the loopback one; empty if there is none.
std::string OutsideAddress() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  std::string found;
  for (const ifaddrs* entry = list; entry != nullptr && found.empty(); entry = entry->ifa_next) {
    char host[NI_MAXHOST];
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) continue;
    if (getnameinfo(entry->ifa_addr, sizeof(sockaddr_in), host, sizeof(host), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      found = host;
    }
  }
  freeifaddrs(list);
  return found;
}

TEST(RendezvousTest, RanksOfSeveralHostsMeetBesideTorchrunsAgent) {
  const std::string host = OutsideAddress();
  if (host.empty()) GTEST_SKIP() << "this host has no address but the loopback one";
  // The agent's port and the one after it are taken, so that the ranks must find the next.
  std::unique_ptr<ForeignProgram> agent, other;
  for (int attempt = 0; attempt < 100 && other == nullptr; ++attempt) {
    agent = std::make_unique<ForeignProgram>(HostPort{host, 0});
    const HostPort next = {host, agent->port() + 1};
    if (next.port < 65530 && internal::ListenOn(next).ok())
      other = std::make_unique<ForeignProgram>(next);
  }
  ASSERT_NE(other, nullptr);
  Variables variables = TorchrunVariables(3, host, agent->port());
  variables["LOCAL_WORLD_SIZE"] = "1";
  variables["EVENKEEL_SECRET"] = "a secret that is known to all";
  EXPECT_THAT(RunRanks(variables, {{0}, {1}, {2}}), Each(absl::OkStatus()));
}

TEST(RendezvousTest, APortThatAForeignProgramHoldsIsNamed) {
  const ForeignProgram foreign({"127.0.0.1", 0});
  Variables variables = JobVariables(2);
  variables.insert({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", absl::StrCat(foreign.port())}});
  const std::string place = absl::StrCat("127.0.0.1:", foreign.port());
  const std::vector<absl::Status> told = RunRanks(variables, {{0}, {1}}, kShort);
  EXPECT_THAT(Text(told[0]), AllOf(HasSubstr(place), HasSubstr("in use"),
                                   HasSubstr("another program"), HasSubstr("MASTER_PORT")));
  EXPECT_THAT(Text(told[1]),
              AllOf(HasSubstr("rank 1"), HasSubstr(absl::StrCat("the server at ", place)),
                    HasSubstr("not this job's store"), HasSubstr("rank 0, which hosts it")));
}

TEST(RendezvousTest, TheSystemMayChooseThePort) {
  for (const Variables& where : {Variables{{"EVENKEEL_STORE", "127.0.0.1:0"}},
                                 Variables{{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "0"}}}) {
    Variables variables = JobVariables(3);
    variables.insert(where.begin(), where.end());
    EXPECT_THAT(RunRanks(variables, {{0}, {1}, {2}}), Each(absl::OkStatus()));
    const std::string folder = absl::StrCat(variables["TMPDIR"], "/evenkeel-", geteuid());
    EXPECT_EQ(rmdir(folder.c_str()), 0) << "something was left in it";
  }
}

TEST(RendezvousTest, WhoComesIsToldAllWhoAreMissing) {
  Variables variables = JobVariables(5);
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  for (const absl::Status& told : RunRanks(variables, {{0}, {1}, {3}}, kShort)) {
    EXPECT_THAT(Text(told), AllOf(HasSubstr("kind=deadline"), HasSubstr("for ranks 2,4")));
  }
}

TEST(RendezvousTest, WithoutTheHostRankZeroIsMissing) {
  Variables variables = JobVariables(3);
  for (const Variables& where :
       {Variables{{"EVENKEEL_STORE", variables["TMPDIR"] + "/store"}},
        Variables{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", absl::StrCat(FreePort())}}}) {
    Variables all = variables;
    all.insert(where.begin(), where.end());
    for (const absl::Status& told : RunRanks(all, {{1}, {2}}, absl::Milliseconds(300))) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(told)) << told;
      EXPECT_THAT(Text(told),
                  AllOf(HasSubstr("no store"), HasSubstr("rank 0, which hosts it, is missing")));
    }
  }
  variables.insert({{"EVENKEEL_STORE", absl::StrCat("127.0.0.1:", FreePort())},
                    {"EVENKEEL_STORE_HOSTED", "1"},
                    {"EVENKEEL_SECRET", "the secret of this test"}});
  EXPECT_THAT(Text(RunRanks(variables, {{1}}, absl::Milliseconds(300))[0]),
              Not(HasSubstr("rank 0, which")));
}

// A rank that never comes. The others wait for it, for a little longer than they do in silence.
struct Absence {
  const char* what;
  const char* backend;
  std::vector<Comer> absent;  // Its attempt to come, if it makes one.
};

// Ranks 0 and 1 of 3 wait, and log for whom.
void ExpectLogged(const Absence& absence) {
  SCOPED_TRACE(absence.what);
  Variables variables = JobVariables(3);
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  variables["EVENKEEL_SECRET"] = "a secret that is known to all";
  const absl::Time start = absl::Now();
  std::vector<std::pair<absl::Time, std::string>> warned[2];
  absl::Status ended[2];
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      FactoryOptions options = {.backend = absence.backend, .connect_timeout = kLonger};
      options.communicator.watch.warn = [&](const std::string& text) {
        warned[rank].emplace_back(absl::Now(), text);
      };
      Variables mine = variables;
      mine["RANK"] = absl::StrCat(rank);
      ended[rank] = Meet(mine, options);
    });
  }
  for (const absl::Status& refused : RunRanks(variables, absence.absent, kLonger))
    EXPECT_FALSE(refused.ok());
  for (std::thread& thread : threads) thread.join();
  for (const int rank : {0, 1}) {
    EXPECT_THAT(Text(ended[rank]),
                AllOf(HasSubstr("kind=deadline"), HasSubstr("for rank 2 to join")));
    ASSERT_EQ(warned[rank].size(), 1);
    const auto& [at, text] = warned[rank].front();
    EXPECT_EQ(text,
              absl::StrCat("rank ", rank, " has waited 5s for rank 2 to join the group world"));
    EXPECT_GE(at - start, absl::Seconds(5));
    EXPECT_LT(at - start, absl::Seconds(10));
  }
}

TEST(RendezvousTest, WhoWaitsForFiveSecondsLogsForWhom) {
  testing::internal::CaptureStderr();
  std::vector<std::thread> jobs;
  for (const Absence& absence :
       {Absence{"missing, shm", "shm", {}}, Absence{"missing, tcp", "tcp", {}},
        Absence{"missing, hierarchical", "auto", {}},
        Absence{
            "another secret", "auto", {{2, {{"EVENKEEL_SECRET", "the secret of another job"}}}}},
        Absence{"another world size",
                "auto",
                {{2, {{"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "4"}}}}}}) {
    jobs.emplace_back([absence] { ExpectLogged(absence); });
  }
  // Rank 0, which is to host the store.
  Variables variables = JobVariables(2);
  variables.insert({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", absl::StrCat(FreePort())}});
  EXPECT_TRUE(absl::IsDeadlineExceeded(RunRanks(variables, {{1}}, kLonger)[0]));
  for (std::thread& job : jobs) job.join();
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      testing::ContainsRegex("evenkeel: rank 1 found no store at 127.0.0.1:[0-9]+ within "
                             "5[0-9.]*s .*: rank 0, which hosts it, is missing; retrying\n"));
}

TEST(RendezvousTest, ASecondProcessOfARankIsRefused) {
  Variables variables = JobVariables(3);
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  const std::vector<absl::Status> told = RunRanks(variables, {{0}, {1}, {1}}, kShort);
  // One of the two is let in, and misses rank 2 as rank 0 does.
  const bool is_first = absl::StrContains(Text(told[1]), "for rank 2 to join");
  EXPECT_THAT(Text(told[is_first ? 2 : 1]), AnyOf(HasSubstr("two processes claim to be rank 1"),
                                                  HasSubstr("rank 1 of the group world has left")));
  for (const absl::Status& status : {told[0], told[is_first ? 1 : 2]}) {
    EXPECT_THAT(Text(status), AllOf(HasSubstr("kind=deadline"), HasSubstr("for rank 2 to join")));
  }
}

// The ranks that have come to the first one must not be led away, nor its folder be cleared.
TEST(RendezvousTest, ASecondRankZeroOfAFolderIsRefused) {
  Variables variables = JobVariables(2);
  const Environment environment =
      ParseEnvironment(
          [&] {
            Variables own = variables;
            own.insert({{"RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "0"}});
            return own;
          }(),
          {.user = static_cast<int>(geteuid()), .parent = 1})
          .value();
  const auto first = Rendezvous::Join(environment, kSoon);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = Rendezvous::Join(environment, kSoon).status();
  EXPECT_TRUE(absl::IsAlreadyExists(second)) << second;
  EXPECT_THAT(Text(second), HasSubstr("two processes claim to be rank 0"));
  Environment other = environment;
  other.rank = 1;
  other.hosts_store = false;
  EXPECT_TRUE(Rendezvous::Join(other, kSoon).ok());
}

// Files that a killed job left behind must not stop the next one.
TEST(RendezvousTest, AFolderOfADeadJobIsTakenOver) {
  Variables variables = JobVariables(2);
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  const auto folder = FileStore::Open(variables["EVENKEEL_STORE"]);
  ASSERT_TRUE((*folder)->Set(kAddressKey, absl::StrCat("127.0.0.1:", FreePort())).ok());
  ASSERT_TRUE((*folder)->Set("secret", "of the dead").ok());
  EXPECT_THAT(RunRanks(variables, {{0}, {1}}), Each(absl::OkStatus()));
}

TEST(RendezvousTest, AShortSecretIsRefused) {
  Variables variables = JobVariables(2);
  variables["EVENKEEL_SECRET"] = "fifteen letters";
  EXPECT_THAT(Text(RunRanks(variables, {{0}})[0]),
              HasSubstr("the secret in EVENKEEL_SECRET has 15 bytes, so others could guess it: "
                        "give at least 16, such as the output of `openssl rand -hex 32`"));
  variables.erase("EVENKEEL_SECRET");
  const std::string path = variables["TMPDIR"] + "/secret";
  variables["EVENKEEL_SECRET_FILE"] = path;
  for (const auto& [text, size] :
       {std::pair("", 0), std::pair(" \n", 0), std::pair("fifteen letters\n", 15)}) {
    std::ofstream(path) << text;
    EXPECT_THAT(Text(RunRanks(variables, {{0}})[0]),
                HasSubstr(absl::StrCat("the secret in EVENKEEL_SECRET_FILE=", path, " has ", size,
                                       " bytes, ")));
  }
}

TEST(RendezvousTest, ASecretThatOtherUsersCanReadIsReportedOnce) {
  Variables variables = JobVariables(2);
  const std::string path = variables["TMPDIR"] + "/secret";
  variables["EVENKEEL_SECRET_FILE"] = path;
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  std::ofstream(path) << "the secret of this test\n";
  for (const auto& [mode, text] :
       {std::pair(0600, std::string()),
        std::pair(0640, absl::StrCat("evenkeel: other users can read the job's secret in ", path,
                                     " and join the job: chmod 600 ", path, "\n"))}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    testing::internal::CaptureStderr();
    EXPECT_THAT(RunRanks(variables, {{0}, {1}}), Each(absl::OkStatus()));
    EXPECT_EQ(testing::internal::GetCapturedStderr(), text);
  }
}

TEST(RendezvousTest, WrongWorldSizesAreRefused) {
  Variables variables = JobVariables(3);
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  const std::vector<absl::Status> told = RunRanks(
      variables, {{0}, {1}, {2, {{"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "4"}}}}, kShort);
  EXPECT_THAT(Text(told[2]),
              AllOf(HasSubstr("rank 2"), HasSubstr("has 4 ranks, but the job has 3")));
  for (int rank : {0, 1}) EXPECT_THAT(Text(told[rank]), HasSubstr("rank 2"));
}

}  // namespace
}  // namespace evenkeel
