#include "evenkeel/zero_optim/device/device_update.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/device/testing/tested_devices.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr Device kDevice = Device::Cuda(0);
const std::vector<int64_t> kSizes = {7, 4096, 0, 1, 9001, 64};

std::vector<UpdateRule> OneOfEach() {
  return {Sgd{.learning_rate = 0.1},
          Sgd{.learning_rate = 0.1, .weight_decay = 0.01},
          Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01},
          Sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true},
          Adam{.weight_decay = 0.1},
          AdamW{.learning_rate = 0.01}};
}

absl::Time Soon() { return absl::Now() + absl::Minutes(1); }

float Noise(uint64_t seed) {
  seed = (seed + 1) * 0x9e3779b97f4a7c15u;
  seed = (seed ^ (seed >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<float>(static_cast<int64_t>(seed >> 40) - (1 << 23)) / (1 << 23);
}

float Read(const TensorView& view, int64_t i) {
  if (view.dtype == DType::kBFloat16)
    return static_cast<float>(static_cast<BFloat16*>(view.data)[i]);
  return static_cast<float*>(view.data)[i];
}
void Write(const TensorView& view, int64_t i, float value) {
  if (view.dtype == DType::kBFloat16) {
    static_cast<BFloat16*>(view.data)[i] = BFloat16(value);
  } else {
    static_cast<float*>(view.data)[i] = value;
  }
}

// Parameters on a device, and the same, in float32, on the CPU. The memory of a simulated device is
// the host's.
class Pair {
 public:
  Pair(TestedDevices* devices, const std::vector<UpdateRule>& rules,
       const std::vector<int64_t>& sizes, DType dtype)
      : devices_(devices), rules_(rules), dtype_(dtype) {
    stream_ = *devices->CreateStream(kDevice);
    update_ = *DeviceUpdate::Create(devices, kDevice, static_cast<int>(sizes.size()));
    params_.resize(sizes.size());
    for (size_t p = 0; p < sizes.size(); ++p) {
      Param& param = params_[p];
      // Not all at the beginning of their memory, so that some are not aligned.
      const int64_t offset = p % 3 == 1 ? 3 : 0;
      param.value = Make(sizes[p], dtype, offset);
      param.gradient = Make(sizes[p], dtype, p % 2 == 1 ? 3 : 0);
      const UpdateRule& rule = rules_[p % rules_.size()];
      for (size_t t = 0; t < StateTensorNames(rule, dtype).size(); ++t) {
        param.state.push_back(Make(sizes[p], DType::kFloat32, 0));
      }
      param.plain.resize(sizes[p]);
      param.plain_gradient.resize(sizes[p]);
      param.plain_state.assign(StateTensorNames(rule).size(), std::vector<float>(sizes[p]));
      for (int64_t i = 0; i < sizes[p]; ++i) {
        Write(param.value, i, Noise(p * 100000 + i));
        param.plain[i] = Read(param.value, i);
      }
    }
  }

  // Makes the next step's gradients; the device must have finished the one before.
  void MakeGradients(int step, float factor = 1.0f) {
    for (size_t p = 0; p < params_.size(); ++p) {
      Param& param = params_[p];
      for (int64_t i = 0; i < param.value.count; ++i) {
        Write(param.gradient, i, factor * Noise(step * 1000003 + p * 100000 + i));
        param.plain_gradient[i] = Read(param.gradient, i);
      }
    }
  }

  std::vector<DeviceUpdateItem> Items(int from = 0) const {
    std::vector<DeviceUpdateItem> items;
    for (int p = from; p < static_cast<int>(params_.size()); ++p) {
      items.push_back({.param = p,
                       .rule = static_cast<int>(p % rules_.size()),
                       .value = params_[p].value,
                       .gradient = params_[p].gradient,
                       .state = params_[p].state});
    }
    return items;
  }

  absl::Status Step(const StepOptions& options = {}, int from = 0) {
    const bool is_measured = options.clip.has_value() || options.skip_nonfinite;
    EK_RETURN_IF_ERROR(update_->SetList(0, rules_, Items(from), stream_.ref()));
    const double norm = options.clip.has_value() ? options.clip->norm : kInfinityNorm;
    if (is_measured) EK_RETURN_IF_ERROR(update_->Measure(0, norm, stream_.ref()));
    EK_RETURN_IF_ERROR(update_->Prepare(0, rules_, options, is_measured, stream_.ref()));
    return update_->Apply(0, stream_.ref());
  }
  void PlainStep(int64_t step, double grad_scale = 1.0, int from = 0) {
    for (size_t p = from; p < params_.size(); ++p) {
      Param& param = params_[p];
      std::vector<TensorView> state;
      for (std::vector<float>& tensor : param.plain_state)
        state.emplace_back(absl::MakeSpan(tensor));
      ApplyUpdate(rules_[p % rules_.size()], step, grad_scale, absl::MakeSpan(param.plain),
                  absl::MakeSpan(param.plain_gradient), state);
    }
  }
  void Finish() { ASSERT_TRUE(devices_->Synchronize(stream_.ref(), Soon()).ok()); }

  // Bit for bit.
  void ExpectEqual() {
    Finish();
    for (size_t p = 0; p < params_.size(); ++p) {
      Param& param = params_[p];
      const auto names = StateTensorNames(rules_[p % rules_.size()], dtype_);
      size_t plain = 0;
      for (size_t t = 0; t < names.size(); ++t) {
        const std::vector<float>& wanted =
            names[t] == "master" ? param.plain : param.plain_state[plain++];
        for (int64_t i = 0; i < param.value.count; ++i) {
          ASSERT_EQ(Read(param.state[t], i), wanted[i]) << names[t] << " of " << p << " at " << i;
        }
      }
      for (int64_t i = 0; i < param.value.count; ++i) {
        const float wanted = dtype_ == DType::kBFloat16
                                 ? static_cast<float>(BFloat16(param.plain[i]))
                                 : param.plain[i];
        ASSERT_EQ(Read(param.value, i), wanted) << "value of " << p << " at " << i;
      }
    }
  }

  double PlainNorm(double norm) const {
    double sum = 0;
    for (const Param& param : params_) {
      for (const float g : param.plain_gradient) {
        sum = std::isinf(norm) ? std::max<double>(sum, std::abs(g))
                               : sum + std::pow(std::abs(static_cast<double>(g)), norm);
      }
    }
    return std::isinf(norm) ? sum : std::pow(sum, 1 / norm);
  }

  DeviceUpdate& update() { return *update_; }
  StreamRef stream() const { return stream_.ref(); }
  TensorView gradient(int param) const { return params_[param].gradient; }

 private:
  struct Param {
    TensorView value, gradient;
    std::vector<TensorView> state;
    std::vector<float> plain, plain_gradient;
    std::vector<std::vector<float>> plain_state;
  };

  TensorView Make(int64_t count, DType dtype, int64_t offset) {
    memory_.push_back(*devices_->Allocate(kDevice, (count + offset) * SizeOf(dtype)));
    return TensorView(memory_.back().data.get(), count + offset, dtype, kDevice)
        .Slice(offset, count);
  }

  TestedDevices* const devices_;
  const std::vector<UpdateRule> rules_;
  const DType dtype_;
  std::vector<Memory> memory_;
  Stream stream_;
  std::vector<Param> params_;
  std::unique_ptr<DeviceUpdate> update_;
};

TEST(DeviceUpdateTest, UpdatesAsTheCpuDoesBitForBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const UpdateRule& rule : OneOfEach()) {
      SCOPED_TRACE(absl::StrCat(ToString(rule), " ", ToString(dtype)));
      TestedDevices devices;
      Pair pair(&devices, {rule}, kSizes, dtype);
      for (int step = 1; step <= 3; ++step) {
        pair.MakeGradients(step);
        ASSERT_TRUE(pair.Step({.grad_scale = 0.25}).ok());
        pair.PlainStep(step, 0.25);
        ASSERT_NO_FATAL_FAILURE(pair.ExpectEqual());
      }
    }
  }
}

TEST(DeviceUpdateTest, ManyRulesAndParametersTakeAFewLaunches) {
  std::vector<UpdateRule> rules;
  std::vector<int64_t> sizes;
  for (int i = 0; i < 40; ++i) {
    if (i % 3 == 0) rules.push_back(Sgd{.learning_rate = 0.1 + i});
    if (i % 3 == 1) rules.push_back(Sgd{.learning_rate = 0.1 + i, .momentum = 0.5});
    if (i % 3 == 2) rules.push_back(AdamW{.learning_rate = 0.1 + i});
    sizes.push_back(10 * i);
    sizes.push_back(3);
  }
  TestedDevices devices;
  Pair pair(&devices, rules, sizes, DType::kFloat32);
  for (int step = 1; step <= 2; ++step) {
    pair.MakeGradients(step);
    const int64_t before = devices.launches();
    ASSERT_TRUE(pair.Step().ok());
    EXPECT_EQ(devices.launches() - before, 3 + 3);  // Sixteen rules at a time; three kinds.
    pair.PlainStep(step);
    ASSERT_NO_FATAL_FAILURE(pair.ExpectEqual());
  }
}

TEST(DeviceUpdateTest, AStepHasNoHostWaitAndNoCopyButOfItsCheck) {
  TestedDevices devices({.delay = absl::Microseconds(200)});
  Pair pair(&devices, {AdamW{}}, kSizes, DType::kFloat32);
  pair.MakeGradients(1);
  ASSERT_TRUE(pair.Step().ok());
  const int64_t waits = devices.host_waits(), launches = devices.launches(),
                copies = devices.copies();
  for (int step = 0; step < 5; ++step) ASSERT_TRUE(pair.Step().ok());
  EXPECT_EQ(devices.host_waits(), waits);
  EXPECT_EQ(devices.launches(), launches + 5 * 2);
  EXPECT_EQ(devices.copies(), copies);
  for (int step = 0; step < 5; ++step) {
    ASSERT_TRUE(pair.Step({.clip = ClipOptions(), .skip_nonfinite = true}).ok());
  }
  EXPECT_EQ(devices.host_waits(), waits);
  EXPECT_EQ(devices.launches(), launches + 5 * 2 + 5 * 4);
  EXPECT_EQ(devices.copies(), copies + 5);
}

TEST(DeviceUpdateTest, MeasuresAndClips) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const double norm : {1.0, 2.0, 3.5, kInfinityNorm}) {
      SCOPED_TRACE(absl::StrCat("norm ", norm));
      TestedDevices devices;
      Pair pair(&devices, {Sgd{.learning_rate = 1}}, kSizes, dtype);
      pair.MakeGradients(1);
      ASSERT_TRUE(
          pair.Step({.grad_scale = -0.5, .clip = ClipOptions{.max_norm = 0.125, .norm = norm}})
              .ok());
      const double wanted = pair.PlainNorm(norm) * 0.5;
      const auto check = pair.update().LastCheck(Soon());
      ASSERT_TRUE(check.ok() && check->has_value());
      EXPECT_NEAR((*check)->norm, wanted, 1e-12 * wanted);
      EXPECT_TRUE((*check)->is_finite);
      EXPECT_FALSE((*check)->is_skipped);
      // A norm that differs in its last bit gives the same float, but for one in 2^28 or so.
      pair.PlainStep(1, -0.5 * ClipCoefficient(0.125, (*check)->norm));
      pair.ExpectEqual();
      const auto now = pair.update().CheckNow(norm, -0.5, pair.stream(), Soon());
      ASSERT_TRUE(now.ok());
      EXPECT_EQ(now->norm, (*check)->norm);
    }
  }
}

TEST(DeviceUpdateTest, ASkippedStepChangesNothingAndDoesNotCount) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const double norm : {1.0, 2.0, 3.0, kInfinityNorm}) {
      TestedDevices devices;
      Pair pair(&devices, {AdamW{}}, kSizes, DType::kFloat32);
      const StepOptions options{.clip = ClipOptions{.max_norm = 1e30, .norm = norm},
                                .skip_nonfinite = true};
      int64_t counted = 0;
      for (int step = 1; step <= 4; ++step) {
        pair.MakeGradients(step);
        const bool is_bad = step != 2;
        if (is_bad) Write(pair.gradient(4), 9000 - step, bad);
        ASSERT_TRUE(pair.Step(options).ok());
        if (!is_bad) pair.PlainStep(++counted);
        ASSERT_NO_FATAL_FAILURE(pair.ExpectEqual());
        const auto check = pair.update().LastCheck(Soon());
        ASSERT_TRUE(check.ok() && check->has_value());
        EXPECT_EQ((*check)->is_finite, !is_bad);
        EXPECT_EQ((*check)->is_skipped, is_bad);
        EXPECT_EQ(std::isinf((*check)->norm), is_bad);
      }
      const auto steps = pair.update().ReadSteps(pair.stream(), Soon());
      ASSERT_TRUE(steps.ok());
      EXPECT_EQ(*steps, std::vector<int64_t>(kSizes.size(), 1));
      const auto before = pair.update().LastCheck(Soon(), 1);
      ASSERT_TRUE(before.ok() && before->has_value());
      EXPECT_FALSE((*before)->is_finite);
      EXPECT_EQ(*pair.update().LastCheck(Soon(), 2), std::nullopt);
    }
  }
}

TEST(DeviceUpdateTest, WithoutGradientsTheNormIsZero) {
  TestedDevices devices;
  Pair pair(&devices, {AdamW{}}, kSizes, DType::kFloat32);
  ASSERT_TRUE(pair.Step({.clip = ClipOptions()}, static_cast<int>(kSizes.size())).ok());
  EXPECT_EQ(*pair.update().LastCheck(Soon()), GradientCheck());
}

// The device is far behind when lists change: what it still works with must stay.
TEST(DeviceUpdateTest, ListsMayChangeInEachStep) {
  TestedDevices devices({.delay = absl::Microseconds(500)});
  Pair pair(&devices, {Adam{}}, kSizes, DType::kFloat32);
  pair.MakeGradients(1);
  const int64_t waits = devices.host_waits();
  for (int step = 0; step < 6; ++step) ASSERT_TRUE(pair.Step({}, step % 2).ok());
  EXPECT_EQ(devices.host_waits(), waits);
  const auto steps = pair.update().ReadSteps(pair.stream(), Soon());
  ASSERT_TRUE(steps.ok());
  EXPECT_EQ((*steps)[0], 3);
  EXPECT_EQ((*steps)[1], 6);
}

TEST(DeviceUpdateTest, AnItemWhoseFlagIsZeroIsLeftAlone) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TestedDevices devices;
    Pair pair(&devices, {AdamW{}}, {5, 6, 7}, DType::kFloat32);
    pair.MakeGradients(1);
    const Memory memory = *devices.Allocate(kDevice, 3 * SizeOf(dtype));
    const TensorView flags(memory.data.get(), 3, dtype, kDevice);
    Write(flags, 0, 3.0f);
    Write(flags, 1, -0.0f);
    std::vector<DeviceUpdateItem> items = pair.Items();
    for (int i = 0; i < 3; ++i) items[i].flag = i < 2 ? 1 - i : -1;
    const std::vector<UpdateRule> rules = {AdamW{}};
    ASSERT_TRUE(pair.update().SetList(0, rules, items, pair.stream()).ok());
    ASSERT_TRUE(pair.update().Prepare(0, rules, {}, false, pair.stream(), flags).ok());
    ASSERT_TRUE(pair.update().Apply(0, pair.stream()).ok());
    EXPECT_EQ(*pair.update().ReadSteps(pair.stream(), Soon()), (std::vector<int64_t>{0, 1, 1}));
    EXPECT_EQ(Read(items[0].value, 2), Noise(2));
    EXPECT_NE(Read(items[1].value, 2), Noise(100002));
  }
}

TEST(DeviceUpdateTest, StepCountsAreReadAndWritten) {
  TestedDevices devices({.delay = absl::Microseconds(100)});
  Pair pair(&devices, {AdamW{}}, {5, 6}, DType::kFloat32);
  const std::vector<int64_t> counts = {41, 7};
  ASSERT_TRUE(pair.update().WriteSteps(counts, pair.stream()).ok());
  ASSERT_TRUE(pair.Step({}, 1).ok());
  EXPECT_EQ(*pair.update().ReadSteps(pair.stream(), Soon()), (std::vector<int64_t>{41, 8}));
}

TEST(DeviceUpdateTest, ErrorsOfTheDeviceComeBack) {
  TestedDevices devices;
  Pair pair(&devices, {AdamW{}}, {5, 6}, DType::kFloat32);
  ASSERT_TRUE(pair.Step().ok());
  devices.FailNext("Launch", absl::InternalError("unspecified launch failure"));
  EXPECT_EQ(pair.Step(), absl::InternalError("unspecified launch failure"));
  devices.FailNext("Launch", absl::OkStatus());
  std::vector<DeviceUpdateItem> items = pair.Items();
  for (DeviceUpdateItem& item : items) item.state = {};
  const std::vector<UpdateRule> rules = {AdamW{}};
  ASSERT_TRUE(pair.update().SetList(1, rules, items, pair.stream()).ok());
  EXPECT_TRUE(pair.update().Measure(1, 2, pair.stream()).ok());
  EXPECT_TRUE(absl::IsInternal(pair.update().Apply(1, pair.stream())));
  EXPECT_TRUE(absl::IsResourceExhausted(DeviceUpdate::Create(&devices, kDevice, 1 << 30).status()));
}

}  // namespace
}  // namespace evenkeel
