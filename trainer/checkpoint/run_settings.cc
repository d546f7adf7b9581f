#include "evenkeel/trainer/checkpoint/run_settings.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

// Returns the names whose values differ or that only one of them has.
std::set<std::string> Differences(const RunSettings::Values& a, const RunSettings::Values& b) {
  std::set<std::string> names;
  std::vector<std::pair<std::string, std::string>> settings;
  std::ranges::set_symmetric_difference(a, b, std::back_inserter(settings));
  for (const auto& [name, value] : settings) names.insert(name);
  return names;
}

std::string ValueOf(const RunSettings::Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? "not set" : found->second.empty() ? "none" : found->second;
}

}  // namespace

absl::StatusOr<ResumeTerms> CompareSettings(const RunSettings& saved, const RunSettings& mine) {
  for (const std::string& name : Differences(saved.fixed, mine.fixed)) {
    if (name == kContentSetting && !saved.fixed.contains(name)) continue;  // Version 0.3.
    return absl::InvalidArgumentError(absl::StrCat(
        "the checkpoint belongs to a different run: ", name, " is ", ValueOf(saved.fixed, name),
        " in the checkpoint, but ", ValueOf(mine.fixed, name), " in this run"));
  }
  ResumeTerms terms;
  for (const auto& [before, now] :
       {std::pair(&saved.dealing, &mine.dealing), std::pair(&saved.free, &mine.free)}) {
    for (const std::string& name : Differences(*before, *now)) {
      terms.notes.push_back(absl::StrCat(name, " is ", ValueOf(*now, name),
                                         ", in the checkpoint it was ", ValueOf(*before, name)));
    }
  }
  terms.is_exact = saved.dealing == mine.dealing;
  if (terms.is_exact) return terms;
  terms.notes.push_back("the rest of the epoch is redistributed over the ranks");
  for (const RunSettings* settings : {&saved, &mine}) {
    const auto limits = settings->dealing.find("rank_steps"),
               stops = settings->free.find("stop_early");
    const bool has_limits = limits != settings->dealing.end() && !limits->second.empty();
    const bool stops_early = stops != settings->free.end() && stops->second == "true";
    if (!has_limits && !stops_early) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("with --rank_steps or --stop_early a run can only be resumed with the same "
                     "ranks and batches: ",
                     terms.notes[0]));
  }
  return terms;
}

}  // namespace evenkeel
