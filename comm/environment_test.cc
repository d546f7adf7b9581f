#include "evenkeel/comm/environment.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/verify.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;

const ProcessFacts kProcess = {.user = 1000, .parent = 77};

Environment Parse(const Variables& variables) {
  absl::StatusOr<Environment> environment = ParseEnvironment(variables, kProcess);
  EXPECT_TRUE(environment.ok()) << environment.status();
  return environment.value_or(Environment());
}

std::string Complaint(const Variables& variables) {
  const absl::Status status = ParseEnvironment(variables, kProcess).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

Variables With(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kTwoRanks = {{"RANK", "1"},
                             {"WORLD_SIZE", "2"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", "29500"}};
const Variables kTorchrun = With(kTwoRanks, {{"LOCAL_RANK", "1"},
                                             {"TORCHELASTIC_RUN_ID", "none"},
                                             {"TORCHELASTIC_RESTART_COUNT", "0"},
                                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}});

TEST(ParseEnvironmentTest, WithoutALauncherTheJobIsOneProcess) {
  for (const Variables& variables :
       {Variables{}, Variables{{"MASTER_ADDR", "x"}, {"EVENKEEL_SECRET", "s"}},
        Variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}}) {
    const Environment environment = Parse(variables);
    EXPECT_EQ(environment.launcher, "");
    EXPECT_EQ(environment.world_size, 1);
    EXPECT_FALSE(environment.hosts_store);
  }
}

TEST(ParseEnvironmentTest, VariablesOfOneHostNeedNoSecret) {
  const Environment one = Parse(kTwoRanks);
  EXPECT_EQ(one.launcher, "variables");
  EXPECT_EQ(one.rank, 1);
  EXPECT_EQ(one.world_size, 2);
  EXPECT_EQ(one.local_rank, 1);
  EXPECT_TRUE(one.is_one_host);
  EXPECT_FALSE(one.hosts_store);
  EXPECT_THAT(one.store_addresses, ElementsAre("127.0.0.1:29500"));
  EXPECT_EQ(one.secret_folder, "/tmp/evenkeel-1000/port-29500");
  const Environment zero = Parse(With(kTwoRanks, {{"RANK", "0"}, {"TMPDIR", "/scratch"}}));
  EXPECT_TRUE(zero.hosts_store);
  EXPECT_EQ(zero.secret_folder, "/scratch/evenkeel-1000/port-29500");
}

TEST(ParseEnvironmentTest, TorchrunsAgentKeepsItsPort) {
  const Environment one_host = Parse(kTorchrun);
  EXPECT_EQ(one_host.launcher, "torchrun");
  EXPECT_THAT(one_host.store_addresses, IsEmpty());
  EXPECT_EQ(one_host.store_folder, "/tmp/evenkeel-1000/torchrun-none-29500-0");
  EXPECT_TRUE(one_host.folder_is_ours);
  EXPECT_EQ(one_host.secret_folder, one_host.store_folder);

  const Environment hosts = Parse(With(kTorchrun, {{"LOCAL_WORLD_SIZE", "1"},
                                                   {"LOCAL_RANK", "0"},
                                                   {"MASTER_ADDR", "node0"},
                                                   {"EVENKEEL_SECRET", "s"}}));
  EXPECT_FALSE(hosts.is_one_host);
  EXPECT_EQ(hosts.local_rank, 0);
  EXPECT_THAT(hosts.store_addresses, SizeIs(8));
  EXPECT_EQ(hosts.store_addresses[0], "node0:29501");
  EXPECT_EQ(hosts.secret, "s");
}

TEST(ParseEnvironmentTest, ARestartIsAnotherJob) {
  EXPECT_NE(Parse(kTorchrun).job,
            Parse(With(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).job);
}

TEST(ParseEnvironmentTest, SaysHowOftenTheJobWasStartedAnew) {
  EXPECT_EQ(Parse(kTwoRanks).restarts, 0);
  EXPECT_EQ(Parse(With(kTwoRanks, {{"EVENKEEL_RESTART", "2"}})).restarts, 2);
  EXPECT_EQ(Parse(With(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).restarts, 1);
  EXPECT_EQ(Parse(With(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}, {"EVENKEEL_RESTART", "0"}}))
                .restarts,
            0);
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"EVENKEEL_RESTART", "-1"}})),
              HasSubstr("EVENKEEL_RESTART=-1"));
  const Variables hosted =
      With(kTwoRanks, {{"EVENKEEL_STORE", "127.0.0.1:29400"}, {"EVENKEEL_STORE_HOSTED", "1"}});
  EXPECT_EQ(Parse(hosted).newcomer, 0);
  EXPECT_EQ(Parse(With(hosted, {{"EVENKEEL_NEWCOMER", "3"}})).newcomer, 3);
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"RANK", "0"}, {"EVENKEEL_NEWCOMER", "1"}})),
              HasSubstr("rank 0 hosted the job's store"));
  EXPECT_THAT(Complaint({{"EVENKEEL_NEWCOMER", "1"}}), HasSubstr("the variables of the lost rank"));
}

TEST(ParseEnvironmentTest, AHostMayCountAsSeveral) {
  EXPECT_EQ(Parse(kTwoRanks).host_parts, 1);
  EXPECT_EQ(Parse(With(kTwoRanks, {{"EVENKEEL_HOST_PARTS", "3"}})).host_parts, 3);
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"EVENKEEL_HOST_PARTS", "0"}})),
              HasSubstr("EVENKEEL_HOST_PARTS=0"));
}

TEST(ParseEnvironmentTest, OurOwnVariablesComeFirst) {
  const Environment hosted = Parse(With(kTorchrun, {{"EVENKEEL_STORE", "10.0.0.7:4000"},
                                                    {"EVENKEEL_STORE_HOSTED", "1"},
                                                    {"EVENKEEL_SECRET_FILE", "/run/secret"},
                                                    {"EVENKEEL_ADDRESS", "10.0.0.8"},
                                                    {"EVENKEEL_JOB", "my/job"},
                                                    {"RANK", "0"}}));
  EXPECT_THAT(hosted.store_addresses, ElementsAre("10.0.0.7:4000"));
  EXPECT_FALSE(hosted.hosts_store);
  EXPECT_EQ(hosted.secret_file, "/run/secret");
  EXPECT_EQ(hosted.address, "10.0.0.8");
  EXPECT_EQ(hosted.job, "my_job");

  const Environment folder =
      Parse(With(kTorchrun, {{"EVENKEEL_STORE", "/shared/job"}, {"RANK", "0"}}));
  EXPECT_EQ(folder.store_folder, "/shared/job");
  EXPECT_FALSE(folder.folder_is_ours);
  EXPECT_TRUE(folder.hosts_store);
  EXPECT_EQ(folder.secret_folder, "/shared/job");
  EXPECT_EQ(Parse(With(kTwoRanks, {{"EVENKEEL_STORE", "[::1]:4000"}})).store_addresses[0],
            "[::1]:4000");
}

// The others learn the port in a folder, which is one host's.
TEST(ParseEnvironmentTest, TheSystemMayChooseThePortOnOneHost) {
  const Environment ours =
      Parse(With(kTwoRanks, {{"EVENKEEL_STORE", "127.0.0.2:0"}, {"RANK", "0"}}));
  EXPECT_THAT(ours.store_addresses, IsEmpty());
  EXPECT_EQ(ours.store_folder, "/tmp/evenkeel-1000/port-29500");
  EXPECT_EQ(ours.secret_folder, ours.store_folder);
  EXPECT_EQ(ours.address, "127.0.0.2");
  EXPECT_TRUE(ours.folder_is_ours);
  EXPECT_TRUE(ours.hosts_store);
  // A port that all such jobs share does not name one of them.
  EXPECT_EQ(Parse(With(kTwoRanks, {{"MASTER_PORT", "0"}})).store_folder,
            "/tmp/evenkeel-1000/variables-77");

  const Variables hosts =
      With(kTwoRanks, {{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"EVENKEEL_SECRET", "s"}});
  EXPECT_THAT(
      Complaint(With(hosts, {{"MASTER_PORT", "0"}})),
      AllOf(HasSubstr("MASTER_PORT=0"), HasSubstr("several hosts"), HasSubstr("EVENKEEL_STORE")));
  EXPECT_THAT(Complaint(With(hosts, {{"EVENKEEL_STORE", "10.0.0.7:0"}})),
              HasSubstr("EVENKEEL_STORE=10.0.0.7:0"));
}

// The candidates go on below where the ports end.
TEST(ParseEnvironmentTest, TorchrunsAgentMayHaveTheLastPort) {
  const Environment last = Parse(With(kTorchrun, {{"LOCAL_WORLD_SIZE", "1"},
                                                  {"LOCAL_RANK", "0"},
                                                  {"MASTER_PORT", "65534"},
                                                  {"EVENKEEL_SECRET", "s"}}));
  ASSERT_THAT(last.store_addresses, SizeIs(8));
  EXPECT_EQ(last.store_addresses[0], "127.0.0.1:65535");
  EXPECT_EQ(last.store_addresses[1], "127.0.0.1:1024");
}

TEST(ParseEnvironmentTest, KnowsSlurm) {
  const Variables slurm = {{"SLURM_PROCID", "5"},    {"SLURM_NTASKS", "8"},
                           {"SLURM_LOCALID", "1"},   {"SLURM_JOB_ID", "4711"},
                           {"SLURM_STEP_ID", "0"},   {"SLURM_STEP_NUM_NODES", "2"},
                           {"EVENKEEL_SECRET", "s"}, {"SLURM_JOB_NODELIST", "gpu[07-09,12],cpu1"}};
  const Environment hosts = Parse(slurm);
  EXPECT_EQ(hosts.launcher, "slurm");
  EXPECT_EQ(hosts.rank, 5);
  EXPECT_EQ(hosts.world_size, 8);
  EXPECT_EQ(hosts.local_rank, 1);
  EXPECT_EQ(hosts.job, "slurm-4711.0");
  EXPECT_THAT(hosts.store_addresses[0], StartsWith("gpu07:"));
  EXPECT_EQ(Parse(With(slurm, {{"SLURM_PROCID", "0"}})).store_addresses, hosts.store_addresses);
  EXPECT_NE(Parse(With(slurm, {{"SLURM_JOB_ID", "4712"}})).store_addresses, hosts.store_addresses);
  EXPECT_THAT(Parse(With(slurm, {{"SLURM_JOB_NODELIST", "a,b"}})).store_addresses[0],
              StartsWith("a:"));
  EXPECT_THAT(Parse(With(slurm, {{"SLURM_JOB_NODELIST", "node-3"}})).store_addresses[0],
              StartsWith("node-3:"));

  const Environment one_host =
      Parse(With(slurm, {{"SLURM_STEP_NUM_NODES", "1"}, {"EVENKEEL_SECRET", ""}}));
  EXPECT_EQ(one_host.store_folder, "/tmp/evenkeel-1000/slurm-4711.0");
  EXPECT_EQ(Parse(With(slurm, {{"SLURM_STEP_NUM_TASKS", "6"}})).world_size, 6);
}

TEST(ParseEnvironmentTest, KnowsTheMpis) {
  const Environment open = Parse({{"OMPI_COMM_WORLD_RANK", "3"},
                                  {"OMPI_COMM_WORLD_SIZE", "4"},
                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                  {"PMIX_NAMESPACE", "prterun-host-12@1"},
                                  {"PMI_RANK", "0"}});
  EXPECT_EQ(open.launcher, "openmpi");
  EXPECT_EQ(open.rank, 3);
  EXPECT_EQ(open.store_folder, "/tmp/evenkeel-1000/openmpi-prterun-host-12_1");

  const Variables mpich = {
      {"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}};
  EXPECT_EQ(Parse(mpich).launcher, "mpich");
  EXPECT_EQ(Parse(mpich).store_folder, "/tmp/evenkeel-1000/mpich-77");
  // An MPI in a Slurm allocation leaves its daemons' Slurm variables to the ranks; srun itself sets
  // PMI_RANK.
  const Variables step = {
      {"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "1"}, {"SLURM_NTASKS", "1"}, {"SLURM_NNODES", "1"}};
  EXPECT_EQ(Parse(With(mpich, step)).launcher, "mpich");
  EXPECT_EQ(Parse(With(step, {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})).launcher, "slurm");
}

TEST(ParseEnvironmentTest, SeveralHostsNeedASecret) {
  const Variables hosts = With(
      kTwoRanks, {{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "10.1.1.1"}});
  EXPECT_THAT(Complaint(hosts),
              AllOf(HasSubstr("EVENKEEL_SECRET="), HasSubstr("EVENKEEL_SECRET_FILE=")));
  EXPECT_EQ(Parse(With(hosts, {{"EVENKEEL_SECRET_FILE", "f"}})).secret_file, "f");
  // Without LOCAL_WORLD_SIZE an address that other hosts could reach means that there may be some.
  Variables unknown = hosts;
  unknown.erase("LOCAL_WORLD_SIZE");
  EXPECT_THAT(Complaint(unknown), HasSubstr("EVENKEEL_SECRET="));
  EXPECT_TRUE(Parse(With(unknown, {{"MASTER_ADDR", "localhost"}})).is_one_host);
}

TEST(ParseEnvironmentTest, SaysWhatIsWrong) {
  EXPECT_THAT(Complaint({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(Complaint({{"WORLD_SIZE", "2"}}), HasSubstr("RANK is not set"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"RANK", "2"}})),
              HasSubstr("RANK=2 does not fit WORLD_SIZE=2"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"RANK", "-1"}})), HasSubstr("RANK=-1"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"RANK", "one"}})), HasSubstr("RANK=one"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE=0"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"LOCAL_RANK", "2"}})), HasSubstr("LOCAL_RANK=2"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"LOCAL_WORLD_SIZE", "3"}})),
              HasSubstr("LOCAL_WORLD_SIZE=3"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"MASTER_PORT", "65536"}})),
              HasSubstr("MASTER_PORT=65536"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"MASTER_PORT", ""}})),
              HasSubstr("MASTER_PORT is not set"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"MASTER_ADDR", ""}})), HasSubstr("MASTER_ADDR is not"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"EVENKEEL_STORE", "here"}})),
              HasSubstr("EVENKEEL_STORE=here"));
  EXPECT_THAT(
      Complaint(With(kTwoRanks, {{"EVENKEEL_STORE", "here:0"}, {"EVENKEEL_STORE_HOSTED", "1"}})),
      AllOf(HasSubstr("EVENKEEL_STORE=here:0"), HasSubstr("the other ranks cannot learn")));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"EVENKEEL_STORE_HOSTED", "yes"}})),
              HasSubstr("EVENKEEL_STORE_HOSTED=yes"));
  EXPECT_THAT(Complaint(With(kTwoRanks, {{"EVENKEEL_STORE_HOSTED", "1"}})),
              HasSubstr("needs EVENKEEL_STORE"));
  const Variables hosts = {{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}};
  EXPECT_THAT(Complaint(hosts), HasSubstr("set EVENKEEL_STORE=host:port"));
  EXPECT_THAT(Complaint(With(hosts, {{"EVENKEEL_STORE", "/shared/x"}})),
              HasSubstr("set EVENKEEL_ADDRESS"));
}

TEST(ParseEnvironmentTest, SaysHowMuchIsCheckedAndWhereRecordsGo) {
  EXPECT_FALSE(Parse({}).verify.has_value());
  EXPECT_EQ(Parse({{"EVENKEEL_VERIFY", "every"}}).verify, VerifyLevel::kEvery);
  EXPECT_EQ(Parse(With(kTwoRanks, {{"EVENKEEL_VERIFY", "off"}})).verify, VerifyLevel::kOff);
  EXPECT_EQ(Parse({{"EVENKEEL_FLIGHT", "/tmp/job"}}).flight_folder, "/tmp/job");
  EXPECT_THAT(Complaint({{"EVENKEEL_VERIFY", "all"}}),
              AllOf(HasSubstr("EVENKEEL_VERIFY=all"), HasSubstr("off, positions, every")));
}

TEST(ReadNumberTest, NamesTheVariableTheValueAndTheRange) {
  constexpr char kName[] = "EVENKEEL_ENVIRONMENT_TEST";
  EXPECT_EQ(ReadNumber(kName, 0, 9, 5).value(), 5);
  setenv(kName, "", /*replace=*/1);
  EXPECT_EQ(ReadNumber(kName, 0, 9, 5).value(), 5);
  setenv(kName, "9", /*replace=*/1);
  EXPECT_EQ(ReadNumber(kName, 0, 9, 5).value(), 9);
  for (const std::string bad : {"10", "-1", "yes"}) {
    setenv(kName, bad.c_str(), /*replace=*/1);
    const absl::Status status = ReadNumber(kName, 0, 9, 5).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(status.message(), absl::StrCat(kName, "=", bad, " is not a number from 0 to 9"));
  }
  unsetenv(kName);
}

}  // namespace
}  // namespace evenkeel
