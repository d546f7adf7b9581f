#include "evenkeel/trainer/run_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/trainer/idx_dataset.h"
#include "evenkeel/trainer/image_shape.h"
#include "evenkeel/trainer/report/testing/page_check.h"
#include "evenkeel/trainer/report/testing/trace_check.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/train_rank.h"
#include "evenkeel/trainer/training_data.h"
#include "evenkeel/zero_optim/file_io.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;

std::unique_ptr<const IdxDataset> Grey(int count) {
  const std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  const std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  return std::make_unique<const IdxDataset>(
      *IdxDataset::Parse(images + std::string(count * 784, 100), labels + std::string(count, 3)));
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
  const auto data =
      std::make_shared<const TrainingData>(TrainingData{.train = Grey(100), .test = Grey(5), .image = ImageShape{}});
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
    const Written written = Train(ranks, {.epochs = 2, .batch_size = 4, .rank_steps = steps});
    ASSERT_TRUE(written.status.ok()) << written.status;
    EXPECT_EQ(CheckPage(written.report), "");
    EXPECT_EQ(CheckTrace(written.trace), "");
    EXPECT_LT(written.report.size(), 1 << 20);
    EXPECT_THAT(written.report, HasSubstr("Test accuracy"));
    EXPECT_THAT(written.report, HasSubstr("fc1.weight"));
    EXPECT_THAT(written.report, Not(HasSubstr("did not come to its end")));
  }
}

TEST(RunRecorderTest, TheTraceHasEveryRankAndWhatItDid) {
  const Written written = Train(3, {.epochs = 2, .batch_size = 4, .rank_steps = "6,6,3"});
  ASSERT_TRUE(written.status.ok()) << written.status;
  std::set<std::string> seen;
  const nlohmann::json trace = nlohmann::json::parse(written.trace);
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event["ph"] == "X") seen.insert(absl::StrCat(event["pid"].get<int>(), " ", event["name"].get<std::string>()));
  }
  for (const char* what : {"data", "begin", "forward", "backward", "wait", "optimizer", "bucket 0", "step 2"}) {
    for (const int rank : {0, 1, 2}) EXPECT_TRUE(seen.contains(absl::StrCat(rank, " ", what))) << rank << " " << what;
  }
  EXPECT_TRUE(seen.contains("2 follows the others"));
  EXPECT_FALSE(seen.contains("0 follows the others"));
}

TEST(RunRecorderTest, UnevenRanksAreCounted) {
  const Written written = Train(2, {.epochs = 2, .batch_size = 4, .rank_steps = "7,4"});
  EXPECT_THAT(written.report, HasSubstr("So 24 samples were trained on"));
  EXPECT_THAT(written.report, HasSubstr("8 batches, ran dry first at step 4, followed 6 steps"));
}

TEST(RunRecorderTest, WhatIsFrozenIsAnEvent) {
  const Written written = Train(2, {.epochs = 1, .batch_size = 4, .rank_steps = "6,6", .freeze = "fc1@2:4"});
  EXPECT_THAT(written.report, HasSubstr("frozen</b> fc1.weight, fc1.bias"));
  EXPECT_THAT(written.report, HasSubstr("trained</b> fc1.weight, fc1.bias"));
}

TEST(RunRecorderTest, ARunThatFailsLeavesWhatThereIs) {
  const Written written =
      Train(2, {.epochs = 1, .batch_size = 4, .rank_steps = "9,9", .optimizer = "sgd", .lr = 1e30, .zero = false});
  ASSERT_FALSE(written.status.ok());
  EXPECT_EQ(CheckPage(written.report), "");
  EXPECT_EQ(CheckTrace(written.trace), "");
  EXPECT_THAT(written.report, HasSubstr("The run did not come to its end."));
  EXPECT_THAT(written.report, HasSubstr("the loss is"));
}

}  // namespace
}  // namespace evenkeel
