// What a run tells while it goes on: lines for a person on standard output, JSON lines for scripts (--metrics).
//
//   EK_ASSIGN_OR_RETURN(auto report, RunReport::Create(stdout, options, comm.backend_name(), run));   // on rank 0
//   EK_RETURN_IF_ERROR(report->OnStep(facts));
//   EK_RETURN_IF_ERROR(report->OnEpoch(epoch, result, test));
//   EK_RETURN_IF_ERROR(report->OnEnd(test));                  // test_accuracy=0.9012, the last line
//
// Each JSON line has a field `event`: "run" (once), "step" (each of the group's; loss, accuracy and sync_ms are those
// of rank 0, null once it has run dry), "dry" (a rank had fewer batches than the group had steps), "epoch" (training
// and test numbers over all ranks), "freeze" (another set of parameters is frozen from this step on), "test" (once, at
// the end).
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path.

#ifndef EVENKEEL_TRAINER_RUN_REPORT_H_
#define EVENKEEL_TRAINER_RUN_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/metrics.h"
#include "evenkeel/trainer/progress.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

class RunReport {
 public:
  // `out` and `run` must outlive the object.
  static absl::StatusOr<std::unique_ptr<RunReport>> Create(std::FILE* out, const TrainOptions& options,
                                                           absl::string_view backend, const TrainingRun& run);

  absl::Status OnStep(const StepFacts& facts);
  absl::Status OnEpoch(int epoch, const EpochResult& result, const Evaluation& test);
  absl::Status OnSaved(absl::string_view path);
  absl::Status OnEnd(const Evaluation& test);

 private:
  RunReport(std::FILE* out, const TrainOptions& options, const TrainingRun& run,
            std::unique_ptr<MetricsWriter> metrics);

  absl::Status OnStart(const TrainOptions& options, absl::string_view backend, const TrainingRun& run);
  absl::Status ReportFreezing(int64_t step);
  absl::Status ReportDryRanks(int epoch, const EpochResult& result);
  absl::Status WriteMetrics(std::initializer_list<MetricsField> fields);
  absl::Duration Elapsed() const;

  std::FILE* const out_;
  const FreezeSchedule freeze_;
  const ParameterSet& parameters_;
  const StepPlan plan_;
  const std::unique_ptr<MetricsWriter> metrics_;  // Null: none.
  const absl::Time start_;
  ProgressLine progress_;
  ProgressState state_;
  std::vector<int> frozen_;    // In the last step.
  int64_t rank0_samples_ = 0;  // Of the current epoch, as are the next two.
  int64_t rank0_correct_ = 0;
  double rank0_loss_ = 0;  // A running mean: a batch's own jumps too much to read.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RUN_REPORT_H_
