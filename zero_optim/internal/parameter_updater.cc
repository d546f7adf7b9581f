#include "evenkeel/zero_optim/internal/parameter_updater.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

ParameterUpdater::ParameterUpdater(const ParameterSet* params, ParameterGroups groups)
    : params_(params), groups_(std::move(groups)), slots_(params->size()) {
  for (int i = 0; i < params->size(); ++i) slots_[i].part.count = (*params)[i].value.count;
}

absl::Status ParameterUpdater::Check() const {
  EK_RETURN_IF_ERROR(params_->Validate());
  for (int i = 0; i < params_->size(); ++i) {
    if (!groups_.contains(i)) continue;
    const Parameter& param = (*params_)[i];
    if (params_->is_ignored(i)) continue;
    EK_RETURN_IF_ERROR(Annotate(CheckUpdatable(param.value), absl::StrCat("parameter \"", param.name, "\"")));
    const Sgd* const sgd = std::get_if<Sgd>(&groups_.rule_of(i));
    if (params_->row_size(i) == 0 || (sgd != nullptr && sgd->momentum == 0 && sgd->weight_decay == 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", param.name, "\" is sparse, and ", ToString(groups_.rule_of(i)),
                     " would have to change all of its rows: only Sgd without momentum and weight decay updates some"));
  }
  return absl::OkStatus();
}

absl::Status ParameterUpdater::CheckDense() const {
  for (int i = 0; i < params_->size(); ++i) {
    if (params_->row_size(i) == 0 || params_->is_ignored(i) || !groups_.contains(i)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", (*params_)[i].name,
                     "\" is sparse: only an Optimizer updates rows, one whose state is "
                     "split over the ranks does not; leave it to an Optimizer of its own"));
  }
  return absl::OkStatus();
}

// Sgd alone, see Check(): an update of a row is one of a small tensor.
void ParameterUpdater::UpdateRows(int param, const TensorView& elements, double grad_scale) {
  const TensorView& value = (*params_)[param].value;
  const int64_t row_size = params_->row_size(param);
  const std::vector<int64_t>& rows = params_->sparse_grad(param).rows;
  const int64_t step = ++slots_[param].step;
  for (size_t i = 0; i < rows.size(); ++i) {
    ApplyUpdate(groups_.rule_of(param), step, grad_scale, value.Slice(rows[i] * row_size, row_size),
                elements.Slice(static_cast<int64_t>(i) * row_size, row_size), {});
  }
}

std::vector<StateTensor> ParameterUpdater::ZerosFor(int param) const {
  return std::vector<StateTensor>(NamesFor(param).size(),
                                  StateTensor((*params_)[param].value.dtype, slots_[param].part.count));
}

ParameterUpdater::Part ParameterUpdater::SetPart(int param, int64_t begin, int64_t count) {
  Slot& slot = slots_[param];
  Part old = std::exchange(slot.part, Part{{begin, count}, {}});
  if (slot.step > 0) slot.part.tensors = ZerosFor(param);
  return old;
}

void ParameterUpdater::Update(int param, const TensorView& gradient, double grad_scale) {
  if (params_->row_size(param) > 0) return UpdateRows(param, gradient, grad_scale);
  Prepare(param, slots_[param].step + 1);
  Slot& slot = slots_[param];
  absl::InlinedVector<TensorView, kMaxStateTensors> state;
  for (StateTensor& tensor : slot.part.tensors) state.push_back(tensor.view());
  const TensorView value = (*params_)[param].value.Slice(slot.part.begin, slot.part.count);
  ApplyUpdate(groups_.rule_of(param), slot.step, grad_scale, value, gradient, state);
}

void ParameterUpdater::Prepare(int param, int64_t step) {
  Slot& slot = slots_[param];
  if (step == 0) slot.part.tensors.clear();
  if (slot.step == 0 && step > 0) slot.part.tensors = ZerosFor(param);
  slot.step = step;
}

int64_t ParameterUpdater::state_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const StateTensor& tensor : slot.part.tensors) bytes += tensor.bytes();
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
    for (size_t t = 0; t < names.size(); ++t) entry.tensors.emplace(names[t], slot.part.tensors[t]);
  }
  return state;
}

StatePieces ParameterUpdater::Pieces() {
  StatePieces mine;
  for (int param = 0; param < params_->size(); ++param) {
    Slot& slot = slots_[param];
    const bool has_part = slot.part.count > 0 || (*params_)[param].value.count == 0;
    if (slot.step == 0 || !has_part) continue;
    mine.steps[param] = slot.step;
    const auto names = NamesFor(param);
    for (size_t t = 0; t < names.size(); ++t) {
      mine.pieces.push_back({param, std::string(names[t]), slot.part.begin, slot.part.tensors[t].view()});
    }
  }
  return mine;
}

absl::Status ParameterUpdater::CheckState(const OptimizerState& state) const {
  return CheckParts(state, [this](int param) { return StateRange{0, (*params_)[param].value.count}; });
}

absl::Status ParameterUpdater::CheckParts(const OptimizerState& state,
                                          absl::FunctionRef<StateRange(int param)> range_of) const {
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
      const int64_t count = range_of(param).count;
      if (tensor.count() != count || tensor.dtype() != value.dtype) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": ", tensor_name, " is ", ToString(tensor.dtype()), "[", tensor.count(), "], ",
                         count == value.count ? "the parameter " : "a part of ", ToString(value)));
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
  for (int param = 0; param < params_->size(); ++param) Prepare(param, 0);
  for (const auto& [param, entry] : state.params) {
    if (!keeps(param)) continue;
    Prepare(param, entry.step);
    Part& part = slots_[param].part;
    const auto names = NamesFor(param);
    for (size_t t = 0; t < names.size(); ++t) {
      const TensorView to = part.tensors[t].view();
      const std::byte* const from = entry.tensors.at(std::string(names[t])).data() + part.begin * SizeOf(to.dtype);
      if (to.count > 0) std::memcpy(to.data, from, to.bytes());
    }
  }
}

void ParameterUpdater::ImportParts(OptimizerState parts, absl::FunctionRef<StateRange(int)> range_of) {
  for (int param = 0; param < params_->size(); ++param) {
    Prepare(param, 0);
    slots_[param].part = Part{range_of(param), {}};
  }
  for (auto& [param, entry] : parts.params) {
    Slot& slot = slots_[param];
    slot.step = entry.step;
    for (absl::string_view name : NamesFor(param)) {
      slot.part.tensors.push_back(std::move(entry.tensors.at(std::string(name))));
    }
  }
}

}  // namespace evenkeel::internal
