#include "evenkeel/comm/nccl/api.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::internal {

absl::Status ToStatus(absl::string_view what, const NcclAnswer& answer) {
  const std::string text = absl::StrCat("nccl: ", what, ": ", answer.text);
  switch (answer.code) {
    case NcclCode::kSuccess:
    case NcclCode::kInProgress:
      return absl::OkStatus();
    case NcclCode::kSystemError:
    case NcclCode::kRemoteError:
      return absl::UnavailableError(text);
    case NcclCode::kInvalidArgument:
    case NcclCode::kInvalidUsage:
      return absl::InvalidArgumentError(text);
    case NcclCode::kUnimplemented:
      return absl::UnimplementedError(text);
    case NcclCode::kUnhandledCudaError:
    case NcclCode::kInternalError:
    case NcclCode::kUnknown:
      break;
  }
  return absl::InternalError(text);
}

std::string NcclVersionText(int version) {
  // 2.8 and earlier were 2 * 1000 + 8 * 100 + patch.
  const int unit = version < 10000 ? 1000 : 10000;
  return absl::StrCat(version / unit, ".", version % unit / 100, ".", version % 100);
}

}  // namespace evenkeel::internal
