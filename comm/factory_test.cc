#include "evenkeel/comm/factory.h"

#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/rendezvous/rendezvous.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kWorld = 3;

// The variables of a job of this test alone.
Variables JobVariables() {
  std::string pattern = testing::TempDir() + "/factoryXXXXXX";
  return {{"WORLD_SIZE", absl::StrCat(kWorld)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(kWorld)},
          {"TMPDIR", mkdtemp(pattern.data())}};
}

// Each rank, in a thread, is created from its environment, adds, and leaves.
std::vector<absl::Status> RunJob(
    const Variables& common, const std::function<void(int rank, Variables&)>& change = {},
    const FactoryOptions& options = {.connect_timeout = absl::Seconds(30)},
    std::vector<std::string>* backends = nullptr) {
  std::vector<absl::Status> statuses(kWorld);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      Variables variables = common;
      variables["RANK"] = absl::StrCat(rank);
      if (change) change(rank, variables);
      const absl::StatusOr<Environment> environment =
          ParseEnvironment(variables, {.user = static_cast<int>(geteuid()), .parent = 1});
      ASSERT_TRUE(environment.ok()) << environment.status();
      auto comm = CreateCommunicator(*environment, options);
      statuses[rank] = comm.status();
      if (!comm.ok()) return;
      if (backends != nullptr) (*backends)[rank] = std::string((*comm)->backend_name());
      std::vector<float> data(10, 1);
      statuses[rank] = (*comm)->AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
      EXPECT_THAT(data, Each(kWorld));
      if (statuses[rank].ok()) statuses[rank] = (*comm)->Finalize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

int FreePort() { return TcpStoreServer::Create({.secret = "s"}).value()->port(); }

TEST(CreateCommunicatorTest, RanksOfOneHostMeetInAFolderAndLeaveNothingBehind) {
  Variables variables = JobVariables();
  variables.insert({{"TORCHELASTIC_RUN_ID", "none"},
                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"MASTER_PORT", "29500"}});
  EXPECT_THAT(RunJob(variables), Each(absl::OkStatus()));
  const std::string folder = variables["TMPDIR"] + absl::StrCat("/evenkeel-", geteuid());
  EXPECT_EQ(access(folder.c_str(), F_OK), 0);
  EXPECT_EQ(rmdir(folder.c_str()), 0) << "something was left in it";
}

TEST(CreateCommunicatorTest, RanksMeetAtThePortThatIsGiven) {
  Variables variables = JobVariables();
  variables.insert({{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", absl::StrCat(FreePort())}});
  EXPECT_THAT(RunJob(variables), Each(absl::OkStatus()));
}

TEST(CreateCommunicatorTest, RanksMeetInAFolderOfTheUsers) {
  Variables variables = JobVariables();
  variables["EVENKEEL_STORE"] = variables["TMPDIR"] + "/store";
  EXPECT_THAT(RunJob(variables), Each(absl::OkStatus()));
}

// Another job's server uses the first of several ports.
TEST(CreateCommunicatorTest, RanksMeetAtTheFirstPortThatIsFree) {
  const std::unique_ptr<TcpStoreServer> other =
      TcpStoreServer::Create({.job = "other", .secret = "other"}).value();
  std::vector<std::thread> threads;
  const std::string free = absl::StrCat("127.0.0.1:", FreePort());
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      const Environment environment{.launcher = "torchrun",
                                    .job = "mine",
                                    .rank = rank,
                                    .world_size = kWorld,
                                    .store_addresses = {other->address(), free},
                                    .hosts_store = rank == 0,
                                    .secret = "the secret of this test"};
      auto comm = CreateCommunicator(environment);
      ASSERT_TRUE(comm.ok()) << comm.status();
      EXPECT_TRUE((*comm)->Finalize().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CreateCommunicatorTest, SeveralHostsCannotMeetAtALoopbackAddress) {
  Variables variables = JobVariables();
  variables.insert({{"EVENKEEL_SECRET", "the secret of this test"},
                    {"MASTER_ADDR", "127.0.1.1"},
                    {"MASTER_PORT", absl::StrCat(FreePort())}});
  variables["LOCAL_WORLD_SIZE"] = "1";
  const std::vector<absl::Status> statuses =
      RunJob(variables, {}, {.connect_timeout = absl::Seconds(1)});
  EXPECT_THAT(std::string(statuses[0].message()),
              AllOf(HasSubstr("127.0.1.1"), HasSubstr("set EVENKEEL_ADDRESS")));
  for (int rank : {1, 2}) EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[rank])) << statuses[rank];
}

TEST(CreateCommunicatorTest, AHostedStoreServesAndASecretComesFromAFile) {
  const std::unique_ptr<TcpStoreServer> server =
      TcpStoreServer::Create(
          {.secret = "the secret from a file", .world_size = kWorld, .host = "the launcher"})
          .value();
  Variables variables = JobVariables();
  const std::string file = variables["TMPDIR"] + "/secret";
  std::ofstream(file) << "the secret from a file\n";
  variables.insert({{"EVENKEEL_STORE", server->address()},
                    {"EVENKEEL_STORE_HOSTED", "1"},
                    {"EVENKEEL_SECRET_FILE", file}});
  EXPECT_THAT(RunJob(variables), Each(absl::OkStatus()));

  const std::vector<absl::Status> statuses = RunJob(variables,
                                                    [](int rank, Variables& own) {
                                                      own[rank == 1 ? "EVENKEEL_SECRET" : "OTHER"] =
                                                          "a secret that is wrong";
                                                    },
                                                    {.connect_timeout = absl::Seconds(2)});
  EXPECT_TRUE(absl::IsPermissionDenied(statuses[1])) << statuses[1];
  for (int rank : {0, 2}) EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 1"));

  variables["EVENKEEL_SECRET_FILE"] = "/nowhere/secret";
  for (const absl::Status& status : RunJob(variables)) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/secret"));
  }
}

TEST(CreateCommunicatorTest, ADifferentWorldSizeIsRefused) {
  Variables variables = JobVariables();
  variables.insert({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", absl::StrCat(FreePort())}});
  const std::vector<absl::Status> statuses = RunJob(variables,
                                                    [](int rank, Variables& own) {
                                                      if (rank == 2)
                                                        own["WORLD_SIZE"] =
                                                            own["LOCAL_WORLD_SIZE"] = "4";
                                                    },
                                                    {.connect_timeout = absl::Seconds(2)});
  EXPECT_TRUE(absl::IsInvalidArgument(statuses[2])) << statuses[2];
  EXPECT_THAT(std::string(statuses[2].message()),
              AllOf(HasSubstr("4 ranks"), HasSubstr("the job has 3")));
  for (int rank : {0, 1}) EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 2"));
}

TEST(CreateCommunicatorTest, OneProcessNeedsNobody) {
  for (const char* backend : {"auto", "local", "tcp", "gloo"}) {
    auto comm = CreateCommunicator({}, {.backend = backend});
    ASSERT_TRUE(comm.ok()) << comm.status();
    std::vector<float> data(3, 2);
    EXPECT_TRUE((*comm)->AllReduce(absl::MakeSpan(data), ReduceOp::kAverage).ok());
    EXPECT_THAT(data, Each(2));
    EXPECT_TRUE((*comm)->Finalize().ok());
  }
}

TEST(CreateCommunicatorTest, AHostThatCountsAsSeveralGetsTheirBackend) {
  for (const auto& [parts, expected] :
       {std::pair("1", "shm"), {"2", "hierarchical"}, {"3", "tcp"}}) {
    SCOPED_TRACE(parts);
    Variables variables = JobVariables();
    variables.insert(
        {{"EVENKEEL_STORE", variables["TMPDIR"] + "/store"}, {"EVENKEEL_HOST_PARTS", parts}});
    std::vector<std::string> names(kWorld);
    EXPECT_THAT(RunJob(variables, {}, {.connect_timeout = absl::Seconds(30)}, &names),
                Each(absl::OkStatus()));
    EXPECT_THAT(names, Each(expected));
  }
}

TEST(CreateCommunicatorTest, KnowsItsBackends) {
  const absl::Status unknown = CreateCommunicator({}, {.backend = "smoke"}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(unknown)) << unknown;
  EXPECT_THAT(std::string(unknown.message()),
              AllOf(HasSubstr("smoke"),
                    HasSubstr("auto, shm, tcp (or gloo), hierarchical, nccl, local, none")));
  EXPECT_TRUE(absl::IsInvalidArgument(
      CreateCommunicator({.world_size = 2}, {.backend = "local"}).status()));
  // Either not built, or no device, or it works.
  const absl::Status nccl = CreateCommunicator({}, {.backend = "nccl"}).status();
  EXPECT_TRUE(nccl.ok() || absl::IsUnimplemented(nccl) || absl::IsFailedPrecondition(nccl)) << nccl;
}

TEST(CreateCommunicatorTest, NoneMovesNoDataAndHasAControlPlane) {
  const Variables variables = JobVariables();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      Variables own = variables;
      own["RANK"] = absl::StrCat(rank);
      const Environment environment =
          ParseEnvironment(own, {.user = static_cast<int>(geteuid()), .parent = 1}).value();
      const auto comm = CreateCommunicator(environment, {.backend = "none"});
      ASSERT_TRUE(comm.ok()) << comm.status();
      EXPECT_EQ((*comm)->backend_name(), "none");
      EXPECT_TRUE(absl::IsUnimplemented((*comm)->Barrier()));
      const auto parts =
          (*comm)->control().Exchange("names", absl::StrCat(rank), absl::Seconds(30));
      ASSERT_TRUE(parts.ok()) << parts.status();
      EXPECT_THAT(*parts, testing::ElementsAre("0", "1", "2"));
      EXPECT_TRUE((*comm)->Finalize().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Joinables are made over it: agreements end as if all ranks had passed the same.
TEST(CreateCommunicatorTest, ANewcomersCommunicatorWaits) {
  Variables variables = JobVariables();
  variables.insert({{"RANK", "2"},
                    {"EVENKEEL_STORE", "127.0.0.1:1"},
                    {"EVENKEEL_STORE_HOSTED", "1"},
                    {"EVENKEEL_SECRET", "00112233445566778899aabbccddeeff"},
                    {"EVENKEEL_NEWCOMER", "1"}});
  const Environment environment = ParseEnvironment(variables, {}).value();
  for (const char* backend : {"auto", "shm", "tcp", "hierarchical", "none"}) {
    auto comm = CreateCommunicator(environment, {.backend = backend});
    ASSERT_TRUE(comm.ok()) << comm.status();
    EXPECT_TRUE((*comm)->waiting());
    EXPECT_EQ((*comm)->rank(), 2);
    EXPECT_EQ((*comm)->world_size(), kWorld);
    const auto parts = (*comm)->control().Exchange("names", "mine", absl::Seconds(30));
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_THAT(*parts, testing::ElementsAre("mine", "mine", "mine"));
    (*comm)->control().Send(2, "letter", "to myself");
    EXPECT_EQ((*comm)->control().Receive("letter", absl::Seconds(30)).value_or(""), "to myself");
    std::vector<float> data = {1, 2}, all(6);
    EXPECT_TRUE((*comm)->Broadcast(absl::MakeSpan(data), 0).ok());
    EXPECT_TRUE((*comm)->AllGather(absl::MakeSpan(data), absl::MakeSpan(all)).ok());
    EXPECT_THAT(all, testing::ElementsAre(1, 2, 1, 2, 1, 2));
    EXPECT_THAT(std::string((*comm)->Split(0, 0).status().message()),
                HasSubstr("waits for the place of rank 2"));
    const absl::Status away = (*comm)->Regroup({.timeout = absl::Milliseconds(50)}).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(away)) << away;
    EXPECT_THAT(std::string(away.message()),
                AllOf(HasSubstr("in the place of rank 2"), HasSubstr("127.0.0.1:1")));
  }
  const auto refused = CreateCommunicator(environment, {.backend = "nccl"});
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("a lost rank of the backend nccl is not replaced"));
}

TEST(RendezvousTest, SeveralGroupsShareOneJob) {
  Variables variables = JobVariables();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      Variables own = variables;
      own["RANK"] = absl::StrCat(rank);
      own["EVENKEEL_STORE"] = own["TMPDIR"] + "/store";
      const Environment environment = ParseEnvironment(own, {}).value();
      auto job = Rendezvous::Join(environment, absl::Seconds(30));
      ASSERT_TRUE(job.ok()) << job.status();
      EXPECT_TRUE((*job)->store().Add("ranks", 1).ok());
      std::vector<std::unique_ptr<Communicator>> groups;
      for (const char* name : {"first", "second"}) {
        auto comm = CreateCommunicator(environment, {.group = name, .rendezvous = *job});
        ASSERT_TRUE(comm.ok()) << comm.status();
        groups.push_back(*std::move(comm));
      }
      *job = nullptr;
      for (auto& comm : groups) {
        EXPECT_TRUE(comm->Barrier().ok());
        EXPECT_TRUE(comm->Finalize().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace evenkeel
