// The promises of every model, checked for each.

#include "evenkeel/trainer/models/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"

namespace evenkeel {
namespace {

struct ModelCase {
  std::string name;
  std::function<absl::StatusOr<std::unique_ptr<Model>>(uint64_t seed)> make;
};

const ModelCase kCases[] = {
    {"Mlp", [](uint64_t seed) { return MakeMlp({.hidden = {9}, .seed = seed}); }},
    {"MlpFloat64",
     [](uint64_t seed) {
       return MakeMlp({.hidden = {5}, .dtype = DType::kFloat64, .seed = seed});
     }},
    {"Cnn",
     [](uint64_t seed) {
       return MakeCnn({.widths = {4, 6, 8}, .seed = seed});
     }},
    {"DefaultCnn", [](uint64_t seed) { return MakeCnn({.seed = seed}); }},
    {"StemOnlyCnn", [](uint64_t seed) { return MakeCnn({.widths = {3}, .seed = seed}); }},
};

std::vector<double> ToDoubles(const TensorView& view) {
  if (view.dtype == DType::kFloat32) return {view.as<float>().begin(), view.as<float>().end()};
  return {view.as<double>().begin(), view.as<double>().end()};
}

void FillBytes(const TensorView& view, int byte) { std::memset(view.data, byte, view.bytes()); }

class ModelTest : public testing::TestWithParam<ModelCase> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Model>> model = GetParam().make(1);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

  ParameterSet& parameters() { return model_->parameters(); }

  absl::StatusOr<BatchResult> Forward(const TestBatch& batch, Mode mode = Mode::kTraining) {
    return model_->Forward(batch.images, batch.labels, mode);
  }

  // Remembers what was announced, and that it was complete then.
  absl::Status Backward() {
    announced_.clear();
    return model_->Backward([&](int index) {
      EXPECT_EQ(parameters().grad_state(index), GradState::kLocal);
      announced_.push_back(index);
      at_announcement_.resize(parameters().size());
      at_announcement_[index] = Gradient(index);
      return absl::OkStatus();
    });
  }

  absl::Status Step(const TestBatch& batch) {
    if (absl::StatusOr<BatchResult> result = Forward(batch); !result.ok()) return result.status();
    return Backward();
  }

  std::vector<double> Gradient(int index) { return ToDoubles(parameters()[index].grad); }
  std::vector<std::vector<double>> Gradients() {
    std::vector<std::vector<double>> gradients;
    for (int i = 0; i < parameters().size(); ++i) gradients.push_back(Gradient(i));
    return gradients;
  }

  static void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    double scale = 1e-3;
    for (double value : expected) scale = std::max(scale, std::abs(value));
    for (size_t i = 0; i < actual.size(); ++i)
      ASSERT_NEAR(actual[i], expected[i], 1e-5 * scale) << i;
  }

  std::unique_ptr<Model> model_;
  std::vector<int> announced_;
  std::vector<std::vector<double>> at_announcement_;
};

TEST_P(ModelTest, HasAlignedMemoryAndFittingShapes) {
  EXPECT_TRUE(parameters().Validate().ok());
  for (int i = 0; i < parameters().size(); ++i) {
    const Parameter& parameter = parameters()[i];
    int64_t count = 1;
    for (int64_t size : model_->shape(i)) count *= size;
    EXPECT_EQ(parameter.value.count, count);
    EXPECT_EQ(parameter.grad.count, count);
    EXPECT_EQ(parameter.grad.dtype, parameter.value.dtype);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.value.data) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.grad.data) % 64, 0u);
    EXPECT_EQ(parameters().grad_state(i), GradState::kNone);
  }
}

TEST_P(ModelTest, StartsEquallyFromTheSameSeedOnly) {
  const std::unique_ptr<Model> same = *GetParam().make(1);
  const std::unique_ptr<Model> other = *GetParam().make(2);
  for (int i = 0; i < parameters().size(); ++i) {
    EXPECT_EQ(ToDoubles(parameters()[i].value), ToDoubles(same->parameters()[i].value));
  }
  EXPECT_NE(ToDoubles(parameters()[0].value), ToDoubles(other->parameters()[0].value));
}

TEST_P(ModelTest, AnnouncesEachGradientOnceAndLastLayerFirst) {
  ASSERT_TRUE(Step(StripedImages(6, 1)).ok());
  ASSERT_EQ(announced_.size(), parameters().size());
  EXPECT_TRUE(std::ranges::is_sorted(announced_, std::greater<>()));
  EXPECT_EQ(at_announcement_, Gradients());  // None changed after it was announced.
}

TEST_P(ModelTest, AddsToAGradientUnlessThereIsNone) {
  const TestBatch batch = StripedImages(6, 1);
  for (int i = 0; i < parameters().size(); ++i) FillBytes(parameters()[i].grad, 0x7f);
  ASSERT_TRUE(Step(batch).ok());
  const auto once = Gradients();
  ASSERT_TRUE(Step(batch).ok());
  for (int i = 0; i < parameters().size(); ++i) {
    SCOPED_TRACE(parameters()[i].name);
    std::vector<double> twice = once[i];
    for (double& value : twice) value *= 2;
    ExpectNear(Gradient(i), twice);
  }
  parameters().ClearGradients();
  ASSERT_TRUE(Step(batch).ok());
  EXPECT_EQ(Gradients(), once);
}

TEST_P(ModelTest, WritesGradientsWhereTheSetSaysAtAnyAlignment) {
  const TestBatch batch = StripedImages(6, 1);
  ASSERT_TRUE(Step(batch).ok());
  const auto expected = Gradients();
  std::vector<std::vector<double>> memory;  // Room for a shifted copy of each.
  for (int i = 0; i < parameters().size(); ++i) {
    TensorView grad = parameters()[i].grad;
    memory.emplace_back(grad.count + 2, 1e30);
    grad.data = reinterpret_cast<char*>(memory[i].data()) + SizeOf(grad.dtype);
    parameters().SetGradMemory(i, grad);
  }
  parameters().ClearGradients();
  ASSERT_TRUE(Step(batch).ok());
  EXPECT_EQ(Gradients(), expected);
}

TEST_P(ModelTest, FrozenPrefixGetsNoGradientsAndChangesNoOthers) {
  const TestBatch batch = StripedImages(6, 1);
  ASSERT_TRUE(Step(batch).ok());
  const auto all = Gradients();
  for (int lowest = 1; lowest <= parameters().size(); ++lowest) {
    SCOPED_TRACE(lowest);
    parameters().SetTrainable(lowest - 1, false);
    parameters().ClearGradients();
    for (int i = 0; i < lowest; ++i) FillBytes(parameters()[i].grad, 0);
    ASSERT_TRUE(Step(batch).ok());
    ASSERT_EQ(announced_.size(), parameters().size() - lowest);
    for (int i = 0; i < parameters().size(); ++i) {
      EXPECT_EQ(Gradient(i), i < lowest ? std::vector<double>(all[i].size()) : all[i])
          << parameters()[i].name;
      EXPECT_EQ(parameters().grad_state(i), i < lowest ? GradState::kNone : GradState::kLocal);
    }
  }
}

TEST_P(ModelTest, AFrozenParameterInTheMiddleIsSkipped) {
  const TestBatch batch = StripedImages(6, 1);
  ASSERT_TRUE(Step(batch).ok());
  const auto all = Gradients();
  for (int frozen = 0; frozen < parameters().size(); ++frozen) {
    SCOPED_TRACE(parameters()[frozen].name);
    parameters().SetTrainable(frozen, false);
    parameters().ClearGradients();
    FillBytes(parameters()[frozen].grad, 0);
    ASSERT_TRUE(Step(batch).ok());
    EXPECT_EQ(std::ranges::count(announced_, frozen), 0);
    auto expected = all;
    std::ranges::fill(expected[frozen], 0.0);
    EXPECT_EQ(Gradients(), expected);
    parameters().SetTrainable(frozen, true);
  }
}

TEST_P(ModelTest, TakesAnyBatchSizeInAnyOrder) {
  const auto first_of = [](const TestBatch& batch) {
    return std::vector<float>(batch.images.begin(), batch.images.begin() + 3);
  };
  ASSERT_EQ(first_of(StripedImages(1, 1)), first_of(StripedImages(7, 1)));
  std::vector<double> losses;
  for (int size : {7, 1, 3, 7, 2, 5, 8, 4, 7}) {
    const absl::StatusOr<BatchResult> result = Forward(StripedImages(size, 1));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_LE(result->correct, size);
    ASSERT_TRUE(Backward().ok());
    if (size == 7) losses.push_back(result->loss_mean);
  }
  EXPECT_EQ(losses, std::vector<double>(3, losses[0]));
}

TEST_P(ModelTest, StartsNearTheLossOfChance) {
  const absl::StatusOr<BatchResult> result = Forward(StripedImages(50, 1));
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->loss_mean, std::log(10.0), 0.5);
}

TEST_P(ModelTest, LearnsWhatCanBeLearned) {
  const TestBatch batch = StripedImages(40, 1);
  const double before = Forward(batch)->loss_mean;
  for (int step = 0; step < 20; ++step) {
    parameters().ClearGradients();
    ASSERT_TRUE(Step(batch).ok());
    for (int i = 0; i < parameters().size(); ++i) {
      const TensorView& value = parameters()[i].value;
      const std::vector<double> gradient = Gradient(i);
      for (int64_t k = 0; k < value.count; ++k) {
        if (value.dtype == DType::kFloat32)
          value.as<float>()[k] -= 0.05f * static_cast<float>(gradient[k]);
        if (value.dtype == DType::kFloat64) value.as<double>()[k] -= 0.05 * gradient[k];
      }
    }
  }
  EXPECT_LT(Forward(batch)->loss_mean, before - 0.02);
}

TEST_P(ModelTest, EvaluationChangesNothing) {
  ASSERT_TRUE(Step(StripedImages(6, 1)).ok());
  const auto gradients = Gradients();
  std::vector<std::vector<double>> buffers;
  for (const NamedBuffer& buffer : model_->buffers()) buffers.push_back(ToDoubles(buffer.value));
  const double loss = Forward(StripedImages(5, 2), Mode::kEvaluation)->loss_mean;
  EXPECT_EQ(Forward(StripedImages(5, 2), Mode::kEvaluation)->loss_mean, loss);
  EXPECT_EQ(Gradients(), gradients);
  for (size_t i = 0; i < buffers.size(); ++i)
    EXPECT_EQ(ToDoubles(model_->buffers()[i].value), buffers[i]);
}

TEST_P(ModelTest, BackwardNeedsATrainingForwardRightBeforeIt) {
  const TestBatch batch = StripedImages(4, 1);
  EXPECT_EQ(Backward().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Step(batch).ok());
  EXPECT_EQ(Backward().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Forward(batch).ok());
  ASSERT_TRUE(Forward(batch, Mode::kEvaluation).ok());
  EXPECT_EQ(Backward().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(ModelTest, AFailingAnnouncementEndsBackward) {
  ASSERT_TRUE(Forward(StripedImages(4, 1)).ok());
  int calls = 0;
  const absl::Status status = model_->Backward([&](int) {
    return ++calls == 2 ? absl::UnavailableError("rank 1 is gone") : absl::OkStatus();
  });
  EXPECT_EQ(status, absl::UnavailableError("rank 1 is gone"));
  EXPECT_EQ(calls, 2);
}

TEST_P(ModelTest, RefusesBatchesThatDoNotFit) {
  const TestBatch good = StripedImages(2, 1);
  EXPECT_EQ(Forward({}).status().message(), "forward: the batch is empty");
  EXPECT_EQ(Forward({good.images, {1}}).status().message(),
            "forward: 1 labels need 784 pixels, got 1568");
  EXPECT_EQ(Forward({good.images, {1, 10}}).status().message(),
            "forward: label 10 is not below 10");
  EXPECT_EQ(Backward().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(ModelTest, TrainsAlikeWithValuesInTheTransportsMemory) {
  const std::unique_ptr<Model> moved = *GetParam().make(1);
  auto group = *CreateShmGroupInProcess(1, {});
  ASSERT_TRUE(moved->MoveValuesTo(*group.front()).ok());
  group.clear();  // The model keeps the memory.
  const TestBatch batch = StripedImages(4, 1);
  ASSERT_TRUE(Step(batch).ok());
  ASSERT_TRUE(moved->Forward(batch.images, batch.labels, Mode::kTraining).ok());
  ASSERT_TRUE(moved->Backward([](int) { return absl::OkStatus(); }).ok());
  const std::byte* last = nullptr;
  for (int i = 0; i < parameters().size(); ++i) {
    const Parameter &plain = parameters()[i], &other = moved->parameters()[i];
    EXPECT_EQ(ToDoubles(plain.value), ToDoubles(other.value)) << plain.name;
    EXPECT_EQ(ToDoubles(plain.grad), ToDoubles(other.grad)) << plain.name;
    const auto* const data = static_cast<const std::byte*>(other.value.data);
    if (last != nullptr) {
      EXPECT_TRUE(data >= last && data < last + 64)
          << other.name << " is not behind the one before";
    }
    last = data + other.value.bytes();
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ModelTest, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel
