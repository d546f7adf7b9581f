// The fixture of tests of a GPT on a device: a tiny model on the host and on a device, batches, and
// their gradients.

#ifndef EVENKEEL_TRAINER_DEVICE_TESTING_DEVICE_GPT_FIXTURE_H_
#define EVENKEEL_TRAINER_DEVICE_TESTING_DEVICE_GPT_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/testing/tested_devices.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

inline const GptOptions kTiny{
    .vocabulary = 67, .context = 16, .layers = 2, .width = 48, .heads = 3, .seed = 5};

// Bounds relative to a gradient's largest element. float32: some hundred additions on the way, each
// off by 2^-24, in another order. bfloat16: an operand that float32 computed a little differently
// may round to the other side, 2^-8 away; few do, and a sum of operands sees them diluted.
inline constexpr double kFloatBound = 1e-5, kBFloatBound = 1e-2;

struct Tokens {
  Tokens(int64_t sequences, int64_t context, uint64_t seed = 1) : context(context) {
    StableRandom random(seed);
    for (int64_t i = 0; i < sequences * context; ++i) {
      // Some of them often.
      inputs.push_back(static_cast<int32_t>(random.Below(random.Below(2) == 0 ? 3 : 67)));
      targets.push_back(static_cast<int32_t>(random.Below(67)));
    }
  }
  TokenBatch Batch() const { return {inputs, targets, context}; }
  std::vector<int32_t> inputs, targets;
  int64_t context;
};

using Gradients = std::map<std::string, std::vector<float>>;

class DeviceGptTest : public testing::Test {
 protected:
  std::unique_ptr<Gpt> MakeHost(const GptOptions& options) {
    absl::StatusOr<std::unique_ptr<Gpt>> host = MakeGpt(options);
    EXPECT_TRUE(host.ok()) << host.status();
    return *std::move(host);
  }
  DevicePlace Place() {
    absl::StatusOr<DevicePlace> place = MakeDevicePlace(*devices_, Device::Cuda(0));
    EXPECT_TRUE(place.ok()) << place.status();
    return *place;
  }
  std::unique_ptr<Gpt> MakeOnDevice(const Gpt& host, const DeviceGptOptions& options = {}) {
    absl::StatusOr<std::unique_ptr<Gpt>> model = MakeDeviceGpt(host, Place(), options);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  // Forward, Backward, and the gradients of all that are trained, on the host.
  Gradients Pass(Gpt& model, const TokenBatch& batch, const PassOptions& options = {},
                 bool clears = true) {
    ParameterSet& parameters = model.parameters();
    if (clears) parameters.ClearGradients();
    const absl::StatusOr<PendingResult> pending =
        model.StartForward(batch, Mode::kTraining, options);
    EXPECT_TRUE(pending.ok()) << pending.status();
    announced_.clear();
    const absl::Status backward = model.Backward([&](int index) {
      announced_.push_back(index);
      return absl::OkStatus();
    });
    EXPECT_TRUE(backward.ok()) << backward;
    const absl::StatusOr<BatchResult> result = pending->Wait(SteadyNow() + absl::Minutes(2));
    EXPECT_TRUE(result.ok()) << result.status();
    result_ = *result;
    Gradients gradients;
    for (int i = 0; i < parameters.size(); ++i) {
      if (!parameters.trainable(i)) continue;
      gradients[parameters[i].name] = ToHost(model, parameters[i].grad);
    }
    return gradients;
  }
  std::vector<float> ToHost(const Gpt& model, const TensorView& tensor) {
    std::vector<float> values(tensor.count);
    if (tensor.device.is_cpu()) {
      std::ranges::copy(tensor.as<float>(), values.begin());
      return values;
    }
    const StreamRef stream = model.place().stream.ref();
    EXPECT_TRUE(devices_->Copy(values.data(), tensor.data, tensor.bytes(), stream).ok());
    EXPECT_TRUE(devices_->Synchronize(stream, SteadyNow() + absl::Minutes(2)).ok());
    return values;
  }

  void ExpectNear(const Gradients& actual, const Gradients& expected, double bound) {
    ASSERT_EQ(actual.size(), expected.size());
    for (const auto& [name, values] : expected) {
      const std::vector<double> wanted(values.begin(), values.end());
      EXPECT_LE(Difference<float>(actual.at(name), wanted), bound) << name;
    }
  }

  void ExpectParity(GptOptions options, double bound, const DeviceGptOptions& device_options = {}) {
    const std::unique_ptr<Gpt> host = MakeHost(options),
                               model = MakeOnDevice(*host, device_options);
    for (const Tokens& tokens : {Tokens(2, options.context), Tokens(1, 1), Tokens(3, 7)}) {
      SCOPED_TRACE(testing::Message() << tokens.inputs.size() << " tokens");
      const PassOptions pass{.weight = 3, .noise = 11, .first_sample = 5};
      const Gradients expected = Pass(*host, tokens.Batch(), pass);
      const BatchResult wanted = result_;
      const std::vector<int> order = announced_;
      const Gradients actual = Pass(*model, tokens.Batch(), pass);
      ExpectNear(actual, expected, bound);
      EXPECT_NEAR(result_.loss_mean, wanted.loss_mean, bound * wanted.loss_mean);
      EXPECT_EQ(result_.predictions, wanted.predictions);
      EXPECT_EQ(announced_, order);
      if (tokens.context != 7) continue;
      EXPECT_EQ(Pass(*model, tokens.Batch(), pass), actual) << "another time, other bits";
    }
  }

  TestedDevices tested_devices_;
  DeviceRuntime* devices_ = &tested_devices_;
  std::vector<int> announced_;
  BatchResult result_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_TESTING_DEVICE_GPT_FIXTURE_H_
