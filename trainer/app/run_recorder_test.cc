#include "evenkeel/trainer/app/run_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/train_rank.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/report/testing/report_page.h"
#include "evenkeel/trainer/report/testing/trace_check.h"

namespace evenkeel {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsSupersetOf;

std::unique_ptr<const ImageDataset> Grey(int count) {
  const std::string images = {0, 0, 8, 3,  0, 0, 0, static_cast<char>(count),
                              0, 0, 0, 28, 0, 0, 0, 28};
  const std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  return std::make_unique<const ImageDataset>(
      *ParseIdx(images + std::string(count * 784, 100), labels + std::string(count, 3)));
}

struct Written {
  absl::Status status;
  std::string report;
  std::string trace;
};

// A real run of so many ranks, and its files.
Written Train(int ranks, TrainFlags flags) {
  const std::string folder = testing::TempDir();
  flags.model = "mlp";
  flags.hidden = "8";
  flags.report = absl::StrCat(folder, "/run.html");
  flags.trace = absl::StrCat(folder, "/run.json");
  std::remove(flags.report.c_str());
  std::remove(flags.trace.c_str());
  const auto data = std::make_shared<const TrainingData>(
      TrainingData{.train = Grey(100), .test = Grey(5), .image = ImageShape{}});
  std::FILE* const out = std::fopen((folder + "/out.txt").c_str(), "w");
  Written written;
  written.status = RunRanks(ranks, [&](Communicator& comm) {
    return TrainRank(comm, *MakeTrainOptions(flags), data, {.out = out, .log = out}).status;
  });
  std::fclose(out);
  written.report = ReadFile(flags.report).value_or("");
  written.trace = ReadFile(flags.trace).value_or("");
  return written;
}

TEST(RunRecorderTest, ARealRunHasAReportAndATrace) {
  for (const char* steps : {"6", "6,2", "0,5,3", "4,4,4", "1,2,3,4,0", "1,1,1,1,1,1,1,3"}) {
    SCOPED_TRACE(steps);
    const std::string text = steps;
    const int ranks = 1 + static_cast<int>(std::count(text.begin(), text.end(), ','));
    const Written written = Train(ranks, {.batch_size = 4, .epochs = 2, .rank_steps = steps});
    ASSERT_TRUE(written.status.ok()) << written.status;
    EXPECT_EQ(CheckTrace(written.trace), "");
    EXPECT_LT(written.report.size(), 1 << 20);
    const nlohmann::json report = DataOf(written.report);
    EXPECT_TRUE(report["result"]["test_accuracy"].is_number());
    EXPECT_THAT(report["plans"].dump(), HasSubstr("fc1.weight"));
    EXPECT_EQ(report["ending"], "");
  }
}

TEST(RunRecorderTest, TheTraceHasEveryRankAndWhatItDid) {
  const Written written = Train(3, {.batch_size = 4, .epochs = 2, .rank_steps = "6,6,3"});
  ASSERT_TRUE(written.status.ok()) << written.status;
  std::set<std::string> seen;
  const nlohmann::json trace = nlohmann::json::parse(written.trace);
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["ph"] == "X")
      seen.insert(absl::StrCat(event["pid"].get<int>(), " ", event["name"].get<std::string>()));
  }
  for (const char* what :
       {"data", "begin", "forward", "backward", "wait", "optimizer", "bucket 0", "step 2"}) {
    for (const int rank : {0, 1, 2})
      EXPECT_TRUE(seen.contains(absl::StrCat(rank, " ", what))) << rank << " " << what;
  }
  EXPECT_TRUE(seen.contains("2 shadows active ranks"));
  EXPECT_FALSE(seen.contains("0 shadows active ranks"));
}

TEST(RunRecorderTest, UnevenRanksAreCounted) {
  const Written written = Train(2, {.batch_size = 4, .epochs = 2, .rank_steps = "7,4"});
  const nlohmann::json report = DataOf(written.report);
  EXPECT_EQ(report["samples_of_tail"], 24);
  const nlohmann::json& rank = report["batches"]["shown"][1];
  EXPECT_EQ(rank["batches"], 8);
  EXPECT_EQ(rank["exhausted"], 4);
  EXPECT_EQ(rank["shadowed"], 6);
}

TEST(RunRecorderTest, WhatIsFrozenIsAnEvent) {
  const Written written =
      Train(2, {.batch_size = 4, .epochs = 1, .rank_steps = "6,6", .freeze = "fc1@2:4"});
  EXPECT_THAT(EventsOf(DataOf(written.report)),
              ElementsAre("frozen: fc1.weight, fc1.bias", "trained: fc1.weight, fc1.bias"));
}

TEST(RunRecorderTest, ARunThatFailsLeavesWhatThereIs) {
  const Written written = Train(2, {.batch_size = 4,
                                    .epochs = 1,
                                    .rank_steps = "9,9",
                                    .optimizer = "sgd",
                                    .lr = 1e30,
                                    .zero = false});
  ASSERT_FALSE(written.status.ok());
  EXPECT_EQ(CheckTrace(written.trace), "");
  EXPECT_THAT(DataOf(written.report)["ending"].get<std::string>(), HasSubstr("the loss is"));
}

// A trace shows the steps of the run's curve, and the sampled steps of rank 0.
struct Shown {
  int points = 0;
  double first_ts = 0, last_ts = 0;  // The curve's, microseconds since the run began.
  std::set<std::string> steps;
};

Shown ShownBy(const std::string& trace_text) {
  Shown shown;
  const nlohmann::json trace = nlohmann::json::parse(trace_text);
  for (const nlohmann::json& event : trace["traceEvents"]) {
    const std::string name = event["name"];
    if (event["ph"] == "C" && absl::StartsWith(name, "loss, rank ")) {
      if (shown.points++ == 0) shown.first_ts = event["ts"];
      shown.last_ts = event["ts"];
    }
    if (event["ph"] == "X" && event["pid"] == 0 && absl::StartsWith(name, "step "))
      shown.steps.insert(name);
  }
  return shown;
}

// Three attempts at one run, the third after its end: after the last two of them there is one
// report of the whole.
TEST(RunRecorderTest, ARunThatGoesOnHasOneReport) {
  const std::string checkpoints = testing::TempDir() + "/checkpoints";
  std::filesystem::remove_all(checkpoints);
  TrainFlags flags{.batch_size = 4,
                   .epochs = 2,
                   .max_steps = 5,
                   .rank_steps = "6,4",
                   .freeze = "fc1@2:4",
                   .checkpoint_dir = checkpoints};
  const Written first = Train(2, flags);
  ASSERT_TRUE(first.status.ok()) << first.status;
  EXPECT_EQ(ShownBy(first.trace).points, 5);
  double last_ts = ShownBy(first.trace).last_ts;
  flags.max_steps = 0;
  for (const char* attempt : {"resumed", "finished"}) {
    SCOPED_TRACE(attempt);
    const Written written = Train(2, flags);
    ASSERT_TRUE(written.status.ok()) << written.status;
    EXPECT_EQ(CheckTrace(written.trace), "");
    const nlohmann::json report = DataOf(written.report);
    EXPECT_EQ(report["total_steps"], 12);
    EXPECT_EQ(report["result"]["epochs"], 2);
    EXPECT_THAT(EventsOf(report),
                IsSupersetOf({"frozen: fc1.weight, fc1.bias", "resumed: with 2 ranks"}));
    const nlohmann::json& rank = report["batches"]["shown"][1];
    EXPECT_EQ(rank["batches"], 8);
    EXPECT_EQ(rank["exhausted"], 4);
    EXPECT_EQ(rank["shadowed"], 4);
    const Shown shown = ShownBy(written.trace);
    EXPECT_EQ(shown.points, 12);
    EXPECT_GT(shown.last_ts, last_ts);
    last_ts = shown.last_ts - 1;
    for (const char* step : {"step 2", "step 3", "step 4", "step 6"})
      EXPECT_TRUE(shown.steps.contains(step)) << step;
  }
}

// Images whose labels are none from a certain batch on.
class BreaksOff : public Dataset {
 public:
  BreaksOff(std::unique_ptr<const ImageDataset> whole, int batches)
      : whole_(std::move(whole)), left_(batches) {}
  int64_t size() const override { return whole_->size(); }
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override {
    const Batch batch = whole_->Gather(samples, memory);
    if (--left_ < 0) std::ranges::fill(memory.labels, 200);
    return batch;
  }

 private:
  const std::unique_ptr<const ImageDataset> whole_;
  mutable int left_;
};

// Rank 0 fails in its eighth step, and rank 1 is rank 0 then: what it reports is the whole run,
// too.
TEST(RunRecorderTest, TheNextRankZeroReportsTheWholeRun) {
  constexpr int kRanks = 3;
  const std::string folder = testing::TempDir();
  TrainOptions options = *MakeTrainOptions({.model = "mlp",
                                            .hidden = "8",
                                            .batch_size = 4,
                                            .epochs = 2,
                                            .zero = false,
                                            .freeze = "fc1@2:4",
                                            .metrics = folder + "/lost.jsonl",
                                            .report = folder + "/lost.html",
                                            .trace = folder + "/lost.json"});
  options.goes_on = true;
  std::vector<std::unique_ptr<Communicator>> group = *CreateLocalGroup(kRanks);
  std::vector<absl::Status> statuses(kRanks);
  std::vector<std::thread> threads;
  std::FILE* const out = std::fopen((folder + "/out.txt").c_str(), "w");
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      auto data = std::make_shared<TrainingData>(
          TrainingData{.train = Grey(100), .test = Grey(5), .image = ImageShape{}});
      if (rank == 0) data->train = std::make_unique<BreaksOff>(Grey(100), 7);
      statuses[rank] =
          TrainRank(*group[rank], options, std::shared_ptr<const TrainingData>(std::move(data)),
                    {.out = out, .log = out})
              .status;
      group[rank].reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::fclose(out);
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("label"));
  for (int rank = 1; rank < kRanks; ++rank)
    EXPECT_TRUE(statuses[rank].ok()) << rank << ": " << statuses[rank];

  const nlohmann::json report = DataOf(ReadFile(options.flags.report).value_or(""));
  EXPECT_THAT(report["title"].get<std::string>(), EndsWith(", 3 ranks"));
  EXPECT_EQ(report["world_size"], 3);
  EXPECT_EQ(report["ranks_left"], 2);
  EXPECT_EQ(report["reporter"], 1);
  EXPECT_THAT(EventsOf(report), Contains("frozen: fc1.weight, fc1.bias"));
  EXPECT_THAT(
      EventsOf(report),
      Contains(HasSubstr("lost: rank 0; the other ranks continue from this step, after a")));
  const std::string trace = ReadFile(options.flags.trace).value_or("");
  EXPECT_EQ(CheckTrace(trace), "");
  // 9 steps of three ranks are an epoch, 13 of two. Rank 1 has a batch in each step but the last of
  // the second epoch.
  EXPECT_GE(ShownBy(trace).points, 17);
  double seconds = 0;
  int lost = 0;
  for (absl::string_view line :
       absl::StrSplit(*ReadFile(options.flags.metrics), '\n', absl::SkipEmpty())) {
    const nlohmann::json event = nlohmann::json::parse(std::string(line));
    lost += event["event"] == "lost";
    if (!event.contains("seconds")) continue;
    EXPECT_GE(event["seconds"], seconds) << line;
    seconds = event["seconds"];
  }
  EXPECT_EQ(lost, 1);
}

}  // namespace
}  // namespace evenkeel
