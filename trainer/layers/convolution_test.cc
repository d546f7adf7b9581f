#include "evenkeel/trainer/layers/convolution.h"

#include <gtest/gtest.h>

#include <vector>

#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/layers/testing/layer_test_data.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

// Channels below, at and above the blocks that layouts are made of; strides that meet the last
// pixel and that do not.
constexpr ConvolutionShape kShapes[] = {
    {.batch = 2, .inputs = 1, .outputs = 3, .side = 5, .kernel = 3, .stride = 1},
    {.batch = 1, .inputs = 3, .outputs = 2, .side = 6, .kernel = 3, .stride = 2},
    {.batch = 3, .inputs = 2, .outputs = 4, .side = 7, .kernel = 3, .stride = 2},
    {.batch = 2, .inputs = 16, .outputs = 16, .side = 3, .kernel = 3, .stride = 1},
    {.batch = 2, .inputs = 16, .outputs = 32, .side = 4, .kernel = 1, .stride = 2},
    {.batch = 1, .inputs = 5, .outputs = 18, .side = 3, .kernel = 1, .stride = 1},
};

int64_t SourceSize(const ConvolutionShape& s) {
  return int64_t{s.batch} * s.inputs * s.side * s.side;
}
int64_t WeightSize(const ConvolutionShape& s) {
  return int64_t{s.outputs} * s.inputs * s.kernel * s.kernel;
}

// The definition, in double.
std::vector<float> Reference(const ConvolutionShape& s, const std::vector<float>& source,
                             const std::vector<float>& weight) {
  const int border = (s.kernel - 1) / 2;
  std::vector<float> output;
  for (int n = 0; n < s.batch; ++n) {
    for (int o = 0; o < s.outputs; ++o) {
      for (int y = 0; y < s.side; y += s.stride) {
        for (int x = 0; x < s.side; x += s.stride) {
          double sum = 0;
          for (int ky = 0; ky < s.kernel; ++ky) {
            for (int kx = 0; kx < s.kernel; ++kx) {
              const int sy = y + ky - border, sx = x + kx - border;
              if (sy < 0 || sx < 0 || sy >= s.side || sx >= s.side) continue;
              for (int i = 0; i < s.inputs; ++i) {
                sum += double{source[((n * s.inputs + i) * s.side + sy) * s.side + sx]} *
                       weight[((o * s.inputs + i) * s.kernel + ky) * s.kernel + kx];
              }
            }
          }
          output.push_back(static_cast<float>(sum));
        }
      }
    }
  }
  return output;
}

class ConvolutionTest : public testing::TestWithParam<ConvolutionShape> {
 protected:
  const ConvolutionShape shape_ = GetParam();
  const OneDnn dnn_;
  const dnnl::memory::desc source_desc_ =
      PlainDesc({shape_.batch, shape_.inputs, shape_.side, shape_.side});
  std::vector<float> source_ = RandomFloats(SourceSize(shape_), 1);
  std::vector<float> weight_ = RandomFloats(WeightSize(shape_), 2);
};

TEST_P(ConvolutionTest, ForwardIsTheDefinitionInBothModes) {
  const std::vector<float> expected = Reference(shape_, source_, weight_);
  for (Mode mode : {Mode::kTraining, Mode::kEvaluation}) {
    Convolution convolution(dnn_, shape_, source_desc_, mode);
    const std::vector<float> output =
        ToPlain(dnn_, convolution.Forward(ToLayout(dnn_, source_, source_desc_), weight_.data()));
    ASSERT_EQ(output.size(), expected.size());
    for (size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], expected[i], 2e-5) << i;
  }
}

TEST_P(ConvolutionTest, GradientsMatchDifferences) {
  Convolution convolution(dnn_, shape_, source_desc_, Mode::kTraining);
  const dnnl::memory source = ToLayout(dnn_, source_, source_desc_);
  const size_t outputs = ToPlain(dnn_, convolution.Forward(source, weight_.data())).size();
  const std::vector<float> diff_output = RandomFloats(outputs, 3);
  const dnnl::memory diff = ToLayout(dnn_, diff_output, convolution.output_desc());

  std::vector<float> diff_weight(weight_.size(), 77);
  convolution.BackwardWeight(diff, {.data = diff_weight.data()});
  const dnnl::memory diff_source_memory = convolution.BackwardSource(diff);
  EXPECT_TRUE(diff_source_memory.get_desc() == source_desc_);
  const std::vector<float> diff_source = ToPlain(dnn_, diff_source_memory);

  const auto objective = [&] {
    return WeightedSum<float>(Reference(shape_, source_, weight_), diff_output);
  };
  // Linear in each element: a step of 1 loses nothing.
  EXPECT_LT(RelativeError<float>(diff_weight, NumericGradient<float>(weight_, 1, objective)), 1e-4);
  EXPECT_LT(RelativeError<float>(diff_source, NumericGradient<float>(source_, 1, objective)), 1e-4);

  std::vector<float> added(weight_.size(), 5);
  convolution.BackwardWeight(diff, {.data = added.data(), .add = true});
  for (size_t i = 0; i < added.size(); ++i) ASSERT_NEAR(added[i], diff_weight[i] + 5, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ConvolutionTest, testing::ValuesIn(kShapes));

}  // namespace
}  // namespace evenkeel
