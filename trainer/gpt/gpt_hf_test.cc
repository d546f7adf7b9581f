// A file that other software wrote, read and computed with: the scores are those that it gets
// itself.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

constexpr char kHfTiny[] = "tests/testdata/gpt/hf_tiny.safetensors";

template <typename T>
std::vector<T> ValuesOf(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsFile::Tensor& tensor = *file.Find(name);
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

class GptHfTest : public testing::Test {
 protected:
  // The largest difference of a score after any number of tokens; the scores are between -3 and 3.
  double Difference(Gpt& model) const {
    const std::vector<float> expected = ValuesOf<float>(recorded_, "scores");
    const std::vector<int64_t> wide = ValuesOf<int64_t>(recorded_, "tokens");
    const std::vector<int32_t> tokens(wide.begin(), wide.end());
    const int64_t vocabulary = model.options().vocabulary;
    double difference = 0;
    for (size_t count = 1; count <= tokens.size(); ++count) {
      const auto scores = model.NextToken(std::span(tokens).first(count));
      EXPECT_TRUE(scores.ok()) << scores.status();
      if (!scores.ok() || static_cast<int64_t>(scores->size()) != vocabulary) return HUGE_VAL;
      for (int64_t i = 0; i < vocabulary; ++i) {
        const double one =
            std::fabs(static_cast<double>((*scores)[i]) - expected[(count - 1) * vocabulary + i]);
        if (!(one <= difference)) difference = one;  // NaN stays.
      }
    }
    return difference;
  }

  std::unique_ptr<Gpt> Load(const std::string& path, GptCompute compute, int64_t heads) const {
    const absl::StatusOr<GptFile> file = GptFile::Read(path);
    EXPECT_TRUE(file.ok()) << file.status();
    GptOptions options = file->options();
    options.compute = compute;
    if (heads > 0) options.heads = heads;
    absl::StatusOr<std::unique_ptr<Gpt>> model = MakeGpt(options);
    EXPECT_TRUE(model.ok()) << model.status();
    const absl::Status status = file->LoadInto(**model);
    EXPECT_TRUE(status.ok()) << status;
    return *std::move(model);
  }

  int64_t heads() const {
    int64_t heads = 0;
    EXPECT_TRUE(absl::SimpleAtoi(recorded_.metadata().at("heads"), &heads));
    return heads;
  }

  const SafetensorsFile recorded_ =
      *SafetensorsFile::Read("tests/testdata/gpt/hf_tiny_scores.safetensors");
};

TEST_F(GptHfTest, GivesTheScoresThatOthersGet) {
  EXPECT_LT(Difference(*Load(kHfTiny, GptCompute::kFloat64, heads())),
            1e-6);  // Scores are stored in float32.
  EXPECT_LT(Difference(*Load(kHfTiny, GptCompute::kFloat32, heads())), 1e-5);
  EXPECT_GT(Difference(*Load(kHfTiny, GptCompute::kFloat32, /*heads=*/1)),
            1e-2);  // The test sees what matters.
}

TEST_F(GptHfTest, KnowsItsHeadsWhenSavedAndReadAgain) {
  const std::string path = testing::TempDir() + "/saved.safetensors";
  ASSERT_TRUE(SaveModel(*Load(kHfTiny, GptCompute::kFloat32, heads()), path).ok());
  EXPECT_LT(Difference(*Load(path, GptCompute::kFloat32, /*heads=*/0)), 1e-5);
}

}  // namespace
}  // namespace evenkeel
