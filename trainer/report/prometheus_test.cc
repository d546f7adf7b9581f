#include "evenkeel/trainer/report/prometheus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/report/metrics_sink.h"

namespace evenkeel {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

const absl::Time kTime = absl::UnixEpoch() + absl::Milliseconds(1700000000250);

std::string PathOf(const std::string& name) {
  const std::string path = testing::TempDir() + "/" + name + ".prom";
  std::filesystem::remove(path);
  return path;
}

absl::Status WriteLoss(MetricsSink& sink, int64_t step, double loss, absl::Time time) {
  const Scalar scalars[] = {{"train/loss", loss, "Mean loss"}};
  return sink.Write(step, time, scalars);
}

TEST(PrometheusTest, WritesEachValueWithItsHelpAndType) {
  const std::string path = PathOf("whole");
  const auto sink = OpenPrometheus(path, "cnn");
  const Scalar scalars[] = {{"train/loss", 0.1, "Mean loss of rank 0's batch"},
                            {"train/learning_rate", 3e-4, "Its"}};
  ASSERT_TRUE(sink->Write(12, kTime, scalars).ok());
  EXPECT_EQ(
      *ReadFile(path),
      "# HELP evenkeel_train_learning_rate Its\n"
      "# TYPE evenkeel_train_learning_rate gauge\n"
      "evenkeel_train_learning_rate{model=\"cnn\",run=\"whole\"} 3e-04\n"
      "# HELP evenkeel_train_loss Mean loss of rank 0's batch\n"
      "# TYPE evenkeel_train_loss gauge\n"
      "evenkeel_train_loss{model=\"cnn\",run=\"whole\"} 0.1\n"
      "# HELP evenkeel_train_step Last finished training step\n"
      "# TYPE evenkeel_train_step gauge\n"
      "evenkeel_train_step{model=\"cnn\",run=\"whole\"} 12\n"
      "# HELP evenkeel_train_up 1 while training is running, else 0\n"
      "# TYPE evenkeel_train_up gauge\n"
      "evenkeel_train_up{model=\"cnn\",run=\"whole\"} 1\n"
      "# HELP evenkeel_train_last_update_timestamp_seconds Unix time at which these values "
      "were written\n"
      "# TYPE evenkeel_train_last_update_timestamp_seconds gauge\n"
      "evenkeel_train_last_update_timestamp_seconds{model=\"cnn\",run=\"whole\"} 1700000000.25\n");
}

TEST(PrometheusTest, EscapesWhatWouldEndALabel) {
  const std::string path = PathOf("a \"b\"\\\nc}");
  const auto sink = OpenPrometheus(path, "f\u00fcnf");
  const Scalar scalars[] = {{"test_part/bits_per_token", 1, "one"}};
  ASSERT_TRUE(sink->Write(0, kTime, scalars).ok());
  EXPECT_THAT(*ReadFile(path), HasSubstr("evenkeel_test_part_bits_per_token{model=\"f\u00fcnf\","
                                         "run=\"a \\\"b\\\"\\\\\\nc}\"} 1\n"));
}

TEST(PrometheusTest, KnowsNumbersThatAreNone) {
  const std::string path = PathOf("numbers");
  const auto sink = OpenPrometheus(path, "cnn");
  const Scalar scalars[] = {
      {"a", NAN, ""}, {"b", INFINITY, ""}, {"c", -INFINITY, ""}, {"d", -0.0, ""}, {"e", 1e300, ""}};
  ASSERT_TRUE(sink->Write(0, kTime, scalars).ok());
  for (const char* line :
       {"_a{model=\"cnn\",run=\"numbers\"} NaN\n", "_b{model=\"cnn\",run=\"numbers\"} +Inf\n",
        "_c{model=\"cnn\",run=\"numbers\"} -Inf\n", "_d{model=\"cnn\",run=\"numbers\"} -0\n",
        "_e{model=\"cnn\",run=\"numbers\"} 1e+300\n"}) {
    EXPECT_THAT(*ReadFile(path), HasSubstr(line));
  }
}

TEST(PrometheusTest, WritesOncePerPeriodAndAtTheEnd) {
  const std::string path = PathOf("period");
  const auto sink = OpenPrometheus(path, "cnn", absl::Seconds(5));
  ASSERT_TRUE(WriteLoss(*sink, 0, 1, kTime).ok());
  ASSERT_TRUE(WriteLoss(*sink, 1, 2, kTime + absl::Seconds(4.9)).ok());
  EXPECT_THAT(*ReadFile(path), HasSubstr("evenkeel_train_loss{model=\"cnn\",run=\"period\"} 1\n"));
  ASSERT_TRUE(WriteLoss(*sink, 2, 3, kTime + absl::Seconds(5)).ok());
  EXPECT_THAT(*ReadFile(path), HasSubstr("evenkeel_train_loss{model=\"cnn\",run=\"period\"} 3\n"));
  const Scalar scalars[] = {{"test/loss", 0.5, "Over the test data"}};
  ASSERT_TRUE(sink->Write(2, kTime + absl::Seconds(6), scalars).ok());
  EXPECT_THAT(*ReadFile(path), Not(HasSubstr("test_loss")));
  ASSERT_TRUE(sink->Finish(kTime + absl::Seconds(7)).ok());
  EXPECT_THAT(*ReadFile(path), HasSubstr("evenkeel_test_loss{model=\"cnn\",run=\"period\"} 0.5\n"));
  EXPECT_THAT(*ReadFile(path), HasSubstr("evenkeel_train_loss{model=\"cnn\",run=\"period\"} 3\n"));
  EXPECT_THAT(*ReadFile(path), HasSubstr("evenkeel_train_up{model=\"cnn\",run=\"period\"} 0\n"));
}

TEST(PrometheusTest, AReaderSeesAWholeFileAlways) {
  const std::string path = PathOf("renamed");
  const auto sink = OpenPrometheus(path, "cnn", absl::ZeroDuration());
  ASSERT_TRUE(WriteLoss(*sink, 0, 0, kTime).ok());
  std::atomic<bool> is_done = false;
  std::thread writer([&] {
    for (int step = 0; step < 500; ++step) EXPECT_TRUE(WriteLoss(*sink, step, step, kTime).ok());
    is_done = true;
  });
  while (!is_done)
    EXPECT_THAT(
        *ReadFile(path),
        EndsWith("evenkeel_train_last_update_timestamp_seconds{model=\"cnn\",run=\"renamed\"} "
                 "1700000000.25\n"));
  writer.join();
  for (const auto& entry : std::filesystem::directory_iterator(testing::TempDir())) {
    EXPECT_FALSE(absl::EndsWith(entry.path().string(), ".tmp")) << entry.path();
  }
}

TEST(PrometheusTest, SaysWhatCannotBeWritten) {
  const absl::Status status = WriteLoss(*OpenPrometheus("/proc/none/x.prom", "cnn"), 0, 1, kTime);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/proc/none/x.prom"));
  const std::string folder = testing::TempDir() + "/folder.prom";
  std::filesystem::create_directories(folder);
  EXPECT_THAT(std::string(WriteLoss(*OpenPrometheus(folder, "cnn"), 0, 1, kTime).message()),
              HasSubstr(folder));
}

}  // namespace
}  // namespace evenkeel
