#include "evenkeel/trainer/report/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/report/crc32c.h"
#include "evenkeel/trainer/report/metrics_sink.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::SizeIs;
using testing::StartsWith;

template <typename Number>
Number Take(absl::string_view& bytes) {
  Number number{};
  EXPECT_GE(bytes.size(), sizeof(number));
  std::memcpy(&number, bytes.data(),
              std::min(bytes.size(), sizeof(number)));  // Little-endian, as this machine is.
  bytes.remove_prefix(std::min(bytes.size(), sizeof(number)));
  return number;
}

uint64_t TakeVarint(absl::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = Take<uint8_t>(bytes);
    value |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return value;
  }
  ADD_FAILURE() << "a number of more than ten bytes";
  return value;
}

// A message's content: its numbers and its texts by field, in their order.
struct Message {
  std::map<int, std::vector<double>> numbers;
  std::map<int, std::vector<std::string>> texts;

  double number(int field) const { return numbers.at(field).at(0); }
  const std::string& text(int field) const { return texts.at(field).at(0); }
  Message message(int field, size_t index = 0) const { return Parse(texts.at(field).at(index)); }

  static Message Parse(absl::string_view bytes) {
    Message message;
    while (!bytes.empty()) {
      const uint64_t key = TakeVarint(bytes);
      const int field = static_cast<int>(key >> 3);
      switch (key & 7) {
        case 0:
          message.numbers[field].push_back(
              static_cast<double>(static_cast<int64_t>(TakeVarint(bytes))));
          break;
        case 1:
          message.numbers[field].push_back(Take<double>(bytes));
          break;
        case 5:
          message.numbers[field].push_back(Take<float>(bytes));
          break;
        case 2: {
          const uint64_t size = TakeVarint(bytes);
          EXPECT_LE(size, bytes.size());
          message.texts[field].emplace_back(bytes.substr(0, size));
          bytes.remove_prefix(std::min<size_t>(size, bytes.size()));
          break;
        }
        default:
          ADD_FAILURE() << "wire type " << (key & 7);
          return message;
      }
    }
    return message;
  }
};

// The events of a file, all of which must be whole.
std::vector<Message> ReadEvents(const std::string& path) {
  const std::string file = *ReadFile(path);
  std::vector<Message> events;
  for (absl::string_view left = file; !left.empty();) {
    const absl::string_view length = left.substr(0, 8);
    const uint64_t size = Take<uint64_t>(left);
    EXPECT_EQ(Take<uint32_t>(left), MaskedCrc32c(length));
    EXPECT_LE(size, left.size());
    const absl::string_view payload = left.substr(0, size);
    left.remove_prefix(std::min<size_t>(size, left.size()));
    EXPECT_EQ(Take<uint32_t>(left), MaskedCrc32c(payload));
    events.push_back(Message::Parse(payload));
  }
  return events;
}

std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

std::string NewFolder(const std::string& name) {
  const std::string folder = testing::TempDir() + "/" + name;
  fs::remove_all(folder);
  return folder;
}

const absl::Time kTime = absl::UnixEpoch() + absl::Milliseconds(1700000000250);

TEST(TensorboardTest, BeginsWithTheVersionOfTheFormat) {
  const std::string folder = NewFolder("begin/of/run");
  const absl::Time before = absl::Now();
  ASSERT_TRUE(OpenTensorboard(folder).ok());
  ASSERT_THAT(FilesIn(folder), SizeIs(1));
  const std::string path = FilesIn(folder)[0];
  EXPECT_THAT(path, StartsWith(absl::StrCat(folder, "/events.out.tfevents.",
                                            absl::ToUnixSeconds(before) / 100)));
  EXPECT_THAT(path, HasSubstr(absl::StrCat(".", getpid(), ".")));
  const std::vector<Message> events = ReadEvents(path);
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_EQ(events[0].text(3), "brain.Event:2");
  EXPECT_NEAR(events[0].number(1), absl::ToDoubleSeconds(before - absl::UnixEpoch()), 60);
}

TEST(TensorboardTest, AScalarPointIsOneEvent) {
  const std::string folder = NewFolder("scalars");
  const std::unique_ptr<MetricsSink> sink = *OpenTensorboard(folder);
  const Scalar scalars[] = {
      {"train/loss", 0.625, ""}, {"train/samples_per_second", 1e6, ""}, {"odd", NAN, ""}};
  ASSERT_TRUE(sink->Write(int64_t{1} << 40, kTime, scalars).ok());
  // It is in the file at once.
  const std::vector<Message> events = ReadEvents(FilesIn(folder)[0]);
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_EQ(events[1].number(1), 1700000000.25);
  EXPECT_EQ(events[1].number(2), std::pow(2, 40));
  const Message summary = events[1].message(5);
  ASSERT_THAT(summary.texts.at(1), SizeIs(3));
  EXPECT_EQ(summary.message(1, 0).text(1), "train/loss");
  EXPECT_EQ(summary.message(1, 0).number(2), 0.625);
  EXPECT_EQ(summary.message(1, 1).number(2), 1e6);
  EXPECT_TRUE(std::isnan(summary.message(1, 2).number(2)));
}

TEST(TensorboardTest, ATextIsShownVerbatim) {
  const std::string folder = NewFolder("texts");
  const std::unique_ptr<MetricsSink> sink = *OpenTensorboard(folder);
  ASSERT_TRUE(sink->WriteText(7, kTime, "sample", "one\ntwo").ok());
  const std::vector<Message> events = ReadEvents(FilesIn(folder)[0]);
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_EQ(events[1].number(2), 7);
  const Message value = events[1].message(5).message(1);
  EXPECT_EQ(value.text(1), "sample");
  EXPECT_EQ(value.message(8).number(1), 7);  // A tensor of strings.
  EXPECT_EQ(value.message(8).text(8), "    one\n    two");
  EXPECT_EQ(value.message(9).message(1).text(1), "text");
}

// Longer fields, and steps below zero, take more bytes for their size or value.
TEST(TensorboardTest, LongTextsAndNegativeStepsAreWhole) {
  const std::string folder = NewFolder("long");
  const std::unique_ptr<MetricsSink> sink = *OpenTensorboard(folder);
  const std::string text(300, 'x');
  ASSERT_TRUE(sink->WriteText(-1, kTime, "sample", text).ok());
  const std::vector<Message> events = ReadEvents(FilesIn(folder)[0]);
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_EQ(events[1].number(2), -1);
  EXPECT_EQ(events[1].message(5).message(1).message(8).text(8), "    " + text);
}

TEST(TensorboardTest, StepsThatAreTakenAgainAreForgotten) {
  const std::string folder = NewFolder("again");
  const std::unique_ptr<MetricsSink> sink = *OpenTensorboard(folder);
  ASSERT_TRUE(sink->GoBackTo(5, kTime).ok());
  ASSERT_TRUE(sink->Finish(kTime).ok());
  const std::vector<Message> events = ReadEvents(FilesIn(folder)[0]);
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_EQ(events[1].number(2), 5);
  EXPECT_EQ(events[1].message(7).number(1), 1);  // START.
}

TEST(TensorboardTest, EverySinkHasAFileOfItsOwn) {
  const std::string folder = NewFolder("several");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const auto sink = OpenTensorboard(folder);
      ASSERT_TRUE(sink.ok()) << sink.status();
      EXPECT_TRUE((*sink)->Write(1, kTime, {}).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_THAT(FilesIn(folder), SizeIs(4));
  for (const std::string& path : FilesIn(folder)) EXPECT_THAT(ReadEvents(path), SizeIs(2));
}

TEST(TensorboardTest, SaysWhatCannotBeWritten) {
  const absl::Status status = OpenTensorboard("/proc/none").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("/proc/none"));
  const std::string folder = NewFolder("full");
  const std::unique_ptr<MetricsSink> sink = *OpenTensorboard(folder);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const std::string path = FilesIn(folder)[0];
  const rlimit little{.rlim_cur = fs::file_size(path) + 3,
                      .rlim_max = before.rlim_max};  // A part of a record.
  setrlimit(RLIMIT_FSIZE, &little);
  const absl::Status full = sink->Finish(kTime).ok() ? sink->GoBackTo(1, kTime) : absl::OkStatus();
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(full.ok());
  EXPECT_THAT(std::string(full.message()), HasSubstr(path));
  // Once there is room again, the torn record is gone.
  EXPECT_TRUE(sink->GoBackTo(2, kTime).ok());
  const std::vector<Message> events = ReadEvents(path);
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_EQ(events[1].number(2), 2);
}

}  // namespace
}  // namespace evenkeel
