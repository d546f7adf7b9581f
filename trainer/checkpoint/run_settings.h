// The settings of a run in its checkpoints, and the effect of resuming with different ones.
//
//   EK_ASSIGN_OR_RETURN(const ResumeTerms terms, CompareSettings(saved, mine));
//   // terms.is_exact; terms.notes: {"max_steps is 600, before it was 400"}
//
// Three kinds: a difference in a `fixed` setting means a different run and is refused; one in a
// `dealing` setting redistributes the rest of the epoch over the ranks; one in a `free` setting is
// only reported.
//
// Threads: pure functions of values.
// Errors:  InvalidArgument names the setting and both values.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_RUN_SETTINGS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_RUN_SETTINGS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

inline constexpr char kContentSetting[] = "the training data (hash of up to 100 samples)";
inline constexpr char kRanksSetting[] = "the number of ranks";

struct RunSettings {
  using Values = std::map<std::string, std::string>;  // By name.
  Values fixed;
  Values dealing;
  Values free;
  friend bool operator==(const RunSettings&, const RunSettings&) = default;
};

struct ResumeTerms {
  bool is_exact = true;            // The samples are assigned to the same ranks as before.
  std::vector<std::string> notes;  // Descriptions of the differences.
};

absl::StatusOr<ResumeTerms> CompareSettings(const RunSettings& saved, const RunSettings& mine);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_SETTINGS_H_
