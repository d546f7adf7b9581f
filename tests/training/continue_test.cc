// A rank that is killed in mid-epoch, with --on_failure=continue: the others finish, with the
// weights that a group of that many ranks gives which does those steps from that step on.
//
// The reference runs over the same backend, in this process. Gloo adds in an order that depends on
// an element's place in its bucket, so each parameter has a bucket of its own, in every plan. What
// remains are last bits in which a kernel's sums depend on where memory lies, and in which a sum
// depends on how the ranks are divided over hosts: less than a thousandth of what one step more or
// less with four ranks changes. trainer:training_run_test has the same bit for bit, in threads.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int kRanks = 4;
constexpr int kBatch = 4;
constexpr int kEpochs = 2;
// 200 steps per epoch, and an uneven rest: no rank ends before the test has seen the first steps
// and killed a rank.
constexpr int kSteps = 200;
constexpr SmallData kData{.train = kSteps * kRanks * kBatch + 6, .test = 50};

struct Recipe {
  std::string name;
  TrainFlags flags;
};

TrainFlags Small(TrainFlags flags) {
  flags.model = "mlp";
  flags.hidden = "8";
  flags.epochs = kEpochs;
  flags.batch_size = kBatch;
  flags.zero = false;
  flags.bucket_cap_mb = flags.first_bucket_mb = 0;
  return flags;
}

const Recipe kMomentum{"momentum", Small({.optimizer = "sgd", .lr = 0.01, .momentum = 0.9})};
const Recipe kAdam{"adam", Small({.optimizer = "adam", .lr = 0.0005})};

// A run of the program that may lose ranks.
class ElasticRun {
 public:
  explicit ElasticRun(const std::vector<std::string>& more,
                      const std::vector<std::string>& launcher = {},
                      const ProgramOptions& options = {})
      : mark_(TempPath(absl::StrCat("continue", number_++, ".jsonl"))) {
    std::vector<std::string> command = launcher;
    for (const std::string& flag : std::vector<std::string>{
             kTrain, "--model=mlp", "--hidden=8", BackendFlagOfProcesses(),
             absl::StrCat("--nproc=", kRanks), absl::StrCat("--batch_size=", kBatch),
             absl::StrCat("--epochs=", kEpochs), "--on_failure=continue",
             "--data=" + WriteSmallData("data", kData), "--metrics=" + mark_}) {
      command.push_back(flag);
    }
    command.insert(command.end(), more.begin(), more.end());
    program_ = std::make_unique<Program>(command, options);
  }

  std::vector<nlohmann::json> Events(absl::string_view kind) const {
    std::vector<nlohmann::json> events;
    for (const std::string& line : Lines(ReadText(mark_))) {
      const nlohmann::json event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!event.is_discarded() && event.at("event") == std::string(kind)) events.push_back(event);
    }
    return events;
  }

  // Whether the metrics have that many lines about steps (of all epochs) before the run ends.
  bool WaitForSteps(size_t steps) const { return WaitForLines("\"event\":\"step\"", steps); }
  bool WaitForLosses(size_t losses) const { return WaitForLines("\"event\":\"lost\"", losses); }
  // Whether they have the last line, which comes after all files.
  bool WaitForTest() const { return WaitForLines("\"event\":\"test\"", 1); }

  pid_t PidOfRank(int rank) const { return evenkeel::PidOfRank(mark_, rank); }

  void Signal(int rank, int signal) const {
    const pid_t pid = PidOfRank(rank);
    ASSERT_GT(pid, 0) << "rank " << rank;
    ASSERT_EQ(kill(pid, signal), 0);
  }

  void SignalAll(int signal) const { ASSERT_EQ(kill(program_->pid(), signal), 0); }

  Ended Wait() {
    const Ended ended = program_->Wait();
    EXPECT_FALSE(ended.timed_out);
    EXPECT_THAT(ProcessesWith(mark_), IsEmpty());
    return ended;
  }

 private:
  bool WaitForLines(const std::string& text, size_t count) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(40);
    while (absl::Now() < deadline) {
      const std::string contents = ReadText(mark_);
      size_t found = 0;
      for (size_t at = 0; (at = contents.find(text, at)) != std::string::npos; at += text.size())
        ++found;
      if (found >= count) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  static int number_;
  const std::string mark_;
  std::unique_ptr<Program> program_;
};

int ElasticRun::number_ = 0;

// The step from which on the others went on, as the program says it; -1: it does not.
int64_t StepOf(const std::string& err, const std::string& lost, const std::string& left) {
  std::smatch match;
  int64_t step = -1;
  const std::regex line("train: rank " + lost + " is lost \\([^\n]*\\): " + left +
                        " after step ([0-9]+)\n");
  return std::regex_search(err, match, line) && absl::SimpleAtoi(match[1].str(), &step) ? step : -1;
}

// A rank's state after training.
struct Trained {
  Weights weights;
  OptimizerState optimizer;
};

Trained After(TrainingRun& run) {
  Trained trained;
  const ParameterSet& parameters = run.model().parameters();
  for (int i = 0; i < parameters.size(); ++i) {
    const auto value = parameters[i].value.as<float>();
    trained.weights[parameters[i].name].assign(value.begin(), value.end());
  }
  trained.optimizer = *run.ConsolidateOptimizer();
  return trained;
}

// Trains `ranks` threads from `begin` on, from what `from` had, until `max_steps`.
Trained TrainFrom(const TrainFlags& base, int ranks, const EpochPosition& begin,
                  const Trained* from, int64_t max_steps) {
  TrainFlags flags = base;
  flags.max_steps = max_steps;
  const auto data = LoadTrainingData({.path = TempPath("data")});
  Trained result;
  const auto train = [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
    EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, data, comm.rank(), ranks));
    EK_ASSIGN_OR_RETURN(setup.plan, setup.plan.GoOn(begin, ranks));
    ParameterSet& parameters = setup.model->parameters();
    for (int i = 0; from != nullptr && i < parameters.size(); ++i) {
      std::ranges::copy(from->weights.at(parameters[i].name),
                        parameters[i].value.as<float>().begin());
    }
    EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
    if (from != nullptr) EK_RETURN_IF_ERROR(run->LoadOptimizer(from->optimizer));
    for (int epoch = run->plan().begin.epoch; epoch < run->plan().epochs(); ++epoch) {
      EK_RETURN_IF_ERROR(
          run->TrainEpoch(epoch, [](const StepFacts&) { return absl::OkStatus(); }).status());
    }
    EK_RETURN_IF_ERROR(run->AgreeOnState().status());
    if (comm.rank() == 0) result = After(*run);
    return comm.Finalize();
  };
  const absl::StatusOr<TestGroup> group = FindTestBackend(BackendOfProcesses())->create(ranks, {});
  EXPECT_TRUE(group.ok()) << group.status();
  std::vector<std::thread> threads;
  for (const auto& comm : *group) {
    threads.emplace_back([&comm, &train] {
      const absl::Status status = train(*comm);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) comm->Abort(status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

// The weights after losses: group sizes, each with the step that it begins with.
struct Stretch {
  int ranks;
  int64_t first_step;
};

Weights Reference(const TrainFlags& flags, const std::vector<Stretch>& stretches) {
  StepPlan plan = *MakeStepPlan({.world_size = stretches[0].ranks,
                                 .samples = kData.train,
                                 .batch_size = kBatch,
                                 .epochs = kEpochs});
  Trained trained;
  for (size_t i = 0; i < stretches.size(); ++i) {
    if (i > 0) plan = *plan.GoOn(plan.PositionAfter(stretches[i].first_step), stretches[i].ranks);
    const int64_t until = i + 1 < stretches.size() ? stretches[i + 1].first_step : 0;
    trained = TrainFrom(flags, stretches[i].ranks, plan.begin, i > 0 ? &trained : nullptr, until);
  }
  return trained.weights;
}

std::vector<std::string> FlagsOf(const Recipe& recipe) {
  std::vector<std::string> flags = {"--nozero", "--bucket_cap_mb=0", "--first_bucket_mb=0",
                                    "--optimizer=" + recipe.flags.optimizer,
                                    absl::StrCat("--lr=", *recipe.flags.lr)};
  if (recipe.flags.momentum != 0)
    flags.push_back(absl::StrCat("--momentum=", recipe.flags.momentum));
  return flags;
}

struct Case {
  Recipe recipe;
  int lost;
};

class ContinueTest : public testing::TestWithParam<Case> {};

TEST_P(ContinueTest, TheOthersEndAsIfTheyHadDoneThoseStepsAlone) {
  const auto& [recipe, lost] = GetParam();
  std::vector<std::string> flags = FlagsOf(recipe);
  const std::string save = TempPath("continued.safetensors");
  flags.push_back("--save=" + save);
  ElasticRun run(flags);
  ASSERT_TRUE(run.WaitForSteps(40));
  run.Signal(lost, SIGKILL);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  ASSERT_EQ(ended.code, 0);
  EXPECT_THAT(ended.out, HasSubstr("\ntest_accuracy="));
  EXPECT_THAT(ended.err, HasSubstr(absl::StrCat(
                             "train: rank ", lost,
                             " was killed by SIGKILL; the other ranks went on and ended well\n")));
  const int64_t step = StepOf(ended.err, absl::StrCat(lost), "3 ranks continue");
  ASSERT_GE(step, 39);
  ASSERT_LT(step, kEpochs * kSteps);
  EXPECT_THAT(ended.out,
              HasSubstr(absl::StrCat(
                  "rank ", lost, " was lost; the other ranks continued after step ", step, "\n")));

  // All that are left have the same weights and the same state: they have compared their hashes.
  const auto tests = run.Events("test");
  ASSERT_EQ(tests.size(), 1u);
  EXPECT_EQ(tests[0].at("ranks"), 3);
  EXPECT_EQ(tests[0].at("ranks_lost"), 1);
  const auto losses = run.Events("lost");
  ASSERT_EQ(losses.size(), 1u);
  EXPECT_EQ(losses[0].at("rank"), lost);
  EXPECT_EQ(losses[0].at("step"), step);

  const Weights weights = ReadWeights(save);
  const Weights expected = Reference(recipe.flags, {{4, 0}, {3, step}});
  const Weights next = Reference(recipe.flags, {{4, 0}, {3, step + 1}});
  EXPECT_LE(MaxDifference(weights, expected), MaxDifference(next, expected) / 1000);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ContinueTest,
                         testing::Values(Case{kMomentum, 0}, Case{kMomentum, 2}, Case{kAdam, 0},
                                         Case{kAdam, 3}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.recipe.name, "Rank", info.param.lost);
                         });

// Rank 0 has judged the evaluations, and written the best weights, until then.
TEST(ContinueWithEvaluationsTest, TheBestWeightsAreSaved) {
  const std::string save = TempPath("best.safetensors");
  constexpr int kEvery = 6;
  std::vector<std::string> flags = FlagsOf(kAdam);
  flags.insert(flags.end(), {"--save=" + save, "--save_best", absl::StrCat("--eval_every=", kEvery),
                             "--patience=1000"});
  ElasticRun run(flags);
  ASSERT_TRUE(run.WaitForSteps(40));
  run.Signal(0, SIGKILL);
  const Ended ended = run.Wait();
  ASSERT_EQ(ended.code, 0) << ended.err;
  const int64_t lost = StepOf(ended.err, "0", "3 ranks continue");
  double lowest = HUGE_VAL;
  int64_t step = 0, evaluated_after = 0;
  for (const nlohmann::json& event : run.Events("evaluation")) {
    const int64_t at = event.at("step");
    EXPECT_EQ(at % kEvery, 0);
    EXPECT_GE(at, step);  // One may be repeated.
    step = at;
    evaluated_after += at > lost ? 1 : 0;
    lowest = std::min(lowest, event.at("test_loss").get<double>());
  }
  EXPECT_GE(evaluated_after, 40);
  for (const nlohmann::json& event : run.Events("epoch"))
    lowest = std::min(lowest, event.at("test_loss").get<double>());
  const auto saved = SafetensorsFile::Read(save);
  ASSERT_TRUE(saved.ok()) << saved.status();
  double loss = 0;
  ASSERT_TRUE(absl::SimpleAtod(saved->metadata().at("test_loss"), &loss));
  EXPECT_NEAR(loss, lowest, 1e-5 * lowest);
}

TEST(ContinueTwiceTest, OneAfterTheOther) {
  std::vector<std::string> flags = FlagsOf(kMomentum);
  const std::string save = TempPath("twice.safetensors"), flight = TempPath("twice_flight");
  for (const std::string& flag :
       {"--save=" + save, "--flight=" + flight, std::string("--verify=every")}) {
    flags.push_back(flag);
  }
  ElasticRun run(flags);
  ASSERT_TRUE(run.WaitForSteps(30));
  run.Signal(1, SIGKILL);
  ASSERT_TRUE(run.WaitForLosses(1));
  ASSERT_TRUE(run.WaitForSteps(run.Events("step").size() + 30));
  run.Signal(0, SIGKILL);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  ASSERT_EQ(ended.code, 0);
  const int64_t first = StepOf(ended.err, "1", "3 ranks continue"),
                second = StepOf(ended.err, "0", "2 ranks continue");
  ASSERT_GE(first, 29);
  ASSERT_GT(second, first);
  // The records of the ranks left when one was lost, by their numbers in the group of that time.
  for (int rank : {0, 2, 3}) {
    EXPECT_THAT(ReadText(absl::StrCat(flight, "/world.rank", rank, ".json")),
                HasSubstr("all_reduce"));
  }
  EXPECT_THAT(ReadText(flight + "/world.rank1.json"), IsEmpty());
  const Weights expected = Reference(kMomentum.flags, {{4, 0}, {3, first}, {2, second}});
  const Weights next = Reference(kMomentum.flags, {{4, 0}, {3, first}, {2, second + 1}});
  EXPECT_LE(MaxDifference(ReadWeights(save), expected), MaxDifference(next, expected) / 1000);
}

TEST(ContinueShardedTest, IsRefusedAtTheStartWithTheWayOut) {
  ElasticRun run({"--zero"});
  const Ended ended = run.Wait();
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.out, "");
  EXPECT_THAT(Lines(ended.err), SizeIs(1)) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("--nozero"));
  EXPECT_THAT(ended.err, HasSubstr("--lost_shard=fresh"));
}

TEST(ContinueShardedTest, GoesOnWhereTheLostPartMayBeginFresh) {
  ElasticRun run({"--zero", "--lost_shard=fresh"});
  ASSERT_TRUE(run.WaitForSteps(30));
  run.Signal(1, SIGKILL);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 0);
  EXPECT_GE(StepOf(ended.err, "1", "3 ranks continue"), 29);
  ASSERT_EQ(run.Events("test").size(), 1u);
  EXPECT_EQ(run.Events("test")[0].at("ranks"), 3);
}

// The others go on without a rank that falls silent, rank 0 included: they need its checkpoints,
// and its process still has them locked. When that process wakes up it ends, and leaves the
// checkpoints alone.
TEST(ContinueStoppedTest, ARankThatFallsSilentIsLost) {
  const std::string folder = TempPath("taken_over");
  ElasticRun run({"--nozero", "--epochs=4", "--checkpoint_dir=" + folder, "--checkpoint_every=25",
                  "--keep=2"});
  ASSERT_TRUE(run.WaitForSteps(60));
  run.Signal(0, SIGSTOP);
  ASSERT_TRUE(run.WaitForLosses(1));
  ASSERT_TRUE(run.WaitForSteps(run.Events("step").size() + 60));
  run.Signal(0, SIGCONT);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 0);
  EXPECT_GE(StepOf(ended.err, "0", "3 ranks continue"), 59);
  EXPECT_THAT(ended.err, HasSubstr("train: rank 0: "));
  EXPECT_THAT(ended.err,
              HasSubstr("rank 0 ended with exit code 1; the other ranks went on and ended well"));
  ASSERT_EQ(run.Events("test").size(), 1u);
  const int64_t last = run.Events("step").back().at("step").get<int64_t>() + 1;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, testing::UnorderedElementsAre(
                         ".lock", absl::StrFormat("step-%09d", (last - 1) / 25 * 25),
                         absl::StrFormat("step-%09d", last)));
}

// It was rank 0, and would write a page that says that the run did not come to its end.
TEST(ContinueStoppedTest, ARankThatWakesAfterTheEndLeavesTheOthersReportAlone) {
  const std::string report = TempPath("left_behind.html");
  // It has a minute to wake up before the launcher ends it.
  ElasticRun run({"--nozero", "--report=" + report},
                 {"tools/launch", absl::StrCat("--nproc=", kRanks), "--on_failure=continue",
                  "--patience_s=60", "--"});
  ASSERT_TRUE(run.WaitForSteps(60));
  run.Signal(0, SIGSTOP);
  ASSERT_TRUE(run.WaitForTest());
  const std::string written = ReadText(report);
  run.Signal(0, SIGCONT);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 0);
  // It ended by itself, and has said why.
  EXPECT_THAT(ended.err, HasSubstr("train: rank 0: "));
  EXPECT_THAT(ended.err,
              HasSubstr("rank 0 ended with exit code 1; the other ranks went on and ended well"));
  EXPECT_THAT(written, HasSubstr("rank 0; the other ranks continue from this step"));
  EXPECT_THAT(written, HasSubstr(R"("ending":"")"));
  EXPECT_TRUE(ReadText(report) == written);
}

// A group that is told to stop, and loses a rank before all have heard of it: the next one has to
// be told, too.
TEST(ContinueStoppedTest, AWishToStopOutlivesTheGroup) {
  const std::string folder = TempPath("stopped");
  // Steps that are long enough for the loss to come in the one that carries the wish.
  const std::string data = WriteSmallData("long_steps", {.train = 8000, .test = 50});
  ElasticRun run({"--nozero", "--hidden=512,512", "--batch_size=400", "--epochs=30",
                  "--data=" + data, "--checkpoint_dir=" + folder, "--checkpoint_every=0"});
  ASSERT_TRUE(run.WaitForSteps(2));
  const pid_t told = run.PidOfRank(0), lost = run.PidOfRank(3);
  const size_t steps = run.Events("step").size();
  ASSERT_EQ(kill(told, SIGTERM), 0);
  ASSERT_TRUE(run.WaitForSteps(steps + 1));  // After which it asks the others.
  ASSERT_EQ(kill(lost, SIGKILL), 0);
  const Ended ended = run.Wait();
  EXPECT_THAT(ended.err, HasSubstr("train: stopped after step "));
  EXPECT_THAT(run.Events("test"), IsEmpty());
}

// All ranks get the error of the last checkpoint, and end. No rank is taken for lost because it got
// it later. Over tcp: the limit of a file's size is one of shared memory, too.
TEST(ContinueWithoutACheckpointTest, ARankThatCannotWriteTheLastOneEndsTheRun) {
  // Long after rank 0 is stopped, and before the last step of an epoch, however many ranks are
  // left: in that one rank 3 may have no batch, and then nothing to write.
  constexpr int kLate = 380;
  const std::string limited =
      "if [ $RANK = 3 ]; then trap '' XFSZ; ulimit -f 4; fi; exec \"$0\" \"$@\"";
  const auto start = [&](const std::string& folder) {
    return std::make_unique<ElasticRun>(
        std::vector<std::string>{"--nozero", "--backend=tcp",
                                 "--checkpoint_dir=" + TempPath(folder), "--checkpoint_every=0",
                                 absl::StrCat("--max_steps=", kLate)},
        std::vector<std::string>{"tools/launch", absl::StrCat("--nproc=", kRanks),
                                 "--on_failure=continue", "--patience_s=0.5", "--", "/bin/bash",
                                 "-c", limited});
  };
  // The other job runs while the group waits for the rank that is silent.
  const auto losing = start("unwritten_losing");
  ASSERT_TRUE(losing->WaitForSteps(20));
  losing->Signal(0, SIGSTOP);
  const auto whole = start("unwritten");
  for (const bool loses_rank0 : {false, true}) {
    SCOPED_TRACE(loses_rank0 ? "rank 0 is stopped before" : "all ranks are there");
    const Ended ended = (loses_rank0 ? losing : whole)->Wait();
    EXPECT_EQ(ended.code, 1);
    // The lowest rank that is left reports it, once.
    EXPECT_THAT(ended.err, HasSubstr(absl::StrCat("train: the checkpoint of step ", kLate,
                                                  " failed: rank 3: cannot write ")));
    EXPECT_THAT(ended.err, HasSubstr("; no rank ended well"));
    EXPECT_THAT(Lines(ended.err), SizeIs(loses_rank0 ? 3 : 2)) << ended.err;
    if (!loses_rank0) continue;
    EXPECT_GE(StepOf(ended.err, "0", "3 ranks continue"), 19);
    EXPECT_THAT(ended.err,
                HasSubstr("rank 0 was stopped (SIGSTOP) and was ended when the others were done"));
  }
}

// A person debugging a hang wants to know where the ranks are. The starter of the ranks forwards
// the signal.
TEST(FlightOnSignalTest, EveryRankWritesItsCollectivesAndGoesOn) {
  const std::string flight = TempPath("asked");
  ElasticRun run({"--nozero", "--flight=" + flight});
  ASSERT_TRUE(run.WaitForSteps(20));
  run.SignalAll(SIGUSR1);
  const Ended ended = run.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(ReadText(absl::StrCat(flight, "/world.rank", rank, ".json")),
                HasSubstr("all_reduce"));
  }
}

// Where rank 0 hosts the store, the others say so when it is lost, and end.
TEST(ContinueWithoutALauncherTest, NobodyGoesOnWithoutTheStore) {
  const std::string mark = TempPath("hosted.jsonl"), folder = TempPath("hosted_store");
  mkdir(folder.c_str(), 0700);
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    const ProgramOptions options{.environment = {{"RANK", absl::StrCat(rank)},
                                                 {"WORLD_SIZE", "3"},
                                                 {"LOCAL_RANK", absl::StrCat(rank)},
                                                 {"LOCAL_WORLD_SIZE", "3"},
                                                 {"EVENKEEL_STORE", folder},
                                                 {"EVENKEEL_SECRET", "the secret of this test"}}};
    ranks.push_back(std::make_unique<Program>(
        std::vector<std::string>{kTrain, "--model=mlp", "--hidden=8", "--batch_size=4", "--nozero",
                                 "--on_failure=continue", "--data=" + WriteSmallData("data", kData),
                                 "--metrics=" + mark},
        options));
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(40);
  while (Lines(ReadText(mark)).size() < 20 && absl::Now() < deadline)
    absl::SleepFor(absl::Milliseconds(5));
  ASSERT_EQ(kill(ranks[0]->pid(), SIGKILL), 0);
  const absl::Time killed = absl::Now();
  EXPECT_EQ(ranks[0]->Wait().code, 128 + SIGKILL);
  for (int rank : {1, 2}) {
    const Ended ended = ranks[rank]->Wait();
    SCOPED_TRACE(ended.err);
    EXPECT_FALSE(ended.timed_out);
    EXPECT_EQ(ended.code, 1);
    EXPECT_THAT(Lines(ended.err), SizeIs(1));
    EXPECT_THAT(ended.err, HasSubstr("store"));
    EXPECT_THAT(ended.err, HasSubstr("evenkeel-launch or --nproc, which host the store"));
  }
  EXPECT_LT(absl::Now() - killed, absl::Seconds(20));
}

// A rank that fails by itself ends with its error; the others go on.
TEST(ContinueAfterAnErrorTest, ARankWithAnErrorOfItsOwnIsLeftBehind) {
  // No file may have more than 4096 bytes: rank 0 can't write the weights, nor can the rank that
  // takes its place.
  const std::string save = TempPath("limited.safetensors");
  const std::string command =
      absl::StrCat("trap '' XFSZ; ulimit -f 8; exec ", kTrain,
                   " --model=mlp --hidden=8 --backend=tcp --nproc=2 --on_failure=continue "
                   "--nozero --epochs=1 --save=",
                   save, " --data=", WriteSmallData("short", {.train = 9600}));
  const Ended ended = Program({"/bin/sh", "-c", command}).Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 1);
  for (int rank : {0, 1}) {
    EXPECT_THAT(ended.err, HasSubstr(absl::StrCat("train: rank ", rank, ": cannot write ", save)));
  }
  EXPECT_GE(StepOf(ended.err, "0", "1 rank continues"), 1);
  EXPECT_THAT(ended.err, HasSubstr("; no rank ended well"));
}

}  // namespace
}  // namespace evenkeel
