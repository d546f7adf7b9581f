// No bytes in a file do harm.

#include "evenkeel/comm/testing/fuzz.h"

#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

std::string SafetensorsOf(absl::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return absl::StrCat(file, header, std::string(data_bytes, 'x'));
}

// Reads everything that a file gives access to.
absl::StatusOr<std::string> ReadTensors(absl::string_view bytes) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Parse(std::string(bytes));
  if (!file.ok()) return file.status();
  int64_t sum = 0, covered = 0;
  for (const SafetensorsFile::Tensor& tensor : file->tensors()) {
    sum = std::accumulate(tensor.bytes.begin(), tensor.bytes.end(), sum);
    covered += static_cast<int64_t>(tensor.bytes.size());
    EXPECT_EQ(file->Find(tensor.name)->name, tensor.name);
  }
  EXPECT_LE(covered, static_cast<int64_t>(bytes.size()));
  EXPECT_NE(sum, 1);  // It was read.
  return std::string(bytes);
}

TEST(TrainerFuzzTest, Safetensors) {
  Fuzz({SafetensorsOf(
            R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
            R"("b":{"dtype":"I8","shape":[],"data_offsets":[24,25]},"__metadata__":{"step":"7"}})",
            25),
        SafetensorsOf(R"({"empty":{"dtype":"F64","shape":[0,4],"data_offsets":[0,0]}})", 0),
        SafetensorsOf("{}", 0)},
       ReadTensors, {.memory_per_byte = 600});
}

// Deep nesting must cost neither the stack nor much time.
TEST(TrainerFuzzTest, NestedHeader) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string header;
    for (int depth = 0; depth < 100000; ++depth) header += open;
    EXPECT_TRUE(absl::IsInvalidArgument(SafetensorsFile::Parse(SafetensorsOf(header, 0)).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        SafetensorsFile::Parse(SafetensorsOf("{\"a\":" + header, 0)).status()));
  }
}

std::string BigEndian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

TEST(TrainerFuzzTest, IdxDataset) {
  const std::string images = absl::StrCat(BigEndian(0x803), BigEndian(2), BigEndian(28),
                                          BigEndian(28), std::string(2 * 784, '\7'));
  const std::string labels = absl::StrCat(BigEndian(0x801), BigEndian(2), std::string("\3\4"));
  const auto parse = [](const std::string& images,
                        const std::string& labels) -> absl::StatusOr<std::string> {
    const absl::StatusOr<ImageDataset> data = ParseIdx(images, labels);
    // A damaged file may also be called that.
    if (absl::IsDataLoss(data.status())) return absl::InvalidArgumentError(data.status().message());
    if (!data.ok()) return data.status();
    for (int64_t i = 0; i < data->size(); ++i)
      EXPECT_LT(data->label(i), 10 + 0 * data->pixels(i).back());
    return images + labels;
  };
  FuzzOptions options{.rounds = 3000};
  Fuzz(
      {images},
      [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
        const absl::StatusOr<std::string> both = parse(std::string(bytes), labels);
        return both.ok() ? absl::StatusOr<std::string>(std::string(bytes)) : both;
      },
      options);
  Fuzz(
      {labels},
      [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
        const absl::StatusOr<std::string> both = parse(images, std::string(bytes));
        return both.ok() ? absl::StatusOr<std::string>(std::string(bytes)) : both;
      },
      options);
}

}  // namespace
}  // namespace evenkeel
