// Keeps what a run's report and trace will show (--report, --trace), and writes them.
//
//   RunRecorder recorder(options, run, history);                  // on every rank, which may be the next rank 0
//   recorder.OnStep(facts);
//   recorder.OnEpoch(epoch, result, test);
//   recorder.OnEvent(step, "lost", "rank 1 is lost");
//   recorder.Write(std::move(ranks), "", failures);               // on rank 0; ranks: what GatherRecords() gave
//   const std::string bytes = Serialize(recorder.RecordWith(std::move(ranks)));      // for a checkpoint
//
// A run that goes on from a checkpoint has a history: what RecordWith() gave when that was written. Its record goes on
// from there, as if there had been no pause.
//
// Takes a bounded amount of memory, however long the run is. Write() may be called at any time between two steps, and
// again: the files then show the run as far as it has come. Each is complete or absent.
//
// Ownership: the run outlives it.
// Threads:   thread-compatible.
// Errors:    the file system's own are noted in `failures`.

#ifndef EVENKEEL_TRAINER_RUN_RECORDER_H_
#define EVENKEEL_TRAINER_RUN_RECORDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/output_failures.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_series.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

class RunRecorder {
 public:
  RunRecorder(const TrainOptions& options, const TrainingRun& run, RunRecord history = {});

  void OnStep(const StepFacts& facts);
  // Nothing, if it is known already: a rank was lost in the evaluation, which comes again.
  void OnEpoch(int epoch, const EpochResult& result, const Evaluation& test);
  void OnEvent(int64_t step, absl::string_view kind, std::string text);

  // Since the run began, without pauses between attempts.
  double Seconds() const;
  // All that is known by now.
  RunRecord RecordWith(std::vector<RankRecord> ranks) const;
  // Writes the files that the options name. `ending`: why the run ends before its end; empty if it does not.
  void Write(std::vector<RankRecord> ranks, absl::string_view ending, OutputFailures& failures) const;

 private:
  void NoteFreezing(int64_t step);

  const TrainingRun& run_;
  const FreezeSchedule freeze_;
  const std::string report_file_;
  const std::string trace_file_;
  const absl::Time start_;
  RunRecord record_;         // Its ranks, plans and seconds are the history's.
  StepSeries steps_;         // The record's.
  std::vector<int> frozen_;  // In the last step.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RUN_RECORDER_H_
