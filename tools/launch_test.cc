// Runs the binary as a person does.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr char kLaunch[] = "tools/launch";

std::string Folder() { return std::getenv("TEST_TMPDIR"); }

std::string Read(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Outcome {
  int code = -1;
  std::string output;  // Standard output and error.
};

Outcome ReadAll(FILE* pipe) {
  Outcome outcome;
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    outcome.output.append(buffer, size);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return outcome;
}

Outcome RunLaunch(const std::string& arguments, const std::string& wrapper = "") {
  return ReadAll(popen(absl::StrCat(wrapper, kLaunch, " ", arguments, " 2>&1").c_str(), "r"));
}

// Waits until `condition` holds; a deadline, no race to win.
template <typename Condition>
bool Eventually(Condition condition) {
  for (const absl::Time end = absl::Now() + absl::Seconds(20); absl::Now() < end;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return false;
}

bool IsRunning(const std::string& pid) { return kill(std::atoi(pid.c_str()), 0) == 0; }

TEST(LaunchTest, GivesRanksTheirVariables) {
  const Outcome outcome = RunLaunch(
      "--nproc=3 -- sh -c 'echo r=$RANK w=$WORLD_SIZE l=$LOCAL_RANK/$LOCAL_WORLD_SIZE "
      "m=$MASTER_ADDR "
      "s=${EVENKEEL_STORE%%:*} p=$([ \"${EVENKEEL_STORE##*:}\" != $MASTER_PORT ] && echo free) "
      "h=$EVENKEEL_STORE_HOSTED n=${#EVENKEEL_SECRET}'");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(outcome.output,
                HasSubstr(absl::StrCat("r=", rank, " w=3 l=", rank,
                                       "/3 m=127.0.0.1 s=127.0.0.1 p=free h=1 n=64\n")));
  }
}

TEST(LaunchTest, EveryJobHasASecretOfItsOwn) {
  const std::string first = RunLaunch("--nproc=1 -- sh -c 'echo $EVENKEEL_SECRET'").output;
  EXPECT_NE(first, RunLaunch("--nproc=1 -- sh -c 'echo $EVENKEEL_SECRET'").output);
}

// Returns what the status server replies.
std::string StatusOf(int port) {
  return ReadAll(popen(absl::StrCat("bash -c 'exec 3<>/dev/tcp/127.0.0.1/", port,
                                    "; printf \"GET /status.json HTTP/1.1\\r\\nHost: x\\r\\n"
                                    "Authorization: Bearer t\\r\\n\\r\\n\" >&3; cat <&3'")
                           .c_str(),
                       "r"))
      .output;
}

TEST(LaunchTest, ServesTheStateOfEachAttempt) {
  const std::string started = Folder() + "/started", go = Folder() + "/go";
  FILE* launch =
      popen(absl::StrCat("EVENKEEL_STATUS=127.0.0.1:0 EVENKEEL_STATUS_TOKEN=t ", kLaunch,
                         " --nproc=1 --max_restarts=1 --restart_pause_s=0 -- sh -c '"
                         "echo \"token=$EVENKEEL_STATUS_TOKEN.\"; n=$EVENKEEL_RESTART; touch ",
                         started, "$n; until [ -e ", go,
                         "$n ]; do sleep 0.02; done; exit $((1 - n))' 2>&1")
                .c_str(),
            "r");
  char line[200];
  ASSERT_NE(fgets(line, sizeof(line), launch), nullptr);
  int port = 0;
  ASSERT_EQ(sscanf(line, "launch: serving http://127.0.0.1:%d/status.json", &port), 1) << line;
  for (const char* attempt : {"0", "1"}) {
    ASSERT_TRUE(Eventually([&] { return std::ifstream(started + attempt).good(); }));
    const std::string reply = StatusOf(port);
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(reply, EndsWith("\r\n\r\n[]"));
    std::ofstream(go + attempt);
  }
  const Outcome outcome = ReadAll(launch);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("token=.\n"));  // It is not for the ranks.
}

TEST(LaunchTest, StartsNothingIfItCannotServeTheState) {
  const std::string flags = "--nproc=1 --status=127.0.0.1:0 -- echo started";
  Outcome outcome = RunLaunch(flags);
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.output, HasSubstr("set EVENKEEL_STATUS_TOKEN"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("started")));
  outcome =
      RunLaunch("--nproc=1 --status=203.0.113.1:9400 -- echo started", "EVENKEEL_STATUS_TOKEN=t ");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.output, HasSubstr("203.0.113.1:9400"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("started")));
}

TEST(LaunchTest, SaysWhichRankFailedAndHow) {
  Outcome outcome =
      RunLaunch("--nproc=3 --patience_s=0.2 -- sh -c '[ $RANK != 1 ] && exec sleep 60; exit 7'");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(outcome.output,
              HasSubstr("rank 1 ended with exit code 7; the other ranks were ended after 200ms "
                        "(--on_failure=continue lets them go on)\n"));
  outcome = RunLaunch(
      "--nproc=3 --patience_s=0.2 -- sh -c '[ $RANK != 2 ] && exec sleep 60; kill -KILL $$'");
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_THAT(outcome.output, HasSubstr("rank 2 was killed by SIGKILL"));
}

// The connections of a process that is killed close before its parent learns that it has ended.
TEST(LaunchTest, ASignalExplainsAnExitCodeThatIsFoundJustBefore) {
  const Outcome outcome = RunLaunch(
      "--nproc=3 -- sh -c '[ $RANK = 0 ] && exit 1; sleep 0.1; [ $RANK = 2 ] && kill -KILL $$; "
      "exit 1'");
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_THAT(outcome.output, HasSubstr("launch: rank 2 was killed by SIGKILL\n"));
}

TEST(LaunchTest, EndsRanksThatIgnoreSigterm) {
  const absl::Time start = absl::Now();
  const Outcome outcome = RunLaunch(
      "--nproc=2 --patience_s=0.2 -- sh -c 'trap \"\" TERM; [ $RANK = 0 ] && exit 1; while :; do "
      "sleep 1; done'");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("rank 0 ended with exit code 1"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST(LaunchTest, LetsTheOthersEndByThemselves) {
  const Outcome outcome =
      RunLaunch("--nproc=2 -- sh -c '[ $RANK = 0 ] && exit 3; sleep 0.3; echo rank 1 saw it'");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_THAT(outcome.output, HasSubstr("rank 1 saw it"));
  EXPECT_THAT(outcome.output, HasSubstr("launch: rank 0 ended with exit code 3\n"));
}

TEST(LaunchTest, LeavesNothingRunning) {
  const std::string pid = absl::StrCat(Folder(), "/grandchild");
  const Outcome outcome =
      RunLaunch(absl::StrCat("--nproc=1 -- sh -c 'sleep 300 & echo $! > ", pid, "'"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_TRUE(Eventually([&] { return !IsRunning(Read(pid)); }));
}

// Starts the launcher itself as a child, with ranks that do `first`, note their process ids, and
// then do `then`.
pid_t Start(const std::string& prefix, const std::string& first, const std::string& then,
            const std::string& flag = "--on_failure=stop") {
  const pid_t launcher = fork();
  if (launcher == 0) {
    const std::string script = absl::StrCat(first, "echo $$ > ", prefix, ".$RANK.tmp; mv ", prefix,
                                            ".$RANK.tmp ", prefix, ".$RANK; ", then);
    execl(kLaunch, kLaunch, "--nproc=2", "--patience_s=5", flag.c_str(), "--", "sh", "-c",
          script.c_str(), nullptr);
    _exit(127);
  }
  EXPECT_TRUE(
      Eventually([&] { return !Read(prefix + ".0").empty() && !Read(prefix + ".1").empty(); }));
  return launcher;
}

TEST(LaunchTest, ForwardsASignalOnceAndWaits) {
  const std::string prefix = absl::StrCat(Folder(), "/forward");
  const pid_t launcher =
      Start(prefix, absl::StrCat("trap 'echo x >> ", prefix, ".got.$RANK; exit 0' INT; "),
            "while :; do sleep 0.05; done");
  kill(launcher, SIGINT);
  int status = 0;
  waitpid(launcher, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(Read(prefix + ".got.0"), "x\n");
  EXPECT_EQ(Read(prefix + ".got.1"), "x\n");
}

TEST(LaunchTest, ASecondSignalKills) {
  const std::string prefix = absl::StrCat(Folder(), "/stubborn");
  const pid_t launcher =
      Start(prefix, absl::StrCat("trap 'echo x > ", prefix, ".got.$RANK' TERM; "),
            "while :; do sleep 0.05; done");
  kill(launcher, SIGTERM);
  EXPECT_TRUE(Eventually(
      [&] { return !Read(prefix + ".got.0").empty() && !Read(prefix + ".got.1").empty(); }));
  kill(launcher, SIGTERM);
  int status = 0;
  waitpid(launcher, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGKILL) << status;
}

TEST(LaunchTest, LearnsHowRanksEndWhereThatIsIgnored) {
  const Outcome outcome = RunLaunch("--nproc=2 -- sh -c 'exit 3'", "env --ignore-signal=CHLD ");
  EXPECT_EQ(outcome.code, 3) << outcome.output;
}

TEST(LaunchTest, RanksDieWithTheLauncher) {
  const std::string prefix = absl::StrCat(Folder(), "/orphan");
  const pid_t launcher = Start(prefix, "", "exec sleep 300");
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(Eventually(
      [&] { return !IsRunning(Read(prefix + ".0")) && !IsRunning(Read(prefix + ".1")); }));
}

// Ranks that wait for `file`, so that nobody is quicker than the one that makes it.
std::string Await(const std::string& file) {
  return absl::StrCat("while [ ! -e ", file, " ]; do sleep 0.02; done; ");
}

TEST(LaunchTest, GoesOnWithoutAKilledRank) {
  for (int lost : {0, 2}) {
    const std::string gone = absl::StrCat(Folder(), "/gone", lost);
    // The others see that the rank's process is no more, and only then go on.
    const Outcome outcome = RunLaunch(absl::StrCat(
        "--nproc=3 --on_failure=continue --patience_s=0 -- sh -c '[ $RANK = ", lost,
        " ] && { echo $$ > ", gone, ".tmp; mv ", gone, ".tmp ", gone, "; kill -KILL $$; }; ",
        Await(gone), "while kill -0 $(cat ", gone,
        ") 2> /dev/null; do sleep 0.02; done; echo rank $RANK goes on at ${EVENKEEL_STORE%%:*}'"));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == lost) continue;
      EXPECT_THAT(outcome.output,
                  HasSubstr(absl::StrCat("rank ", rank, " goes on at 127.0.0.1\n")));
    }
    EXPECT_THAT(outcome.output,
                HasSubstr(absl::StrCat("launch: rank ", lost,
                                       " was killed by SIGKILL; the other ranks went on and ended "
                                       "well\n")));
  }
}

// tests/replacement has ranks that have met.
TEST(LaunchTest, ReplacesNoRankBeforeTheRanksHaveMet) {
  const Outcome outcome = RunLaunch(
      "--nproc=2 --on_failure=replace --patience_s=0.2 -- sh -c '[ $RANK = 0 ] && sleep "
      "60; exit 7'");
  EXPECT_EQ(outcome.code, 7) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("rank 1 ended with exit code 7"));
  EXPECT_THAT(outcome.output, HasSubstr("; the ranks had not met yet, and the job was ended\n"));
}

TEST(LaunchTest, HostsTheStoreUntilTheLastRankHasEnded) {
  const std::string gone = absl::StrCat(Folder(), "/store_gone");
  // bash can open a connection.
  const Outcome outcome = RunLaunch(absl::StrCat(
      "--nproc=2 --on_failure=continue --patience_s=0 -- bash -c '[ $RANK = 0 ] && { touch ", gone,
      "; exit 3; }; ", Await(gone),
      "sleep 0.2; exec 3<>/dev/tcp/127.0.0.1/${EVENKEEL_STORE##*:} && echo the store is there'"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("the store is there"));
  EXPECT_THAT(outcome.output,
              HasSubstr("rank 0 ended with exit code 3; the other rank went on and ended well"));
}

TEST(LaunchTest, NamesEveryRankThatFailedInTheirOrder) {
  const std::string file = absl::StrCat(Folder(), "/order");
  const Outcome outcome = RunLaunch(absl::StrCat(
      "--nproc=4 --on_failure=continue -- sh -c 'case $RANK in 3) echo $$ > ", file, ".tmp; mv ",
      file, ".tmp ", file, "; exit 5;; 1) ", Await(file), "while kill -0 $(cat ", file,
      ") 2> /dev/null; do sleep 0.02; done; ", "kill -KILL $$;; esac'"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      HasSubstr("rank 3 ended with exit code 5, rank 1 was killed by SIGKILL; the other ranks "
                "went on and ended well"));
}

TEST(LaunchTest, FailsWhereNoRankEndedWell) {
  const std::string file = absl::StrCat(Folder(), "/none");
  const Outcome outcome = RunLaunch(
      absl::StrCat("--nproc=2 --on_failure=continue -- sh -c '[ $RANK = 1 ] && { echo $$ > ", file,
                   ".tmp; mv ", file, ".tmp ", file, "; kill -KILL $$; }; ", Await(file),
                   "while kill -0 $(cat ", file, ") 2> /dev/null; do sleep 0.02; done; exit 4'"));
  EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      HasSubstr("rank 1 was killed by SIGKILL, rank 0 ended with exit code 4; no rank ended well"));
}

TEST(LaunchTest, AStoppedRankDoesNotKeepTheJobUp) {
  const struct {
    int code;  // The other rank's.
    const char* says;
  } cases[] = {{0, "; the other rank went on and ended well\n"}, {3, "; no rank ended well\n"}};
  for (const auto& [code, says] : cases) {
    SCOPED_TRACE(code);
    const absl::Time start = absl::Now();
    const Outcome outcome =
        RunLaunch(absl::StrCat("--nproc=2 --on_failure=continue --patience_s=0.2 -- sh -c '[ $RANK "
                               "= 1 ] && kill -STOP "
                               "$$; exit ",
                               code, "'"),
                  "timeout 15 ");
    EXPECT_EQ(outcome.code, code) << outcome.output;
    EXPECT_THAT(outcome.output,
                HasSubstr("rank 1 was stopped (SIGSTOP) and was ended when the others were done"));
    EXPECT_THAT(outcome.output, HasSubstr(says));
    EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  }
}

// It ends by itself when it is continued, after it was told to; it was stopped all the same.
TEST(LaunchTest, AStoppedRankThatIsContinuedWasStopped) {
  const Outcome outcome = RunLaunch(
      "--nproc=2 --on_failure=continue --patience_s=2 -- sh -c '[ $RANK = 0 ] && exit 0; trap "
      "\"exit 1\" TERM; "
      "p=$$; setsid sh -c \"sleep 3; kill -CONT $p\" & kill -STOP $$; while :; do sleep 0.05; "
      "done'",
      "timeout 15 ");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              HasSubstr("rank 1 was stopped (SIGSTOP) and was ended when the others were done"));
}

TEST(LaunchTest, ARankThatHangsDoesNotKeepTheJobUp) {
  for (const std::string how : {"exec sleep 300", "trap \"\" TERM; while :; do sleep 1; done",
                                "trap \"exit 9\" TERM; while :; do sleep 0.05; done"}) {
    const Outcome outcome =
        RunLaunch(absl::StrCat("--nproc=3 --on_failure=continue --patience_s=0.2 "
                               "--last_patience_s=0.5 -- sh -c '[ $RANK != 1 ] && "
                               "exit 0; ",
                               how, "'"));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    EXPECT_THAT(
        outcome.output,
        HasSubstr("rank 1 was still running 500ms after the others were done and was ended; the "
                  "other ranks went on and ended well\n"));
  }
}

TEST(LaunchTest, ARankThatIsLateIsWaitedFor) {
  const Outcome outcome = RunLaunch(
      "--nproc=2 --on_failure=continue --patience_s=0 -- sh -c '[ $RANK = 0 ] && exit 0; sleep "
      "0.5; echo late'");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(outcome.output, "late\n");
}

TEST(LaunchTest, ForwardsTheSignalThatAsksWhereRanksAre) {
  const std::string prefix = absl::StrCat(Folder(), "/where");
  const pid_t launcher =
      Start(prefix, absl::StrCat("trap 'echo x >> ", prefix, ".got.$RANK' USR1; "),
            absl::StrCat("until [ -e ", prefix, ".end ]; do sleep 0.05; done"));
  for (const std::string got : {"x\n", "x\nx\n"}) {
    kill(launcher, SIGUSR1);
    EXPECT_TRUE(Eventually(
        [&] { return Read(prefix + ".got.0") == got && Read(prefix + ".got.1") == got; }));
  }
  std::ofstream(prefix + ".end").close();
  int status = 0;
  waitpid(launcher, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(LaunchTest, ARankThatIsContinuedIsWaitedFor) {
  const std::string file = absl::StrCat(Folder(), "/continued");
  const Outcome outcome = RunLaunch(absl::StrCat(
      "--nproc=2 --on_failure=continue --patience_s=0.2 -- sh -c '[ $RANK = 1 ] && { echo $$ > ",
      file, ".tmp; mv ", file, ".tmp ", file, "; kill -STOP $$; sleep 1; echo late; exit 0; }; ",
      Await(file), "p=$(cat ", file,
      "); until grep -q \"State:.T\" /proc/$p/status; do sleep 0.02; done; kill -CONT $p'"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(outcome.output, "late\n");
}

TEST(LaunchTest, ForwardsSignalsToRanksThatWentOn) {
  const std::string prefix = absl::StrCat(Folder(), "/went_on");
  const pid_t launcher =
      Start(prefix, absl::StrCat("trap 'echo x >> ", prefix, ".got.$RANK; exit 0' INT; "),
            "[ $RANK = 0 ] && exit 3; while :; do sleep 0.05; done", "--on_failure=continue");
  EXPECT_TRUE(Eventually([&] { return !IsRunning(Read(prefix + ".0")); }));
  kill(launcher, SIGINT);
  int status = 0;
  waitpid(launcher, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(Read(prefix + ".got.1"), "x\n");
}

TEST(LaunchTest, TellsRanksWhereToWriteTheirLastCollectives) {
  const std::string folder = absl::StrCat(Folder(), "/flight");
  const Outcome outcome = RunLaunch(absl::StrCat(
      "--nproc=1 --flight=", folder, " -- sh -c 'cd /; echo here > $EVENKEEL_FLIGHT/$RANK'"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(Read(folder + "/0"), "here\n");
}

TEST(LaunchTest, RefusesAFolderWithRecordsOfAnEarlierJob) {
  const std::string folder = absl::StrCat(Folder(), "/earlier/flight");
  const std::string call = absl::StrCat("--nproc=1 --flight=", folder, " -- sh -c 'echo started'");
  EXPECT_EQ(RunLaunch(call).output, "started\n");
  std::ofstream(folder + "/world.rank.json").close();
  std::ofstream(folder + "/ranks.json").close();
  EXPECT_EQ(RunLaunch(call).output, "started\n");
  std::ofstream(folder + "/world.rank12.json").close();
  const Outcome outcome = RunLaunch(call);
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(
      outcome.output,
      absl::StrCat(
          "launch: --flight=", folder,
          " contains records of an earlier job (world.rank12.json), which would be merged with "
          "this job's; pass another folder, or remove them\n"));
}

TEST(LaunchTest, StartsAFailedJobAnew) {
  const Outcome outcome = RunLaunch(
      "--nproc=2 --max_restarts=4 --restart_pause_s=0 -- sh -c 'echo rank=$RANK "
      "restart=$EVENKEEL_RESTART "
      "s=$EVENKEEL_SECRET; [ $RANK = 0 ] || [ $EVENKEEL_RESTART = 2 ] || exit 7'");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (int restart = 0; restart < 3; ++restart) {
    EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("rank=0 restart=", restart, " ")));
    EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("rank=1 restart=", restart, " ")));
  }
  EXPECT_THAT(outcome.output, Not(HasSubstr("restart=3")));
  EXPECT_THAT(outcome.output,
              HasSubstr("launch: rank 1 ended with exit code 7; attempt 2 of 5 begins in 0\n"));
  EXPECT_THAT(outcome.output,
              HasSubstr("exit code 7; it was attempt 2 of 5; attempt 3 of 5 begins in 0\n"));
  std::set<std::string> secrets;
  for (size_t at = 0; (at = outcome.output.find(" s=", at)) != std::string::npos; ++at) {
    secrets.insert(outcome.output.substr(at, 3 + 64));
  }
  EXPECT_EQ(secrets.size(), 3u) << outcome.output;
}

TEST(LaunchTest, TheLastAttemptSaysHowTheJobEnded) {
  const Outcome outcome = RunLaunch(
      "--nproc=2 --max_restarts=2 --restart_pause_s=0 -- sh -c 'exit $((10 + EVENKEEL_RESTART))'");
  EXPECT_EQ(outcome.code, 12) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr(" ended with exit code 12; it was attempt 3 of 3\n"));
  EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 3) << outcome.output;
}

TEST(LaunchTest, NoRankOfAnAttemptSeesTheNextOne) {
  const std::string file = absl::StrCat(Folder(), "/previous");
  const Outcome outcome = RunLaunch(absl::StrCat(
      "--nproc=2 --patience_s=0.1 --max_restarts=1 --restart_pause_s=0 -- sh -c '[ "
      "$EVENKEEL_RESTART = 0 ] || { kill "
      "-0 $(cat ",
      file, ") 2> /dev/null; exit $((1 - $?)); }; [ $RANK = 1 ] && { trap \"\" TERM; echo $$ > ",
      file, ".tmp; mv ", file, ".tmp ", file, "; while :; do sleep 0.05; done; }; ", Await(file),
      "kill -KILL $$'"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      HasSubstr("rank 0 was killed by SIGKILL; the other rank was ended after 100ms; attempt 2 "
                "of 2 begins in 0\n"));
}

TEST(LaunchTest, RanksThatGoOnAreNotStartedAnewWhenOneEndsWell) {
  const std::string flags =
      "--nproc=2 --on_failure=continue --max_restarts=1 --restart_pause_s=0 -- ";
  Outcome outcome = RunLaunch(flags + "sh -c 'exit $RANK'");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, Not(HasSubstr("attempt")));
  outcome = RunLaunch(flags + "sh -c '[ $EVENKEEL_RESTART = 1 ] || exit 3'");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("; no rank ended well; attempt 2 of 2 begins in 0\n"));
}

// Starts the launcher as a child that writes all it says to a file.
pid_t StartRestarting(const std::string& output, const std::string& pause,
                      const std::string& script) {
  const pid_t launcher = fork();
  if (launcher == 0) {
    dup2(open(output.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), STDOUT_FILENO);
    dup2(STDOUT_FILENO, STDERR_FILENO);
    execl(kLaunch, kLaunch, "--nproc=2", "--max_restarts=2", pause.c_str(), "--", "sh", "-c",
          script.c_str(), nullptr);
    _exit(127);
  }
  return launcher;
}

bool Has(const std::string& file, const std::string& text) {
  return Read(file).find(text) != std::string::npos;
}

int CodeOf(pid_t process) {
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(LaunchTest, AnInterruptedJobIsNotStartedAnew) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string output = absl::StrCat(Folder(), "/interrupted", signal);
    const pid_t launcher = StartRestarting(
        output, "--restart_pause_s=0",
        absl::StrCat("trap 'exit 5' ", signal, "; echo ready $RANK; while :; do sleep 0.05; done"));
    EXPECT_TRUE(Eventually([&] { return Has(output, "ready 0\n") && Has(output, "ready 1\n"); }));
    kill(launcher, signal);
    EXPECT_EQ(CodeOf(launcher), 5);
    EXPECT_THAT(Read(output), HasSubstr("ended with exit code 5\n"));
    EXPECT_THAT(Read(output), Not(HasSubstr("attempt")));
  }
}

TEST(LaunchTest, APauseEndsWhenTheJobIsInterrupted) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string output = absl::StrCat(Folder(), "/pause", signal);
    const pid_t launcher = StartRestarting(output, "--restart_pause_s=600", "exit 3");
    EXPECT_TRUE(Eventually([&] { return Has(output, "attempt 2 of 3 begins in 10m\n"); }));
    const absl::Time start = absl::Now();
    kill(launcher, signal);
    EXPECT_EQ(CodeOf(launcher), 3);
    EXPECT_LT(absl::Now() - start, absl::Seconds(60));
    EXPECT_THAT(Read(output),
                HasSubstr("ended with exit code 3; interrupted before attempt 2 of 3\n"));
  }
}

TEST(LaunchTest, ASignalThatAsksWhereRanksAreDoesNotEndAPause) {
  const std::string output = absl::StrCat(Folder(), "/asked");
  const pid_t launcher =
      StartRestarting(output, "--restart_pause_s=0.5", "exit $((3 - 3 * EVENKEEL_RESTART))");
  EXPECT_TRUE(Eventually([&] { return Has(output, "attempt 2 of 3 begins in 500ms\n"); }));
  kill(launcher, SIGUSR1);
  EXPECT_EQ(CodeOf(launcher), 0) << Read(output);
}

TEST(LaunchTest, KeepsTheFlightRecordsOfAttemptsApart) {
  const std::string folder = absl::StrCat(Folder(), "/attempts");
  const std::string call =
      absl::StrCat("--nproc=1 --max_restarts=2 --restart_pause_s=0 --flight=", folder,
                   " -- sh -c 'echo $EVENKEEL_RESTART > $EVENKEEL_FLIGHT/world.rank0.json; "
                   "exit $((2 - EVENKEEL_RESTART))'");
  EXPECT_EQ(RunLaunch(call).code, 0);
  EXPECT_EQ(Read(folder + "/world.rank0.json"), "0\n");
  EXPECT_EQ(Read(folder + "/restart1/world.rank0.json"), "1\n");
  EXPECT_EQ(Read(folder + "/restart2/world.rank0.json"), "2\n");
  unlink((folder + "/world.rank0.json").c_str());
  unlink((folder + "/restart1/world.rank0.json").c_str());
  const Outcome outcome = RunLaunch(call);
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.output, HasSubstr("/restart2 contains records of an earlier job"));
}

TEST(LaunchTest, RefusesBadCallsWithOneSentence) {
  for (const auto& [arguments, expected] :
       {std::pair<std::string, std::string>("", "no program to start is given"),
        {"--nproc=0 -- true", "--nproc must be at least 1"},
        {"--patience_s=-1 -- true", "--patience_s must not be negative"},
        {"--last_patience_s=-1 -- true", "--last_patience_s must not be negative"},
        {"--max_restarts=-1 -- true", "--max_restarts must not be negative"},
        {"--restart_pause_s=-1 -- true", "--restart_pause_s must not be negative"},
        {"sh --epochs=3", "put `--` before the program"},
        {"--nproc 2 sh script -x", "put `--` before the program"},
        {"sh -- --epochs=3", "put `--` before the program"},
        {"--on_failure=replace --max_replacements=-1 -- true",
         "--max_replacements must not be negative"},
        {"--on_failure=pray -- true",
         "--on_failure=pray is not known; choose stop, continue, replace"},
        {"--flight=/proc/none -- true", "--flight=/proc/none: cannot write to this folder"},
        {"-- ./no_such_program", "cannot run ./no_such_program: No such file"},
        {"--nproc=two -- true", "illegal value 'two'"},
        {"--procs=2 -- true", "unknown command line flag 'procs'"}}) {
    const Outcome outcome = RunLaunch(arguments);
    EXPECT_NE(outcome.code, 0) << arguments;
    EXPECT_THAT(outcome.output, HasSubstr(expected)) << arguments;
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }
  EXPECT_THAT(RunLaunch("--help").output, HasSubstr("launch [--nproc=2]"));
}

}  // namespace
