#include "evenkeel/trainer/app/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {
namespace {

TEST(MetricsTest, WritesEachTypeInOrder) {
  EXPECT_EQ(MetricsLine({{"step", 12},
                         {"big", int64_t{1} << 60},
                         {"loss", 0.25},
                         {"done", true},
                         {"split", "test"}}),
            R"({"step":12,"big":1152921504606846976,"loss":0.25,"done":true,"split":"test"})");
}

TEST(MetricsTest, IsAlwaysJson) {
  EXPECT_EQ(MetricsLine(MetricsFields::object()), "{}");
  EXPECT_EQ(MetricsLine({{"nan", NAN}, {"inf", -INFINITY}}), R"({"nan":null,"inf":null})");
  EXPECT_EQ(MetricsLine({{"text", "a \"b\"\n"}}), R"({"text":"a \"b\"\n"})");
  EXPECT_EQ(MetricsLine({{"text", "\xff"}}), "{\"text\":\"\xef\xbf\xbd\"}");
}

TEST(MetricsTest, NumbersSurviveTheTextForm) {
  EXPECT_EQ(MetricsLine({{"x", 0.1 + 0.2}}), R"({"x":0.30000000000000004})");
}

TEST(MetricsTest, LinesAreInTheFileAtOnce) {
  const std::string path = testing::TempDir() + "/metrics.jsonl";
  const auto metrics = MetricsWriter::Create(path);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_TRUE((*metrics)->Write({{"step", 1}}).ok());
  EXPECT_EQ(*ReadFile(path), "{\"step\":1}\n");
  EXPECT_TRUE((*metrics)->Write({{"step", 2}}).ok());
  EXPECT_EQ(*ReadFile(path), "{\"step\":1}\n{\"step\":2}\n");
}

// Whoever wrote before may have been killed, or the disk was full, in the middle of a line.
TEST(MetricsTest, WhatIsAppendedBeginsWithALineOfItsOwn) {
  const std::string path = testing::TempDir() + "/appended.jsonl";
  for (const auto& [before, after] : std::vector<std::pair<std::string, std::string>>{
           {"", "{\"step\":1}\n"},
           {"{\"step\":0}\n", "{\"step\":0}\n{\"step\":1}\n"},
           {"{\"st", "{\"st\n{\"step\":1}\n"}}) {
    const absl::string_view pieces[] = {before};
    ASSERT_TRUE(WriteFileAtomically(path, pieces).ok());
    EXPECT_TRUE((*MetricsWriter::Create(path, MetricsMode::kAppend))->Write({{"step", 1}}).ok());
    EXPECT_EQ(*ReadFile(path), after);
  }
}

MetricsFields StepLine(int64_t step) { return {{"event", "step"}, {"step", step}}; }

TEST(MetricsTest, ALineThatIsThereIsNotRepeated) {
  const std::string path = testing::TempDir() + "/once.jsonl";
  const auto first = MetricsWriter::Create(path);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE((*first)->Write({{"event", "run"}, {"first_step", 0}}).ok());
  EXPECT_TRUE((*(*MetricsWriter::Create(path, MetricsMode::kTakeOver))).Lacks(0));
  for (const int64_t step : {0, 1, 1, 0}) EXPECT_TRUE((*first)->Write(StepLine(step)).ok());
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE((*first)->Write({{"event", "lost"}, {"step", 1}, {"replaced", true}}).ok());

  const auto next = MetricsWriter::Create(path, MetricsMode::kTakeOver);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_FALSE((*next)->Lacks(1));
  EXPECT_TRUE((*next)->Lacks(2));
  EXPECT_FALSE((*next)->Lacks(3));
  EXPECT_TRUE((*next)->Write(StepLine(1)).ok());
  EXPECT_TRUE((*next)->Write(StepLine(2)).ok());
  (*next)->GoBack(2);  // With other ranks.
  EXPECT_TRUE((*next)->Write(StepLine(2)).ok());
  const std::string text = *ReadFile(path), before = "\"step\",\"step\":";
  std::string steps;
  for (size_t at = text.find(before); at != std::string::npos; at = text.find(before, at + 1))
    steps += text[at + before.size()];
  EXPECT_EQ(steps, "0122");
}

// The limit stands for a full disk, which has room again later.
TEST(MetricsTest, ALineThatIsTornIsALineOfItsOwn) {
  const std::string path = testing::TempDir() + "/torn.jsonl";
  const auto metrics = MetricsWriter::Create(path);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  signal(SIGXFSZ, SIG_IGN);
  rlimit whole{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &whole), 0);
  const rlimit little{.rlim_cur = 15, .rlim_max = whole.rlim_max};
  EXPECT_TRUE((*metrics)->Write({{"step", 1}}).ok());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
  for (int i = 0; i < 2; ++i) EXPECT_FALSE((*metrics)->Write({{"step", 2}}).ok());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &whole), 0);
  EXPECT_TRUE((*metrics)->Write({{"step", 3}}).ok());
  EXPECT_EQ(*ReadFile(path), "{\"step\":1}\n{\"st\n{\"step\":3}\n");
}

TEST(MetricsTest, SaysWhatCannotBeWritten) {
  const absl::Status status =
      MetricsWriter::Create(testing::TempDir() + "/no/such/folder/m").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  const auto full = MetricsWriter::Create("/dev/full");
  ASSERT_TRUE(full.ok());
  EXPECT_EQ((*full)->Write({{"step", 1}}).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace evenkeel
