// Evaluations while a run goes on: --eval_every, --eval_batches, --save_best, --patience,
// --sample_every, also where ranks are exhausted, resumed or lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using Flags = std::vector<std::string>;

// 250 samples in batches of 8 on 3 ranks: 11, 11 and 10 steps per epoch.
Ended TrainSmall(Flags more) {
  Flags flags = {"--nproc=3",   "--batch_size=8",
                 "--epochs=2",  "--lr_decay=none",
                 BackendFlag(), "--data=" + WriteSmallData("data", {.train = 250, .test = 50})};
  if (more.empty() || more[0] != "--model=cnn")
    flags.insert(flags.end(), {"--model=mlp", "--hidden=8"});
  flags.insert(flags.end(), more.begin(), more.end());
  Ended ended = Train(flags);
  EXPECT_EQ(ended.code, 0) << ended.err;
  return ended;
}

std::vector<json> Events(const std::string& metrics, const std::string& kind) {
  std::vector<json> events;
  for (const std::string& line : Lines(ReadText(metrics))) {
    json event = json::parse(line);
    if (event["event"] == kind) events.push_back(std::move(event));
  }
  return events;
}

std::vector<int> StepsOf(const std::vector<json>& events) {
  std::vector<int> steps;
  for (const json& event : events) steps.push_back(event["step"]);
  return steps;
}

std::map<std::string, std::string> MetadataOf(const std::string& path) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Read(path);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? file->metadata() : std::map<std::string, std::string>();
}

// Rank 2 is exhausted in the last step of each epoch, with uneven steps rank 0 for most of it.
TEST(EvaluationTest, IsThatOfARunWhichEndsThere) {
  // The running statistics of the cnn are those of the highest rank with a batch.
  for (const Flags& flags : {Flags{}, Flags{"--rank_steps=3,11,7"},
                             Flags{"--model=cnn", "--widths=2,3", "--rank_steps=3,11,7"}}) {
    SCOPED_TRACE(absl::StrJoin(flags, " "));
    const std::string metrics = TempPath("metrics.jsonl");
    Flags more = flags;
    more.insert(more.end(), {"--eval_every=3", "--metrics=" + metrics});
    const Ended whole = TrainSmall(more);
    const std::vector<json> events = Events(metrics, "evaluation");
    ASSERT_THAT(StepsOf(events), ElementsAre(3, 6, 9, 12, 15, 18, 21));
    EXPECT_THAT(whole.out, HasSubstr("\nstep 3  test loss "));
    const double total = json::parse(Lines(ReadText(metrics)).front())["total_steps"];
    EXPECT_EQ(total, 22);
    for (const int at : {0, 2, 3, 6}) {
      const std::string shorter = TempPath("shorter.jsonl");
      Flags until = flags;
      until.insert(until.end(),
                   {absl::StrCat("--max_steps=", 3 * (at + 1)), "--metrics=" + shorter});
      TrainSmall(until);
      EXPECT_EQ(Events(shorter, "test")[0]["loss"], events[at]["test_loss"]);
      EXPECT_EQ(Events(shorter, "test")[0]["accuracy"], events[at]["test_accuracy"]);
    }
  }
}

// Neither weights nor running statistics, which differ between ranks.
TEST(EvaluationTest, ChangesNothing) {
  for (const Flags& flags :
       {Flags{}, Flags{"--model=cnn", "--widths=2,3", "--rank_steps=3,11,7"}}) {
    Flags with = flags, without = flags;
    with.insert(with.end(), {"--eval_every=1", "--save=" + TempPath("with.safetensors")});
    without.push_back("--save=" + TempPath("without.safetensors"));
    TrainSmall(with);
    TrainSmall(without);
    EXPECT_EQ(MaxDifference(ReadWeights(TempPath("with.safetensors")),
                            ReadWeights(TempPath("without.safetensors"))),
              0);
  }
}

// The end of an epoch has one of its own, unless that is of other data.
TEST(EvaluationTest, APartOfTheTestDataIsNotComparedWithAllOfIt) {
  const std::string metrics = TempPath("part.jsonl");
  TrainSmall({"--eval_every=11", "--metrics=" + metrics});
  EXPECT_THAT(Events(metrics, "evaluation"), IsEmpty());
  TrainSmall({"--eval_every=11", "--eval_batches=1", "--metrics=" + metrics});
  EXPECT_THAT(StepsOf(Events(metrics, "evaluation")), ElementsAre(11, 22));
  EXPECT_NE(Events(metrics, "evaluation")[1]["test_loss"],
            Events(metrics, "epoch")[1]["test_loss"]);
  // The epoch that ends with step 11 does not count.
  EXPECT_THAT(TrainSmall({"--lr=0", "--eval_every=5", "--eval_batches=1", "--patience=3"}).out,
              HasSubstr("stopped after step 20"));
}

// With a learning rate of 0 no evaluation is better than the first.
TEST(PatienceTest, EndsTheRun) {
  const std::string save = TempPath("patience.safetensors"), metrics = TempPath("patience.jsonl");
  const Ended ended = TrainSmall({"--lr=0", "--eval_every=2", "--patience=3", "--save_best",
                                  "--save=" + save, "--metrics=" + metrics});
  EXPECT_THAT(StepsOf(Events(metrics, "evaluation")), ElementsAre(2, 4, 6, 8));
  EXPECT_THAT(Events(metrics, "step"), SizeIs(8));
  EXPECT_THAT(ended.out,
              AllOf(HasSubstr("stopped after step 8: no lower test loss in 3 evaluations"),
                    HasSubstr("test_accuracy=")));
  EXPECT_EQ(MetadataOf(save).at("steps"), "2");
}

// Rank 0 has no more batches after step 2, rank 1 after step 5.
TEST(PatienceTest, EndsARunWithExhaustedRanks) {
  const std::string metrics = TempPath("exhausted.jsonl");
  const Ended ended = TrainSmall(
      {"--lr=0", "--rank_steps=2,5,10", "--eval_every=1", "--patience=6", "--metrics=" + metrics});
  EXPECT_THAT(StepsOf(Events(metrics, "evaluation")), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(ended.out, HasSubstr("stopped after step 7"));
}

TEST(PatienceTest, CountsEpochsWithoutEvalEvery) {
  const Ended ended = TrainSmall({"--lr=0", "--epochs=9", "--patience=2"});
  EXPECT_THAT(ended.out,
              AllOf(HasSubstr("epoch 3/9"), Not(HasSubstr("epoch 4/9")),
                    HasSubstr("stopped after step 33: no lower test loss in 2 evaluations")));
}

TEST(PatienceTest, IsKeptOverAResumption) {
  const std::string folder = TempPath("kept");
  std::filesystem::remove_all(folder);
  const Flags flags = {"--lr=0", "--eval_every=1", "--patience=5", "--checkpoint_dir=" + folder};
  for (const int steps : {2, 4}) {
    Flags part = flags;
    part.push_back(absl::StrCat("--max_steps=", steps));
    EXPECT_THAT(TrainSmall(part).out, Not(HasSubstr("stopped after")));
  }
  EXPECT_THAT(TrainSmall(flags).out, HasSubstr("stopped after step 6"));
}

TEST(PatienceTest, AResumedRunThatHasConvergedStopsAtOnce) {
  const std::string folder = TempPath("converged"), metrics = TempPath("converged.jsonl");
  std::filesystem::remove_all(folder);
  const Flags flags = {"--lr=0", "--eval_every=1", "--patience=2", "--checkpoint_dir=" + folder,
                       "--metrics=" + metrics};
  EXPECT_THAT(TrainSmall(flags).out, HasSubstr("stopped after step 3"));
  EXPECT_THAT(Events(metrics, "step"), SizeIs(3));
  const Ended again = TrainSmall(flags);
  EXPECT_THAT(again.out, AllOf(HasSubstr("step-000000003"), HasSubstr("stopped after step 3"),
                               HasSubstr("test_accuracy=")));
  EXPECT_THAT(Events(metrics, "step"), SizeIs(3));
}

// With the running statistics of that evaluation, which are not rank 0's.
TEST(SaveBestTest, SavesTheBuffersThatWereEvaluated) {
  const std::string best = TempPath("best_cnn.safetensors"), end = TempPath("end_cnn.safetensors");
  const Flags cnn = {"--model=cnn", "--widths=2,3",    "--rank_steps=3,11,7",
                     "--epochs=1",  "--optimizer=sgd", "--lr=0.5"};
  Flags with = cnn, until = cnn;
  with.insert(with.end(), {"--eval_every=1", "--save_best", "--save=" + best});
  TrainSmall(with);
  const std::string step = MetadataOf(best).at("steps");
  ASSERT_NE(step, "11") << "the test needs its best evaluation within an epoch";
  until.insert(until.end(), {"--max_steps=" + step, "--save=" + end});
  TrainSmall(until);
  EXPECT_EQ(MaxDifference(ReadWeights(best), ReadWeights(end)), 0);
}

// Nothing is evaluated before the end, and that is of other data.
TEST(SaveBestTest, WithoutABestTheLastWeightsAreSaved) {
  const std::string save = TempPath("only.safetensors");
  TrainSmall(
      {"--max_steps=2", "--eval_every=5", "--eval_batches=1", "--save_best", "--save=" + save});
  EXPECT_TRUE(std::filesystem::exists(save));
}

TEST(SaveBestTest, SavesTheBestWeights) {
  const std::string best = TempPath("best.safetensors"), metrics = TempPath("best.jsonl");
  // It learns, and then a rate that is too high undoes it.
  const Ended ended = TrainSmall({"--optimizer=sgd", "--lr=1", "--epochs=4", "--eval_every=1",
                                  "--save_best", "--save=" + best, "--metrics=" + metrics});
  double lowest = 1e9;
  int step = 0;
  for (const json& event : Events(metrics, "evaluation")) {
    const double loss = event["test_loss"];
    EXPECT_EQ(event["is_best"], loss < lowest);
    if (loss < lowest) {
      lowest = loss;
      step = event["step"];
    }
  }
  for (const json& epoch : Events(metrics, "epoch"))
    ASSERT_GT(epoch["test_loss"], lowest) << "the test needs its best evaluation within an epoch";
  EXPECT_EQ(MetadataOf(best).at("steps"), absl::StrCat(step));
  const std::string last = TempPath("last.safetensors");
  TrainSmall({"--optimizer=sgd", "--lr=1", "--epochs=4", absl::StrCat("--max_steps=", step),
              "--save=" + last});
  EXPECT_EQ(MaxDifference(ReadWeights(best), ReadWeights(last)), 0);
}

TEST(SampleTest, TextsAreWrittenWhileTheRunGoesOn) {
  std::string text;
  while (text.size() < 20 * 4096) text += "over and over again\n";
  WriteText(TempPath("text.txt"), text);
  const Flags flags = {"--model=gpt",      "--preset=tiny",        "--max_steps=4",
                       "--nproc=2",        BackendFlag(),          "--data=" + TempPath("text.txt"),
                       "--sample_every=2", "--sample_prompt=over", "--sample_tokens=7"};
  const std::string metrics = TempPath("sample.jsonl"), with = TempPath("sample.safetensors"),
                    report = TempPath("sample.html"), events = TempPath("sample_events");
  Flags all = flags;
  all.insert(all.end(), {"--metrics=" + metrics, "--save=" + with, "--report=" + report,
                         "--tensorboard=" + events});
  const Ended ended = Train(all);
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("sample after step 2:\nover"),
                               HasSubstr("sample after step 4:\nover")));
  const std::vector<json> samples = Events(metrics, "sample");
  ASSERT_THAT(StepsOf(samples), ElementsAre(2, 4));
  EXPECT_THAT(samples[0]["text"].get<std::string>(), HasSubstr("over"));
  EXPECT_THAT(ReadText(report), HasSubstr("\"kind\":\"sample\""));
  // Sampling does not change the training.
  const std::string without = TempPath("no_sample.safetensors");
  ASSERT_EQ(Train({"--model=gpt", "--preset=tiny", "--max_steps=4", "--nproc=2", BackendFlag(),
                   "--data=" + TempPath("text.txt"), "--save=" + without})
                .code,
            0);
  EXPECT_EQ(MaxDifference(ReadWeights(with), ReadWeights(without)), 0);
}

}  // namespace
}  // namespace evenkeel
