#include "evenkeel/bucket/parameter_set.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/trainable_mask.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

int ParameterSet::Add(std::string name, TensorView value, TensorView grad) {
  if (grad.data == nullptr) grad = TensorView(nullptr, value.count, value.dtype, value.device);
  const int index = size();
  index_of_.try_emplace(name, index);
  params_.push_back({.name = std::move(name), .value = value, .grad = grad});
  grad_states_.push_back(GradState::kNone);
  mask_.Append(true);
  ++mask_version_;
  return index;
}

absl::Status ParameterSet::Validate() const {
  for (int index = 0; index < size(); ++index) {
    const auto& [name, value, grad] = params_[index];
    if (const int first = Find(name); first != index) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameters ", first, " and ", index, " are both named \"", name, "\""));
    }
    if (value.count < 0 || (value.data == nullptr && value.count > 0)) {
      return absl::InvalidArgumentError(absl::StrCat("parameter \"", name, "\" has no memory for ", ToString(value)));
    }
    if (grad.count != value.count || grad.dtype != value.dtype || grad.device != value.device) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter \"", name, "\" is ", ToString(value), ", its gradient ", ToString(grad)));
    }
  }
  return absl::OkStatus();
}

int ParameterSet::Find(absl::string_view name) const {
  const auto found = index_of_.find(name);
  return found == index_of_.end() ? -1 : found->second;
}

void ParameterSet::ClearGradients() { std::fill(grad_states_.begin(), grad_states_.end(), GradState::kNone); }

void ParameterSet::SetTrainable(int index, bool trained) {
  if (mask_.Set(index, trained)) ++mask_version_;
}

int ParameterSet::SetTrainable(absl::string_view prefix, bool trained) {
  int matches = 0;
  for (int index = 0; index < size(); ++index) {
    if (!absl::StartsWith(params_[index].name, prefix)) continue;
    ++matches;
    SetTrainable(index, trained);
  }
  return matches;
}

absl::Status ParameterSet::SetTrainable(std::span<const uint8_t> flags) {
  if (flags.size() != params_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", flags.size(), " trainable flags for ", params_.size(), " parameters"));
  }
  if (mask_.Set(flags)) ++mask_version_;
  return absl::OkStatus();
}

absl::Status ParameterSet::SetTrainable(const TrainableMask& mask) {
  if (mask.size() != size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("got a trainable mask of ", mask.size(), " entries for ", size(), " parameters"));
  }
  if (mask == mask_) return absl::OkStatus();
  mask_ = mask;
  ++mask_version_;
  return absl::OkStatus();
}

}  // namespace evenkeel
