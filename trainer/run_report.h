// What a run tells while it goes on: lines for a person on standard output, JSON lines for scripts (--metrics).
//
//   EK_ASSIGN_OR_RETURN(auto report, RunReport::Create(stdout, options, run));   // on rank 0
//   EK_RETURN_IF_ERROR(report->OnStep(facts));
//   EK_RETURN_IF_ERROR(report->OnEpoch(epoch, result, test));
//   EK_RETURN_IF_ERROR(report->OnEnd(test, state_hash));      // test_accuracy=0.9012, the last line; of text
//                                                             // test_bits_per_byte=2.31, of tokens test_loss=3.29
//
// When a rank is lost and the others go on, OnLost() tells it. If it was rank 0, the new rank 0 makes a report with the
// list of who is lost, which goes on where the other one ended: nothing is said twice.
//
// Each JSON line has a field `event`: "run" (once; again where a run is resumed, whose lines come behind those that are
// there, and steps since the checkpoint once more), "step" (each of the group's; loss, accuracy and exposed_ms are those
// of rank 0, null once it has run dry; times are by the clock that `clock` names), "dry" (a rank had fewer batches than the group had steps), "epoch" (training
// and test numbers over all ranks), "freeze" (another set of parameters is frozen from this step on), "lost" (a rank;
// steps from this one on are repeated, so that lines about them come again), "test" (once, at the end, with
// a hash of the weights, and of the optimizer's state where every rank has it, that all ranks agreed on).
//
// README.md has a table of all fields. TensorBoard and Prometheus are told the same (run_sinks.h).
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path.

#ifndef EVENKEEL_TRAINER_RUN_REPORT_H_
#define EVENKEEL_TRAINER_RUN_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/metrics.h"
#include "evenkeel/trainer/progress.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/run_recorder.h"
#include "evenkeel/trainer/run_sinks.h"
#include "evenkeel/trainer/step_numbers.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

struct LostRank {
  int rank = 0;      // Its number in the job's first group.
  int64_t step = 0;  // That the others went on with.
};

class RunReport {
 public:
  // `out` and `run` must outlive the object.
  static absl::StatusOr<std::unique_ptr<RunReport>> Create(std::FILE* out, const TrainOptions& options,
                                                           const TrainingRun& run,
                                                           const std::vector<LostRank>& lost = {});

  absl::Status OnStep(const StepFacts& facts);
  absl::Status OnEpoch(int epoch, const EpochResult& result, const Evaluation& test);
  // `lost` has those of before, too. The run's plan is the new one.
  absl::Status OnLost(const std::vector<LostRank>& lost);
  absl::Status OnSaved(absl::string_view path);
  // The run ends here, before its end.
  absl::Status OnStopped();
  // Writes the files of --report and --trace, if there are any; may be called again. `ending`: why the run ends before
  // its end.
  absl::Status WriteRecord(std::vector<RankRecord> ranks, absl::string_view ending);
  // `state_hash` is what TrainingRun::AgreeOnState() gave.
  absl::Status OnEnd(const Evaluation& test, uint64_t state_hash);

 private:
  RunReport(std::FILE* out, const TrainOptions& options, const TrainingRun& run, std::unique_ptr<MetricsWriter> metrics,
            RunSinks sinks);

  absl::Status OnStart(const TrainOptions& options);
  ProgressOptions HowToShow() const;
  void ShowProgress(const StepFacts& facts, const StepNumbers& numbers);
  absl::Status ReportFreezing(int64_t step);
  absl::Status ReportDryRanks(int epoch, const EpochResult& result);
  absl::Status WriteMetrics(const std::vector<MetricsField>& fields);
  std::string DescribeQuality(const Evaluation& evaluation) const;
  // `fields`, and for language models the loss in bits.
  std::vector<MetricsField> WithBits(absl::string_view name, double loss, std::vector<MetricsField> fields) const;
  absl::Status WriteStep(const StepFacts& facts, const StepNumbers& numbers);
  absl::Duration Elapsed() const;

  std::FILE* const out_;
  const FreezeSchedule freeze_;
  const TrainingRun& run_;
  const bool counts_tokens_;  // And not samples.
  const bool are_bytes_;      // Those tokens.
  const int64_t predictions_per_sample_;
  StepPlan plan_;
  const std::unique_ptr<MetricsWriter> metrics_;  // Null: none.
  RunSinks sinks_;
  std::optional<RunRecorder> recorder_;  // For --report and --trace.
  const absl::Time start_;
  std::optional<ProgressLine> progress_;
  ProgressState state_;
  std::vector<int> frozen_;  // In the last step.
  std::vector<LostRank> lost_;
  int epochs_reported_;
  int64_t rank0_predictions_ = 0;  // Of the current epoch, as is the next one.
  int64_t rank0_correct_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RUN_REPORT_H_
