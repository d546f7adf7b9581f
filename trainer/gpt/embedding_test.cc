#include "evenkeel/trainer/gpt/embedding.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "evenkeel/trainer/gpt/testing/recorded.h"

namespace evenkeel {
namespace {

template <typename T>
class EmbeddingTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(EmbeddingTest, Types);

TYPED_TEST(EmbeddingTest, AgreesWithPyTorch) {
  using T = TypeParam;
  const Recorded recorded("layers");
  const std::vector<int32_t> tokens = recorded.Get<int32_t>("embedding.tokens");
  const std::vector<T> table = recorded.Get<T>("embedding.tokens_table");
  const std::vector<T> positions = recorded.Get<T>("embedding.positions_table");
  const std::vector<T> diff = recorded.Get<T>("embedding.diff_output");
  std::vector<T> output(diff.size()), diff_table(table.size()), diff_positions(positions.size());
  EmbeddingForward<T>(4, 6, tokens, table.data(), positions.data(), output.data());
  EmbeddingBackward<T>(4, 6, tokens, diff.data(), diff_table.data(), diff_positions.data());
  EXPECT_LT(Difference<T>(output, recorded.Get<double>("embedding.output")), kRounding<T>);
  EXPECT_LT(Difference<T>(diff_table, recorded.Get<double>("embedding.diff_tokens_table")),
            kRounding<T>);
  EXPECT_LT(Difference<T>(diff_positions, recorded.Get<double>("embedding.diff_positions_table")),
            kRounding<T>);
  // Tables that are not wanted are left out, the other is added to.
  EmbeddingBackward<T>(4, 6, tokens, diff.data(), nullptr, diff_positions.data());
  std::vector<double> twice = recorded.Get<double>("embedding.diff_positions_table");
  for (double& element : twice) element *= 2;
  EXPECT_LT(Difference<T>(diff_positions, twice), kRounding<T>);
}

}  // namespace
}  // namespace evenkeel
