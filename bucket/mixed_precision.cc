#include "evenkeel/bucket/mixed_precision.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/reducer/accumulate_kernels.cuh"
#include "evenkeel/bucket/reducer/accumulate_kernels_image.h"
#include "evenkeel/bucket/reducer/repeated_copy.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

MixedPrecision::MixedPrecision(ParameterSet* params, DataParallel* ddp, DType compute)
    : params_(params), ddp_(ddp), compute_(compute), copies_(params->size()) {}

absl::StatusOr<std::unique_ptr<MixedPrecision>> MixedPrecision::Create(
    ParameterSet* params, DataParallel* ddp, MixedPrecisionOptions options) {
  if (options.compute != DType::kFloat16 && options.compute != DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat("mixed precision cannot compute in ",
                                                   ToString(options.compute),
                                                   ": only in float16 or bfloat16"));
  }
  std::unique_ptr<MixedPrecision> mixed(new MixedPrecision(params, ddp, options.compute));
  for (int i = 0; i < params->size(); ++i) {
    const TensorView& value = (*params)[i].value;
    if (params->is_ignored(i) || params->row_size(i) > 0) {
      mixed->copies_[i].is_ignored = true;
      continue;
    }
    const Device device = ddp->communicator().device();
    if (device.is_cpu() || value.device != device) {
      EK_RETURN_IF_ERROR(Annotate(CheckConvertible(value, value),
                                  absl::StrCat("parameter \"", (*params)[i].name, "\"")));
    }
    mixed->copies_[i].is_ignored = SizeOf(value.dtype) == SizeOf(options.compute);
  }
  for (const std::string& name : options.ignored) {
    const int param = params->Find(name);
    if (param < 0)
      return absl::InvalidArgumentError(
          absl::StrCat("there is no parameter \"", name, "\" to ignore"));
    mixed->copies_[param].is_ignored = true;
  }
  if (!ddp->communicator().device().is_cpu()) EK_RETURN_IF_ERROR(mixed->PrepareDevice());
  return mixed;
}

// On a device -------------------------------------------------------------------------------------

namespace {

constexpr int64_t kAlignment = 256;
constexpr absl::Duration kDrainTimeout = absl::Minutes(1);

const auto kAccumulateHalves =
    MakeKernel<&ek_accumulate_halves>("ek_accumulate_halves", accumulate_kernels_image);

}  // namespace

MixedPrecision::~MixedPrecision() {
  if (IsOnDevice()) (void)runtime_->Synchronize(params_->stream(), SteadyNow() + kDrainTimeout);
}

absl::Status MixedPrecision::PrepareDevice() {
  runtime_ = ddp_->communicator().runtime();
  const Device device = ddp_->communicator().device();
  const auto room = [&](int i) {
    return ((*params_)[i].value.count * SizeOf(compute_) + kAlignment - 1) / kAlignment *
           kAlignment;
  };
  int64_t bytes = 0;
  for (int i = 0; i < params_->size(); ++i) bytes += copies_[i].is_ignored ? 0 : 2 * room(i);
  EK_ASSIGN_OR_RETURN(memory_, runtime_->Allocate(device, bytes));
  auto* free = static_cast<std::byte*>(memory_.data.get());
  std::vector<CopySegment> casts;
  for (int i = 0; i < params_->size(); ++i) {
    if (copies_[i].is_ignored) continue;
    for (TensorView* const view : {&copies_[i].device_value, &copies_[i].device_gradient}) {
      *view = TensorView(free, (*params_)[i].value.count, compute_, device);
      free += room(i);
    }
    casts.push_back({.to = copies_[i].device_value, .from = (*params_)[i].value});
  }
  cast_ = std::make_unique<RepeatedCopy>(runtime_, device);
  return cast_->Prepare(casts, params_->stream());
}

// All that may be stale, as soon as one of them is asked for.
void MixedPrecision::CastOnDevice() {
  std::vector<CopySegment> casts;
  for (int i = 0; i < params_->size(); ++i) {
    if (copies_[i].is_ignored || IsFresh(i)) continue;
    casts.push_back({.to = copies_[i].device_value, .from = (*params_)[i].value});
    NoteMade(i);
  }
  failed_.Update(cast_->Run(casts, params_->stream()));
}

absl::Status MixedPrecision::WidenOnDevice(int param, bool add) {
  EK_RETURN_IF_ERROR(failed_);
  const TensorView& half = copies_[param].device_gradient;
  const TensorView& master = (*params_)[param].grad;
  if (!add) {
    return CopySegmentsOnce(*runtime_, {{.to = master, .from = half}}, params_->stream(),
                            {.scale = grad_scale_});
  }
  return Launch(*runtime_, kAccumulateHalves, ShapeFor(master.count), params_->stream(),
                master.data, master.dtype == DType::kFloat64, half.data,
                half.dtype == DType::kFloat16, master.count, grad_scale_);
}

bool MixedPrecision::IsFresh(int param) const {
  const Copy& copy = copies_[param];
  if (!copy.is_made) return false;
  if (copy.reductions == ddp_->reducer().reductions()) return true;
  // Others may have trained it meanwhile, and frozen it again.
  return !copy.was_trained && !params_->trainable(param) &&
         copy.mask_version == params_->mask_version();
}

TensorView MixedPrecision::ViewOf(int param, std::vector<std::byte>& memory) const {
  const TensorView& master = (*params_)[param].value;
  memory.resize(master.count * SizeOf(compute_));
  return TensorView(memory.data(), master.count, compute_);
}

TensorView MixedPrecision::Compute(int param) {
  Copy& copy = copies_[param];
  if (copy.is_ignored) return (*params_)[param].value;
  if (IsOnDevice()) {
    if (!IsFresh(param)) CastOnDevice();
    return copy.device_value;
  }
  const TensorView view = ViewOf(param, copy.value);
  if (IsFresh(param)) return view;
  ConvertFloats((*params_)[param].value, view);
  NoteMade(param);
  return view;
}

void MixedPrecision::NoteMade(int param) {
  Copy& copy = copies_[param];
  ++casts_;
  copy.is_made = true;
  copy.was_trained = params_->trainable(param);
  copy.reductions = ddp_->reducer().reductions();
  copy.mask_version = params_->mask_version();
}

TensorView MixedPrecision::Gradient(int param) {
  Copy& copy = copies_[param];
  if (copy.is_ignored) return (*params_)[param].grad;
  return IsOnDevice() ? copy.device_gradient : ViewOf(param, copy.gradient);
}

absl::Status MixedPrecision::GradientReady(int param) {
  if (param < 0 || param >= params_->size())
    return ddp_->GradientReady(param);  // Returns the error.
  if (IsOnDevice() && !copies_[param].is_ignored) {
    EK_RETURN_IF_ERROR(
        WidenOnDevice(param, /*add=*/params_->grad_state(param) != GradState::kNone));
  } else if (!copies_[param].is_ignored) {
    if (copies_[param].gradient.empty() && (*params_)[param].value.count > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("GradientReady() was called for parameter \"", (*params_)[param].name,
                       "\" before Gradient(): write its gradient to the memory that Gradient() "
                       "returns"));
    }
    const bool add = params_->grad_state(param) != GradState::kNone;
    const TensorView& master = (*params_)[param].grad;
    ConvertFloats(Gradient(param), master, {.scale = grad_scale_, .add = add});
  }
  params_->SetGradState(param, GradState::kLocal);
  return ddp_->GradientReady(param);
}

void MixedPrecision::ValuesChanged() {
  for (Copy& copy : copies_) copy.is_made = false;
}

}  // namespace evenkeel
