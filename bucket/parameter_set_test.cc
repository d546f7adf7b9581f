#include "evenkeel/bucket/parameter_set.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Parameters of three floats each, with gradients.
class ParameterSetTest : public testing::Test {
 protected:
  ParameterSetTest() {
    for (const char* name : {"fc1.weight", "fc1.bias", "fc10.weight", "fc2.weight"}) {
      const size_t index = params_.size();
      params_.Add(name, absl::MakeSpan(values_).subspan(3 * index, 3),
                  absl::MakeSpan(grads_).subspan(3 * index, 3));
    }
  }
  static TensorView View(std::vector<float>& floats) { return TensorView(absl::MakeSpan(floats)); }
  std::vector<bool> Trainable() const {
    std::vector<bool> flags;
    for (int i = 0; i < params_.size(); ++i) flags.push_back(params_.trainable(i));
    return flags;
  }

  std::vector<float> values_ = std::vector<float>(4 * 3);
  std::vector<float> grads_ = std::vector<float>(4 * 3);
  ParameterSet params_;
};

TEST_F(ParameterSetTest, KeepsWhatWasAdded) {
  EXPECT_EQ(params_.size(), 4);
  EXPECT_EQ(params_[1].name, "fc1.bias");
  EXPECT_EQ(params_[1].value, View(values_).Slice(3, 3));
  EXPECT_EQ(params_[1].grad, View(grads_).Slice(3, 3));
  EXPECT_EQ(params_.grad_state(1), GradState::kNone);
  EXPECT_TRUE(params_.Validate().ok()) << params_.Validate();
}

TEST_F(ParameterSetTest, KnowsWhatWasClearedSinceTheReduction) {
  EXPECT_FALSE(params_.is_reduced());
  params_.SetGradState(1, GradState::kNone);
  params_.SetReduced(true);
  EXPECT_TRUE(params_.is_reduced());
  EXPECT_FALSE(params_.was_cleared(1));
  params_.SetGradState(1, GradState::kReduced);
  params_.SetGradState(2, GradState::kNone);  // It was before; the program has decided it.
  EXPECT_FALSE(params_.was_cleared(1));
  EXPECT_TRUE(params_.was_cleared(2));
  params_.ClearGradients();
  params_.SetReduced(false);
  EXPECT_FALSE(params_.is_reduced());
  EXPECT_TRUE(params_.was_cleared(1));
}

TEST_F(ParameterSetTest, FindsByName) {
  EXPECT_EQ(params_.Find("fc10.weight"), 2);
  EXPECT_EQ(params_.Find("fc1"), -1);
  EXPECT_EQ(ParameterSet().Find(""), -1);
}

TEST_F(ParameterSetTest, FindsByTheMemoryOfTheValue) {
  EXPECT_EQ(params_.Find(values_.data() + 6), 2);
  EXPECT_EQ(params_.Find(values_.data() + 7), -1);
  EXPECT_EQ(params_.Find(grads_.data()), -1);
  EXPECT_EQ(params_.Find(static_cast<const void*>(nullptr)), -1);
  std::vector<float> moved(3);
  ASSERT_TRUE(params_.Rebind(2, View(moved)).ok());
  EXPECT_EQ(params_.Find(moved.data()), 2);
  EXPECT_EQ(params_.Find(values_.data() + 6), -1);
}

TEST_F(ParameterSetTest, AShapeIsOptionalAndFitsItsValue) {
  std::vector<float> matrix(6), other(6);
  const int index = params_.Add("matrix", View(matrix), {}, {2, 3});
  EXPECT_THAT(params_.shape(index), testing::ElementsAre(2, 3));
  EXPECT_TRUE(params_.shape(0).empty());
  EXPECT_TRUE(params_.Validate().ok()) << params_.Validate();
  EXPECT_EQ(params_.Add("tied", View(matrix)), index);
  EXPECT_THAT(params_.shape(index), testing::ElementsAre(2, 3));
  params_.Add("other", View(other), {}, {2, 4});
  EXPECT_THAT(std::string(params_.Validate().message()), testing::HasSubstr("its shape [2, 4]"));
}

TEST_F(ParameterSetTest, SurvivesAMove) {
  params_.SetTrainable(0, false);
  const uint64_t version = params_.mask_version();
  const ParameterSet moved = std::move(params_);
  EXPECT_EQ(moved.Find("fc2.weight"), 3);
  EXPECT_FALSE(moved.trainable(0));
  EXPECT_EQ(moved.mask_version(), version);
}

TEST_F(ParameterSetTest, AGradientLeftOutTakesTheShapeOfItsValue) {
  std::vector<Float16> halves(5);
  const int index = params_.Add("half", TensorView(absl::MakeSpan(halves)));
  EXPECT_EQ(params_[index].grad, TensorView(nullptr, 5, DType::kFloat16));
  EXPECT_TRUE(params_.Validate().ok());
}

TEST_F(ParameterSetTest, GradientStatesAndMemoryAreSetOneByOneAndClearedTogether) {
  params_.SetGradState(2, GradState::kLocal);
  params_.SetGradState(3, GradState::kReduced);
  EXPECT_EQ(params_.grad_state(2), GradState::kLocal);
  std::vector<float> bucket = {1, 2, 3};
  params_.SetGradMemory(2, View(bucket));
  params_.ClearGradients();
  for (int i = 0; i < params_.size(); ++i) EXPECT_EQ(params_.grad_state(i), GradState::kNone);
  EXPECT_EQ(params_[2].grad, View(bucket));
  EXPECT_THAT(bucket, testing::ElementsAre(1, 2, 3));
}

TEST_F(ParameterSetTest, FreezesByPrefixAndCounts) {
  EXPECT_EQ(params_.SetTrainable("fc1.", false), 2);
  EXPECT_THAT(Trainable(), testing::ElementsAre(false, false, true, true));
  EXPECT_EQ(params_.SetTrainable("fc1", true), 3);
  EXPECT_EQ(params_.SetTrainable("", false), 4);
  EXPECT_EQ(params_.SetTrainable("conv", true), 0);
  EXPECT_THAT(Trainable(), testing::Each(false));
}

TEST_F(ParameterSetTest, TheVersionGrowsWithChangesOnly) {
  uint64_t version = params_.mask_version();
  auto changed = [&] {
    const uint64_t before = std::exchange(version, params_.mask_version());
    EXPECT_GE(version, before);
    return version != before;
  };
  params_.SetTrainable(0, true);
  EXPECT_FALSE(changed());
  params_.SetTrainable(0, false);
  EXPECT_TRUE(changed());
  params_.SetTrainable("fc2", true);
  EXPECT_FALSE(changed());
  params_.SetTrainable("fc2", false);
  EXPECT_TRUE(changed());

  const std::vector<uint8_t> flags = {0, 1, 1, 0};
  EXPECT_TRUE(params_.SetTrainable(flags).ok());
  EXPECT_FALSE(changed());
  EXPECT_TRUE(params_.SetTrainable(std::vector<uint8_t>{0, 1, 1, 7}).ok());
  EXPECT_TRUE(changed());
  EXPECT_THAT(Trainable(), testing::ElementsAre(false, true, true, true));

  EXPECT_TRUE(params_.SetTrainable(TrainableMask(params_.mask())).ok());
  EXPECT_FALSE(changed());
  EXPECT_TRUE(params_.SetTrainable(TrainableMask(4)).ok());
  EXPECT_TRUE(changed());
  EXPECT_EQ(params_.mask(), TrainableMask(4));

  params_.ClearGradients();
  params_.SetGradState(0, GradState::kLocal);
  EXPECT_FALSE(changed());
  std::vector<float> more(3);
  params_.Add("more", View(more));
  EXPECT_TRUE(changed());
}

TEST_F(ParameterSetTest, FlagsAndMasksOfAnotherSizeAreRefused) {
  const uint64_t version = params_.mask_version();
  for (int size : {0, 3, 5}) {
    const absl::Status flags = params_.SetTrainable(std::vector<uint8_t>(size, 0));
    const absl::Status mask = params_.SetTrainable(TrainableMask(size, false));
    for (const absl::Status& status : {flags, mask}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("4 parameters"));
    }
  }
  EXPECT_EQ(params_.mask_version(), version);
}

TEST_F(ParameterSetTest, ValidateNamesWhatDoesNotFit) {
  std::vector<float> three(3), grad(3), two(2);
  std::vector<double> doubles(3);
  struct Case {
    std::string name;
    TensorView value, grad;
    std::string message;
  };
  const Case cases[] = {
      {"fc1.bias", View(three), View(grad), "parameters 1 and 4 are both named \"fc1.bias\""},
      {"x", View(three), View(two), "parameter \"x\" is float32[3], its gradient float32[2]"},
      {"x", View(three), TensorView(absl::MakeSpan(doubles)),
       "parameter \"x\" is float32[3], its gradient float64[3]"},
      {"x", View(three), TensorView(grad.data(), 3, DType::kFloat32, Device::Cuda(0)),
       "parameter \"x\" is float32[3], its gradient float32[3] on cuda:0"},
      {"x", TensorView(nullptr, 3, DType::kFloat32), View(grad),
       "parameter \"x\" has no memory for float32[3]"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    ParameterSet params;
    for (int i = 0; i < params_.size(); ++i)
      params.Add(params_[i].name, params_[i].value, params_[i].grad);
    params.Add(c.name, c.value, c.grad);
    EXPECT_EQ(params.Validate(), absl::InvalidArgumentError(c.message));
  }
  ParameterSet empty;
  empty.Add("none", TensorView());
  EXPECT_TRUE(empty.Validate().ok()) << empty.Validate();
}

}  // namespace
}  // namespace evenkeel
