#include "evenkeel/trainer/gpt/attention.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <type_traits>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/strided_product.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"

namespace evenkeel {
namespace {

// Attention with memory of its own, laid out as the model's: where T is O, operands lie in that of
// the scores.
template <typename T, typename O = T>
struct Memory {
  explicit Memory(const AttentionShape& shape)
      : shape(shape),
        scores(CausalAttention<T, O>::WorkSize(shape)),
        probabilities(scores.size()),
        operands(scores.size()),
        output(shape.sequences * shape.context * shape.width()),
        diff_qkv(3 * output.size(), 99) {}

  void Forward(const std::vector<O>& qkv) {
    EXPECT_TRUE(attention.Forward(shape, noise, qkv.data(), output.data()).ok());
  }
  void Backward(const std::vector<O>& qkv, const std::vector<O>& diff) {
    EXPECT_TRUE(attention.Backward(shape, noise, qkv.data(), diff.data(), diff_qkv.data()).ok());
  }

  O* Operands() {
    if constexpr (std::is_same_v<T, O>) {
      return scores.data();
    } else {
      return operands.data();
    }
  }

  AttentionShape shape;
  DropoutNoise noise;
  StridedProducts<O> products;
  std::vector<T> scores;
  std::vector<O> probabilities, operands;
  CausalAttention<T, O> attention{&products, {scores.data(), probabilities.data(), Operands()}};
  std::vector<O> output;
  std::vector<T> diff_qkv;
};

template <typename T>
class AttentionTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(AttentionTest, Types);

TYPED_TEST(AttentionTest, AgreesWithPyTorch) {
  using T = TypeParam;
  const Recorded recorded("layers");
  Memory<T> run({.sequences = 2, .context = 70, .heads = 2, .head_width = 4});
  const std::vector<T> qkv = recorded.Get<T>("attention.qkv");
  run.Forward(qkv);
  run.Backward(qkv, recorded.Get<T>("attention.diff_output"));
  EXPECT_LT(Difference<T>(run.output, recorded.Get<double>("attention.output")), kRounding<T>);
  EXPECT_LT(Difference<T>(run.diff_qkv, recorded.Get<double>("attention.diff_qkv")), kRounding<T>);
}

TEST(AttentionGradientTest, MatchesDifferencesAlsoWithDropout) {
  for (const int64_t context : {1, 2, 66}) {
    for (const double dropout : {0.0, 0.4}) {
      SCOPED_TRACE(testing::Message() << context << " " << dropout);
      Memory<double> run(
          {.sequences = context == 66 ? 1 : 2, .context = context, .heads = 2, .head_width = 1});
      run.noise = {.probability = dropout, .seed = 7};
      std::vector<double> qkv = RandomValues<double>(run.diff_qkv.size(), 1, 2);
      const std::vector<double> diff = RandomValues<double>(run.output.size(), 2);
      const auto objective = [&] {
        run.Forward(qkv);
        return WeightedSum<double>(run.output, diff);
      };
      objective();
      run.Backward(qkv, diff);
      const std::vector<double> analytic = run.diff_qkv;
      EXPECT_LT(RelativeError<double>(analytic, NumericGradient<double>(qkv, 1e-5, objective)),
                1e-7);
    }
  }
}

// The columns of head `head` of sequence `sequence` in a matrix of `parts` (queries, keys, values,
// or one) of all heads.
std::vector<float> OfHead(const AttentionShape& shape, int parts, int64_t sequence, int64_t head,
                          const std::vector<float>& all) {
  std::vector<float> own;
  for (int64_t row = sequence * shape.context; row < (sequence + 1) * shape.context; ++row) {
    for (int64_t part = row * parts; part < (row + 1) * parts; ++part) {
      const auto begin = all.begin() + part * shape.width() + head * shape.head_width;
      own.insert(own.end(), begin, begin + shape.head_width);
    }
  }
  return own;
}

// More matrices than a part has: some sequences, and some heads of one.
TEST(AttentionPartsTest, EachMatrixIsThatOfItsHeadAlone) {
  for (const AttentionShape& shape :
       {AttentionShape{.sequences = 20, .context = 70, .heads = 2, .head_width = 3},
        AttentionShape{.sequences = 2, .context = 530, .heads = 4, .head_width = 2}}) {
    SCOPED_TRACE(shape.context);
    Memory<float> whole(shape);
    const std::vector<float> qkv = RandomValues<float>(whole.diff_qkv.size(), 1);
    const std::vector<float> diff = RandomValues<float>(whole.output.size(), 2);
    whole.Forward(qkv), whole.Backward(qkv, diff);
    for (int64_t sequence = 0; sequence < shape.sequences; ++sequence) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        SCOPED_TRACE(testing::Message() << "head " << head << " of " << sequence);
        Memory<float> alone(
            {.sequences = 1, .context = shape.context, .heads = 1, .head_width = shape.head_width});
        const std::vector<float> own = OfHead(shape, 3, sequence, head, qkv);
        alone.Forward(own), alone.Backward(own, OfHead(shape, 1, sequence, head, diff));
        EXPECT_LT(Difference<float>(OfHead(shape, 1, sequence, head, whole.output),
                                    std::vector<double>(alone.output.begin(), alone.output.end())),
                  kRounding<float>);
        EXPECT_LT(
            Difference<float>(OfHead(shape, 3, sequence, head, whole.diff_qkv),
                              std::vector<double>(alone.diff_qkv.begin(), alone.diff_qkv.end())),
            kRounding<float>);
      }
    }
  }
}

TEST(AttentionPartsTest, EqualMatricesHaveDropoutOfTheirOwn) {
  const AttentionShape shape{.sequences = 20, .context = 70, .heads = 2, .head_width = 3};
  Memory<float> run(shape);
  run.noise = {.probability = 0.5, .seed = 7};
  const std::vector<float> row = RandomValues<float>(shape.head_width, 1);
  std::vector<float> qkv;
  while (qkv.size() < run.diff_qkv.size()) qkv.insert(qkv.end(), row.begin(), row.end());
  run.Forward(qkv);
  std::set<std::vector<float>> outputs;
  for (int64_t sequence = 0; sequence < shape.sequences; ++sequence) {
    for (int64_t head = 0; head < shape.heads; ++head)
      outputs.insert(OfHead(shape, 1, sequence, head, run.output));
  }
  EXPECT_EQ(static_cast<int64_t>(outputs.size()), shape.matrices());
}

TEST(AttentionForwardTest, NothingComesFromLaterPositions) {
  Memory<float> run({.sequences = 1, .context = 100, .heads = 2, .head_width = 3});
  std::vector<float> qkv = RandomValues<float>(run.diff_qkv.size(), 1);
  run.Forward(qkv);
  const std::vector<float> before = run.output;
  const int64_t changed = 80;
  for (size_t i = changed * 18; i < qkv.size(); ++i) qkv[i] = 1000;
  run.Forward(qkv);
  for (int64_t i = 0; i < changed * 6; ++i) ASSERT_EQ(run.output[i], before[i]) << i;
}

TEST(AttentionForwardTest, BFloat16IsNearFloat) {
  const AttentionShape shape{.sequences = 2, .context = 70, .heads = 2, .head_width = 8};
  Memory<float> exact(shape);
  Memory<float, BFloat16> rounded(shape);
  const std::vector<float> values = RandomValues<float>(exact.diff_qkv.size(), 1);
  const std::vector<float> diff_values = RandomValues<float>(exact.output.size(), 2);
  std::vector<BFloat16> qkv, diff;
  std::vector<float> widened, diff_widened;
  for (float value : values) widened.push_back(static_cast<float>(qkv.emplace_back(value)));
  for (float value : diff_values)
    diff_widened.push_back(static_cast<float>(diff.emplace_back(value)));
  exact.Forward(widened), exact.Backward(widened, diff_widened);
  rounded.Forward(qkv), rounded.Backward(qkv, diff);
  std::vector<double> expected(exact.output.begin(), exact.output.end());
  std::vector<float> output;
  for (BFloat16 value : rounded.output) output.push_back(static_cast<float>(value));
  // Probabilities, outputs and scores' gradients are rounded by at most 2^-9 each.
  EXPECT_LT(Difference<float>(output, expected), 2 * 0x1p-8);
  expected.assign(exact.diff_qkv.begin(), exact.diff_qkv.end());
  EXPECT_LT(Difference<float>(rounded.diff_qkv, expected), 3 * 0x1p-8);
}

}  // namespace
}  // namespace evenkeel
