// Keeps what a run's report and trace will show (--report, --trace), and writes them.
//
//   RunRecorder recorder(options, run);                           // on rank 0
//   recorder.OnStep(facts);
//   recorder.OnEpoch(epoch, result, test);
//   recorder.OnEvent(step, "lost", "rank 1 is lost");
//   EK_RETURN_IF_ERROR(recorder.Write(std::move(ranks), ""));     // ranks: what GatherRecords() gave
//
// Takes a bounded amount of memory, however long the run is. Write() may be called at any time between two steps, and
// again: the files then show the run as far as it has come. Each is complete or absent.
//
// Ownership: the run outlives it.
// Threads:   thread-compatible.
// Errors:    the file system's own, with the path.

#ifndef EVENKEEL_TRAINER_RUN_RECORDER_H_
#define EVENKEEL_TRAINER_RUN_RECORDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_series.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

class RunRecorder {
 public:
  RunRecorder(const TrainOptions& options, const TrainingRun& run);

  void OnStep(const StepFacts& facts);
  void OnEpoch(int epoch, const EpochResult& result, const Evaluation& test);
  void OnEvent(int64_t step, absl::string_view kind, std::string text);

  // `ending`: why the run ends before its end; empty if it does not.
  absl::Status Write(std::vector<RankRecord> ranks, absl::string_view ending);

 private:
  double Seconds() const;

  const TrainingRun& run_;
  const std::string report_file_;
  const std::string trace_file_;
  const absl::Time start_;
  RunRecord record_;
  StepSeries steps_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RUN_RECORDER_H_
