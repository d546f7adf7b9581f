#include "evenkeel/comm/verify.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/names.h"

namespace evenkeel {

namespace {

constexpr absl::string_view kNames[] = {"off", "positions", "every"};

}  // namespace

absl::string_view ToString(VerifyLevel level) {
  return internal::NameIn(kNames, level, "unknown level");
}

absl::StatusOr<VerifyLevel> VerifyLevelFromString(absl::string_view name) {
  if (const auto level = internal::ValueIn<VerifyLevel>(kNames, name)) return *level;
  return absl::InvalidArgumentError(absl::StrCat("unknown level of verification \"", name,
                                                 "\": it is one of off, positions, every"));
}

}  // namespace evenkeel
