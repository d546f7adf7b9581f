#include "evenkeel/trainer/app/run_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/run_recorder.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/report/output_failures.h"

namespace evenkeel {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

std::unique_ptr<const ImageDataset> Black(int count) {
  std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  return std::make_unique<const ImageDataset>(
      *ParseIdx(images + std::string(count * 784, 0), labels + std::string(count, 0)));
}

// The output of one rank's report after `tell`: on `out`, and as JSON lines.
struct Said {
  std::string text;
  std::vector<nlohmann::json> lines;
};

template <typename Tell>
Said SaidAfter(TrainFlags flags, Tell tell) {
  flags.model = "mlp";
  flags.batch_size = 4;
  flags.metrics = testing::TempDir() + "/metrics.jsonl";
  const std::string out_path = testing::TempDir() + "/out.txt";
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    const TrainOptions options = *MakeTrainOptions(flags);
    EK_ASSIGN_OR_RETURN(
        RankSetup setup,
        PrepareRank(options,
                    std::make_shared<const TrainingData>(
                        TrainingData{.train = Black(12), .test = Black(2), .image = ImageShape{}}),
                    0, 1));
    EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
    std::FILE* const out = std::fopen(out_path.c_str(), "w");
    const RunRecorder recorder(*run);
    OutputFailures failures(out);
    RunOutput report({.out = out, .log = out}, *run, recorder, failures);
    EK_RETURN_IF_ERROR(tell(report));
    std::fclose(out);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  Said said{.text = *ReadFile(out_path)};
  for (absl::string_view line : absl::StrSplit(*ReadFile(flags.metrics), '\n', absl::SkipEmpty())) {
    said.lines.push_back(nlohmann::json::parse(std::string(line)));
  }
  return said;
}

TEST(RunOutputTest, BeginsWithWhatIsTrainedAndEndsWithTheAccuracy) {
  const Said said = SaidAfter({}, [](RunOutput& report) {
    return report.OnEnd({.predictions = 3, .correct = 2, .loss_sum = 1.5}, 0xabc);
  });
  EXPECT_THAT(said.text, HasSubstr("mlp with 50890 parameters on 1 rank over local\n"));
  EXPECT_THAT(said.text, HasSubstr("rank 0: 3 batches (even)\n"));
  EXPECT_THAT(said.text, EndsWith("\ntest_accuracy=0.6667\n"));
  ASSERT_EQ(said.lines.size(), 2u);
  EXPECT_EQ(said.lines[0].at("event"), "run");
  EXPECT_EQ(said.lines[0].at("total_steps"), 12);
  EXPECT_EQ(said.lines[1].at("event"), "test");
  EXPECT_EQ(said.lines[1].at("correct"), 2);
  EXPECT_EQ(said.lines[1].at("ranks"), 1);
  EXPECT_EQ(said.lines[1].at("state_hash"), "0000000000000abc");
}

TEST(RunOutputTest, StragglersAreALineAndEvents) {
  StragglerReport recent{.steps = 500};
  recent.ranks.resize(3);
  recent.ranks[1] = {.rank = 4, .cost = 0.25, .is_straggler = true, .phase = StepPhase::kInput};
  const Said said = SaidAfter({}, [&](RunOutput& report) {
    report.OnStragglers(549, "", recent);  // No news.
    report.OnStragglers(599, recent.Stragglers(), recent);
    return absl::OkStatus();
  });
  EXPECT_THAT(said.text, EndsWith("\nrank 4 cost the group 25 % of the last 500 steps: input\n"));
  ASSERT_EQ(said.lines.size(), 2u);
  EXPECT_EQ(said.lines[1].at("event"), "straggler");
  EXPECT_EQ(said.lines[1].at("step"), 599);
  EXPECT_EQ(said.lines[1].at("rank"), 4);
  EXPECT_EQ(said.lines[1].at("cost"), 0.25);
  EXPECT_EQ(said.lines[1].at("phase"), "input");
}

TEST(RunOutputTest, StepsSayWhatTheyCost) {
  const Said said = SaidAfter({}, [](RunOutput& report) {
    report.OnStep({.active = 1,
                   .samples = 4,
                   .own = BatchResult{.loss_mean = 0.5, .predictions = 4, .correct = 3},
                   .own_samples = 4,
                   .took = absl::Milliseconds(200),
                   .sync = absl::Milliseconds(50)});
    return absl::OkStatus();
  });
  EXPECT_EQ(said.lines.at(1).at("step_ms"), 200);
  EXPECT_EQ(said.lines.at(1).at("exposed_ms"), 50);
  EXPECT_EQ(said.lines.at(1).at("clock"), "host");
  EXPECT_EQ(said.lines.at(1).at("samples_per_second"), 20);
  EXPECT_FALSE(said.lines.at(1).contains("bits_per_token"));
}

TEST(RunOutputTest, TellsTensorboardAndPrometheusToo) {
  const std::string folder = testing::TempDir() + "/sinks";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  SaidAfter({.tensorboard = folder + "/events", .prometheus = folder + "/x.prom"},
            [&](RunOutput& report) {
              report.OnStep({.step = 4, .active = 1, .samples = 4});
              EXPECT_THAT(*ReadFile(folder + "/x.prom"),
                          HasSubstr("evenkeel_train_up{model=\"mlp\",run=\"x\"} 1\n"));
              report.OnEpoch(0, {.batches_done = {3}},
                             {.steps = 5, .test = {.predictions = 4, .correct = 1}});
              return report.OnEnd({.predictions = 4, .correct = 1}, 0);
            });
  EXPECT_THAT(*ReadFile(folder + "/x.prom"),
              HasSubstr("evenkeel_train_step{model=\"mlp\",run=\"x\"} 4\n"));
  EXPECT_THAT(*ReadFile(folder + "/x.prom"),
              HasSubstr("evenkeel_test_accuracy{model=\"mlp\",run=\"x\"} 0.25\n"));
  EXPECT_THAT(*ReadFile(folder + "/x.prom"),
              HasSubstr("evenkeel_train_up{model=\"mlp\",run=\"x\"} 0\n"));
  const std::string events = std::filesystem::directory_iterator(folder + "/events")->path();
  EXPECT_THAT(*ReadFile(events), HasSubstr("test/accuracy"));
  // Field 7, the start of a session, at step 0.
  EXPECT_THAT(*ReadFile(events), HasSubstr(std::string("\x10\x00\x3a\x02\x08\x01", 6)));
}

// The run was resumed after the last step of an epoch: no step comes before the evaluation.
TEST(RunOutputTest, AnEpochIsShownAtItsLastStepAlsoWithoutAStepOfThisProcess) {
  const std::string folder = testing::TempDir() + "/resumed_events";
  std::filesystem::remove_all(folder);
  SaidAfter({.tensorboard = folder}, [](RunOutput& report) {
    report.OnEpoch(0, {.batches_done = {3}}, {.steps = 100, .test = {.predictions = 4}});
    return absl::OkStatus();
  });
  const std::string events = std::filesystem::directory_iterator(folder)->path();
  // Field 2, the step, is 99; field 5 is the summary.
  EXPECT_THAT(*ReadFile(events), HasSubstr(std::string("\x10\x63\x2a", 3)));
}

TEST(RunOutputTest, StepsOfADryRankHaveNoLossOfTheirOwn) {
  const Said said = SaidAfter({}, [](RunOutput& report) -> absl::Status {
    report.OnStep({.step = 0,
                   .active = 2,
                   .samples = 8,
                   .own = BatchResult{.loss_mean = 0.5, .predictions = 4, .correct = 3},
                   .own_samples = 4});
    report.OnStep({.step = 1, .active = 1, .samples = 4});
    return absl::OkStatus();
  });
  ASSERT_EQ(said.lines.size(), 3u);
  EXPECT_EQ(said.lines[1].at("loss"), 0.5);
  EXPECT_EQ(said.lines[1].at("accuracy"), 0.75);
  EXPECT_EQ(said.lines[2].at("active"), 1);
  EXPECT_TRUE(said.lines[2].at("loss").is_null());
}

TEST(RunOutputTest, SaysFromWhichStepOnParametersAreFrozen) {
  const Said said = SaidAfter({.freeze = "fc1@1:3,fc1.bias@2:,fc2.bias@0:1"},
                              [](RunOutput& report) -> absl::Status {
                                for (int64_t step = 0; step < 5; ++step)
                                  report.OnStep({.step = step, .active = 1});
                                return absl::OkStatus();
                              });
  EXPECT_THAT(said.text, HasSubstr("frozen after step 0: fc2.bias\n"));
  EXPECT_THAT(
      said.text,
      HasSubstr("frozen after step 1: fc1.weight, fc1.bias\ntrained after step 1: fc2.bias\n"));
  EXPECT_THAT(said.text, HasSubstr("trained after step 3: fc1.weight\n"));
  EXPECT_THAT(said.text, testing::Not(HasSubstr("after step 2:")));
  std::vector<int> frozen;
  for (const nlohmann::json& line : said.lines) {
    if (line.at("event") == "freeze") frozen.push_back(line.at("frozen"));
  }
  EXPECT_THAT(frozen, testing::ElementsAre(1, 2, 1));
}

TEST(RunOutputTest, EpochNamesTheRanksThatRanDry) {
  const Said said = SaidAfter({}, [](RunOutput& report) {
    report.OnEpoch(1,
                   {.training = {.predictions = 10, .correct = 5, .loss_sum = 20},
                    .batches_done = {3, 1, 3, 2}},
                   {.test = {.predictions = 2, .correct = 1, .loss_sum = 1}});
    return absl::OkStatus();
  });
  ASSERT_EQ(said.lines.size(), 4u);
  EXPECT_EQ(said.lines[1].at("event"), "exhausted");
  EXPECT_EQ(said.lines[1].at("rank"), 1);
  EXPECT_EQ(said.lines[2].at("rank"), 3);
  EXPECT_EQ(said.lines[2].at("batches"), 2);
  EXPECT_EQ(said.lines[3].at("train_loss"), 2);
  EXPECT_THAT(said.text, HasSubstr("epoch 2/4  training loss 2.0000 accuracy 0.5000"));
}

TEST(RunOutputTest, SaysWhoWasLost) {
  const Said said = SaidAfter({}, [](RunOutput& report) -> absl::Status {
    report.OnEpoch(0, {.batches_done = {3}}, {});
    report.OnLost({{.rank = 2, .step = 5}});
    report.OnEpoch(0, {.batches_done = {3}}, {});  // Again.
    report.OnLost({{.rank = 2, .step = 5}, {.rank = 0, .step = 7}});
    return report.OnEnd({.predictions = 3, .correct = 2, .loss_sum = 1.5}, 0xabc);
  });
  EXPECT_THAT(
      said.text,
      EndsWith("\nrank 2 was lost; the other ranks continued after step 5\n"
               "rank 0 was lost; the other ranks continued after step 7\ntest_accuracy=0.6667\n"));
  std::vector<std::string> events;
  for (const nlohmann::json& line : said.lines) events.push_back(line.at("event"));
  EXPECT_THAT(events, testing::ElementsAre("run", "epoch", "lost", "lost", "test"));
  EXPECT_EQ(said.lines[2].at("rank"), 2);
  EXPECT_EQ(said.lines[2].at("step"), 5);
  EXPECT_EQ(said.lines[3].at("rank"), 0);
  EXPECT_EQ(said.lines[4].at("ranks_lost"), 2);
}

TEST(RunOutputTest, AnotherRankGoesOnWithTheReport) {
  TrainFlags flags{
      .model = "mlp", .batch_size = 4, .metrics = testing::TempDir() + "/goes_on.jsonl"};
  const std::string out_path = testing::TempDir() + "/goes_on.txt";
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    const TrainOptions options = *MakeTrainOptions(flags);
    EK_ASSIGN_OR_RETURN(
        RankSetup setup,
        PrepareRank(options,
                    std::make_shared<const TrainingData>(
                        TrainingData{.train = Black(12), .test = Black(2), .image = ImageShape{}}),
                    0, 1));
    EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
    std::FILE* const out = std::fopen(out_path.c_str(), "w");
    const TrainStreams streams{.out = out, .log = out};
    const RunRecorder recorder(*run);
    OutputFailures failures(out);
    RunOutput first(streams, *run, recorder, failures);
    // It had not written the line of step 0, which the others had finished.
    RunOutput second(streams, *run, recorder, failures,
                     {.lost = {{.rank = 0, .step = 1}}, .steps = {{.step = 0, .active = 2}}});
    // The first one may be a rank that was given up and wakes up later: its lines are added, and
    // overwrite none.
    first.OnStep({.step = 7, .active = 1});
    EK_RETURN_IF_ERROR(second.OnEnd({.predictions = 2, .correct = 1}, 0));
    std::fclose(out);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  std::vector<std::string> events;
  for (absl::string_view line : absl::StrSplit(*ReadFile(flags.metrics), '\n', absl::SkipEmpty())) {
    events.push_back(nlohmann::json::parse(std::string(line)).at("event"));
  }
  EXPECT_THAT(events, testing::ElementsAre("run", "step", "lost", "step", "test"));
  const std::string text = *ReadFile(out_path);
  EXPECT_EQ(text.find("mlp with"), text.rfind("mlp with"));  // Once.
}

// A disk that is full, or a file that can't be made: the run is told of it once and goes on.
TEST(RunOutputTest, AMetricsFileThatCannotBeWrittenEndsNothing) {
  for (const std::string metrics : {"/dev/full", "/proc/no/metrics"}) {
    SCOPED_TRACE(metrics);
    const std::string log_path = testing::TempDir() + "/unwritten.txt";
    std::FILE* const log = std::fopen(log_path.c_str(), "w");
    const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
      TrainOptions options = *MakeTrainOptions({.model = "mlp", .batch_size = 4});
      EK_ASSIGN_OR_RETURN(
          RankSetup setup,
          PrepareRank(options,
                      std::make_shared<const TrainingData>(TrainingData{
                          .train = Black(12), .test = Black(2), .image = ImageShape{}}),
                      0, 1));
      options.flags.metrics = metrics;
      EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
      const RunRecorder recorder(*run);
      OutputFailures failures(log);
      RunOutput report({.out = log, .log = log}, *run, recorder, failures);
      for (int64_t step = 0; step < 3; ++step) report.OnStep({.step = step, .active = 1});
      return report.OnEnd({.predictions = 2, .correct = 1}, 0);
    });
    EXPECT_TRUE(status.ok()) << status;
    std::fclose(log);
    const std::string text = *ReadFile(log_path);
    EXPECT_THAT(text, HasSubstr("run_output_test: --metrics: cannot "));
    EXPECT_THAT(text, HasSubstr(metrics));
    EXPECT_EQ(text.find("--metrics"), text.rfind("--metrics"));  // Once.
    EXPECT_THAT(text, EndsWith("\ntest_accuracy=0.5000\n"));
  }
}

}  // namespace
}  // namespace evenkeel
