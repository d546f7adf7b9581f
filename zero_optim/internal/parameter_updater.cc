#include "evenkeel/zero_optim/internal/parameter_updater.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

ParameterUpdater::ParameterUpdater(const ParameterSet* params, ParameterGroups groups)
    : params_(params), groups_(std::move(groups)), slots_(params->size()) {}

absl::Status ParameterUpdater::Check() const {
  EK_RETURN_IF_ERROR(params_->Validate());
  for (int i = 0; i < params_->size(); ++i) {
    if (!groups_.contains(i)) continue;
    const Parameter& param = (*params_)[i];
    EK_RETURN_IF_ERROR(Annotate(CheckUpdatable(param.value), absl::StrCat("parameter \"", param.name, "\"")));
  }
  return absl::OkStatus();
}

void ParameterUpdater::Update(int param, const TensorView& gradient, double grad_scale) {
  const TensorView& value = (*params_)[param].value;
  Slot& slot = slots_[param];
  if (slot.step == 0) slot.tensors.assign(NamesFor(param).size(), StateTensor(value.dtype, value.count));
  ++slot.step;
  absl::InlinedVector<TensorView, kMaxStateTensors> state;
  for (StateTensor& tensor : slot.tensors) state.push_back(tensor.view());
  ApplyUpdate(groups_.rule_of(param), slot.step, grad_scale, value, gradient, state);
}

void ParameterUpdater::Prepare(int param, int64_t step) {
  Slot& slot = slots_[param];
  if (step == 0) {
    slot = Slot();
    return;
  }
  const TensorView& value = (*params_)[param].value;
  if (slot.step == 0) slot.tensors.assign(NamesFor(param).size(), StateTensor(value.dtype, value.count));
  slot.step = step;
}

int64_t ParameterUpdater::state_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const StateTensor& tensor : slot.tensors) bytes += tensor.bytes();
  }
  return bytes;
}

OptimizerState ParameterUpdater::Export() const {
  OptimizerState state;
  for (int param = 0; param < params_->size(); ++param) {
    const Slot& slot = slots_[param];
    if (slot.step == 0) continue;
    const auto names = NamesFor(param);
    ParameterState& entry = state.params[param];
    entry.step = slot.step;
    for (size_t t = 0; t < names.size(); ++t) entry.tensors.emplace(names[t], slot.tensors[t]);
  }
  return state;
}

absl::Status ParameterUpdater::CheckState(const OptimizerState& state) const {
  for (const auto& [param, entry] : state.params) {
    if (param < 0 || param >= params_->size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("optimizer state of parameter ", param, ", but there are ", params_->size(), " parameters"));
    }
    const auto& [name, value, grad] = (*params_)[param];
    const std::string where = absl::StrCat("optimizer state of parameter ", param, " \"", name, "\"");
    if (entry.step < 1) return absl::InvalidArgumentError(absl::StrCat(where, ": its step is ", entry.step));
    if (!groups_.contains(param)) return absl::InvalidArgumentError(absl::StrCat(where, ", which is in no group"));
    const auto names = NamesFor(param);
    std::vector<absl::string_view> held;
    for (const auto& [tensor_name, tensor] : entry.tensors) {
      held.push_back(tensor_name);
      if (tensor.count() != value.count || tensor.dtype() != value.dtype) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": ", tensor_name, " is ", ToString(tensor.dtype()), "[",
                                                       tensor.count(), "], the parameter ", ToString(value)));
      }
    }
    if (!std::ranges::equal(held, names)) {  // Both in alphabetical order.
      return absl::InvalidArgumentError(absl::StrCat(where, " holds {", absl::StrJoin(held, ", "), "}, but ",
                                                     ToString(groups_.rule_of(param)), " needs {",
                                                     absl::StrJoin(names, ", "), "}"));
    }
  }
  return absl::OkStatus();
}

void ParameterUpdater::Import(const OptimizerState& state, absl::FunctionRef<bool(int)> keeps) {
  slots_.assign(slots_.size(), Slot());
  for (const auto& [param, entry] : state.params) {
    if (!keeps(param)) continue;
    Slot& slot = slots_[param];
    slot.step = entry.step;
    for (absl::string_view name : NamesFor(param)) slot.tensors.push_back(entry.tensors.at(std::string(name)));
  }
}

}  // namespace evenkeel::internal
