#include "evenkeel/trainer/models/evaluate.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

ImageDataset Dataset(int count) {
  const std::string size = {static_cast<char>(count >> 8), static_cast<char>(count)};
  std::string images =
      std::string("\0\0\x08\x03\0\0", 6) + size + std::string("\0\0\0\x1c\0\0\0\x1c", 8);
  std::string labels = std::string("\0\0\x08\x01\0\0", 6) + size;
  for (int i = 0; i < count; ++i) {
    for (int p = 0; p < kImagePixels; ++p) images += static_cast<char>(i * 31 + p * i);
    labels += static_cast<char>(i % kClasses);
  }
  absl::StatusOr<ImageDataset> data = ParseIdx(images, labels);
  EXPECT_TRUE(data.ok()) << data.status();
  return *std::move(data);
}

TEST(EvaluateTest, PartsAddUpToTheWhole) {
  const std::unique_ptr<Model> model = *MakeMlp({.hidden = {8}});
  const ImageDataset data = Dataset(601);  // Two full batches and one sample.
  const Evaluation whole = *Evaluate(*model, data, 0, 601);
  EXPECT_EQ(whole.predictions, 601);
  Evaluation sum;
  const int bounds[] = {0, 1, 1, 333, 601};
  for (int part = 0; part < 4; ++part) {
    const Evaluation evaluation = *Evaluate(*model, data, bounds[part], bounds[part + 1]);
    sum.predictions += evaluation.predictions;
    sum.correct += evaluation.correct;
    sum.loss_sum += evaluation.loss_sum;
  }
  EXPECT_EQ(sum.predictions, 601);
  EXPECT_EQ(sum.correct, whole.correct);
  EXPECT_NEAR(sum.loss_mean(), whole.loss_mean(), 1e-6);
  EXPECT_EQ(whole.accuracy(), whole.correct / 601.0);
}

TEST(EvaluateTest, NothingIsNothing) {
  const std::unique_ptr<Model> model = *MakeMlp({.hidden = {8}});
  const Evaluation evaluation = *Evaluate(*model, Dataset(3), 2, 2);
  EXPECT_EQ(evaluation.predictions, 0);
  EXPECT_EQ(evaluation.accuracy(), 0);
  EXPECT_EQ(evaluation.loss_mean(), 0);
}

TEST(EvaluateTest, RefusesSamplesThatAreNotThere) {
  const std::unique_ptr<Model> model = *MakeMlp({.hidden = {8}});
  EXPECT_EQ(Evaluate(*model, Dataset(3), 1, 4).status(),
            absl::InvalidArgumentError("evaluate: samples 1 to 4 are not within 3"));
  EXPECT_EQ(Evaluate(*model, Dataset(3), 0, 3, 0).status(),
            absl::InvalidArgumentError("evaluate: batch size must be at least 1, got 0"));
}

}  // namespace
}  // namespace evenkeel
