#include "evenkeel/trainer/app/dashboards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/time/time.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/step_facts.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/report/output_failures.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

const absl::Time kStart = absl::FromUnixSeconds(1700000000);

// A step of two ranks that took 200 ms; rank 0 had a batch.
StepFacts Facts(int64_t step) {
  return {.step = step,
          .samples = 8,
          .learning_rate = 0.125,
          .own = BatchResult{.loss_mean = 0.5, .predictions = 4, .correct = 3},
          .own_samples = 4,
          .took = absl::Milliseconds(200),
          .sync = absl::Milliseconds(50)};
}

class DashboardsTest : public testing::Test {
 protected:
  DashboardsTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~DashboardsTest() override { std::fclose(log_); }

  Dashboards Open(bool counts_tokens) {
    TrainOptions options;
    options.flags.tensorboard = folder_ + "/events";
    options.flags.prometheus = folder_ + "/train.prom";
    return Dashboards(options, counts_tokens, failures_);
  }

  std::string Prometheus() const { return *ReadFile(folder_ + "/train.prom"); }
  std::string Events() const {
    return *ReadFile(std::filesystem::directory_iterator(folder_ + "/events")->path().string());
  }

  std::string Log() const {
    std::fflush(log_);
    return *ReadFile(log_path_);
  }

  const std::string folder_ = testing::TempDir() + "/dashboards";
  const std::string log_path_ = testing::TempDir() + "/dashboards.log";
  std::FILE* const log_ = std::fopen(log_path_.c_str(), "w");
  OutputFailures failures_{log_};
};

TEST_F(DashboardsTest, BothSinksHearOfEachStep) {
  Dashboards sinks = Open(/*counts_tokens=*/false);
  sinks.OnStep(Facts(3), NumbersOf(Facts(3), 1), kStart);
  for (const char* line :
       {"evenkeel_train_loss{model=\"cnn\",run=\"train\"} 0.5\n",
        "evenkeel_train_accuracy{model=\"cnn\",run=\"train\"} 0.75\n",
        "evenkeel_train_learning_rate{model=\"cnn\",run=\"train\"} 0.125\n",
        "evenkeel_train_samples_per_second{model=\"cnn\",run=\"train\"} 40\n",
        "evenkeel_train_exposed_communication_ratio{model=\"cnn\",run=\"train\"} 0.25\n",
        "evenkeel_train_step{model=\"cnn\",run=\"train\"} 3\n",
        "evenkeel_train_up{model=\"cnn\",run=\"train\"} 1\n"}) {
    EXPECT_THAT(Prometheus(), HasSubstr(line));
  }
  EXPECT_THAT(Prometheus(), Not(HasSubstr("token")));
  for (const char* tag : {"train/loss", "train/accuracy", "train/learning_rate",
                          "train/samples_per_second", "train/exposed_communication_ratio"}) {
    EXPECT_THAT(Events(), HasSubstr(tag));
  }
}

TEST_F(DashboardsTest, LanguageModelsCountTokensAndBits) {
  Dashboards sinks = Open(/*counts_tokens=*/true);
  sinks.OnStep(Facts(0), NumbersOf(Facts(0), 100), kStart);
  sinks.OnTest(0, {.predictions = 10, .correct = 5, .loss_sum = 10 * std::log(8)}, kStart);
  sinks.OnEnd(kStart);
  EXPECT_THAT(Prometheus(),
              HasSubstr("evenkeel_train_tokens_per_second{model=\"cnn\",run=\"train\"} 4000\n"));
  EXPECT_THAT(Prometheus(),
              HasSubstr("evenkeel_train_bits_per_token{model=\"cnn\",run=\"train\"} 0.7213"));
  EXPECT_THAT(Prometheus(), HasSubstr("evenkeel_test_accuracy{model=\"cnn\",run=\"train\"} 0.5\n"));
  EXPECT_THAT(Prometheus(),
              HasSubstr("evenkeel_test_bits_per_token{model=\"cnn\",run=\"train\"} 3\n"));
  EXPECT_THAT(Prometheus(), HasSubstr("evenkeel_train_up{model=\"cnn\",run=\"train\"} 0\n"));
}

TEST_F(DashboardsTest, WhatADryRankDoesNotKnowIsLeftOut) {
  Dashboards sinks = Open(/*counts_tokens=*/false);
  StepFacts facts = Facts(0);
  facts.own.reset();
  sinks.OnStep(facts, NumbersOf(facts, 1), kStart);
  EXPECT_THAT(Prometheus(), Not(HasSubstr("loss")));
  EXPECT_THAT(Prometheus(), HasSubstr("samples_per_second"));
}

TEST_F(DashboardsTest, SharesAreWrittenIfTheyMayDiffer) {
  Dashboards even = Open(/*counts_tokens=*/false);
  even.OnStep(Facts(0), NumbersOf(Facts(0), 1), kStart);
  EXPECT_THAT(Prometheus(), Not(HasSubstr("rank0_samples")));
  TrainOptions options;
  options.flags.balance = true;
  options.flags.prometheus = folder_ + "/train.prom";
  Dashboards balanced(options, /*counts_tokens=*/false, failures_);
  balanced.OnStep(Facts(0), NumbersOf(Facts(0), 1), kStart);
  EXPECT_THAT(Prometheus(),
              HasSubstr("evenkeel_train_rank0_samples{model=\"cnn\",run=\"train\"} 4\n"));
}

TEST_F(DashboardsTest, ALossThatIsNotFiniteIsTold) {
  Dashboards sinks = Open(/*counts_tokens=*/false);
  StepFacts facts = Facts(0);
  facts.own->loss_mean = NAN;
  sinks.OnStep(facts, NumbersOf(facts, 1), kStart);
  EXPECT_THAT(Prometheus(), HasSubstr("evenkeel_train_loss{model=\"cnn\",run=\"train\"} NaN\n"));
}

TEST_F(DashboardsTest, WithoutFilesThereIsNothingToDo) {
  Dashboards sinks(TrainOptions(), false, failures_);
  sinks.OnStep(Facts(0), NumbersOf(Facts(0), 1), kStart);
  sinks.OnGoBack(0, kStart);
  sinks.OnEnd(kStart);
  EXPECT_EQ(Log(), "");
}

TEST_F(DashboardsTest, ASinkThatFailsIsReportedOnceAndTheOthersGoOn) {
  TrainOptions options;
  options.flags.tensorboard = folder_ + "/a_file/events";
  options.flags.prometheus = folder_ + "/no_folder/train.prom";
  std::ofstream(folder_ + "/a_file").close();
  Dashboards sinks(options, /*counts_tokens=*/false, failures_);
  for (int64_t step = 0; step < 3; ++step) {
    sinks.OnStep(Facts(step), NumbersOf(Facts(step), 1), kStart + absl::Minutes(step));
  }
  EXPECT_THAT(Log(), MatchesRegex("dashboards_test: --tensorboard: cannot make the folder [^\n]*; "
                                  "the run continues .reported once.\n"
                                  "dashboards_test: --prometheus: cannot create [^\n]*; the run "
                                  "continues .reported once.\n"));
  std::filesystem::create_directory(folder_ + "/no_folder");
  sinks.OnEnd(kStart);
  EXPECT_THAT(*ReadFile(options.flags.prometheus),
              HasSubstr("evenkeel_train_step{model=\"cnn\",run=\"train\"} 2\n"));
}

}  // namespace
}  // namespace evenkeel
