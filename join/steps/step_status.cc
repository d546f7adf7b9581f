#include "evenkeel/join/steps/step_status.h"

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/json.h"

namespace evenkeel {
namespace {

std::string Milliseconds(double us) { return absl::StrFormat("%.3f", us / 1e3); }
const char* Bool(bool value) { return value ? "true" : "false"; }

// Writes to `json`, which must outlive the brackets.
void Write(const StepStatus& status, const StragglerReport& recent, int rank, std::string* json) {
  internal::JsonJoined fields(json, '{', '}');
  fields.Add("\"step\":", status.step);
  fields.Add("\"phase\":", internal::JsonQuoted(NameOf(status.phase)));
  fields.Add("\"exhausted\":", Bool(status.is_exhausted));
  fields.Add("\"waited_ms\":", status.waited_ms);
  if (recent.steps == 0) return;
  const StragglerReport::Rank& mine = recent.ranks[rank];
  fields.Add("\"step_ms\":", Milliseconds(absl::ToDoubleMicroseconds(recent.time) /
                                          static_cast<double>(recent.steps)));
  fields.Add("\"cost\":", absl::StrFormat("%.4f", mine.cost));
  fields.Add("\"straggler\":", Bool(mine.is_straggler));
  fields.Add("\"cost_phase\":", internal::JsonQuoted(NameOf(mine.phase)));
  if (mine.samples > 0) fields.Add("\"samples\":", absl::StrFormat("%.1f", mine.samples));
  fields.Add("\"ms\":");
  {
    internal::JsonJoined times(json, '{', '}');
    for (int i = 0; i < kStepPhases; ++i) {
      const auto phase = static_cast<StepPhase>(i);
      times.Add(internal::JsonQuoted(NameOf(phase)), ":",
                Milliseconds(static_cast<double>(mine.mean.busy(phase))));
    }
    times.Add("\"waiting\":", Milliseconds(static_cast<double>(mine.mean.waited_us)));
  }
  const BucketsReady& ready = mine.mean.ready;
  if (ready.last_us == 0) return;
  fields.Add("\"ready_ms\":{\"first\":", Milliseconds(static_cast<double>(ready.first_us)),
             ",\"last\":", Milliseconds(static_cast<double>(ready.last_us)), "}");
}

}  // namespace

std::string ToJson(const StepStatus& status, const StragglerReport& recent, int rank) {
  std::string json;
  Write(status, recent, rank, &json);
  return json;
}

}  // namespace evenkeel
