#include "evenkeel/trainer/app/choose_device.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

bool IsForCpu(BackendKind backend) {
  switch (backend) {
    case BackendKind::kAuto:
    case BackendKind::kNccl:
      return false;
    case BackendKind::kLocal:
    case BackendKind::kShm:
    case BackendKind::kTcp:
    case BackendKind::kHierarchical:
      break;
  }
  return true;
}

// Returns an error if only ranks on the CPU support an option; empty if GPUs support all.
std::string CpuOnly(const TrainOptions& options) {
  if (options.goes_on)
    return absl::StrCat("--on_failure=", options.flags.on_failure,
                        " supports only ranks on the CPU; choose --device=cpu");
  if (options.compute == DType::kFloat64)
    return "--compute=float64 supports only ranks on the CPU; choose --device=cpu";
  if (options.flags.balance) {
    return "--balance supports only ranks on the CPU, since it does not see the times of a GPU; "
           "choose --device=cpu";
  }
  return "";
}

std::string Count(int count, absl::string_view what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

absl::Status CheckComputesOnCpu(const TrainOptions& options) {
  const bool is_reduced = options.compute == DType::kBFloat16 || options.compute == DType::kFloat16;
  if (!is_reduced || options.model == ModelKind::kGpt) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--compute=", ToString(options.compute),
                                                 " of --model=", NameOf(options.model),
                                                 " requires GPUs, but this run uses the CPU"));
}

}  // namespace

bool AsksForDevices(const TrainOptions& options) {
  if (options.device == DeviceKind::kCpu) return false;
  return options.device == DeviceKind::kCuda || options.backend == BackendKind::kNccl ||
         !(IsForCpu(options.backend) || !CpuOnly(options).empty());
}

absl::StatusOr<std::string> ChooseDevice(const absl::StatusOr<int>& devices,
                                         std::optional<int> local_ranks, TrainOptions& options) {
  const bool is_free =
      !local_ranks.has_value() && !options.flags.nproc.has_value() && options.rank_steps.empty();
  const bool is_asked =
      options.device == DeviceKind::kCuda || options.backend == BackendKind::kNccl;
  if (options.device == DeviceKind::kCuda && IsForCpu(options.backend)) {
    return absl::InvalidArgumentError(
        "--device=cuda conflicts with a --backend for the CPU; choose --backend=auto, or "
        "--device=cpu");
  }
  if (options.device == DeviceKind::kCpu && options.backend == BackendKind::kNccl) {
    return absl::InvalidArgumentError(
        "--backend=nccl is for tensors on a GPU; choose --backend=auto, or --device=cuda");
  }
  if (const std::string why = CpuOnly(options); is_asked && !why.empty())
    return absl::InvalidArgumentError(why);
  if (is_free) options.nproc = kDefaultRanks;
  const int there = devices.ok() ? *devices : 0;
  const int ranks = local_ranks.value_or(is_free ? std::max(there, 1) : options.nproc);
  const bool matters = AsksForDevices(options);
  if (!matters || (!is_asked && there < ranks)) {
    options.device = DeviceKind::kCpu;
    EK_RETURN_IF_ERROR(CheckComputesOnCpu(options));
    if (matters && absl::IsNotFound(devices.status()))
      return absl::StrCat(devices.status().message(), "; the run uses the CPU");
    if (there == 0 || !matters || local_ranks.has_value())
      return "";  // The launcher has chosen the number of ranks.
    const std::string line = absl::StrCat(Count(ranks, "rank"), " and ", Count(there, "GPU"),
                                          ", so the run uses the CPU");
    if (!options.rank_steps.empty()) return line;
    return absl::StrCat(line, "; --nproc=", there, " would use ", there == 1 ? "it" : "them");
  }
  if (there < ranks) {
    const std::string asked =
        options.device == DeviceKind::kCuda ? "--device=cuda" : "--backend=nccl";
    if (there == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(asked, ": ", devices.ok() ? "no CUDA device" : devices.status().message()));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        asked, ": ", Count(ranks, "rank"), " need as many GPUs, but this host has ", there));
  }
  options.device = DeviceKind::kCuda;
  options.backend = BackendKind::kNccl;
  if (!local_ranks.has_value()) options.nproc = ranks;
  return is_free && there == 1 ? "1 GPU, so the run uses one rank" : "";
}

}  // namespace evenkeel
