// The steps that the parts of one rank have finished in a group, and the settings of their last ones.
//
//   ledger.Finish("optimizer#0", 12, "learning_rate=0.001");     // at the end of its step 12
//   const std::string mine = ledger.Serialize(StepLedger::Plans::kWith);
//   absl::Status same = StepLedger::Compare(texts);              // every rank's
//
// The text is part of a rank's record of the next step (step_control.h), of Finalize(), and of what is agreed on before
// a checkpoint is written. So a rank that left a step out, or took it with settings of its own, is found before another
// gradient is reduced. Ranks are compared with each other, never with an expected number. `number` is for messages: the
// comparison counts the steps of this group only, because ranks may join it after different numbers of steps.
//
// A part that updates while gradients are still reduced plans its settings before the step (Plan()); they are compared
// in that step's record, between the ranks that have inputs. A rank that begins no step leaves its plans out: those for
// a step that only accumulated were never carried out.
//
// Size:    a line per part: its name, two numbers, its settings; some 20 bytes for a reducer, 40 for an optimizer.
// Threads: thread-compatible; the thread that runs steps.

#ifndef EVENKEEL_COMM_STEP_LEDGER_H_
#define EVENKEEL_COMM_STEP_LEDGER_H_

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
  // `settings`: "name=value" with ", " between, equal on all ranks; may be empty.
  void Finish(absl::string_view part, int64_t number, absl::string_view settings);
  void Plan(absl::string_view part, absl::string_view settings);

  enum class Plans { kWith, kWithout };
  std::string Serialize(Plans plans) const;

  // OK if no rank contradicts another one. FailedPrecondition names part, step, ranks and both values: "optimizer#0:
  // step 12 was taken with different settings: rank 1 has learning_rate=0.2; ranks 0,2 have learning_rate=0.1: ...".
  // InvalidArgument for a text that is malformed.
  static absl::Status Compare(absl::Span<const std::string> texts);  // By rank.

 private:
  struct Line {
    int64_t count = 0;   // Steps finished in this group.
    int64_t number = 0;  // The last of them.
    bool is_planned = false;
    std::string settings;  // The last step's; planned: the next step's.
  };
  static absl::Status ParseInto(absl::string_view text, size_t rank, size_t ranks,
                                std::map<std::string, std::vector<Line>>& by_part);
  static absl::Status CompareCounts(const std::string& part, absl::Span<const Line> lines);
  static absl::Status CompareSettings(const std::string& part, absl::Span<const Line> lines, bool is_planned);

  std::map<std::string, Line, std::less<>> lines_;  // By part.
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_STEP_LEDGER_H_
