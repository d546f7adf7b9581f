#include "evenkeel/trainer/data/batch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace evenkeel {
namespace {

TEST(BatchTest, CountsSamplesAndPredictions) {
  const std::vector<float> images(6 * 4);
  const std::vector<uint8_t> labels(6);
  EXPECT_EQ(SamplesOf(ImageBatch{images, labels}), 6);
  EXPECT_EQ(PredictionsOf(ImageBatch{images, labels}), 6);
  const std::vector<int32_t> tokens(6);
  EXPECT_EQ(SamplesOf(TokenBatch{tokens, tokens, 3}), 2);
  EXPECT_EQ(PredictionsOf(TokenBatch{tokens, tokens, 3}), 6);
  EXPECT_EQ(SamplesOf(TokenBatch{}), 0);
}

TEST(BatchTest, TokensMustFitTheModel) {
  const std::vector<int32_t> good = {0, 1, 2, 3, 4, 255};
  EXPECT_TRUE(CheckTokens(TokenBatch{good, good, 3}, 3, 256).ok());
  const auto message = [](const Batch& batch) {
    return std::string(CheckTokens(batch, 3, 256).status().message());
  };
  EXPECT_EQ(message(ImageBatch{}), "forward: this model is for tokens, the batch is of images");
  EXPECT_EQ(message(TokenBatch{{}, {}, 3}), "forward: the batch is empty");
  EXPECT_EQ(message(TokenBatch{good, good, 6}),
            "forward: sequences of 6 tokens do not fit a context of 3");
  EXPECT_EQ(message(TokenBatch{good, good, 0}),
            "forward: sequences of 0 tokens do not fit a context of 3");
  const std::vector<int32_t> short_one = {1, 2, 3, 4};
  EXPECT_EQ(message(TokenBatch{good, short_one, 3}),
            "forward: 6 inputs and 4 targets do not form the same number of sequences of 3");
  EXPECT_EQ(message(TokenBatch{short_one, short_one, 3}),
            "forward: 4 inputs and 4 targets do not form the same number of sequences of 3");
  const std::vector<int32_t> high = {0, 1, 256}, low = {0, -1, 255}, three = {1, 2, 3};
  EXPECT_EQ(message(TokenBatch{high, three, 3}), "forward: token 256 is not within 0 to 255");
  EXPECT_EQ(message(TokenBatch{three, low, 3}), "forward: token -1 is not within 0 to 255");
}

TEST(BatchTest, ImagesMustFitTheModel) {
  const std::vector<float> images(2 * 4);
  const std::vector<uint8_t> labels = {1, 9};
  EXPECT_TRUE(CheckImages(ImageBatch{images, labels}, 4, 10).ok());
  const auto message = [](const Batch& batch, int64_t pixels, int classes) {
    return std::string(CheckImages(batch, pixels, classes).status().message());
  };
  EXPECT_EQ(message(TokenBatch{}, 4, 10),
            "forward: this model is for images, the batch is of tokens");
  EXPECT_EQ(message(ImageBatch{}, 4, 10), "forward: the batch is empty");
  EXPECT_EQ(message(ImageBatch{images, labels}, 5, 10), "forward: 2 labels need 10 pixels, got 8");
  EXPECT_EQ(message(ImageBatch{images, labels}, 4, 9), "forward: label 9 is not below 9");
}

}  // namespace
}  // namespace evenkeel
