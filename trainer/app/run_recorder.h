// Records a run for its report and trace (--report, --trace), and writes them.
//
//   RunRecorder recorder(run, history);  // on every rank: each may become rank 0
//   recorder.OnStep(facts);
//   recorder.OnEpoch(epoch, result, test);
//   recorder.OnEvent(step, "lost", "rank 1 is lost");
//   recorder.Write(std::move(ranks), "", failures);  // on rank 0; ranks: from GatherRecords()
//   // for a checkpoint
//   const std::string bytes = Serialize(WithRanks(recorder.Now(), std::move(ranks)));
//
// A run that is resumed from a checkpoint has a history: that record at the time of the
// checkpoint. Its record continues from there, as if there had been no pause.
//
// Uses a bounded amount of memory, however long the run is. Write() may be called between any two
// steps, and repeatedly: the files then show the run up to that step. Each is complete or absent.
//
// Ownership: the run outlives it.
// Threads:   thread-compatible.
// Errors:    the file system's own are noted in `failures`.

#ifndef EVENKEEL_TRAINER_APP_RUN_RECORDER_H_
#define EVENKEEL_TRAINER_APP_RUN_RECORDER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/report/output_failures.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_series.h"

namespace evenkeel {

// The kind of the events with texts of the model; only the latest of them are kept.
inline constexpr char kSampleEvent[] = "sample";

// Returns the record with `ranks`, added to those of its history.
RunRecord WithRanks(RunRecord record, std::vector<RankRecord> ranks);

class RunRecorder {
 public:
  explicit RunRecorder(const TrainingRun& run, RunRecord history = {});

  void OnStep(const StepFacts& facts);
  // Ignores an epoch that it has already: when a rank is lost in the evaluation, it is repeated.
  void OnEpoch(int epoch, const EpochResult& result, const TestResult& tested);
  // `steps`: before the evaluation. Ignores one that it has already.
  void OnTest(int64_t steps, const Evaluation& test);
  void OnEvent(int64_t step, absl::string_view kind, std::string text);
  // Continues the record of another rank, from now on.
  void TakeOver(RunRecord record);
  // The plan of the run is still that of `members`, before the loss.
  void OnLost(const std::vector<int>& members, const GoneOn& gone_on, absl::Duration pause);
  // Adds a point to the curves of the ranks' costs.
  void OnStragglers(int64_t step, const StragglerReport& recent);

  // Returns the time since the run began, without pauses between attempts.
  double Seconds() const;
  // Returns the record up to now; its ranks are those of the history.
  RunRecord Now() const;
  // Writes the files that the options name. `ending`: the reason for which the run stopped before
  // its end; empty if it reached its end; nullopt if it goes on, and then only writes the report.
  void Write(std::vector<RankRecord> ranks, std::optional<absl::string_view> ending,
             OutputFailures& failures) const;

 private:
  // Drops the oldest sample if there are kMostSamples.
  void DropOldestSample();
  void NoteFreezing(int64_t step);

  const TrainingRun& run_;
  absl::Time start_;
  RunRecord record_;         // Its ranks, plans and seconds are the history's.
  StepSeries steps_;         // The record's.
  std::vector<int> frozen_;  // In the last step.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_RUN_RECORDER_H_
