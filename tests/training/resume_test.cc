// A run that goes on from a checkpoint: what it ends with, what it says, and what it refuses.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using Flags = std::vector<std::string>;

namespace fs = std::filesystem;

std::string Fresh(const std::string& name) {
  const std::string path = TempPath(name);
  fs::remove_all(path);
  return path;
}

std::string StepFolder(const std::string& folder, int step) {
  const std::string digits = absl::StrCat(step);
  return absl::StrCat(folder, "/step-", std::string(9 - digits.size(), '0'), digits);
}

std::vector<std::string> CheckpointsIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  std::erase(names, ".lock");
  return names;
}

Flags operator+(Flags flags, const Flags& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// A run's result: the bytes of its weights, and values from its last line of metrics.
struct Outcome {
  Ended ended;
  std::string weights, state_hash;
  Weights values;                       // The same weights as numbers.
  std::map<int, double> training_loss;  // By epoch.
};

Outcome RunToEnd(const Flags& flags) {
  const std::string weights = Fresh("weights.safetensors"), metrics = Fresh("metrics.jsonl");
  Outcome outcome{.ended = Train(flags + Flags{"--save=" + weights, "--metrics=" + metrics})};
  EXPECT_EQ(outcome.ended.code, 0) << outcome.ended.err;
  if (outcome.ended.code != 0) return outcome;
  outcome.weights = ReadText(weights);
  outcome.values = ReadWeights(weights);
  for (const std::string& line : Lines(ReadText(metrics))) {
    const nlohmann::json event = nlohmann::json::parse(line);
    if (event["event"] == "test") outcome.state_hash = event["state_hash"];
    if (event["event"] == "epoch") outcome.training_loss[event["epoch"]] = event["train_loss"];
  }
  return outcome;
}

Flags Small(const Flags& more, int nproc = 3, int train = 250) {
  return Flags{
             "--data=" + WriteSmallData(absl::StrCat("data", train), {.train = train, .test = 50}),
             absl::StrCat("--nproc=", nproc), "--epochs=2", "--batch_size=8"} +
         more;
}

// Each checkpoint of an undisturbed run leads to its end, bit for bit: weights, the optimizer's
// state, and what it says of its epochs. 250 samples in batches of 8 on 3 ranks are 11, 11 and 10
// steps, so that one rank is exhausted in the last step of an epoch, which is the 11th, and the
// 22nd.
struct Variant {
  std::string name;
  Flags flags;
};

class ExactResumeTest : public testing::TestWithParam<Variant> {};

TEST_P(ExactResumeTest, EndsAsTheUndisturbedRunDoes) {
  const Flags flags = Small(GetParam().flags);
  const std::string folder = Fresh("all");
  const Outcome whole = RunToEnd(flags);
  const Outcome saved =
      RunToEnd(flags + Flags{"--checkpoint_dir=" + folder, "--checkpoint_every=1", "--keep=0"});
  EXPECT_EQ(saved.weights, whole.weights) << "saving has changed something";
  const std::vector<std::string> names = CheckpointsIn(folder);
  ASSERT_GE(names.size(), 10u);
  std::vector<size_t> chosen = {
      0, 1, names.size() / 3, names.size() / 2 - 1, names.size() / 2, names.size() - 1};
  for (const size_t i : chosen) {
    SCOPED_TRACE(names[i]);
    const Outcome resumed = RunToEnd(flags + Flags{"--resume=" + folder + "/" + names[i]});
    EXPECT_THAT(resumed.ended.out, HasSubstr("resumed from " + folder + "/" + names[i]));
    EXPECT_TRUE(resumed.weights == whole.weights);
    EXPECT_EQ(resumed.state_hash, whole.state_hash);
    for (const auto& [epoch, loss] : resumed.training_loss)
      EXPECT_EQ(loss, whole.training_loss.at(epoch)) << epoch;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Variants, ExactResumeTest,
    testing::Values(
        Variant{"slices", {"--model=mlp", BackendFlagOfProcesses()}},
        Variant{"tensors",
                {"--model=mlp", BackendFlagOfProcesses(), "--shards=tensors", "--optimizer=adam"}},
        Variant{"whole",
                {"--model=mlp", BackendFlagOfProcesses(), "--nozero", "--optimizer=sgd",
                 "--momentum=0.9"}},
        Variant{"threads", {"--model=mlp", "--backend=local", "--lr_decay=linear"}},
        Variant{"buffers", {"--model=cnn", BackendFlagOfProcesses()}},
        Variant{"buffers_unjoined",
                {"--model=cnn", BackendFlagOfProcesses(), "--nojoin", "--max_steps=10"}},
        Variant{"accumulated",
                {"--model=mlp", BackendFlagOfProcesses(), "--batch_size=4", "--accumulate=2",
                 "--clip=0.5"}},
        Variant{"limits",
                {"--model=cnn", BackendFlagOfProcesses(), "--rank_steps=4,9,2",
                 "--divide_by=effective"}},
        Variant{
            "frozen",
            {"--model=mlp", BackendFlagOfProcesses(), "--freeze=fc1@3:12", "--bucket_cap_mb=0"}}),
    [](const auto& info) { return info.param.name; });

// 24 samples are one step of four ranks with 6 each, of three with 8, of eight with 3: the same
// samples in each step, so the same gradients, but for the order in which they are added. In
// float64 a sum of 24 terms in another order differs by 24 * 2^-53 = 2.7e-15 of the sum of their
// magnitudes. A step moves weights by that, a momentum of 0.9 ten times as far in the end, and a
// loss that is smooth passes it on to the 40 steps that follow: 1e-10 of the change since the start
// leaves room for a factor of a hundred. An optimizer's state that is lost, or misplaced by one
// element, does not fit in.
TEST(ResumeTest, GoesOnWithOtherNumbersOfRanks) {
  const Flags flags = {
      "--model=mlp",     BackendFlagOfProcesses(),
      "--optimizer=sgd", "--compute=float64",
      "--momentum=0.9",  "--lr=0.05",
      "--epochs=3",      "--checkpoint_every=8",
      "--keep=0",        "--data=" + WriteSmallData("data384", {.train = 384, .test = 50})};
  const auto with = [&](int ranks, int batch, const Flags& more) {
    return flags + Flags{absl::StrCat("--nproc=", ranks), absl::StrCat("--batch_size=", batch)} +
           more;
  };
  const std::string folder = Fresh("four"), three = Fresh("three"), eight = Fresh("eight");
  const Outcome begun =
      RunToEnd(with(1, 24, {"--max_steps=1", "--lr=0", "--checkpoint_dir=" + Fresh("begun")}));
  const Outcome whole = RunToEnd(with(4, 6, {"--checkpoint_dir=" + folder}));
  // Each goes on in the middle of an epoch of 16 steps.
  const Outcome first = RunToEnd(
      with(3, 8,
           {"--checkpoint_dir=" + three, "--resume=" + StepFolder(folder, 8), "--shards=tensors"}));
  EXPECT_THAT(first.ended.out, HasSubstr("the number of ranks is 3, in the checkpoint it was 4"));
  const Outcome second = RunToEnd(with(
      8, 3, {"--checkpoint_dir=" + eight, "--resume=" + StepFolder(three, 24), "--shards=slices"}));
  const Outcome third = RunToEnd(
      with(1, 24,
           {"--checkpoint_dir=" + Fresh("one"), "--resume=" + StepFolder(eight, 40), "--nozero"}));
  const double change = MaxDifference(whole.values, begun.values);
  EXPECT_GT(change, 0.01);  // It does learn.
  for (const Outcome* outcome : {&first, &second, &third}) {
    EXPECT_LE(MaxDifference(outcome->values, whole.values) / change, 1e-10) << outcome->ended.out;
    ASSERT_FALSE(outcome->training_loss.empty());
    for (const auto& [epoch, loss] : outcome->training_loss) {
      EXPECT_NEAR(loss, whole.training_loss.at(epoch), 1e-9) << epoch;
    }
  }
  EXPECT_EQ(first.training_loss.size(), 3u);
  EXPECT_EQ(third.training_loss.size(), 1u);
}

bool WaitFor(const std::string& path) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!fs::exists(path)) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

// To the process that starts the ranks, or to one of them: all save after the same step.
TEST(ResumeTest, ASignalSavesAndEndsAndTheRunGoesOn) {
  const Flags flags =
      Small({"--model=mlp", "--backend=tcp", "--epochs=400", "--rank_steps=3,40,60"}, 3, 1500);
  const Outcome whole = RunToEnd(flags + Flags{"--max_steps=700", "--epochs=20"});
  for (const int signal : {SIGTERM, SIGINT}) {
    for (const bool to_an_exhausted_rank : {false, true}) {
      SCOPED_TRACE(absl::StrCat("signal ", signal, to_an_exhausted_rank ? " to rank 0" : ""));
      const std::string folder = Fresh("stopped");
      Program program(Flags{kTrain} + flags +
                      Flags{"--checkpoint_dir=" + folder, "--checkpoint_every=5"});
      ASSERT_TRUE(WaitFor(StepFolder(folder, 5)));
      pid_t pid = program.pid();
      for (const pid_t other : ProcessesWith(folder)) {
        if (to_an_exhausted_rank &&
            ReadText(absl::StrCat("/proc/", other, "/environ")).find("LOCAL_RANK=0") !=
                std::string::npos) {
          pid = other;
        }
      }
      ASSERT_EQ(kill(pid, signal), 0);
      const Ended ended = program.Wait();
      // Others than the one that got it say what is usual.
      EXPECT_THAT(ended.code, testing::AnyOf(128 + signal, 128 + SIGTERM)) << ended.err;
      EXPECT_THAT(Lines(ended.err), SizeIs(1));
      EXPECT_THAT(ended.err, HasSubstr("train: stopped after step "));
      const std::string last = CheckpointsIn(folder).back();
      EXPECT_THAT(ended.err, HasSubstr("saved " + folder + "/" + last +
                                       "; the same command continues from there"));
      EXPECT_THAT(ProcessesWith(folder), IsEmpty());
      const Outcome resumed =
          RunToEnd(flags + Flags{"--max_steps=700", "--epochs=20", "--checkpoint_dir=" + folder,
                                 "--checkpoint_every=5"});
      EXPECT_THAT(resumed.ended.out, HasSubstr("resumed from " + folder + "/" + last));
      EXPECT_TRUE(resumed.weights == whole.weights);
    }
  }
}

void FlipBit(const std::string& path) {
  std::string bytes = ReadText(path);
  bytes[bytes.size() / 2] ^= 1;
  WriteText(path, bytes);
}

// A file of the newest checkpoint is damaged, or gone: the run says which one, and what to do; that
// helps.
TEST(ResumeTest, ADamagedCheckpointIsNamedAndNotPassedOver) {
  const Flags flags =
      Small({"--model=cnn", "--backend=local", "--max_steps=6", "--checkpoint_every=2"}, 2);
  const std::string folder = Fresh("damaged"), kept = Fresh("kept");
  RunToEnd(flags + Flags{"--checkpoint_dir=" + folder});
  EXPECT_THAT(CheckpointsIn(folder),
              ElementsAre("step-000000002", "step-000000004", "step-000000006"));
  const std::string newest = StepFolder(folder, 6);
  fs::copy(newest, kept, fs::copy_options::recursive);
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(kept)) {
    if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), kept));
  }
  EXPECT_THAT(
      files,
      SizeIs(
          8));  // Weights, state, history, a manifest, and of each rank its buffers and its slices.
  for (const std::string& file : files) {
    for (const bool is_gone : {false, true}) {
      SCOPED_TRACE(absl::StrCat(file, is_gone ? " is gone" : " is damaged"));
      is_gone ? (void)fs::remove(newest + "/" + file) : FlipBit(newest + "/" + file);
      // At the end of an epoch nobody needs its own buffers; here the run ends within one.
      const Ended ended = Train(flags + Flags{"--max_steps=12", "--checkpoint_dir=" + folder});
      EXPECT_EQ(ended.code, 1);
      EXPECT_THAT(Lines(ended.err), SizeIs(1));
      EXPECT_THAT(ended.err,
                  HasSubstr(file == "optimizer/manifest.json" ? newest : newest + "/" + file));
      EXPECT_THAT(ended.err,
                  HasSubstr("; remove or rename " + newest +
                            "; then --resume=auto continues from " + StepFolder(folder, 4)));
      fs::copy_file(kept + "/" + file, newest + "/" + file, fs::copy_options::overwrite_existing);
    }
  }
  fs::remove_all(newest);
  EXPECT_THAT(RunToEnd(flags + Flags{"--checkpoint_dir=" + folder}).ended.out,
              HasSubstr("resumed from " + StepFolder(folder, 4)));
}

TEST(ResumeTest, AnotherRunsCheckpointIsRefused) {
  const Flags flags =
      Small({"--model=mlp", "--backend=local", "--max_steps=6", "--checkpoint_every=2"}, 2);
  const std::string folder = Fresh("others");
  RunToEnd(flags + Flags{"--checkpoint_dir=" + folder});
  const std::string elsewhere = Fresh("elsewhere");
  RunToEnd(flags + Flags{"--checkpoint_dir=" + elsewhere});
  const struct {
    Flags flags;
    const char* says;
  } cases[] = {
      {{"--seed=1"},
       "the checkpoint belongs to a different run: seed is 0 in the checkpoint, but 1 in this run"},
      {{"--hidden=32"}, "the model's parameters is "},
      {{"--optimizer=sgd"},
       "optimizer is adamw with {exp_avg, exp_avg_sq} in the checkpoint, but sgd with {} in this "
       "run"},
      {{"--noshuffle"}, "shuffle is true in the checkpoint, but false in this run"},
      {{"--resume=never"}, "pass --resume=auto to continue from it"},
      {{"--resume=" + StepFolder(folder, 4)}, "step-000000006 exists as well"},
      {{"--resume=" + StepFolder(elsewhere, 6)}, "others/step-000000006 exists as well"},
      {{"--rank_steps=2,2"}, "--rank_steps or --stop_early"},
  };
  for (const auto& wrong : cases) {
    const Ended ended = Train(flags + Flags{"--checkpoint_dir=" + folder} + wrong.flags);
    EXPECT_EQ(ended.code, 1) << wrong.says;
    EXPECT_THAT(Lines(ended.err), SizeIs(1));
    EXPECT_THAT(ended.err, HasSubstr(wrong.says));
  }
  const Flags nothing = {"--checkpoint_dir=" + Fresh("anew"), "--resume=" + folder + "/nothing"};
  EXPECT_THAT(Train(flags + nothing).err, HasSubstr("nothing/state.json: No such file"));
  // Harmless differences are reported.
  const Ended other =
      Train(flags + Flags{"--checkpoint_dir=" + folder, "--lr=0.01", "--max_steps=8"});
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(other.out, HasSubstr("max_steps is 8, in the checkpoint it was 6"));
}

// A run is over when as much is asked for as it has done, or less: what it ends with is the same.
TEST(ResumeTest, WhatIsDoneIsEvaluatedThoughLessIsAskedFor) {
  const Flags flags =
      Small({"--model=mlp", "--backend=local"}, 2) + Flags{"--checkpoint_dir=" + Fresh("done")};
  const Outcome whole = RunToEnd(flags);
  for (const char* less : {"--epochs=2", "--epochs=1", "--max_steps=3"}) {
    const Outcome again = RunToEnd(flags + Flags{less});
    EXPECT_EQ(Lines(again.ended.out).back(), Lines(whole.ended.out).back()) << less;
    EXPECT_TRUE(again.weights == whole.weights) << less;
  }
}

// Who looks at a run that was stopped sees that it was, and how far it came.
TEST(ResumeTest, ARunThatIsStoppedWritesWhatThereIs) {
  const std::string folder = Fresh("looked_at"), report = Fresh("run.html"),
                    state = Fresh("run.prom");
  Program program(Flags{kTrain} + Small({"--model=mlp", "--backend=tcp", "--epochs=400"}, 2) +
                  Flags{"--checkpoint_dir=" + folder, "--checkpoint_every=5", "--report=" + report,
                        "--prometheus=" + state});
  ASSERT_TRUE(WaitFor(StepFolder(folder, 5)));
  ASSERT_EQ(kill(program.pid(), SIGTERM), 0);
  const Ended ended = program.Wait();
  EXPECT_EQ(ended.code, 128 + SIGTERM) << ended.err;
  EXPECT_THAT(ReadText(report), HasSubstr("The run was asked to stop and stopped after "));
  EXPECT_THAT(ReadText(state), HasSubstr("evenkeel_train_up{model=\"mlp\",run=\"run\"} 0"));
}

// Without checkpoints the weights are what can be kept: those after the step that all ranks
// finished.
TEST(ResumeTest, ASignalWithoutCheckpointsSavesTheWeightsAndTheReport) {
  const Flags flags = Small({"--model=cnn", "--widths=4,4,4", "--backend=tcp", "--epochs=4000",
                             "--rank_steps=2,5", "--lr_decay=none"},
                            2);
  const std::string save = Fresh("stopped.safetensors"), report = Fresh("stopped.html"),
                    mark = Fresh("stopped.jsonl");
  Program program(Flags{kTrain} + flags +
                  Flags{"--save=" + save, "--report=" + report, "--metrics=" + mark});
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (Lines(ReadText(mark)).size() < 12 && absl::Now() < deadline)
    absl::SleepFor(absl::Milliseconds(2));
  ASSERT_EQ(kill(program.pid(), SIGINT), 0);
  const Ended ended = program.Wait();
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 128 + SIGINT);
  std::smatch match;
  ASSERT_TRUE(std::regex_match(ended.err, match,
                               std::regex("train: stopped after step ([0-9]+), saved " + save +
                                          "; with --checkpoint_dir the same command would "
                                          "continue from there\n")));
  EXPECT_THAT(ReadText(report), HasSubstr("The run was asked to stop and stopped after " +
                                          match[1].str() + " steps"));
  RunToEnd(flags + Flags{"--max_steps=" + match[1].str()});
  EXPECT_EQ(MaxDifference(ReadWeights(save), ReadWeights(TempPath("weights.safetensors"))), 0);
}

TEST(ResumeTest, WeightsThatAreNotTheBestAreCalledSo) {
  const std::string save = Fresh("no_best.safetensors"), mark = Fresh("no_best.jsonl");
  // Evaluations of all the data at the end of an epoch do not count beside those of a part.
  Program program(Flags{kTrain} +
                  Small({"--model=mlp", "--backend=tcp", "--epochs=40000", "--save_best",
                         "--eval_every=1000000", "--eval_batches=1"},
                        2) +
                  Flags{"--save=" + save, "--metrics=" + mark});
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (Lines(ReadText(mark)).size() < 12 && absl::Now() < deadline)
    absl::SleepFor(absl::Milliseconds(2));
  ASSERT_EQ(kill(program.pid(), SIGTERM), 0);
  const Ended ended = program.Wait();
  EXPECT_EQ(ended.code, 128 + SIGTERM) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("saved " + save +
                                   " (the last weights, since no evaluation has "
                                   "determined the best); "));
  EXPECT_FALSE(ReadWeights(save).empty());
}

// While ranks wait for one that is missing there is nothing to save, with whatever flags.
TEST(ResumeTest, ASignalEndsARankThatStillWaitsForOthers) {
  for (const std::string flag : {"save", "report", "checkpoint_dir"}) {
    SCOPED_TRACE(flag);
    const std::string store = Fresh("waiting_store"), path = Fresh("waiting_" + flag);
    Program program(
        Flags{kTrain} +
            Small({"--model=mlp", "--backend=tcp", absl::StrCat("--", flag, "=", path)}, 2),
        {.environment = {{"RANK", "0"},
                         {"WORLD_SIZE", "2"},
                         {"LOCAL_RANK", "0"},
                         {"LOCAL_WORLD_SIZE", "2"},
                         {"EVENKEEL_STORE", store},
                         {"EVENKEEL_SECRET", "the secret of this test"}}});
    ASSERT_TRUE(WaitFor(store + "/v.address"));  // Its store's, for the other ranks.
    ASSERT_EQ(kill(program.pid(), SIGINT), 0);
    const Ended ended = program.Wait();
    EXPECT_FALSE(ended.timed_out);
    EXPECT_EQ(ended.code, 128 + SIGINT) << ended.err;
  }
}

// Steps before the one that a run begins with are not done again.
TEST(ResumeTest, TensorboardKeepsWhatCameBefore) {
  const std::string events = Fresh("events");
  const Flags flags = Small({"--model=mlp", "--backend=local", "--tensorboard=" + events}, 2) +
                      Flags{"--checkpoint_dir=" + Fresh("shown")};
  RunToEnd(flags + Flags{"--max_steps=4"});
  fs::remove_all(events);
  RunToEnd(flags + Flags{"--max_steps=6"});
  const std::string file = fs::directory_iterator(events)->path();
  // Field 2, the step, and field 7, the start of a session.
  EXPECT_THAT(ReadText(file), HasSubstr(std::string("\x10\x04\x3a\x02\x08\x01", 6)));
}

TEST(ResumeTest, TheReportShowsTheStepsBeforeTheCheckpoint) {
  const std::string report = Fresh("whole.html");
  const Flags flags =
      Small({"--model=mlp", "--backend=local", "--checkpoint_dir=" + Fresh("reported")}, 2);
  RunToEnd(flags + Flags{"--max_steps=4"});
  RunToEnd(flags + Flags{"--max_steps=6", "--report=" + report});
  EXPECT_THAT(ReadText(report), testing::AllOf(HasSubstr("\"kind\":\"resumed\""),
                                               HasSubstr("\"text\":\"with 2 ranks\"")));
}

TEST(ResumeTest, ASecondJobInTheSameFolderIsRefused) {
  const Flags flags = Small({"--model=mlp", "--backend=local", "--max_steps=6"}, 2);
  const std::string folder = Fresh("locked");
  fs::create_directory(folder);
  const int lock = open((folder + "/.lock").c_str(), O_RDWR | O_CREAT, 0666);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  const Ended ended = Train(flags + Flags{"--checkpoint_dir=" + folder});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("another job is writing its checkpoints to " + folder));
  close(lock);
  EXPECT_EQ(Train(flags + Flags{"--checkpoint_dir=" + folder}).code, 0);
}

// A disk that has room for the weights only: each other output is reported once, and the training
// is not lost.
TEST(ResumeTest, OutputsOnAFullDiskEndNoTraining) {
  const std::string folder = Fresh("outputs");
  fs::create_directory(folder);
  const Flags flags = Small({"--model=mlp", "--hidden=8", "--backend=tcp", "--epochs=20"}, 2);
  Flags command = Flags{kTrain} + flags + Flags{"--save=" + folder + "/weights.safetensors"};
  const Flags outputs = {"metrics", "tensorboard", "report", "trace"};
  for (const std::string& output : outputs)
    command.push_back("--" + output + "=" + folder + "/" + output);
  // The weights take 26 KiB, each of the others more.
  const Ended ended = evenkeel::Run(
      {"/bin/bash", "-c",
       absl::StrCat("trap '' XFSZ; ulimit -f 28; exec ", absl::StrJoin(command, " "))});
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.out, HasSubstr("\ntest_accuracy="));
  EXPECT_THAT(Lines(ended.err), SizeIs(outputs.size())) << ended.err;
  for (const std::string& output : outputs) {
    EXPECT_THAT(ended.err,
                HasSubstr("train: --" + output + ": cannot write " + folder + "/" + output));
  }
  EXPECT_EQ(ReadText(folder + "/weights.safetensors"), RunToEnd(flags).weights);
}

// The lines are more than a pipe holds, so that the run still writes when the reader has ended.
TEST(ResumeTest, AMetricsPipeWhoseReaderEndsEndsNoTraining) {
  const std::string pipe = Fresh("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const Flags command = Flags{kTrain} +
                        Small({"--model=mlp", "--hidden=8", "--backend=tcp", "--epochs=60"}, 2) +
                        Flags{"--metrics=" + pipe};
  const Ended ended = evenkeel::Run(
      {"/bin/bash", "-c",
       absl::StrCat("head -n 2 ", pipe, " > /dev/null & exec ", absl::StrJoin(command, " "))});
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.out, HasSubstr("\ntest_accuracy="));
  EXPECT_THAT(Lines(ended.err), SizeIs(1)) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("train: --metrics: cannot write " + pipe + ": Broken pipe"));
}

// The numbers of a run that nothing reads are lost: unlike other outputs, that is an error.
TEST(ResumeTest, AStandardOutputWithoutAReaderIsAnError) {
  const std::string pipe = Fresh("unread");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const Flags command = Flags{kTrain} + Small({"--model=mlp", "--hidden=8", "--backend=local"}, 2);
  const Ended ended =
      evenkeel::Run({"/bin/bash", "-c",
                     absl::StrCat("exec 3<> ", pipe, "; exec 4> ", pipe, "; exec 3<&-; exec ",
                                  absl::StrJoin(command, " "), " >&4 4>&-")});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("cannot write to standard output"));
}

// Files can't grow beyond a limit, as if the disk were full: a sentence for each checkpoint, and
// the older ones stay.
TEST(ResumeTest, AFullDiskIsReportedAndLeavesTheOlderCheckpoints) {
  const std::string folder = Fresh("full");
  const Flags flags = Flags{kTrain} + Small({"--model=mlp", "--backend=tcp", "--hidden=64"}, 2) +
                      Flags{"--checkpoint_dir=" + folder, "--checkpoint_every=3"};
  ASSERT_EQ(evenkeel::Run(flags + Flags{"--max_steps=6"}).code, 0);
  // The weights take 200 KiB.
  const Ended ended = evenkeel::Run(
      {"/bin/bash", "-c", absl::StrCat("ulimit -f 64; exec ", absl::StrJoin(flags, " "))});
  SCOPED_TRACE(ended.err);
  EXPECT_EQ(ended.code, 1);  // Because of the last one.
  const std::vector<std::string> lines = Lines(ended.err);
  ASSERT_THAT(lines, SizeIs(9));  // Of steps 9, 12, ..., 30, and of the end.
  EXPECT_THAT(lines[0],
              HasSubstr("; training continues; the newest complete checkpoint is step 6"));
  EXPECT_THAT(lines[8], HasSubstr("train: the checkpoint of step 32 failed: "));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, HasSubstr("cannot write " + folder));
    EXPECT_THAT(line, HasSubstr("File too large"));
  }
  EXPECT_THAT(CheckpointsIn(folder), ElementsAre("step-000000003", "step-000000006"));
  EXPECT_EQ(evenkeel::Run(flags).code, 0);
}

}  // namespace
}  // namespace evenkeel
