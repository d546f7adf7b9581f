#include "evenkeel/trainer/layers/gradient_sink.h"

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

class GradientSinkTest : public testing::Test {
 protected:
  GradientSinkTest() {
    for (const char* name : {"a", "b", "c"}) {
      const int index = parameters_.size();
      parameters_.Add(name, std::span<float>(value_[index]), std::span<float>(grads_[index]));
    }
  }

  // Writes 5 as the gradient of `index` through a sink made now.
  absl::Status WriteFive(int index) {
    const auto on_gradient = [&](int announced) {
      announced_.push_back(announced);
      return answer_;
    };
    GradientSink sink(parameters_, on_gradient);
    return sink.Write<float>(index, [&](GradTarget<float> target) {
      *target.data = 5 + (target.add ? *target.data : 0);
      return absl::OkStatus();
    });
  }

  bool AnyTrainedBefore(int index) {
    const auto ignore = [](int) { return absl::OkStatus(); };
    return GradientSink(parameters_, ignore).AnyTrainedBefore(index);
  }

  absl::Status Check() {
    const auto ignore = [](int) { return absl::OkStatus(); };
    return GradientSink(parameters_, ignore).Check();
  }

  float value_[3][2] = {};
  float grads_[3][2] = {{77, 77}, {77, 77}, {77, 77}};
  float (&grad_)[2] = grads_[1];  // The one that most tests write.
  ParameterSet parameters_;
  std::vector<int> announced_;
  absl::Status answer_;
};

TEST_F(GradientSinkTest, OverwritesTheFirstGradientAndAddsTheNext) {
  EXPECT_TRUE(WriteFive(1).ok());
  EXPECT_EQ(grad_[0], 5);
  EXPECT_EQ(parameters_.grad_state(1), GradState::kLocal);
  EXPECT_TRUE(WriteFive(1).ok());
  EXPECT_EQ(grad_[0], 10);
  parameters_.SetGradState(1, GradState::kReduced);
  EXPECT_TRUE(WriteFive(1).ok());
  EXPECT_EQ(grad_[0], 15);
  EXPECT_EQ(parameters_.grad_state(1), GradState::kLocal);
  parameters_.ClearGradients();
  EXPECT_TRUE(WriteFive(1).ok());
  EXPECT_EQ(grad_[0], 5);
  EXPECT_EQ(announced_, (std::vector<int>{1, 1, 1, 1}));
}

TEST_F(GradientSinkTest, WritesWhereTheSetSaysNow) {
  float elsewhere[2] = {};
  parameters_.SetGradMemory(1, std::span<float>(elsewhere));
  EXPECT_TRUE(WriteFive(1).ok());
  EXPECT_EQ(elsewhere[0], 5);
  EXPECT_EQ(grad_[0], 77);
}

TEST_F(GradientSinkTest, LeavesFrozenParametersAlone) {
  parameters_.SetTrainable(1, false);
  EXPECT_TRUE(WriteFive(1).ok());
  EXPECT_EQ(grad_[0], 77);
  EXPECT_EQ(parameters_.grad_state(1), GradState::kNone);
  EXPECT_TRUE(announced_.empty());
}

TEST_F(GradientSinkTest, KnowsHowFarBackwardGoes) {
  EXPECT_FALSE(AnyTrainedBefore(0));
  EXPECT_TRUE(AnyTrainedBefore(1));
  parameters_.SetTrainable(0, false);
  EXPECT_FALSE(AnyTrainedBefore(1));
  EXPECT_TRUE(AnyTrainedBefore(2));
  parameters_.SetTrainable(1, false);
  parameters_.SetTrainable(2, false);
  EXPECT_FALSE(AnyTrainedBefore(3));
}

TEST_F(GradientSinkTest, PassesTheAnswerOn) {
  answer_ = absl::UnavailableError("rank 1 is gone");
  EXPECT_EQ(WriteFive(1), answer_);
}

TEST_F(GradientSinkTest, NeedsMemoryOfTheRightKindForWhatIsTrained) {
  EXPECT_TRUE(Check().ok());
  parameters_.SetGradMemory(1, {});
  EXPECT_EQ(Check().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Check().message(),
            "backward: the gradient of b needs float32[2] of memory, it has none");
  parameters_.SetTrainable(1, false);
  EXPECT_TRUE(Check().ok());
  double wide[2];
  parameters_.SetGradMemory(2, std::span<double>(wide));
  EXPECT_EQ(Check().message(),
            "backward: the gradient of c needs float32[2] of memory, it has float64[2]");
}

}  // namespace
}  // namespace evenkeel
