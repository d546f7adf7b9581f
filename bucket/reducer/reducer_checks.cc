// The checks of a reducer's parameters and options, before any communication.

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/reducer/reducer.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// Parameters that are not ignored lie where `group` ("the group", "the new group") has its tensors;
// where that is no CPU, they have a stream on it.
absl::Status CheckDevice(const ParameterSet& params, Device group_device, absl::string_view group) {
  for (int i = 0; i < params.size(); ++i) {
    if (params.is_ignored(i) || params[i].value.device == group_device) continue;
    return absl::InvalidArgumentError(absl::StrCat("parameter \"", params[i].name, "\" lies on ",
                                                   ToString(params[i].value.device), ", ", group,
                                                   "'s tensors on ", ToString(group_device)));
  }
  const StreamRef stream = params.stream();
  if (group_device.is_cpu() || (stream.handle != nullptr && stream.device == group_device))
    return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the parameters have no stream on ", ToString(group_device), ", where ", group,
      "'s tensors lie: pass the stream on which gradients are computed to "
      "ParameterSet::SetStream(); it cannot be CUDA's default stream (null)",
      stream.handle != nullptr ? absl::StrCat(", and was given one of ", ToString(stream.device))
                               : ""));
}

// There are parameters, valid ones, of float types, on the group's device, with a stream there, and
// no other reducer moves their gradients. Unless gradients are views of buckets, they have memory.
// Ignored ones may be anything.
absl::Status CheckParameters(const ParameterSet& params, Device group_device,
                             bool gradients_are_views) {
  EK_RETURN_IF_ERROR(params.CheckDetached());
  if (params.size() == params.ignored_count()) {
    return absl::InvalidArgumentError(params.size() == 0 ? "the parameter list is empty"
                                                         : "all parameters are ignored");
  }
  EK_RETURN_IF_ERROR(params.Validate());
  EK_RETURN_IF_ERROR(CheckDevice(params, group_device, "the group"));
  for (int i = 0; i < params.size(); ++i) {
    if (params.is_ignored(i)) continue;
    const Parameter& param = params[i];
    if (!IsFloat(param.value.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter \"", param.name, "\" is ", ToString(param.value), ": gradients are floats"));
    }
    if (!group_device.is_cpu() && params.row_size(i) > 0) {
      return absl::UnimplementedError(absl::StrCat(
          "parameter \"", param.name, "\" is sparse: rows are gathered on the CPU, and it lies on ",
          ToString(group_device)));
    }
    if (param.grad.data == nullptr && !gradients_are_views && param.value.count > 0 &&
        params.row_size(i) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("parameter \"", param.name, "\" is ",
                                                     ToString(param.value),
                                                     " and its gradient has no memory"));
    }
  }
  return absl::OkStatus();
}

// Checks that `delayed` and `delay_until` are both empty, or both name existing parameters.
absl::Status CheckDelayed(const ParameterSet& params, const std::vector<std::string>& delayed,
                          absl::string_view delay_until) {
  if (delayed.empty() != delay_until.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`delayed` and `delay_until` need each other: got ", delayed.size(),
                     " delayed parameters, and they wait for \"", delay_until, "\""));
  }
  const auto check = [&](absl::string_view name, absl::string_view what) -> absl::Status {
    const int index = params.Find(name);
    if (index >= 0 && !params.is_ignored(index)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        what, " \"", name, "\" is ", index < 0 ? "not a parameter" : "an ignored parameter"));
  };
  for (const std::string& name : delayed) {
    if (const int index = params.Find(name); index < 0 || params.row_size(index) == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "`delayed`: \"", name, "\" is sparse; those are gathered behind all buckets anyway"));
  }
  for (const std::string& name : delayed) EK_RETURN_IF_ERROR(check(name, "`delayed`:"));
  return delay_until.empty() ? absl::OkStatus() : check(delay_until, "`delay_until`:");
}

}  // namespace

absl::Status Reducer::Check(const Communicator& comm, const ParameterSet& params,
                            const ReducerOptions& options) {
  EK_RETURN_IF_ERROR(CheckParameters(params, comm.device(), options.gradient_as_bucket_view));
  EK_RETURN_IF_ERROR(CheckDelayed(params, options.delayed, options.delay_until));
  return CheckCaps(options.caps);
}

absl::Status Reducer::CheckGroup(const Communicator& comm, const ParameterSet& params) {
  return CheckDevice(params, comm.device(), "the new group");
}

}  // namespace evenkeel
