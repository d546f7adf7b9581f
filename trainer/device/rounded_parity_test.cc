// The mlp and the cnn with products of bfloat16 and float16 against the same models in float32, on
// one device.
//
// Bounds: of all gradients together the norm of what they are apart, over their norm. Each layer
// rounds to 8 bits (bfloat16) or 11 bits (float16), forward and backward. In so small a cnn the
// rectifier of a single pixel that rounding opens or closes is some 0.03.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
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

constexpr ImageShape kImage{.channels = 1, .side = 12};
const MlpOptions kMlp{.image = kImage, .hidden = {33, 20}, .seed = 5};
const CnnOptions kCnn{.image = kImage, .widths = {4, 6, 5}, .seed = 5};

struct Case {
  std::string name;
  bool is_cnn = false;
  DType dtype = DType::kFloat32;
  double bound = 0;  // Limit on the difference of gradients.
  double loss_bound = 0;
  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

class RoundedParityTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const absl::StatusOr<DevicePlace> place = MakeDevicePlace(devices_, Device::Cuda(0));
    ASSERT_TRUE(place.ok()) << place.status();
    place_ = *place;
    exact_ = Make(DType::kFloat32);
    rounded_ = Make(GetParam().dtype);
  }

  std::unique_ptr<Model> Make(DType dtype) {
    absl::StatusOr<std::unique_ptr<Model>> model =
        GetParam().is_cnn ? MakeDeviceCnn(kCnn, **MakeCnn(kCnn), place_, dtype)
                          : MakeDeviceMlp(kMlp, **MakeMlp(kMlp), place_, dtype);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  double Step(Model& model, const TestBatch& batch, const PassOptions& options = {}) {
    const PendingResult result =
        *model.StartForward(ImageBatch{batch.images, batch.labels}, Mode::kTraining, options);
    const absl::Status status = model.Backward([](int) { return absl::OkStatus(); });
    EXPECT_TRUE(status.ok()) << status;
    Finish();
    return result.Wait(absl::Now() + absl::Seconds(60))->loss_mean;
  }
  void Finish() {
    ASSERT_TRUE(devices_.Synchronize(place_.stream.ref(), absl::Now() + absl::Seconds(60)).ok());
  }

  // The tested memory is also the host's.
  static std::span<float> OnHost(TensorView tensor) {
    tensor.device = Device::Cpu();
    return tensor.as<float>();
  }
  // Returns the relative error of all rounded gradients together, divided by `scale`.
  double Apart(double scale) const {
    double apart = 0, norm = 0;
    for (int i = 0; i < exact_->parameters().size(); ++i) {
      const auto exact = OnHost(exact_->parameters()[i].grad);
      const auto rounded = OnHost(rounded_->parameters()[i].grad);
      for (size_t k = 0; k < exact.size(); ++k) {
        apart += std::pow(rounded[k] / scale - exact[k], 2);
        norm += std::pow(exact[k], 2);
      }
    }
    return std::sqrt(apart / norm);
  }

  TestedDevices devices_;
  DevicePlace place_;
  std::unique_ptr<Model> exact_, rounded_;
};

TEST_P(RoundedParityTest, LossAndGradientsAreThoseOfFloat32WithinBounds) {
  const double scale = GetParam().dtype == DType::kFloat16 ? 1024 : 1;
  const TestBatch batch = StripedImages(16, 1, kImage);
  const double loss = Step(*exact_, batch);
  EXPECT_NEAR(Step(*rounded_, batch, {.weight = scale}), loss, GetParam().loss_bound);
  for (int i = 0; i < exact_->parameters().size(); ++i) {
    EXPECT_EQ(rounded_->parameters()[i].value.dtype, DType::kFloat32);
    EXPECT_EQ(rounded_->parameters()[i].grad.dtype, DType::kFloat32);
  }
  EXPECT_LT(Apart(scale), GetParam().bound);
  EXPECT_GT(Apart(scale), 1e-5) << "nothing is rounded";
}

TEST_P(RoundedParityTest, TheMasterCopyKeepsWhatARoundedValueCannot) {
  Step(*rounded_, StripedImages(4, 1, kImage));
  for (int i = 0; i < exact_->parameters().size(); ++i) {
    const auto exact = OnHost(exact_->parameters()[i].value);
    const auto rounded = OnHost(rounded_->parameters()[i].value);
    EXPECT_TRUE(std::ranges::equal(exact, rounded)) << exact_->parameters()[i].name;
  }
}

TEST_P(RoundedParityTest, TrainsAsInFloat32) {
  double losses[2] = {}, first = 0;
  for (int step = 0; step < 60; ++step) {
    const TestBatch batch = StripedImages(16, step % 4, kImage);
    for (Model* const model : {exact_.get(), rounded_.get()}) {
      model->parameters().ClearGradients();
      losses[model == rounded_.get()] = Step(*model, batch);
      if (step == 0) first = losses[0];
      for (int i = 0; i < model->parameters().size(); ++i) {
        const auto value = OnHost(model->parameters()[i].value),
                   gradient = OnHost(model->parameters()[i].grad);
        for (size_t k = 0; k < value.size(); ++k) value[k] -= 0.2f * gradient[k];
      }
    }
  }
  EXPECT_LT(losses[0], first - 0.2);
  EXPECT_NEAR(losses[1], losses[0], 10 * GetParam().loss_bound);
}

TEST_P(RoundedParityTest, ANextStepNeedsNoHostWait) {
  const TestBatch batch = StripedImages(6, 1, kImage);
  const auto step = [&] {
    rounded_->parameters().ClearGradients();
    const PendingResult result =
        *rounded_->StartForward(ImageBatch{batch.images, batch.labels}, Mode::kTraining);
    EXPECT_TRUE(rounded_->Backward([](int) { return absl::OkStatus(); }).ok());
  };
  step();
  step();
  Finish();
  const int64_t waits = devices_.host_waits();
  step();
  step();
  EXPECT_EQ(devices_.host_waits(), waits);
  Finish();
}

INSTANTIATE_TEST_SUITE_P(Types, RoundedParityTest,
                         testing::Values(Case{"MlpBFloat16", false, DType::kBFloat16, 0.03, 0.01},
                                         Case{"MlpFloat16", false, DType::kFloat16, 0.004, 0.002},
                                         Case{"CnnBFloat16", true, DType::kBFloat16, 0.12, 0.02},
                                         Case{"CnnFloat16", true, DType::kFloat16, 0.06, 0.004}),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

TEST(RoundedModelTest, OtherTypesAreRefused) {
  TestedDevices devices;
  const DevicePlace place = *MakeDevicePlace(devices, Device::Cuda(0));
  EXPECT_EQ(MakeDeviceCnn(kCnn, **MakeCnn(kCnn), place, DType::kFloat64).status().message(),
            "cnn: on a device the model computes in float32, bfloat16 or float16, not in float64");
  EXPECT_EQ(MakeDeviceMlp(kMlp, **MakeMlp(kMlp), place, DType::kInt8).status().message(),
            "mlp: on a device the model computes in float32, bfloat16 or float16, not in int8");
}

}  // namespace
}  // namespace evenkeel
