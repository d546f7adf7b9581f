#include "evenkeel/comm/verify.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::string_view ToString(VerifyLevel level) {
  switch (level) {
    case VerifyLevel::kOff:
      return "off";
    case VerifyLevel::kPositions:
      return "positions";
    case VerifyLevel::kEvery:
      return "every";
  }
  return "unknown level";
}

absl::StatusOr<VerifyLevel> VerifyLevelFromString(absl::string_view name) {
  for (VerifyLevel level : {VerifyLevel::kOff, VerifyLevel::kPositions, VerifyLevel::kEvery}) {
    if (name == ToString(level)) return level;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown level of verification \"", name, "\": it is one of off, positions, every"));
}

}  // namespace evenkeel
