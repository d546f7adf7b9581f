#include "evenkeel/trainer/app/freeze_schedule.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/app/flag_table.h"

namespace evenkeel {
namespace {

absl::StatusOr<FreezeRange> ParseRange(absl::string_view text) {
  const size_t at = text.rfind('@');
  const size_t colon = text.rfind(':');
  FreezeRange range;
  bool good =
      at != absl::string_view::npos && colon != absl::string_view::npos && at < colon && at > 0;
  if (good) {
    range.prefix = std::string(text.substr(0, at));
    const absl::string_view end = text.substr(colon + 1);
    good = ParseCount(text.substr(at + 1, colon - at - 1), range.begin) &&
           (end.empty() || ParseCount(end, range.end));
  }
  if (!good) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not of the form PREFIX@FIRST:END, such as fc1@3:5"));
  }
  if (range.begin >= range.end) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is empty: step ", range.end,
                                                   " does not come after step ", range.begin));
  }
  return range;
}

bool Names(const FreezeRange& range, const Parameter& parameter) {
  return absl::StartsWith(parameter.name, range.prefix);
}

bool Covers(const FreezeRange& range, int64_t step) {
  return range.begin <= step && step < range.end;
}

}  // namespace

absl::StatusOr<FreezeSchedule> ParseFreezeSchedule(absl::string_view text) {
  FreezeSchedule schedule;
  if (text.empty()) return schedule;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    EK_ASSIGN_OR_RETURN(FreezeRange range, ParseRange(part));
    schedule.push_back(std::move(range));
  }
  return schedule;
}

absl::Status CheckFreezeSchedule(const FreezeSchedule& schedule, const ParameterSet& parameters) {
  for (const FreezeRange& range : schedule) {
    bool matches = false;
    std::string names;
    for (int i = 0; i < parameters.size(); ++i) {
      matches = matches || absl::StartsWith(parameters[i].name, range.prefix);
      absl::StrAppend(&names, i == 0 ? "" : ", ", parameters[i].name);
    }
    if (matches) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("no parameter begins with \"", range.prefix, "\"; the model has ", names));
  }
  return absl::OkStatus();
}

std::vector<int> FrozenAt(const FreezeSchedule& schedule, int64_t step,
                          const ParameterSet& parameters) {
  std::vector<int> frozen;
  for (int i = 0; i < parameters.size(); ++i) {
    const auto freezes = [&](const FreezeRange& range) {
      return Names(range, parameters[i]) && Covers(range, step);
    };
    if (absl::c_any_of(schedule, freezes)) frozen.push_back(i);
  }
  return frozen;
}

std::string NamesOf(const std::vector<int>& indices, const ParameterSet& parameters) {
  std::vector<std::string> names;
  for (const int index : indices) names.push_back(parameters[index].name);
  return internal::Listed(names, 6);
}

FreezeChange UpdateFrozen(const FreezeSchedule& schedule, int64_t step,
                          const ParameterSet& parameters, std::vector<int>& frozen) {
  const std::vector<int> before = std::exchange(frozen, FrozenAt(schedule, step, parameters));
  const auto without = [&](const std::vector<int>& these,
                           const std::vector<int>& those) {  // Both in order.
    std::vector<int> rest;
    std::ranges::set_difference(these, those, std::back_inserter(rest));
    return NamesOf(rest, parameters);
  };
  return {.begun = without(frozen, before), .ended = without(before, frozen)};
}

void ApplyFreezeSchedule(const FreezeSchedule& schedule, int64_t step, ParameterSet& parameters) {
  if (schedule.empty()) return;
  const std::vector<int> frozen = FrozenAt(schedule, step, parameters);
  for (int i = 0; i < parameters.size(); ++i) {
    const auto names = [&](const FreezeRange& range) { return Names(range, parameters[i]); };
    if (absl::c_any_of(schedule, names))
      parameters.SetTrainable(i, !absl::c_binary_search(frozen, i));
  }
}

}  // namespace evenkeel
