#include "evenkeel/zero_optim/testing/test_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"

namespace evenkeel::internal {
namespace {

// Between -1 and 1, from the position alone.
double Noise(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  const uint64_t hash = StableHash(StableHash(StableHash(StableHash(1, a), b), c), d);
  return static_cast<double>(hash >> 11) / static_cast<double>(uint64_t{1} << 52) - 1.0;
}

template <typename Visitor>
void Visit(DType dtype, Visitor visit) {
  if (dtype == DType::kFloat64) {
    visit(double{});
  } else {
    visit(float{});
  }
}

// A few sums of numbers below 2, each of at most 8 roundings, which momentum and Adam amplify.
bool IsNearly(const StateTensor& a, const StateTensor& b) {
  bool is_near = a.dtype() == b.dtype() && a.count() == b.count();
  Visit(a.dtype(), [&](auto type) {
    using T = decltype(type);
    for (int64_t k = 0; is_near && k < a.count(); ++k) {
      const double x = a.as<T>()[k], y = b.as<T>()[k];
      is_near = std::abs(x - y) <= 2e-5 * std::max(1.0, std::abs(y));
    }
  });
  return is_near;
}

}  // namespace

TestModel::TestModel(std::vector<int64_t> sizes, DType dtype, SimulatedDevices* devices,
                     StreamRef stream)
    : devices_(devices) {
  if (devices != nullptr) params_.SetStream(stream);
  values_.reserve(sizes.size());
  gradients_.reserve(sizes.size());
  for (int64_t size : sizes) {
    const int param = static_cast<int>(values_.size());
    values_.emplace_back(dtype, size);
    gradients_.emplace_back(dtype, size);
    Visit(dtype, [&](auto type) {
      using T = decltype(type);
      for (int64_t k = 0; k < size; ++k)
        values_.back().view().as<T>()[k] = static_cast<T>(Noise(9, 9, param, k));
    });
    TensorView value = values_.back().view(), gradient = gradients_.back().view();
    value.device = gradient.device = stream.device;  // Whose memory is the host's.
    params_.Add(absl::StrCat("p", param), value, gradient);
  }
}

void TestModel::ComputeGradient(int rank, int step, int param, TensorView into) const {
  Visit(into.dtype, [&](auto type) {
    using T = decltype(type);
    const std::span<T> value = params_[param].value.as<T>(), gradient = into.as<T>();
    for (size_t k = 0; k < value.size(); ++k) {
      gradient[k] = static_cast<T>(Noise(rank, step, param, k)) + value[k] / 2;
    }
  });
}

void TestModel::PutGradient(int rank, int step, int param, bool adds) {
  const TensorView gradient = params_[param].grad;
  const auto compute = [=, this] {
    StateTensor fresh(gradient.dtype, gradient.count);
    ComputeGradient(rank, step, param, fresh.view());
    Visit(gradient.dtype, [&](auto type) {
      using T = decltype(type);
      for (int64_t k = 0; k < gradient.count; ++k) {
        const T value = fresh.as<T>()[k];
        gradient.as<T>()[k] = adds ? gradient.as<T>()[k] + value : value;
      }
    });
  };
  if (devices_ == nullptr) {
    compute();
  } else {
    (void)devices_->Put(params_.stream(), compute);
  }
}

void TestModel::Backward(int rank, int step, bool accumulate) {
  for (int param = 0; param < size(); ++param) {
    if (!params_.trainable(param)) continue;
    PutGradient(rank, step, param, accumulate && params_.grad_state(param) == GradState::kLocal);
    params_.SetGradState(param, GradState::kLocal);
  }
}

std::string TestModel::Bytes() const {
  std::string bytes;
  for (const StateTensor& value : values_) {
    bytes.append(reinterpret_cast<const char*>(value.data()), value.bytes());
  }
  return bytes;
}

void TestModel::SetBytes(absl::string_view bytes) {
  for (StateTensor& value : values_) {
    if (value.count() > 0) std::memcpy(value.view().data, bytes.data(), value.bytes());
    bytes.remove_prefix(value.bytes());
  }
}

void PlainTraining::Step(const std::vector<int>& active, int step, double scale,
                         const StepOptions& options) {
  std::vector<StateTensor> sums;
  std::vector<std::optional<TensorView>> gradients(model_->size());
  sums.reserve(model_->size());
  for (int param = 0; param < model_->size(); ++param) {
    if (!model_->params().trainable(param) || !groups_.contains(param)) continue;
    const TensorView value = model_->params()[param].value;
    StateTensor own(value.dtype, value.count);
    sums.emplace_back(value.dtype, value.count);
    Visit(value.dtype, [&](auto type) {
      using T = decltype(type);
      const std::span<T> sum = sums.back().view().template as<T>();
      for (int rank : active) {
        model_->ComputeGradient(rank, step, param, own.view());
        for (size_t k = 0; k < sum.size(); ++k) {
          sum[k] = rank == active.front() ? own.as<T>()[k] : sum[k] + own.as<T>()[k];
        }
      }
      for (T& element : sum) element *= static_cast<T>(scale);
    });
    gradients[param] = sums.back().view();
  }
  Update(gradients, options);
}

void PlainTraining::Update(const std::vector<std::optional<TensorView>>& gradients,
                           const StepOptions& options) {
  if (options.skip) return;
  double grad_scale = options.grad_scale;
  if (options.clip.has_value() || options.skip_nonfinite) {
    const double p = options.clip.value_or(ClipOptions()).norm;
    double power = 0, most = 0;
    bool is_finite = true;
    for (int param = 0; param < model_->size(); ++param) {
      if (!gradients[param].has_value()) continue;
      Visit(gradients[param]->dtype, [&](auto type) {
        for (const auto g : gradients[param]->as<decltype(type)>()) {
          power += std::pow(std::abs(static_cast<double>(g)), p);
          most = std::max(most, std::abs(static_cast<double>(g)));
          is_finite = is_finite && std::isfinite(g);
        }
      });
    }
    norm_ = (std::isinf(p) ? most : std::pow(power, 1 / p)) * std::abs(grad_scale);
    if (options.skip_nonfinite && !is_finite) return;
    if (options.clip.has_value())
      grad_scale *= std::min(1.0, options.clip->max_norm / (norm_ + 1e-6));
  }
  for (int param = 0; param < model_->size(); ++param) {
    if (!gradients[param].has_value()) continue;
    const TensorView value = model_->params()[param].value;
    ParameterState& entry = state_.params[param];
    absl::InlinedVector<TensorView, kMaxStateTensors> tensors;
    for (absl::string_view name : StateTensorNames(groups_.rule_of(param))) {
      tensors.push_back(entry.tensors.try_emplace(std::string(name), value.dtype, value.count)
                            .first->second.view());
    }
    ApplyUpdate(groups_.rule_of(param), ++entry.step, grad_scale, value, *gradients[param],
                tensors);
  }
}

bool IsSame(const TestModel& model, const TestModel& plain) {
  if (TheTestBackend().adds_in_rank_order) return model.Bytes() == plain.Bytes();
  return std::ranges::equal(model.values_, plain.values_, IsNearly);
}

bool IsSame(const OptimizerState& state, const OptimizerState& plain) {
  if (TheTestBackend().adds_in_rank_order) return state == plain;
  return std::ranges::equal(state.params, plain.params, [](const auto& a, const auto& b) {
    const auto& [param, entry] = a;
    return param == b.first && entry.step == b.second.step &&
           std::ranges::equal(
               entry.tensors, b.second.tensors, [](const auto& one, const auto& other) {
                 return one.first == other.first && IsNearly(one.second, other.second);
               });
  });
}

std::vector<int> TestedWorldSizes() {
  return TheTestBackend().is_in_full ? std::vector<int>{1, 2, 3, 5, 8} : std::vector<int>{2, 5};
}

absl::Status Reduce(DataParallel& ddp, const ParameterSet& params) {
  for (int param = params.size() - 1; param >= 0; --param) {
    if (params.trainable(param)) EK_RETURN_IF_ERROR(ddp.GradientReady(param));
  }
  return ddp.FinishStep();
}

}  // namespace evenkeel::internal
