#include "evenkeel/zero_optim/internal/parameter_updater.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <variant>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

namespace {
constexpr absl::Duration kPatience = absl::Minutes(10);  // With a device, where the host waits.
constexpr int kMeasureList = 0, kFirstList = 1;
}  // namespace

ParameterUpdater::ParameterUpdater(const ParameterSet* params, ParameterGroups groups,
                                   DeviceRuntime* runtime)
    : params_(params), groups_(std::move(groups)), runtime_(runtime), slots_(params->size()) {
  for (int i = 0; i < params->size(); ++i) slots_[i].part.count = (*params)[i].value.count;
}

// State may be in use on a device: a moment on its stream, which the DeviceUpdate then waits for.
ParameterUpdater::~ParameterUpdater() {
  if (device_ != nullptr) (void)device_->Keep(Memory(), stream());
}

absl::Status ParameterUpdater::CheckDevice() {
  const Parameter* first = nullptr;
  for (int i = 0; i < params_->size(); ++i) {
    if (!groups_.contains(i) || params_->is_ignored(i)) continue;
    const Parameter& param = (*params_)[i];
    if (runtime_ == nullptr && !param.value.device.is_cpu()) {
      return absl::FailedPreconditionError(absl::StrCat("parameter \"", param.name, "\" lies on ",
                                                        ToString(param.value.device),
                                                        ", but the group's backend is the CPU's"));
    }
    if (runtime_ == nullptr) continue;
    if (params_->row_size(i) > 0) {
      return absl::UnimplementedError(absl::StrCat(
          "parameter \"", param.name, "\" is sparse: rows are updated on the CPU only"));
    }
    if (param.value.device.is_cpu()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter \"", param.name, "\" lies on the CPU, but the group's backend is a device's"));
    }
    if (first == nullptr) first = &param;
    if (param.value.device == first->value.device) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", param.name, "\" lies on ", ToString(param.value.device),
                     ", and \"", first->name, "\" on ", ToString(first->value.device)));
  }
  if (runtime_ == nullptr || device_ != nullptr) return absl::OkStatus();
  if (params_->stream().handle == nullptr) {
    return absl::FailedPreconditionError(
        "parameters on a device need a stream: ParameterSet::SetStream()");
  }
  EK_ASSIGN_OR_RETURN(device_,
                      DeviceUpdate::Create(runtime_, params_->stream().device, params_->size()));
  return absl::OkStatus();
}

absl::Status ParameterUpdater::Check() {
  EK_RETURN_IF_ERROR(params_->Validate());
  EK_RETURN_IF_ERROR(CheckDevice());
  for (int i = 0; i < params_->size(); ++i) {
    if (!groups_.contains(i)) continue;
    const Parameter& param = (*params_)[i];
    if (params_->is_ignored(i)) continue;
    EK_RETURN_IF_ERROR(
        Annotate(CheckUpdatable(param.value), absl::StrCat("parameter \"", param.name, "\"")));
    if (params_->row_size(i) > 0 && StateDType(param.value.dtype) != param.value.dtype) {
      return absl::UnimplementedError(
          absl::StrCat("parameter \"", param.name, "\" is sparse, and rows of ",
                       ToString(param.value.dtype), " are not updated: make it float32"));
    }
    const Sgd* const sgd = std::get_if<Sgd>(&groups_.rule_of(i));
    if (params_->row_size(i) == 0 ||
        (sgd != nullptr && sgd->momentum == 0 && sgd->weight_decay == 0))
      continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", param.name, "\" is sparse, and ", ToString(groups_.rule_of(i)),
                     " would have to change all of its rows: only Sgd without momentum and weight "
                     "decay updates some"));
  }
  return absl::OkStatus();
}

absl::Status ParameterUpdater::CheckDense() const {
  for (int i = 0; i < params_->size(); ++i) {
    if (params_->row_size(i) == 0 || params_->is_ignored(i) || !groups_.contains(i)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", (*params_)[i].name,
                     "\" is sparse: only the placement Replicated updates rows; leave it to an "
                     "Optimizer of its own with that placement"));
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

absl::StatusOr<std::vector<HeldTensor>> ParameterUpdater::NewTensors(int param) const {
  const TensorView& value = (*params_)[param].value;
  const DType dtype = StateDType(value.dtype);
  const int64_t count = slots_[param].part.count;
  std::vector<HeldTensor> zeros;
  for (size_t t = 0; t < NamesFor(param).size(); ++t) {
    if (!is_on_device()) {
      zeros.emplace_back(StateTensor(dtype, count));
      continue;
    }
    EK_ASSIGN_OR_RETURN(Memory memory, runtime_->Allocate(value.device, count * SizeOf(dtype)));
    const TensorView view(memory.data.get(), count, dtype, value.device);
    zeros.emplace_back(std::move(memory), view);
  }
  return zeros;
}

absl::Status ParameterUpdater::MakeState(int param) {
  EK_ASSIGN_OR_RETURN(slots_[param].part.tensors, NewTensors(param));
  return absl::OkStatus();
}

absl::StatusOr<ParameterUpdater::Part> ParameterUpdater::SetPart(int param, int64_t begin,
                                                                 int64_t count) {
  Slot& slot = slots_[param];
  Part old = std::exchange(slot.part, Part{{begin, count}, {}});
  if (slot.step == 0) return old;
  if (absl::Status made = MakeState(param); !made.ok()) {
    slot.part = std::move(old);
    return made;
  }
  return old;
}

void ParameterUpdater::PutBack(int param, Part part) {
  Drop(std::exchange(slots_[param].part, std::move(part)));
}

// Memory of which no moment could be noted stays for good: the device has failed.
void ParameterUpdater::Drop(Part part) {
  if (!is_on_device()) return;
  for (HeldTensor& tensor : part.tensors) (void)device_->Keep(tensor.memory(), stream());
}

void ParameterUpdater::Update(int param, const TensorView& gradient, double grad_scale) {
  if (params_->row_size(param) > 0) return UpdateRows(param, gradient, grad_scale);
  (void)Prepare(param, slots_[param].step + 1);  // Fails on devices only.
  Slot& slot = slots_[param];
  absl::InlinedVector<TensorView, kMaxStateTensors> state;
  for (HeldTensor& tensor : slot.part.tensors) state.push_back(tensor.view());
  const TensorView value = (*params_)[param].value.Slice(slot.part.begin, slot.part.count);
  ApplyUpdate(groups_.rule_of(param), slot.step, grad_scale, value, gradient, state);
}

absl::Status ParameterUpdater::Prepare(int param, int64_t step) {
  Slot& slot = slots_[param];
  if (step == 0) {
    Drop({{}, std::move(slot.part.tensors)});
    slot.part.tensors.clear();
  }
  if (slot.step == 0 && step > 0) EK_RETURN_IF_ERROR(MakeState(param));
  if (slot.step != step) device_must_know_ = true;
  slot.step = step;
  return absl::OkStatus();
}

// On a device -------------------------------------------------------------------------------------

std::vector<DeviceUpdateItem> ParameterUpdater::ItemsFor(absl::Span<const Gradient> gradients,
                                                         std::vector<TensorView>& state) {
  std::vector<DeviceUpdateItem> items;
  items.reserve(gradients.size());
  state.clear();
  state.reserve(gradients.size() * kMaxStateTensors);  // So that the items' spans stay.
  for (const Gradient& gradient : gradients) {
    Part& part = slots_[gradient.param].part;
    const size_t first = state.size();
    for (HeldTensor& tensor : part.tensors) state.push_back(tensor.view());
    items.push_back({.param = gradient.param,
                     .rule = groups_.group_of(gradient.param),
                     .flag = gradient.flag,
                     .value = (*params_)[gradient.param].value.Slice(part.begin, part.count),
                     .gradient = gradient.elements,
                     .state = absl::MakeConstSpan(state).subspan(first)});
  }
  return items;
}

absl::Status ParameterUpdater::SetGradients(int list, absl::Span<const Gradient> gradients,
                                            StreamRef stream) {
  if (list >= static_cast<int>(listed_.size())) listed_.resize(list + 1);
  listed_[list].clear();
  for (const Gradient& gradient : gradients) {
    Slot& slot = slots_[gradient.param];
    if (slot.step == 0 && slot.part.tensors.empty()) EK_RETURN_IF_ERROR(MakeState(gradient.param));
    listed_[list].push_back(gradient.param);
  }
  std::vector<TensorView> state;
  return device_->SetList(kFirstList + list, groups_.rules(), ItemsFor(gradients, state), stream);
}

absl::Status ParameterUpdater::MeasureThere(int list, double norm, StreamRef stream) {
  return device_->Measure(kFirstList + list, norm, stream);
}

absl::Status ParameterUpdater::PrepareThere(int list, const StepOptions& options, bool is_measured,
                                            StreamRef stream, const TensorView& flags,
                                            bool may_be_unset) {
  if (device_must_know_) {
    std::vector<int64_t> steps;
    for (const Slot& slot : slots_) steps.push_back(slot.step);
    EK_RETURN_IF_ERROR(device_->WriteSteps(steps, stream));
    device_must_know_ = false;
  }
  if ((is_measured && options.skip_nonfinite) || may_be_unset) device_knows_better_ = true;
  for (const int param : listed_[list]) ++slots_[param].step;
  return device_->Prepare(kFirstList + list, groups_.rules(), options, is_measured, stream, flags);
}

absl::Status ParameterUpdater::ApplyThere(int list, StreamRef stream) {
  return device_->Apply(kFirstList + list, stream);
}

absl::StatusOr<GradientCheck> ParameterUpdater::MeasureNow(
    absl::Span<const Gradient> gradients, double norm, double grad_scale,
    absl::FunctionRef<absl::Status()> add_up) {
  std::vector<TensorView> state;
  std::vector<DeviceUpdateItem> items = ItemsFor(gradients, state);
  for (DeviceUpdateItem& item : items) item.state = {};
  EK_RETURN_IF_ERROR(device_->SetList(kMeasureList, groups_.rules(), items, stream()));
  EK_RETURN_IF_ERROR(device_->Measure(kMeasureList, norm, stream()));
  EK_RETURN_IF_ERROR(add_up());
  return device_->CheckNow(norm, grad_scale, stream(), SteadyNow() + kPatience);
}

absl::Status ParameterUpdater::Refresh() {
  if (!device_knows_better_) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> steps,
                      device_->ReadSteps(stream(), SteadyNow() + kPatience));
  device_knows_better_ = false;
  for (int param = 0; param < params_->size(); ++param) {
    if (steps[param] == slots_[param].step) continue;
    slots_[param].step = steps[param];
    if (steps[param] == 0) EK_RETURN_IF_ERROR(Prepare(param, 0));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<NamedView>> ParameterUpdater::NamedState() {
  EK_RETURN_IF_ERROR(Refresh());
  std::vector<NamedView> state;
  for (int param = 0; param < params_->size(); ++param) {
    // Without elements nothing is to be compared: ranks may count other steps of it, since none
    // has to have its gradient.
    if (!groups_.contains(param) || (*params_)[param].value.count == 0) continue;
    const absl::string_view name = (*params_)[param].name;
    Slot& slot = slots_[param];
    const auto names = NamesFor(param);
    for (size_t t = 0; t < names.size(); ++t) {
      state.push_back({absl::StrCat(name, ": ", names[t]),
                       slot.step > 0 ? slot.part.tensors[t].view() : TensorView()});
    }
    state.push_back({absl::StrCat(name, ": step"), absl::MakeSpan(&slot.step, 1)});
  }
  return state;
}

absl::Status ParameterUpdater::Copy(const TensorView& to, const TensorView& from) {
  if (to.count == 0) return absl::OkStatus();
  if (is_on_device()) return runtime_->Copy(to.data, from.data, to.bytes(), stream());
  std::memcpy(to.data, from.data, to.bytes());
  return absl::OkStatus();
}

absl::Status ParameterUpdater::CopyNow(const TensorView& to, const TensorView& from) {
  absl::Status status = Copy(to, from);
  status.Update(Synchronize());
  return status;
}

absl::Status ParameterUpdater::Synchronize() {
  return is_on_device() ? runtime_->Synchronize(stream(), SteadyNow() + kPatience)
                        : absl::OkStatus();
}

// State -------------------------------------------------------------------------------------------

int64_t ParameterUpdater::state_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const HeldTensor& tensor : slot.part.tensors) bytes += tensor.bytes();
  }
  return bytes;
}

absl::StatusOr<OptimizerState> ParameterUpdater::Export() {
  EK_RETURN_IF_ERROR(Refresh());
  OptimizerState state;
  for (int param = 0; param < params_->size(); ++param) {
    Slot& slot = slots_[param];
    if (slot.step == 0) continue;
    const auto names = NamesFor(param);
    ParameterState& entry = state.params[param];
    entry.step = slot.step;
    for (size_t t = 0; t < names.size(); ++t) {
      HeldTensor& tensor = slot.part.tensors[t];
      if (!is_on_device()) {
        entry.tensors.emplace(names[t], tensor.here());
        continue;
      }
      StateTensor& copy = entry.tensors[std::string(names[t])];
      copy = StateTensor(tensor.view().dtype, tensor.view().count);
      EK_RETURN_IF_ERROR(Copy(copy.view(), tensor.view()));
    }
  }
  EK_RETURN_IF_ERROR(Synchronize());
  return state;
}

absl::StatusOr<StatePieces> ParameterUpdater::Pieces() {
  EK_RETURN_IF_ERROR(Refresh());
  StatePieces mine;
  for (int param = 0; param < params_->size(); ++param) {
    Slot& slot = slots_[param];
    const bool has_part = slot.part.count > 0 || (*params_)[param].value.count == 0;
    if (slot.step == 0 || !has_part) continue;
    mine.steps[param] = slot.step;
    const auto names = NamesFor(param);
    for (size_t t = 0; t < names.size(); ++t) {
      TensorView data = slot.part.tensors[t].view();
      if (is_on_device()) {
        const TensorView there = data;
        mine.copies.push_back(std::make_shared<StateTensor>(there.dtype, there.count));
        data = mine.copies.back()->view();
        EK_RETURN_IF_ERROR(Copy(data, there));
      }
      mine.pieces.push_back({param, std::string(names[t]), slot.part.begin, data});
    }
  }
  EK_RETURN_IF_ERROR(Synchronize());
  return mine;
}

absl::Status ParameterUpdater::CheckState(const OptimizerState& state, const Ranges& ranges) const {
  for (const auto& [param, entry] : state.params) {
    if (param < 0 || param >= params_->size()) {
      return absl::InvalidArgumentError(absl::StrCat("optimizer state of parameter ", param,
                                                     ", but there are ", params_->size(),
                                                     " parameters"));
    }
    const auto& [name, value, grad] = (*params_)[param];
    const std::string where =
        absl::StrCat("optimizer state of parameter ", param, " \"", name, "\"");
    if (entry.step < 1)
      return absl::InvalidArgumentError(absl::StrCat(where, ": its step is ", entry.step));
    if (!groups_.contains(param))
      return absl::InvalidArgumentError(absl::StrCat(where, ", which is in no group"));
    const auto names = NamesFor(param);
    std::vector<absl::string_view> held;
    for (const auto& [tensor_name, tensor] : entry.tensors) {
      held.push_back(tensor_name);
      const int64_t count = ranges[param].value_or(StateRange()).count;
      if (tensor.count() != count || tensor.dtype() != StateDType(value.dtype)) {
        return absl::InvalidArgumentError(absl::StrCat(
            where, ": ", tensor_name, " is ", ToString(tensor.dtype()), "[", tensor.count(), "], ",
            count == value.count ? "the parameter " : "a part of ", ToString(value)));
      }
    }
    if (!std::ranges::equal(held, names)) {  // Both in alphabetical order.
      return absl::InvalidArgumentError(absl::StrCat(where, " holds {", absl::StrJoin(held, ", "),
                                                     "}, but ", ToString(groups_.rule_of(param)),
                                                     " needs {", absl::StrJoin(names, ", "), "}"));
    }
  }
  return absl::OkStatus();
}

// Host memory must stay until it has been copied from: so the host waits in the end, whatever
// happened.
absl::Status ParameterUpdater::Import(const OptimizerState& state, const Ranges& ranges,
                                      OptimizerState* movable, absl::FunctionRef<bool(int)> keeps) {
  device_knows_better_ = false;
  absl::Status status;
  for (int param = 0; param < params_->size(); ++param) status.Update(Prepare(param, 0));
  for (const auto& [param, entry] : state.params) {
    if (!keeps(param)) continue;
    Part& part = slots_[param].part;
    if (movable != nullptr && !is_on_device() && *ranges[param] == part) {
      slots_[param].step = entry.step;
      for (auto& [name, tensor] : movable->params.at(param).tensors)
        part.tensors.emplace_back(std::move(tensor));
      continue;
    }
    status.Update(Prepare(param, entry.step));
    if (!status.ok()) break;
    const auto names = NamesFor(param);
    for (size_t t = 0; t < names.size(); ++t) {
      const TensorView to = part.tensors[t].view();
      const int64_t before = part.begin - ranges[param]->begin;  // Elements that are not its own.
      const std::byte* const from =
          entry.tensors.at(std::string(names[t])).data() + before * SizeOf(to.dtype);
      status.Update(Copy(to, TensorView(const_cast<std::byte*>(from), to.count, to.dtype)));
    }
  }
  device_must_know_ = true;
  status.Update(Synchronize());
  return status;
}

}  // namespace evenkeel::internal
