// The mlp and the cnn on a device against those on the host: losses, gradients, buffers, and some
// steps of training. Both compute in float32 and add in another order: gradients agree to 2e-5 of
// their largest element.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/testing/tested_devices.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr double kBound = 2e-5;

using Maker = std::function<absl::StatusOr<std::unique_ptr<Model>>()>;
using DeviceMaker =
    std::function<absl::StatusOr<std::unique_ptr<Model>>(const Model&, const DevicePlace&)>;

struct Case {
  std::string name;
  ImageShape image;
  Maker host;
  DeviceMaker device;
  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

Case MlpCase(std::string name, const MlpOptions& options) {
  return {std::move(name), options.image, [=] { return MakeMlp(options); },
          [=](const Model& host, const DevicePlace& place) {
            return MakeDeviceMlp(options, host, place);
          }};
}
Case CnnCase(std::string name, const CnnOptions& options) {
  return {std::move(name), options.image, [=] { return MakeCnn(options); },
          [=](const Model& host, const DevicePlace& place) {
            return MakeDeviceCnn(options, host, place);
          }};
}

const Case kCases[] = {
    MlpCase("mlp", {.hidden = {33, 20}, .seed = 5}),
    CnnCase("cnn", {.image = {.side = 12}, .widths = {4, 6, 5}, .seed = 5}),
    CnnCase(
        "DeepCnnOfColours",
        {.image = {.channels = 3, .side = 9}, .widths = {3, 5}, .blocks_per_stage = 2, .seed = 6}),
};

// Returns the largest difference of two float32 tensors, relative to the largest element.
double Apart(const TensorView& a, const TensorView& b) {
  double largest = 1e-30, apart = 0;
  const auto x = a.as<float>(), y = b.as<float>();
  for (size_t i = 0; i < x.size(); ++i) {
    largest = std::max<double>(largest, std::abs(x[i]));
    apart = std::max<double>(apart, std::abs(x[i] - y[i]));
  }
  return apart / largest;
}

class ParityTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const absl::StatusOr<DevicePlace> place = MakeDevicePlace(devices_, Device::Cuda(0));
    ASSERT_TRUE(place.ok()) << place.status();
    place_ = *place;
    host_ = *GetParam().host();
    absl::StatusOr<std::unique_ptr<Model>> device = GetParam().device(*host_, place_);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  TestBatch Images(int count, uint64_t seed) const {
    return StripedImages(count, seed, GetParam().image);
  }

  // Announced parameters, in their order.
  std::vector<int> Step(Model& model, const TestBatch& batch, const PassOptions& options = {}) {
    last_ = *model.StartForward(ImageBatch{batch.images, batch.labels}, Mode::kTraining, options);
    std::vector<int> announced;
    const absl::Status status = model.Backward([&](int index) {
      announced.push_back(index);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return announced;
  }

  void Finish() {
    ASSERT_TRUE(devices_.Synchronize(place_.stream.ref(), absl::Now() + absl::Seconds(60)).ok());
  }

  // The tested memory is also the host's.
  void ExpectEqualGradients(double bound = kBound) {
    Finish();
    for (int i = 0; i < host_->parameters().size(); ++i) {
      EXPECT_EQ(host_->parameters().grad_state(i), device_->parameters().grad_state(i));
      if (host_->parameters().grad_state(i) == GradState::kNone) continue;
      EXPECT_LT(Apart(host_->parameters()[i].grad, OnHost(device_->parameters()[i].grad)), bound)
          << host_->parameters()[i].name;
    }
  }
  void ExpectEqualValues(double bound) {
    const HostTensors there = *device_->ToHost();
    for (int i = 0; i < host_->parameters().size(); ++i) {
      EXPECT_LE(Apart(host_->parameters()[i].value, there.values[i]), bound)
          << host_->parameters()[i].name;
    }
    for (size_t i = 0; i < host_->buffers().size(); ++i) {
      EXPECT_EQ(host_->buffers()[i].name, device_->buffers()[i].name);
      EXPECT_LE(Apart(host_->buffers()[i].value, there.buffers[i]), bound)
          << host_->buffers()[i].name;
    }
  }
  static TensorView OnHost(TensorView tensor) {
    tensor.device = Device::Cpu();
    return tensor;
  }

  TestedDevices devices_;
  DevicePlace place_;
  std::unique_ptr<Model> host_, device_;
  PendingResult last_;
};

TEST_P(ParityTest, BeginsWithTheSameValuesNamesAndShapes) {
  ASSERT_EQ(host_->parameters().size(), device_->parameters().size());
  ASSERT_EQ(host_->buffers().size(), device_->buffers().size());
  for (int i = 0; i < host_->parameters().size(); ++i) {
    EXPECT_EQ(host_->parameters()[i].name, device_->parameters()[i].name);
    EXPECT_TRUE(std::ranges::equal(host_->shape(i), device_->shape(i)));
    EXPECT_EQ(device_->parameters()[i].value.device, Device::Cuda(0));
  }
  EXPECT_TRUE(device_->parameters().Validate().ok()) << device_->parameters().Validate();
  EXPECT_EQ(device_->parameters().stream().handle, place_.stream.ref().handle);
  ExpectEqualValues(/*bound=*/0);
}

TEST_P(ParityTest, LossGradientsAndTheirOrderAreTheHosts) {
  const TestBatch batch = Images(7, 1);
  const std::vector<int> wanted = Step(*host_, batch);
  const PendingResult host_result = last_;
  EXPECT_EQ(Step(*device_, batch), wanted);
  EXPECT_FALSE(last_.is_there() && devices_.name() == "simulated");  // A GPU may be that fast.
  ExpectEqualGradients();
  const BatchResult host = *host_result.Wait(absl::Now());
  const BatchResult device = *last_.Wait(absl::Now() + absl::Seconds(60));
  EXPECT_NEAR(device.loss_mean, host.loss_mean, 1e-5);
  EXPECT_EQ(device.correct, host.correct);
  EXPECT_EQ(device.predictions, 7);
  ExpectEqualValues(kBound);
}

TEST_P(ParityTest, ASecondPassAddsWithItsWeight) {
  for (Model* const model : {host_.get(), device_.get()}) {
    Step(*model, Images(6, 1), {.weight = 6});
    Step(*model, Images(3, 2), {.weight = 3});
  }
  ExpectEqualGradients();
}

TEST_P(ParityTest, FrozenParametersGetNoGradient) {
  const TestBatch batch = Images(5, 3);
  const int size = host_->parameters().size();
  for (int lowest = 0; lowest < size; lowest += 1 + size / 7) {
    for (Model* const model : {host_.get(), device_.get()}) {
      model->parameters().ClearGradients();
      for (int i = 0; i < size; ++i)
        model->parameters().SetTrainable(i, i >= lowest && i != lowest + 2);
    }
    EXPECT_EQ(Step(*host_, batch), Step(*device_, batch)) << lowest;
    ExpectEqualGradients();
  }
}

TEST_P(ParityTest, TrainsAlike) {
  for (int step = 0; step < 5; ++step) {
    const TestBatch batch = Images(step == 3 ? 4 : 9, step);
    for (Model* const model : {host_.get(), device_.get()}) {
      model->parameters().ClearGradients();
      Step(*model, batch);
      Finish();
      for (int i = 0; i < model->parameters().size(); ++i) {
        const auto value = OnHost(model->parameters()[i].value).as<float>();
        const auto gradient = OnHost(model->parameters()[i].grad).as<float>();
        for (size_t k = 0; k < value.size(); ++k) value[k] -= 0.05f * gradient[k];
      }
    }
  }
  ExpectEqualValues(/*bound=*/1e-3);
  const TestBatch batch = Images(20, 77);
  const BatchResult host = *host_->Forward(batch.images, batch.labels, Mode::kEvaluation);
  const BatchResult device = *device_->Forward(batch.images, batch.labels, Mode::kEvaluation);
  EXPECT_NEAR(device.loss_mean, host.loss_mean, 1e-3);
}

TEST_P(ParityTest, ANextStepNeedsNoHostWait) {
  Step(*device_, Images(6, 1));
  Step(*device_, Images(6, 2));
  Finish();
  const int64_t waits = devices_.host_waits();
  for (int step = 0; step < 2; ++step) {  // Two batches may be on their way.
    device_->parameters().ClearGradients();
    Step(*device_, Images(6 - step, step));
  }
  EXPECT_EQ(devices_.host_waits(), waits);
  EXPECT_TRUE(last_.Wait(absl::Now() + absl::Seconds(60)).ok());
}

TEST_P(ParityTest, EvaluationChangesNothing) {
  const TestBatch batch = Images(5, 1);
  const BatchResult host = *host_->Forward(batch.images, batch.labels, Mode::kEvaluation);
  const BatchResult device = *device_->Forward(batch.images, batch.labels, Mode::kEvaluation);
  EXPECT_NEAR(device.loss_mean, host.loss_mean, 1e-5);
  EXPECT_EQ(device.correct, host.correct);
  ExpectEqualValues(/*bound=*/0);
  EXPECT_TRUE(absl::IsFailedPrecondition(device_->Backward([](int) { return absl::OkStatus(); })));
}

TEST_P(ParityTest, WhatIsChangedOnTheHostGoesBack) {
  HostTensors tensors = *device_->ToHost();
  for (const TensorView& value : tensors.values) std::ranges::fill(value.as<float>(), 0.25f);
  for (const TensorView& buffer : tensors.buffers) std::ranges::fill(buffer.as<float>(), 0.5f);
  ASSERT_TRUE(device_->FromHost(tensors).ok());
  const HostTensors again = *device_->ToHost();
  for (const TensorView& value : again.values) EXPECT_EQ(value.as<float>().front(), 0.25f);
  for (const TensorView& buffer : again.buffers) EXPECT_EQ(buffer.as<float>().back(), 0.5f);
}

INSTANTIATE_TEST_SUITE_P(Models, ParityTest, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel
