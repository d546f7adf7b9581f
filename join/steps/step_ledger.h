// The steps that the parts of one rank have finished in a group, and the settings of their last
// steps.
//
//   ledger.Finish("optimizer#0", 12, "learning_rate=0.001");     // at the end of its step 12
//   const std::string mine = ledger.Serialize(StepLedger::Plans::kWith);
//   absl::Status same = StepLedger::Compare(texts);              // of all ranks
//
// Its text is part of a rank's record of the next step (join/steps), of Finalize(), and of the
// agreement before a checkpoint is written. So a rank that omitted a step, or took it with
// different settings, is found before another gradient is reduced. Ranks are compared with each
// other, never with an expected number. `number` is for messages: the comparison counts the steps
// of this group only, because ranks may join it after different numbers of steps.
//
// A part that updates while gradients are still being reduced plans its settings before the step
// (Plan()); that step's record compares them between the ranks that have inputs. A rank that begins
// no step omits its plans: those for a step that only accumulated were never carried out.
//
// Size:    one line per part: its name, two numbers, its settings; about 20 bytes for a reducer,
//          and 40 for an optimizer.
// Threads: thread-compatible; used by the thread that runs steps.

#ifndef EVENKEEL_JOIN_STEPS_STEP_LEDGER_H_
#define EVENKEEL_JOIN_STEPS_STEP_LEDGER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace evenkeel {

class StepLedger {
 public:
  // `settings` has the form "name=value", separated by ", ", and is equal on all ranks. It may be
  // empty.
  void Finish(absl::string_view part, int64_t number, absl::string_view settings);
  void Plan(absl::string_view part, absl::string_view settings);

  // Without plans, parts that have finished no step are omitted: the text of a rank without steps
  // is "".
  enum class Plans { kWith, kWithout };
  std::string Serialize(Plans plans) const;

  // Returns OK if no rank contradicts another one. FailedPrecondition names part, step, ranks and
  // both values: "optimizer#0: step 12 was taken with different settings: rank 1 has
  // learning_rate=0.2; ranks 0,2 have learning_rate=0.1: ...". InvalidArgument for a text that is
  // malformed.
  static absl::Status Compare(absl::Span<const std::string> texts);  // By rank.

 private:
  struct Line {
    int64_t count = 0;   // Steps finished in this group.
    int64_t number = 0;  // The number of the last one.
    bool is_planned = false;
    std::string settings;  // The settings of the last step; if planned, of the next step.
  };
  static absl::Status ParseInto(absl::string_view text, size_t rank, size_t ranks,
                                std::map<std::string, std::vector<Line>>& by_part);
  static absl::Status CompareCounts(const std::string& part, absl::Span<const Line> lines);
  static absl::Status CompareSettings(const std::string& part, absl::Span<const Line> lines,
                                      bool is_planned);

  std::map<std::string, Line, std::less<>> lines_;  // By part.
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_LEDGER_H_
