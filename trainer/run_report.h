// What a run tells while it goes on: lines for a person on standard output, JSON lines for scripts (--metrics).
//
//   const auto report = RunReport::Create({.out = stdout, .log = stderr}, options, run, recorder);   // on rank 0
//   report->OnStep(facts);
//   report->OnEpoch(epoch, result, test);
//   EK_RETURN_IF_ERROR(report->OnEnd(test, state_hash));      // test_accuracy=0.9012, the last line; of text
//                                                             // test_bits_per_byte=2.31, of tokens test_loss=3.29
//
// When a rank is lost and the others go on, OnLost() tells it. If it was rank 0, the new rank 0 makes a report with the
// list of who is lost, which goes on where the other one ended: nothing is said twice.
//
// Each JSON line has a field `event`: "run" (once; again where a run is resumed, whose lines come behind those that are
// there, and steps since the checkpoint once more), "step" (each of the group's; loss, accuracy and exposed_ms are
// those of rank 0, null once it has run dry; times are by the clock that `clock` names), "dry" (a rank had fewer
// batches than the group had steps), "epoch" (training and test numbers over all ranks), "freeze" (another set of
// parameters is frozen from this step on), "lost" (a rank; steps from this one on are repeated, so that lines about
// them come again), "test" (once, at the end, with a hash of the weights, and of the optimizer's state where every rank
// has it, that all ranks agreed on).
//
// README.md has a table of all fields. TensorBoard and Prometheus are told the same (run_sinks.h).
//
// Threads: thread-compatible.
// Errors:  a file that can't be written is reported in `log` and ends nothing; OnEnd() fails if `out` can't be written.

#ifndef EVENKEEL_TRAINER_RUN_REPORT_H_
#define EVENKEEL_TRAINER_RUN_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/metrics.h"
#include "evenkeel/trainer/output_failures.h"
#include "evenkeel/trainer/progress.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/run_recorder.h"
#include "evenkeel/trainer/run_sinks.h"
#include "evenkeel/trainer/step_numbers.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/train_streams.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

struct LostRank {
  int rank = 0;      // Its number in the job's first group.
  int64_t step = 0;  // That the others went on with.
};

class RunReport {
 public:
  // The streams, `run` and `recorder` must outlive the object. The recorder is told of the run by its owner.
  static std::unique_ptr<RunReport> Create(const TrainStreams& streams, const TrainOptions& options,
                                           const TrainingRun& run, const RunRecorder& recorder,
                                           const std::vector<LostRank>& lost = {});

  void OnStep(const StepFacts& facts);
  void OnEpoch(int epoch, const EpochResult& result, const Evaluation& test);
  // `lost` has those of before, too. The run's plan is the new one.
  void OnLost(const std::vector<LostRank>& lost);
  void OnSaved(absl::string_view path);
  // The run ends here, before its end.
  void OnStopped();
  // RunRecorder::Write().
  void WriteRecord(std::vector<RankRecord> ranks, absl::string_view ending);
  // `state_hash` is what TrainingRun::AgreeOnState() gave.
  absl::Status OnEnd(const Evaluation& test, uint64_t state_hash);

 private:
  RunReport(const TrainStreams& streams, const TrainOptions& options, const TrainingRun& run,
            const RunRecorder& recorder, MetricsMode mode);

  void OnStart(const TrainOptions& options);
  ProgressOptions HowToShow() const;
  void ShowProgress(const StepFacts& facts, const StepNumbers& numbers);
  void ReportFreezing(int64_t step);
  void ReportDryRanks(int epoch, const EpochResult& result);
  void WriteMetrics(const std::vector<MetricsField>& fields);
  std::string DescribeQuality(const Evaluation& evaluation) const;
  // `fields`, and for language models the loss in bits.
  std::vector<MetricsField> WithBits(absl::string_view name, double loss, std::vector<MetricsField> fields) const;
  void WriteStep(const StepFacts& facts, const StepNumbers& numbers);

  std::FILE* const out_;
  const FreezeSchedule freeze_;
  const TrainingRun& run_;
  const RunRecorder& recorder_;
  const bool counts_tokens_;  // And not samples.
  const bool are_bytes_;      // Those tokens.
  const int64_t predictions_per_sample_;
  StepPlan plan_;
  OutputFailures failures_;
  std::unique_ptr<MetricsWriter> metrics_;  // Null: none.
  RunSinks sinks_;
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
