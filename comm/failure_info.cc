#include "evenkeel/comm/failure_info.h"

#include <array>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/names.h"

// The payload is text, because absl::Status prints it: "kind=lost ranks=1,3 position=412 step=7
// operation=all_reduce (user) float32[10] sum". The operation comes last, since it has spaces.

namespace evenkeel {

using internal::kFailureInfoType;

namespace {

constexpr absl::string_view kKindNames[] = {"lost", "failed", "disagreement", "deadline"};

}  // namespace

absl::string_view ToString(FailureKind kind) {
  return internal::NameIn(kKindNames, kind, "unknown");
}

absl::Status WithFailureInfo(absl::Status status, const FailureInfo& info) {
  if (status.ok()) return status;
  // Cord's constructor for a string that it may move is compiled into Abseil, under a name that
  // clang 18 and later mangle otherwise than GCC.
  const std::string text =
      absl::StrCat("kind=", ToString(info.kind), " ranks=", absl::StrJoin(info.ranks, ","),
                   " position=", info.position, " step=", info.step, " operation=", info.operation);
  status.SetPayload(kFailureInfoType, absl::Cord(absl::string_view(text)));
  return status;
}

std::optional<FailureInfo> FailureInfoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kFailureInfoType);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  constexpr std::array<absl::string_view, 5> kFields = {
      "kind=", "ranks=", "position=", "step=", "operation="};
  std::vector<absl::string_view> fields =
      absl::StrSplit(text, absl::MaxSplits(' ', kFields.size() - 1));
  if (fields.size() != kFields.size()) return std::nullopt;
  for (size_t i = 0; i < kFields.size(); ++i) {
    if (!absl::ConsumePrefix(&fields[i], kFields[i])) return std::nullopt;
  }
  FailureInfo info{.operation = std::string(fields[4])};
  info.kind = internal::ValueIn<FailureKind>(kKindNames, fields[0]).value_or(info.kind);
  for (absl::string_view rank : absl::StrSplit(fields[1], ',', absl::SkipEmpty())) {
    if (!absl::SimpleAtoi(rank, &info.ranks.emplace_back())) return std::nullopt;
  }
  if (!absl::SimpleAtoi(fields[2], &info.position)) return std::nullopt;
  if (!absl::SimpleAtoi(fields[3], &info.step)) return std::nullopt;
  return info;
}

}  // namespace evenkeel
