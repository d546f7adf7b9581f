// The code in README.md, so that it stays true.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

struct ReadyList {
  absl::Status GradientReady(int index) {
    ready.push_back(index);
    return absl::OkStatus();
  }
  std::vector<int> ready;
};

TEST(ReadmeTest, BackwardAnnouncesWhatIsTrained) {
  const std::vector<float> images(4 * kImagePixels, 0.5f);
  const std::vector<uint8_t> labels = {0, 1, 2, 3};
  ReadyList list;
  ReadyList* const ddp = &list;

  std::unique_ptr<Model> model = *MakeMlp({.hidden = {64}, .seed = 1});
  ParameterSet& parameters = model->parameters();
  parameters.SetTrainable("fc1.", false);
  absl::StatusOr<BatchResult> batch = model->Forward(images, labels, Mode::kTraining);
  absl::Status status = model->Backward([&](int index) { return ddp->GradientReady(index); });

  EXPECT_TRUE(batch.ok() && status.ok());
  EXPECT_EQ(ddp->ready, (std::vector<int>{3, 2}));
}

}  // namespace
}  // namespace evenkeel
