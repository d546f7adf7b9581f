#include "evenkeel/trainer/layers/average_pool.h"

#include <gtest/gtest.h>

#include <vector>

#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/testing/layer_test_data.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

class AveragePoolTest : public testing::TestWithParam<dnnl::memory::format_tag> {
 protected:
  static constexpr int kBatch = 3, kChannels = 16, kSide = 2, kPixels = kSide * kSide;

  const OneDnn dnn_;
  const dnnl::memory::desc desc_{
      {kBatch, kChannels, kSide, kSide}, dnnl::memory::data_type::f32, GetParam()};
};

TEST_P(AveragePoolTest, TakesTheMeanOfEachChannelInBothModes) {
  const std::vector<float> source = RandomFloats(kBatch * kChannels * kPixels, 1);
  for (Mode mode : {Mode::kTraining, Mode::kEvaluation}) {
    AveragePool pool(dnn_, desc_, mode);
    const float* means = pool.Forward(ToLayout(dnn_, source, desc_));
    for (int i = 0; i < kBatch * kChannels; ++i) {
      const float* pixels = &source[i * kPixels];
      ASSERT_NEAR(means[i], (pixels[0] + pixels[1] + pixels[2] + pixels[3]) / 4, 1e-6) << i;
    }
  }
}

TEST_P(AveragePoolTest, SharesTheGradientEvenly) {
  AveragePool pool(dnn_, desc_, Mode::kTraining);
  const std::vector<float> diff_means = RandomFloats(kBatch * kChannels, 2);
  const dnnl::memory diff_source = pool.Backward(diff_means.data());
  EXPECT_TRUE(diff_source.get_desc() == desc_);
  const std::vector<float> plain = ToPlain(dnn_, diff_source);
  for (size_t i = 0; i < plain.size(); ++i)
    ASSERT_NEAR(plain[i], diff_means[i / kPixels] / kPixels, 1e-6) << i;
}

INSTANTIATE_TEST_SUITE_P(Layouts, AveragePoolTest,
                         testing::Values(dnnl::memory::format_tag::nchw,
                                         dnnl::memory::format_tag::nhwc,
                                         dnnl::memory::format_tag::nChw16c));

}  // namespace
}  // namespace evenkeel
