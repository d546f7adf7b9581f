#include "evenkeel/zero_optim/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {
namespace {

std::string Path() {
  return testing::TempDir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name();
}

// A file of this header and so many bytes of data.
std::string FileOf(absl::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return absl::StrCat(file, header, std::string(data_bytes, 'x'));
}

TEST(SafetensorsTest, KeepsEveryTypeAndTheMetadata) {
  std::vector<std::vector<char>> memory;
  std::vector<NamedTensor> tensors;
  for (DType dtype : kAllDTypes) {
    memory.emplace_back();
    for (int i = 0; i < 6 * SizeOf(dtype); ++i)
      memory.back().push_back(static_cast<char>(memory.size() * 16 + i));
    tensors.push_back(
        {std::string(ToString(dtype)), {2, 3}, TensorView(memory.back().data(), 6, dtype)});
  }
  tensors.push_back({"nothing", {4, 0}, TensorView(nullptr, 0, DType::kFloat32)});
  tensors.push_back({"scalar \"\u00e4\"", {}, TensorView(memory[0].data(), 1, DType::kFloat32)});
  const std::map<std::string, std::string> metadata = {{"step", "7"},
                                                       {"note", "a \"quoted\" line\n"}};
  ASSERT_TRUE(WriteSafetensors(Path(), tensors, metadata).ok());

  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Read(Path());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata(), metadata);
  EXPECT_EQ(file->tensors().size(), tensors.size());
  for (const NamedTensor& tensor : tensors) {
    SCOPED_TRACE(tensor.name);
    const auto* read = file->Find(tensor.name);
    ASSERT_NE(read, nullptr);
    EXPECT_EQ(read->dtype, tensor.value.dtype);
    EXPECT_EQ(read->shape, tensor.shape);
    EXPECT_EQ(read->count(), tensor.value.count);
    EXPECT_EQ(read->bytes,
              absl::string_view(static_cast<char*>(tensor.value.data), tensor.value.bytes()));
  }
  EXPECT_EQ(file->Find("absent"), nullptr);
}

TEST(SafetensorsTest, AlignsTheData) {
  float values[3] = {};
  int8_t byte[1] = {};
  const NamedTensor tensors[] = {{"byte", {1}, std::span<int8_t>(byte)},
                                 {"values", {3}, std::span<float>(values)}};
  ASSERT_TRUE(WriteSafetensors(Path(), tensors).ok());
  const std::string bytes = *ReadFile(Path());
  EXPECT_EQ((bytes.size() - 13) % 64, 0u);  // 12 + 1 bytes of data.
  EXPECT_EQ(SafetensorsFile::Parse(bytes)->tensors()[0].name, "values");
}

TEST(SafetensorsTest, ReadsAnEmptyFile) {
  ASSERT_TRUE(WriteSafetensors(Path(), {}).ok());
  EXPECT_TRUE(SafetensorsFile::Read(Path())->tensors().empty());
}

TEST(SafetensorsTest, ReadsBooleansAsBytes) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Parse(
      FileOf(R"({"mask":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})", 3));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors()[0].dtype, DType::kUint8);
  EXPECT_EQ(file->tensors()[0].bytes, "xxx");
}

// The reference implementation, safetensors 0.8, takes it for no metadata.
TEST(SafetensorsTest, MetadataMayBeNull) {
  const absl::StatusOr<SafetensorsFile> file =
      SafetensorsFile::Parse(FileOf(R"({"__metadata__":null})", 0));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->metadata().empty());
}

TEST(SafetensorsTest, SurvivesBeingMoved) {
  absl::StatusOr<SafetensorsFile> file =
      SafetensorsFile::Parse(FileOf(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1));
  ASSERT_TRUE(file.ok());
  const SafetensorsFile moved = *std::move(file);
  EXPECT_EQ(moved.Find("a")->bytes, "x");
}

struct BadFile {
  std::string contents;
  std::string message;
};

TEST(SafetensorsTest, RefusesAMalformedFileWithASentence) {
  const auto tensor = [](absl::string_view rest) { return absl::StrCat("{\"a\":{", rest, "}}"); };
  std::string huge_length = FileOf("{}", 0);
  std::memset(huge_length.data(), 0xff, 8);
  const BadFile cases[] = {
      {"", "0 bytes are too few"},
      {"1234567", "7 bytes are too few"},
      {huge_length, "a header of 18446744073709551615 bytes does not fit"},
      {FileOf("{}", 0).substr(0, 9), "a header of 2 bytes does not fit into a file of 9"},
      {FileOf("", 0), "the header is empty"},
      {FileOf("{", 0), "the header ends before its JSON is complete"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer; fetch"},
      {FileOf("{} x", 0), "not JSON"},
      {FileOf("{\"\xff\":1}", 0), "not JSON"},
      {FileOf(std::string("{}\0", 3), 0), "not JSON at line 1, column 3, a NUL byte"},
      {FileOf("[]", 0), "not a JSON object"},
      {FileOf("3", 0), "not a JSON object"},
      {FileOf(std::string(100000, '['), 0), "nested too deeply"},
      {FileOf(R"({"a":3})", 0), "tensor a: is not an object"},
      {FileOf(R"({"__metadata__":3})", 0), "__metadata__ is not an object"},
      {FileOf(R"({"__metadata__":{"k":3}})", 0), "metadata \"k\" is not text"},
      {FileOf(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
                  "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
              1),
       "\"a\" appears twice"},
      {FileOf(tensor(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])"), 1),
       "\"dtype\" appears twice"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1])"), 1), "needs dtype, shape and data_offsets"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1)"), 1),
       "and nothing else"},
      {FileOf(tensor(R"("dtype":"F7","shape":[1],"data_offsets":[0,1])"), 1), "unknown dtype F7"},
      {FileOf(tensor(R"("dtype":7,"shape":[1],"data_offsets":[0,1])"), 1),
       "unknown dtype (not text)"},
      {FileOf(tensor(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), 1),
       "not a list of sizes"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), 1),
       "not a list of sizes"},
      {FileOf(tensor(R"("dtype":"U8","shape":1,"data_offsets":[0,1])"), 1), "not a list of sizes"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), 1), "not [begin, end]"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,99999999999999999999999])"), 1),
       "not [begin, end]"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), 1),
       "bytes 1 to 0 are not within"},
      {FileOf(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])"), 1),
       "not within the file's 1 bytes"},
      {FileOf(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,1])"), 1),
       "F32 of shape [1] does not fill"},
      {FileOf(tensor(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0),
       "does not fill"},
      {FileOf(tensor(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])"), 0),
       "does not fill"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1])"), 2),
       "1 bytes follow the last tensor"},
      {FileOf(tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"), 2),
       "1 bytes before tensor a belong to no"},
      {FileOf(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
                  "b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
              3),
       "tensor b overlaps"},
  };
  for (const BadFile& bad : cases) {
    const absl::Status status = SafetensorsFile::Parse(bad.contents).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_TRUE(absl::StrContains(status.message(), bad.message)) << bad.message << "\n" << status;
  }
}

TEST(SafetensorsTest, AcceptsShapesWithAZeroWhateverTheOthersAre) {
  EXPECT_TRUE(
      SafetensorsFile::Parse(
          FileOf(R"({"a":{"dtype":"F64","shape":[9223372036854775807,3,0],"data_offsets":[0,0]}})",
                 0))
          .ok());
}

TEST(SafetensorsTest, TheErrorNamesTheFile) {
  const absl::string_view pieces[] = {"short"};
  ASSERT_TRUE(WriteFileAtomically(Path(), pieces).ok());
  EXPECT_TRUE(absl::StartsWith(SafetensorsFile::Read(Path()).status().message(),
                               Path() + ": not a safetensors file"));
}

TEST(SafetensorsTest, MutatedFilesAreReadOrRefused) {
  float values[4] = {1, 2, 3, 4};
  int64_t numbers[2] = {5, 6};
  const NamedTensor tensors[] = {{"values", {2, 2}, std::span<float>(values)},
                                 {"numbers", {2}, std::span<int64_t>(numbers)}};
  ASSERT_TRUE(WriteSafetensors(Path(), tensors, {{"key", "value"}}).ok());
  const std::string good = *ReadFile(Path());
  std::mt19937_64 random(1);
  const auto below = [&random](size_t limit) { return random() % limit; };
  const std::string interesting = "{}[]\",:0123456789-.eF \\u\xff";
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bad = good;
    for (uint64_t change = below(4); change-- > 0;) {
      const size_t at = below(bad.size());
      switch (below(5)) {
        case 0:
          bad[at] = static_cast<char>(random());
          break;
        case 1:
          bad[at] = interesting[below(interesting.size())];
          break;
        case 2:
          bad.erase(at, below(9));
          break;
        case 3:
          bad.insert(at, bad.substr(below(bad.size()), below(20)));
          break;
        case 4:
          bad.resize(1 + at);
          break;
      }
      if (bad.empty()) break;
    }
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Parse(bad);
    if (!file.ok()) continue;
    ++accepted;
    size_t covered = 0;
    for (const auto& tensor : file->tensors()) covered += tensor.bytes.size();
    EXPECT_LE(covered, bad.size());
  }
  EXPECT_GT(accepted, 1000);  // A quarter has no change at all, and data bytes may be anything.
  EXPECT_LT(accepted, 15000);
}

TEST(SafetensorsTest, RefusesToWriteWhatItCouldNotRead) {
  float values[4] = {};
  const std::span<float> span(values);
  const struct {
    std::vector<NamedTensor> tensors;
    std::string message;
  } cases[] = {
      {{{"a", {3}, span}}, "tensor a: shape [3] is not that of float32[4]"},
      {{{"a", {-2, -2}, span}}, "tensor a: shape [-2,-2] is not that of float32[4]"},
      {{{"__metadata__", {4}, span}}, "tensor __metadata__: this name is reserved"},
      {{{"a", {4}, TensorView(values, 4, DType::kFloat32, Device::Cuda(0))}},
       "tensor a: is not on the CPU"},
      {{{"a", {4}, span}, {"a", {4}, span}}, "two tensors are named a"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(WriteSafetensors(Path(), c.tensors), absl::InvalidArgumentError(c.message));
    EXPECT_EQ(ReadFile(Path()).status().code(), absl::StatusCode::kNotFound);
  }
}

}  // namespace
}  // namespace evenkeel
