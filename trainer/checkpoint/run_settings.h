// The settings of a run that a checkpoint remembers, and what it means for a run that others are there.
//
//   const RunSettings mine = SettingsOf(options, model, data, world_size);
//   EK_ASSIGN_OR_RETURN(const ResumeTerms terms, CompareSettings(saved, mine));
//   // terms.is_exact; terms.notes: {"max_steps is 600, before it was 400"}
//
// Three kinds: what makes the state another run's is refused; what says which rank gets which samples has the rest of
// the epoch dealt out anew; the rest is told and goes on.
//
// Threads: pure functions of values.
// Errors:  InvalidArgument names the setting and both values.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_RUN_SETTINGS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_RUN_SETTINGS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_data.h"

namespace evenkeel {

inline constexpr char kRanksSetting[] = "the number of ranks";

struct RunSettings {
  using Values = std::map<std::string, std::string>;  // By name.
  Values fixed;
  Values dealing;
  Values free;
  friend bool operator==(const RunSettings&, const RunSettings&) = default;
};

RunSettings SettingsOf(const TrainOptions& options, const Model& model, const TrainingData& data, int world_size);

struct ResumeTerms {
  bool is_exact = true;            // The samples go to the ranks that they would have gone to.
  std::vector<std::string> notes;  // For people: what is different.
};

absl::StatusOr<ResumeTerms> CompareSettings(const RunSettings& saved, const RunSettings& mine);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_SETTINGS_H_
