// tools:top says what is wrong with a job, while it runs.

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/stragglers/delayed_training.h"
#include "gflags/gflags.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

DEFINE_int32(hangs, -1, "For ranks: the rank that loads its input for ever after some steps.");
DEFINE_int32(fails, -1, "For ranks: the rank that ends the group once --until exists.");
DEFINE_string(until, "", "For ranks: a file.");
DEFINE_int32(slow, -1, "For ranks: the rank whose loader is slow.");
DEFINE_bool(is_rank, false, "Runs a rank.");

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int kWorld = 3;
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status RunRank() {
  EndWithParent();
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(
      const std::unique_ptr<Communicator> comm,
      CreateCommunicator(environment,
                         {.communicator = {.watch = {.beat = absl::Milliseconds(200)}}}));
  EK_ASSIGN_OR_RETURN(
      const std::unique_ptr<DelayedTraining> training,
      DelayedTraining::Create(comm.get(), {.delay = FLAGS_slow >= 0 ? Delay::kLoader : Delay::kNone,
                                           .rank = FLAGS_slow,
                                           .fraction = 0.5}));
  if (FLAGS_fails == comm->rank()) {
    while (!std::filesystem::exists(FLAGS_until)) EK_RETURN_IF_ERROR(training->Run(10));
    comm->Abort(absl::UnknownError("the disk is full"));
    return comm->status();
  }
  while (FLAGS_hangs != comm->rank()) EK_RETURN_IF_ERROR(training->Run(10));
  EK_RETURN_IF_ERROR(training->Run(20));
  const PhaseScope loading(*comm, StepPhase::kInput);
  absl::SleepFor(absl::InfiniteDuration());
  return absl::OkStatus();
}

// The ranks of a job, which are killed with this object.
class Job {
 public:
  explicit Job(const std::string& flag = "") {
    static int jobs = 0;
    name_ = absl::StrCat("top-test-", getpid(), "-", jobs++);
    for (int rank = 0; rank < kWorld; ++rank) {
      std::vector<std::string> command = {ThisProgram(), "--is_rank"};
      if (!flag.empty()) command.push_back(flag);
      Variables variables = RankVariables(
          rank, kWorld, absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name_), "secret of top_test");
      variables["EVENKEEL_JOB"] = name_;
      EXPECT_TRUE(ranks_.Start(command, variables).ok());
    }
  }
  const std::string& name() const { return name_; }
  void Signal(int rank, int signal) { ranks_.Signal(rank, signal); }
  // Returns what the ranks have written on standard error.
  std::string Complaints() {
    ranks_.Listen(absl::Now() + absl::Seconds(1), [](int, absl::string_view) {});
    std::string all;
    for (int rank = 0; rank < kWorld; ++rank)
      absl::StrAppend(&all, "rank ", rank, ": ", ranks_.complaints(rank), "\n");
    return all;
  }

 private:
  std::string name_;
  ChildProcesses ranks_;
};

class TopTest : public testing::Test {
 protected:
  // A rank is a straggler after 10 s, which pass during the first tests.
  static void SetUpTestSuite() { SlowJob(); }
  static void TearDownTestSuite() { EndSlowJob(); }
  void TearDown() override {
    if (HasFailure() && job_ != nullptr) std::cout << job_->Complaints();
  }

  static Job& SlowJob() {
    if (slow_job_ == nullptr) slow_job_ = std::make_unique<Job>("--slow=2");
    return *slow_job_;
  }
  static void EndSlowJob() { slow_job_ = nullptr; }

  void StartJob(const std::string& flag = "") { job_ = std::make_unique<Job>(flag); }
  // Returns what top prints.
  std::string Top(const std::string& arguments) {
    return ReadAll(popen(absl::StrCat("tools/top ", arguments, " 2>&1").c_str(), "r"));
  }
  std::string ReadAll(FILE* pipe) {
    std::string output;
    std::array<char, 4096> buffer;
    for (size_t size; (size = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
      output.append(buffer.data(), size);
    exit_code_ = WEXITSTATUS(pclose(pipe));
    return output;
  }
  // Returns the first output that has `text`; the last one if none has it in time.
  std::string TopUntil(const std::string& text) { return TopUntil(*job_, text); }
  std::string TopUntil(const Job& job, const std::string& text) {
    std::string output;
    const absl::Time deadline = absl::Now() + kPatience;
    do {
      output = Top(job.name());
    } while (!absl::StrContains(output, text) && absl::Now() < deadline);
    return output;
  }

  std::unique_ptr<Job> job_;
  int exit_code_ = -1;

 private:
  static std::unique_ptr<Job> slow_job_;
};
std::unique_ptr<Job> TopTest::slow_job_;

TEST_F(TopTest, AJobThatTrainsHasNothingToReport) {
  StartJob();
  const std::string text = TopUntil("ms a step");
  EXPECT_EQ(exit_code_, 0);
  EXPECT_THAT(text, HasSubstr("hosted by rank 0\nworld: 3 ranks, step "));
  EXPECT_THAT(text, Not(HasSubstr("waited for")));
  EXPECT_THAT(Top("--json --once " + job_->name()),
              HasSubstr(R"([{"group":"world","error":"","ranks":[)"));
}

TEST_F(TopTest, NamesTheRankThatHangsWhileTheOthersWait) {
  StartJob("--hangs=1");
  // A rank's report may be older than the others' waits: at first the phase may be another one.
  const std::string text = "for rank 1, which runs (input)";
  EXPECT_THAT(TopUntil(text), HasSubstr(text));
}

TEST_F(TopTest, NamesAStoppedProcessAndThenWhyTheGroupEnded) {
  StartJob("--hangs=0");  // So that the host of the store still runs when the others have ended.
  TopUntil("for rank 0");
  job_->Signal(2, SIGSTOP);
  EXPECT_THAT(TopUntil("rank 2 has sent nothing for"), HasSubstr("rank 2 has sent nothing for"));
  EXPECT_THAT(TopUntil("has ended"), HasSubstr("the group has ended: rank 2 is silent"));
}

TEST_F(TopTest, SaysThatTheHostOfTheStoreHangs) {
  StartJob();
  TopUntil("ms a step");
  job_->Signal(0, SIGSTOP);
  const absl::Time begin = absl::Now();
  // After 2 s, or up to 0.25 s earlier: a pause that would last longer than that is not begun.
  EXPECT_THAT(Top(job_->name()),
              testing::ContainsRegex(
                  "top: the observer found no store at [0-9.:]+ within (1[.][7-9]|2)[.0-9]*s"));
  EXPECT_EQ(exit_code_, 1);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST_F(TopTest, NamesTheSlowRank) {
  EXPECT_THAT(TopUntil(SlowJob(), "rank 2 costs the group"),
              testing::ContainsRegex("rank 2 costs the group [0-9]+ % of its time: input"));
}

TEST_F(TopTest, ServesTheStateUntilTheJobHasEnded) {
  TopUntil(SlowJob(), "rank 2 costs the group");
  FILE* server = popen(absl::StrCat("EVENKEEL_STATUS_TOKEN=t tools/top --serve=127.0.0.1:0 ",
                                    SlowJob().name(), " 2>&1")
                           .c_str(),
                       "r");
  std::array<char, 4096> line;
  ASSERT_NE(fgets(line.data(), line.size(), server), nullptr);
  int port = 0;
  ASSERT_EQ(sscanf(line.data(), "serving http://127.0.0.1:%d/status.json", &port), 1)
      << line.data();
  FILE* client = popen(absl::StrCat("bash -c 'exec 3<>/dev/tcp/127.0.0.1/", port,
                                    "; printf \"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n"
                                    "Authorization: Bearer t\\r\\n\\r\\n\" >&3; cat <&3'")
                           .c_str(),
                       "r");
  EXPECT_THAT(ReadAll(client),
              testing::ContainsRegex(
                  "evenkeel_rank_cost_ratio\\{group=\"world\",rank=\"2\"\\} 0\\.[0-9]*[1-9]"));
  EndSlowJob();
  EXPECT_THAT(ReadAll(server), HasSubstr("top: "));
  EXPECT_EQ(exit_code_, 1);
}

TEST_F(TopTest, SaysWhyTheJobHasEnded) {
  // The launcher's folder for a job has its name, and sandboxes that share it have the same pids.
  const std::string name = absl::StrCat("top-test-", absl::ToUnixNanos(absl::Now()), "-ends");
  const std::string until = absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
  FILE* const job =
      popen(absl::StrCat("EVENKEEL_JOB=", name, " tools/launch --nproc=3 -- ", ThisProgram(),
                         " --is_rank --fails=1 --until=", until, " 2>&1")
                .c_str(),
            "r");
  FILE* top = nullptr;
  std::array<char, 4096> line;
  for (const absl::Time end = absl::Now() + kPatience; absl::Now() < end; ReadAll(top)) {
    top = popen(absl::StrCat("tools/top --json --interval=0.2 ", name, " 2>&1").c_str(), "r");
    if (fgets(line.data(), line.size(), top) != nullptr && line[0] == '[') break;
  }
  ASSERT_EQ(line[0], '[') << line.data();
  std::ofstream{until};
  EXPECT_THAT(ReadAll(top),
              testing::ContainsRegex("top: the job has ended: rank 1 [^\n]*the disk is full "
                                     "\\(the store at [^\n]* is gone"));
  EXPECT_EQ(exit_code_, 1);
  ReadAll(job);
}

TEST_F(TopTest, SaysWhichJobsThereAreNot) {
  EXPECT_THAT(Top("no-such-job"), HasSubstr("no process of this user"));
  EXPECT_EQ(exit_code_, 1);
  EXPECT_THAT(Top("127.0.0.1:1"), HasSubstr("set EVENKEEL_SECRET"));
  EXPECT_THAT(Top("/no/such/folder"), HasSubstr("no job is in the folder /no/such/folder"));
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  if (!FLAGS_is_rank) return RUN_ALL_TESTS();
  const absl::Status status = evenkeel::RunRank();
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
