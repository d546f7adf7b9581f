// Each layer on a device against the CPU's.

#include "evenkeel/trainer/device/gpt_layers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/testing/tested_devices.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/device/token_buckets.h"
#include "evenkeel/trainer/gpt/attention.h"
#include "evenkeel/trainer/gpt/causal_softmax.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/embedding.h"
#include "evenkeel/trainer/gpt/gelu.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/token_loss.h"

namespace evenkeel {
namespace {

constexpr Device kDevice = Device::Cuda(0);

// Both sides compute in float: 16 units of its precision at the largest element; a bfloat16 may in
// addition round to the other side, 2^-8 of it.
constexpr double kFloatBound = 2e-6;
template <typename O>
constexpr double kBound = std::is_same_v<O, float> ? kFloatBound : 0x1p-8 + kFloatBound;

template <typename T>
double ToDouble(T value) {
  return static_cast<double>(static_cast<float>(value));
}

template <typename T>
bool IsZero(T value) {
  return ToDouble(value) == 0;
}

template <typename T>
void ExpectNear(const std::vector<T>& actual, const std::vector<T>& expected, double bound) {
  ASSERT_EQ(actual.size(), expected.size());
  double difference = 0, largest = 1e-30;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_FALSE(std::isnan(ToDouble(actual[i]))) << i;
    difference = std::max(difference, std::abs(ToDouble(actual[i]) - ToDouble(expected[i])));
    largest = std::max(largest, std::abs(ToDouble(expected[i])));
  }
  EXPECT_LE(difference, bound * largest);
}

template <typename O>
class DeviceGptLayersTest : public testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<Stream> stream = devices_.CreateStream(kDevice);
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }
  void TearDown() override {
    if (stream_.handle != nullptr) Finish();
  }

  DeviceGptLayers layers() { return DeviceGptLayers(devices_, stream_.ref(), DTypeOf<O>::value); }
  void Finish() {
    const absl::Status done = devices_.Synchronize(stream_.ref(), absl::Now() + absl::Minutes(2));
    EXPECT_TRUE(done.ok()) << done;
  }
  // Memory of the device of exactly that size.
  template <typename T>
  T* Put(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    absl::StatusOr<Memory> memory = devices_.Allocate(kDevice, bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memories_.push_back(*std::move(memory));
    void* const data = memories_.back().data.get();
    EXPECT_TRUE(devices_.Copy(data, values.data(), bytes, stream_.ref()).ok());
    Finish();
    return static_cast<T*>(data);
  }
  template <typename T>
  T* Make(int64_t count) {
    std::vector<T> garbage(count);
    if (count > 0) std::memset(static_cast<void*>(garbage.data()), 0x7f, count * sizeof(T));
    return Put(garbage);
  }
  template <typename T>
  std::vector<T> Get(const T* from, int64_t count) {
    std::vector<T> values(count);
    EXPECT_TRUE(devices_.Copy(values.data(), from, count * sizeof(T), stream_.ref()).ok());
    Finish();
    return values;
  }
  std::vector<O> Operands(int64_t count, uint64_t seed) {
    std::vector<O> operands;
    for (const float value : RandomValues<float>(count, seed)) operands.push_back(O(value));
    return operands;
  }

  TestedDevices devices_;
  Stream stream_;
  std::vector<Memory> memories_;
};

using OperandTypes = testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(DeviceGptLayersTest, OperandTypes);

struct Size {
  int64_t rows, width;
};

TYPED_TEST(DeviceGptLayersTest, NormsAsTheCpuDoes) {
  using O = TypeParam;
  for (const auto [rows, width] : {Size{1, 1},
                                   {7, 48},
                                   {13, 33},
                                   {5, 129},
                                   {3, 1028},
                                   {2, 1603},
                                   {17, 4},
                                   {300, 8},
                                   {2, 8200}}) {
    SCOPED_TRACE(testing::Message() << rows << " x " << width);
    const auto input = RandomValues<float>(rows * width, 1), weight = RandomValues<float>(width, 2),
               bias = RandomValues<float>(width, 3), diff = RandomValues<float>(rows * width, 4),
               around = RandomValues<float>(rows * width, 5);
    std::vector<O> output(rows * width);
    std::vector<float> mean(rows), inverse(rows), diff_weight(width), diff_bias(width),
        diff_input = around;
    LayerNormForward(rows, width, input.data(), weight.data(), bias.data(), output.data(),
                     RowStatistics<float>{mean.data(), inverse.data()});
    LayerNormBackward(rows, width, input.data(), RowStatistics<float>{mean.data(), inverse.data()},
                      weight.data(), diff.data(), diff_weight.data(), diff_bias.data(),
                      diff_input.data());

    const float *on_input = this->Put(input), *on_weight = this->Put(weight),
                *on_bias = this->Put(bias), *on_diff = this->Put(diff);
    O* on_output = this->template Make<O>(rows * width);
    const RowStatistics<float> statistics{this->template Make<float>(rows),
                                          this->template Make<float>(rows)};
    float *on_around = this->Put(around), *on_diff_weight = this->template Make<float>(width),
          *on_diff_bias = this->Put(bias),
          *workspace = this->template Make<float>(DeviceGptLayers::NormWorkspace(rows, width));
    const DeviceGptLayers layers = this->layers();
    ASSERT_TRUE(
        layers.NormForward(rows, width, on_input, on_weight, on_bias, on_output, statistics).ok());
    ASSERT_TRUE(layers
                    .NormBackward(rows, width, on_input, statistics, on_weight, on_diff, on_around,
                                  workspace)
                    .ok());
    ASSERT_TRUE(layers.NormWeight(rows, width, workspace, {on_diff_weight, false}).ok());
    ASSERT_TRUE(layers.NormBias(rows, width, workspace, {on_diff_bias, true}).ok());
    ExpectNear(this->Get(on_output, rows * width), output, kBound<O>);
    ExpectNear(this->Get(statistics.mean, rows), mean,
               4e-6);  // A mean may be near 0, of elements near 1.
    ExpectNear(this->Get(on_around, rows * width), diff_input, 2 * kFloatBound * std::sqrt(width));
    ExpectNear(this->Get(on_diff_weight, width), diff_weight, kFloatBound * 4);
    Add<float>(diff_bias, bias, diff_bias);
    ExpectNear(this->Get(on_diff_bias, width), diff_bias, kFloatBound * 4);
  }
}

TYPED_TEST(DeviceGptLayersTest, SumsBeforeANormWithTheCpusMasks) {
  using O = TypeParam;
  for (const double probability : {0.0, 0.3}) {
    constexpr int64_t kRows = 11, kWidth = 54;
    const DropoutNoise noise{.probability = probability, .seed = 9, .stream = 5, .first_row = 44};
    const auto around = RandomValues<float>(kRows * kWidth, 1),
               weight = RandomValues<float>(kWidth, 2), bias = RandomValues<float>(kWidth, 3);
    auto part = RandomValues<float>(kRows * kWidth, 4);
    float* on_part = this->Put(part);
    if (probability > 0) {
      Dropout(noise, {.rows = kRows, .columns = kWidth, .stride = kWidth}, part.data(),
              part.data());
    }
    Add<float>(around, part, part);
    std::vector<O> output(kRows * kWidth);
    std::vector<float> mean(kRows), inverse(kRows);
    LayerNormForward(kRows, kWidth, part.data(), weight.data(), bias.data(), output.data(),
                     RowStatistics<float>{mean.data(), inverse.data()});
    O* on_output = this->template Make<O>(kRows * kWidth);
    ASSERT_TRUE(this->layers()
                    .SumAndNormForward(
                        kRows, kWidth, noise, this->Put(around), on_part, on_part,
                        this->Put(weight), this->Put(bias), on_output,
                        {this->template Make<float>(kRows), this->template Make<float>(kRows)})
                    .ok());
    ExpectNear(this->Get(on_output, kRows * kWidth), output, kBound<O> * 2);
    // A dropped element leaves exactly what went around.
    const std::vector<float> sum = this->Get(on_part, kRows * kWidth);
    for (size_t i = 0; i < sum.size(); ++i)
      EXPECT_EQ(sum[i] == around[i], part[i] == around[i]) << i;
    ExpectNear(sum, part, 1e-7);
  }
}

TYPED_TEST(DeviceGptLayersTest, DropsTheCpusElementsBitForBit) {
  using O = TypeParam;
  for (const auto [rows, width] : {Size{1, 1}, {3, 257}, {70, 12}}) {
    const DropoutNoise noise{.probability = 0.4, .seed = 77, .stream = 3, .first_row = 210};
    const auto input = RandomValues<float>(rows * width, 1);
    std::vector<O> output(rows * width), rounded(rows * width);
    Dropout(noise, {.rows = rows, .columns = width, .stride = width}, input.data(), output.data());
    for (int64_t i = 0; i < rows * width; ++i) rounded[i] = O(input[i]);
    O *dropped = this->template Make<O>(rows * width),
      *plain = this->template Make<O>(rows * width);
    const float* on_input = this->Put(input);
    ASSERT_TRUE(this->layers().Dropout(rows, width, noise, on_input, dropped).ok());
    ASSERT_TRUE(this->layers().Dropout(rows, width, {}, on_input, plain).ok());
    ExpectNear(this->Get(dropped, rows * width), output, 0);
    ExpectNear(this->Get(plain, rows * width), rounded, 0);
  }
}

TYPED_TEST(DeviceGptLayersTest, GeluIsTheCpus) {
  using O = TypeParam;
  for (const int64_t n : {1, 3, 1021, 4096}) {
    auto input = RandomValues<float>(n, 1, 6);
    input[0] = -100, input[n / 2] = 50, input[n - 1] = n > 1 ? -12.5f : -100;
    const auto diff = RandomValues<float>(n, 2);
    std::vector<O> output(n), diff_input(n);
    GeluForward(n, input.data(), output.data());
    GeluBackward(n, input.data(), diff.data(), diff_input.data());
    O *on_output = this->template Make<O>(n), *on_diff_input = this->template Make<O>(n);
    const float* on_input = this->Put(input);
    ASSERT_TRUE(this->layers().GeluForward(n, on_input, on_output).ok());
    ASSERT_TRUE(this->layers().GeluBackward(n, on_input, this->Put(diff), on_diff_input).ok());
    ExpectNear(this->Get(on_output, n), output, kBound<O>);
    ExpectNear(this->Get(on_diff_input, n), diff_input, kBound<O>);
  }
}

TYPED_TEST(DeviceGptLayersTest, SumsColumns) {
  using O = TypeParam;
  for (const auto [rows, width] : {Size{1, 5}, {97, 130}, {1201, 3}, {700, 132}}) {
    SCOPED_TRACE(testing::Message() << rows << " x " << width);
    const std::vector<O> matrix = this->Operands(rows * width, 1);
    const auto before = RandomValues<float>(width, 2);
    for (const bool add : {false, true}) {
      std::vector<float> sum = before;
      SumRows(rows, width, matrix.data(), GradTarget<float>{sum.data(), add});
      float* to = this->Put(before);
      float* workspace = this->template Make<float>(DeviceGptLayers::SumRowsWorkspace(rows, width));
      ASSERT_TRUE(
          this->layers().SumRows(rows, width, this->Put(matrix), workspace, {to, add}).ok());
      // A sum of `rows` elements near 1 is near its square root, and has as many roundings.
      ExpectNear(this->Get(to, width), sum, 6e-8 * (10 + std::sqrt(rows)));
    }
  }
}

TYPED_TEST(DeviceGptLayersTest, SoftmaxesAreTheCpusBlockByBlock) {
  using O = TypeParam;
  struct Block {
    int64_t matrices, context, begin, end;
    double dropout;
  };
  for (const Block b : {Block{1, 1, 0, 1, 0},
                        {3, 16, 0, 16, 0.25},
                        {2, 37, 16, 32, 0},
                        {2, 37, 32, 37, 0.25},
                        {1, 1100, 1096, 1100, 0}}) {
    SCOPED_TRACE(testing::Message()
                 << b.matrices << " of " << b.context << " from " << b.begin << " to " << b.end);
    const int64_t block_rows = 16 < b.context ? 16 : b.context, in_block = block_rows * b.context,
                  whole = b.context * b.context;
    const DropoutNoise noise{.probability = b.dropout, .seed = 2, .stream = 1, .first_row = 96};
    const AttentionRows rows{
        .shape = {.sequences = b.matrices, .context = b.context, .heads = 1, .head_width = 2},
        .begin = b.begin,
        .end = b.end,
        .block_rows = block_rows};
    const auto scale = rows.Scale<float>();
    std::vector<float> scores = RandomValues<float>(b.matrices * in_block, 1, 9),
                       diff = RandomValues<float>(b.matrices * in_block, 2);
    const float* on_scores = this->Put(scores);
    const float* on_diff = this->Put(diff);
    std::vector<O> probabilities(b.matrices * whole), dropped(b.matrices * in_block),
        diff_scores = dropped;
    O *on_probabilities = this->Put(probabilities), *on_dropped = this->Put(dropped),
      *on_again = this->Put(dropped), *on_diff_scores = this->Put(dropped);
    for (int64_t m = 0; m < b.matrices; ++m) {
      const CausalBlock block{
          .first = b.begin, .rows = b.end - b.begin, .columns = b.end, .stride = b.context};
      const DropoutMatrix matrix{.first_row = m * b.context + b.begin,
                                 .rows = block.rows,
                                 .columns = b.end,
                                 .stride = b.context};
      O* own = probabilities.data() + m * whole + b.begin * b.context;
      CausalSoftmaxForward(block, scale, scores.data() + m * in_block, own);
      if (b.dropout > 0) {
        Dropout(noise, matrix, own, dropped.data() + m * in_block);
        Dropout(noise, matrix, diff.data() + m * in_block, diff.data() + m * in_block);
      }
      CausalSoftmaxBackward(block, scale, own, diff.data() + m * in_block,
                            diff_scores.data() + m * in_block);
    }
    O* first = on_probabilities + b.begin * b.context;
    const bool drops = b.dropout > 0;
    ASSERT_TRUE(
        this->layers()
            .CausalSoftmaxForward(rows, noise, on_scores, first, drops ? on_dropped : nullptr)
            .ok());
    ASSERT_TRUE(
        this->layers().CausalSoftmaxBackward(rows, noise, first, on_diff, on_diff_scores).ok());
    ExpectNear(this->Get(on_probabilities, b.matrices * whole), probabilities, kBound<O> * 2);
    ExpectNear(this->Get(on_diff_scores, b.matrices * in_block), diff_scores, kBound<O> * 4);
    if (!drops) continue;
    ASSERT_TRUE(this->layers().DropProbabilities(rows, noise, first, on_again).ok());
    const std::vector<O> own_dropped = this->Get(on_dropped, b.matrices * in_block);
    ExpectNear(own_dropped, dropped, kBound<O> * 2);
    ExpectNear(this->Get(on_again, b.matrices * in_block), own_dropped, 0);
    for (size_t i = 0; i < dropped.size(); ++i)
      EXPECT_EQ(IsZero(own_dropped[i]), IsZero(dropped[i])) << i;
  }
}

TYPED_TEST(DeviceGptLayersTest, TheLossOfTokensIsTheCpus) {
  using O = TypeParam;
  struct Sizes {
    int64_t rows, vocabulary, stride;
  };
  for (const Sizes s :
       {Sizes{1, 2, 2}, {3, 67, 72}, {37, 257, 257}, {2, 50257, 50264}, {5, 1500, 1504}}) {
    SCOPED_TRACE(testing::Message() << s.rows << " of " << s.vocabulary);
    std::vector<float> scores = RandomValues<float>(s.rows * s.vocabulary, 1, 5);
    std::vector<int32_t> targets(s.rows);
    for (int64_t row = 0; row < s.rows; ++row) {
      float* own = scores.data() + row * s.vocabulary;
      const int64_t highest = std::max_element(own, own + s.vocabulary) - own;
      targets[row] = static_cast<int32_t>(row % 3 == 0 ? highest : row % s.vocabulary);
      if (row % 6 == 3 && highest > 0) own[0] = own[highest];  // Not the first of two.
    }
    std::vector<float> padded(s.rows * s.stride, NAN);
    for (int64_t row = 0; row < s.rows; ++row) {
      std::copy_n(scores.begin() + row * s.vocabulary, s.vocabulary,
                  padded.begin() + row * s.stride);
    }
    float* on_scores = this->Put(padded);
    const int32_t* on_targets = this->Put(targets);
    char* workspace = this->template Make<char>(DeviceGptLayers::TokenLossWorkspaceBytes(s.rows));
    double* loss_sum = this->template Make<double>(1);
    int64_t* correct = this->template Make<int64_t>(1);
    std::vector<float> used = scores;
    std::vector<O> diff(s.rows * s.vocabulary);
    const TokenLossResult expected =
        TokenLoss(s.vocabulary, used.data(), targets, 0.25, diff.data());

    ASSERT_TRUE(this->layers()
                    .TokenLoss(s.rows, s.vocabulary, s.stride, on_scores, on_targets, 0.25, nullptr,
                               workspace, loss_sum, correct)
                    .ok());
    EXPECT_NEAR(this->Get(loss_sum, 1)[0], expected.sum, 1e-6 * std::abs(expected.sum));
    EXPECT_EQ(this->Get(correct, 1)[0], expected.correct);
    O* on_diff = std::is_same_v<O, float> ? reinterpret_cast<O*>(on_scores)
                                          : this->template Make<O>(padded.size());
    ASSERT_TRUE(this->layers()
                    .TokenLoss(s.rows, s.vocabulary, s.stride, on_scores, on_targets, 0.25, on_diff,
                               workspace, loss_sum, correct)
                    .ok());
    EXPECT_NEAR(this->Get(loss_sum, 1)[0], expected.sum, 1e-6 * std::abs(expected.sum));
    EXPECT_EQ(this->Get(correct, 1)[0], expected.correct);
    const std::vector<O> all = this->Get(on_diff, padded.size());
    std::vector<O> own;
    for (int64_t row = 0; row < s.rows; ++row) {
      own.insert(own.end(), all.begin() + row * s.stride,
                 all.begin() + row * s.stride + s.vocabulary);
    }
    ExpectNear(own, diff, kBound<O>);
  }
}

TYPED_TEST(DeviceGptLayersTest, EmbedsAndSumsWhatEachTokenGot) {
  struct Sizes {
    int64_t sequences, context, positions, width, vocabulary;
    double dropout;
  };
  for (const Sizes s : {Sizes{1, 1, 1, 1, 2, 0},
                        {3, 5, 7, 33, 4, 0.3},
                        {2, 16, 16, 132, 67, 0},
                        {4, 8, 9, 8, 2, 0.3}}) {
    SCOPED_TRACE(testing::Message() << s.sequences << " x " << s.context << " x " << s.width);
    const int64_t rows = s.sequences * s.context, size = rows * s.width;
    const DropoutNoise noise{.probability = s.dropout, .seed = 4, .stream = 0, .first_row = 35};
    const DropoutMatrix matrix{.rows = rows, .columns = s.width, .stride = s.width};
    StableRandom random(6);
    std::vector<int32_t> inputs(rows);
    for (int32_t& input : inputs) input = static_cast<int32_t>(random.Below(s.vocabulary));
    const auto token_table = RandomValues<float>(s.vocabulary * s.width, 1),
               position_table = RandomValues<float>(s.positions * s.width, 2);
    auto diff = RandomValues<float>(size, 3);
    const float* on_diff = this->Put(diff);
    std::vector<float> output(size);
    EmbeddingForward<float>(s.context, s.width, inputs, token_table.data(), position_table.data(),
                            output.data());
    if (s.dropout > 0) {
      Dropout(noise, matrix, output.data(), output.data());
      Dropout(noise, matrix, diff.data(), diff.data());
    }
    std::vector<int32_t> tokens(rows), ends(rows), order(rows);
    DeviceTokens on_tokens;
    on_tokens.buckets =
        TokenBuckets(s.vocabulary).Fill(inputs, {tokens.data(), ends.data(), order.data()});
    on_tokens.inputs = this->Put(inputs), on_tokens.tokens = this->Put(tokens),
    on_tokens.ends = this->Put(ends), on_tokens.order = this->Put(order);

    const DeviceGptLayers layers = this->layers();
    float* on_output = this->template Make<float>(size);
    ASSERT_TRUE(layers
                    .EmbeddingForward(rows, s.context, s.width, noise, on_tokens.inputs,
                                      this->Put(token_table), this->Put(position_table), on_output)
                    .ok());
    EXPECT_EQ(this->Get(on_output, size), output);
    for (const bool add : {false, true}) {
      std::vector<float> diff_tokens = token_table, diff_positions = position_table;
      float *to_tokens = this->Put(diff_tokens), *to_positions = this->Put(diff_positions);
      if (!add) std::ranges::fill(diff_positions, 0.0f);
      EmbeddingBackward<float>(s.context, s.width, inputs, diff.data(), diff_tokens.data(),
                               diff_positions.data());
      ASSERT_TRUE(
          layers.EmbeddingBackwardTokens(s.width, noise, on_tokens, on_diff, to_tokens).ok());
      ASSERT_TRUE(layers
                      .EmbeddingBackwardPositions(rows, s.context, s.positions, s.width, noise,
                                                  on_diff, {to_positions, add})
                      .ok());
      ExpectNear(this->Get(to_tokens, diff_tokens.size()), diff_tokens, kFloatBound);
      ExpectNear(this->Get(to_positions, diff_positions.size()), diff_positions, kFloatBound);
    }
  }
}

TYPED_TEST(DeviceGptLayersTest, SplitsRowsIntoHeadsAndMergesThem) {
  using O = TypeParam;
  for (const AttentionShape& shape : {AttentionShape{1, 1, 1, 1}, AttentionShape{2, 5, 3, 8},
                                      AttentionShape{3, 4, 2, 7}, AttentionShape{1, 3, 4, 64}}) {
    for (const int parts : {1, 3}) {
      const int64_t columns = parts * shape.width(),
                    size = shape.sequences * shape.context * columns;
      const auto values = RandomValues<float>(size, 1);
      std::vector<O> rows, heads(size);
      std::vector<float> wide_heads(size);
      for (int64_t i = 0; i < size; ++i) {
        rows.push_back(O(values[i]));
        const int64_t row = i / columns, column = i % columns;
        const int64_t part = column / shape.width(),
                      head = column % shape.width() / shape.head_width;
        const int64_t matrix = (part * shape.sequences + row / shape.context) * shape.heads + head;
        const int64_t place = (matrix * shape.context + row % shape.context) * shape.head_width +
                              column % shape.head_width;
        heads[place] = rows[i], wide_heads[place] = values[i];
      }
      O *on_heads = this->template Make<O>(size), *merged = this->template Make<O>(size),
        *rounded = this->template Make<O>(size);
      ASSERT_TRUE(this->layers().SplitHeads(shape, parts, this->Put(rows), on_heads).ok());
      ASSERT_TRUE(this->layers().MergeHeads(shape, parts, on_heads, merged).ok());
      ASSERT_TRUE(
          this->layers().MergeHeadGradients(shape, parts, this->Put(wide_heads), rounded).ok());
      ExpectNear(this->Get(on_heads, size), heads, 0);
      ExpectNear(this->Get(merged, size), rows, 0);
      ExpectNear(this->Get(rounded, size), rows, 0);
    }
  }
}

TYPED_TEST(DeviceGptLayersTest, SaysWhatIsTooWideAndOfTheWrongType) {
  float x = 0;
  EXPECT_EQ(this->layers().NormForward(1, kMostNormWidth + 1, &x, &x, &x, &x, {&x, &x}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DeviceGptLayers(this->devices_, this->stream_.ref(), DType::kFloat64)
                .GeluForward(1, &x, &x)
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
