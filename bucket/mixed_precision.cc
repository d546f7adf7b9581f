#include "evenkeel/bucket/mixed_precision.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/convert.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<MixedPrecision>> MixedPrecision::Create(ParameterSet* params, DataParallel* ddp,
                                                                       MixedPrecisionOptions options) {
  if (options.compute != DType::kFloat16 && options.compute != DType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("mixed precision can't compute in ", ToString(options.compute), ": only in float16 or bfloat16"));
  }
  std::unique_ptr<MixedPrecision> mixed(new MixedPrecision(params, ddp, options.compute));
  for (int i = 0; i < params->size(); ++i) {
    const TensorView& value = (*params)[i].value;
    if (params->is_ignored(i) || params->row_size(i) > 0) {
      mixed->copies_[i].is_ignored = true;
      continue;
    }
    EK_RETURN_IF_ERROR(Annotate(CheckConvertible(value, value), absl::StrCat("parameter \"", (*params)[i].name, "\"")));
    mixed->copies_[i].is_ignored = SizeOf(value.dtype) == SizeOf(options.compute);
  }
  for (const std::string& name : options.ignored) {
    const int param = params->Find(name);
    if (param < 0) return absl::InvalidArgumentError(absl::StrCat("there is no parameter \"", name, "\" to ignore"));
    mixed->copies_[param].is_ignored = true;
  }
  return mixed;
}

bool MixedPrecision::IsFresh(int param) const {
  const Copy& copy = copies_[param];
  if (!copy.is_made) return false;
  if (copy.reductions == ddp_->reducer().reductions()) return true;
  // Others may have trained it meanwhile, and frozen it again.
  return !copy.was_trained && !params_->trainable(param) && copy.mask_version == params_->mask_version();
}

TensorView MixedPrecision::ViewOf(int param, std::vector<std::byte>& memory) const {
  const TensorView& master = (*params_)[param].value;
  memory.resize(master.count * SizeOf(compute_));
  return TensorView(memory.data(), master.count, compute_);
}

TensorView MixedPrecision::Compute(int param) {
  Copy& copy = copies_[param];
  if (copy.is_ignored) return (*params_)[param].value;
  const TensorView view = ViewOf(param, copy.value);
  if (IsFresh(param)) return view;
  ConvertFloats((*params_)[param].value, view);
  ++casts_;
  copy.is_made = true;
  copy.was_trained = params_->trainable(param);
  copy.reductions = ddp_->reducer().reductions();
  copy.mask_version = params_->mask_version();
  return view;
}

TensorView MixedPrecision::Gradient(int param) {
  Copy& copy = copies_[param];
  return copy.is_ignored ? (*params_)[param].grad : ViewOf(param, copy.gradient);
}

absl::Status MixedPrecision::GradientReady(int param) {
  if (param < 0 || param >= params_->size()) return ddp_->GradientReady(param);  // Answers what is wrong.
  if (!copies_[param].is_ignored) {
    if (copies_[param].gradient.empty() && (*params_)[param].value.count > 0) {
      return absl::FailedPreconditionError(absl::StrCat("the gradient of parameter \"", (*params_)[param].name,
                                                        "\" was announced, and Gradient() never asked where it goes"));
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
