// The output of a run: text on standard output, and JSON lines for scripts (--metrics).
//
//   // on rank 0
//   RunOutput report({.out = stdout, .log = stderr}, run, recorder, failures);
//   report.OnStep(facts);
//   report.OnEpoch(epoch, result, test);
//   // The last line: test_accuracy=0.9012, for text test_bits_per_byte=2.31, for tokens
//   // test_loss=3.29
//   EK_RETURN_IF_ERROR(report.OnEnd(test, state_hash));
//
// When a rank is lost and the others continue, OnLost() reports it. If rank 0 was lost, the new
// rank 0 creates an output with the past of the run, which continues where the old one ended:
// nothing is written twice.
//
// Each JSON line has a field `event`; trainer/README.md has a table of the events and their fields.
// A run that is resumed appends its lines, and repeats the steps since the checkpoint; after the
// loss of a rank that was not replaced, too, steps are repeated with their lines. TensorBoard and
// Prometheus get the same numbers (dashboards.h).
//
// Threads: thread-compatible.
// Errors:  a file that cannot be written is noted in `failures` and does not end the run; OnEnd()
//          fails if `out` cannot be written.

#ifndef EVENKEEL_TRAINER_APP_RUN_OUTPUT_H_
#define EVENKEEL_TRAINER_APP_RUN_OUTPUT_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/join/steps/straggler_report.h"
#include "evenkeel/trainer/app/dashboards.h"
#include "evenkeel/trainer/app/metrics.h"
#include "evenkeel/trainer/app/progress.h"
#include "evenkeel/trainer/app/run_recorder.h"
#include "evenkeel/trainer/app/step_facts.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/checkpoint/run_checkpoints.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/report/output_failures.h"

namespace evenkeel {

// The streams for the text of a run.
struct TrainStreams {
  std::FILE* out;  // Rank 0: the run's description and progress.
  std::FILE* log;  // Warnings and errors.
};

struct LostRank {
  int rank = 0;      // Its number in the job's first group.
  int64_t step = 0;  // The first step without it.
  bool is_replaced = false;
  std::string cause;    // The error of the ranks that continued.
  double pause_ms = 0;  // From that error until they continued.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.rank, self.step, self.is_replaced, self.cause, self.pause_ms);
  }
};

// The past of a run that a new rank 0 needs for its output.
struct RunPast {
  std::vector<LostRank> lost;
  int lost_written = 0;          // The number of them that another rank 0 has written.
  std::vector<StepFacts> steps;  // The last two.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.lost, self.lost_written, self.steps);
  }
};

class RunOutput {
 public:
  // The streams, `run`, `recorder` and `failures` must outlive the object. The caller passes the
  // events of the run to the recorder.
  RunOutput(const TrainStreams& streams, const TrainingRun& run, const RunRecorder& recorder,
            OutputFailures& failures, const RunPast& past = {});

  void OnStep(const StepFacts& facts);
  // `news`: StragglerNews(), may be empty. `recent`: RecentStragglersOf().
  void OnStragglers(int64_t step, const std::string& news, const StragglerReport& recent);
  // `news`: TrainingRun::ShareNews().
  void OnShares(const std::string& news) { Print("%s\n", news); }
  void OnEpoch(int epoch, const EpochResult& result, const TestResult& tested);
  // An evaluation before the end of an epoch.
  void OnTest(const TestResult& result);
  // A text that the model wrote after `steps` steps.
  void OnSample(int64_t steps, const std::string& text);
  void OnConverged(int64_t steps, int64_t patience);
  // `lost` has all lost ranks, earlier ones included. The run's plan is the new one.
  void OnLost(const std::vector<LostRank>& lost);
  void OnSaved(absl::string_view path);
  // Writes the metrics of a checkpoint whose writing has ended; the caller logs its error.
  void OnCheckpoint(const EndedCheckpoint& ended);
  // The run stops before its end.
  void OnStopped();
  // `state_hash` is the result of TrainingRun::AgreeOnState().
  absl::Status OnEnd(const Evaluation& test, uint64_t state_hash);

 private:
  void OnStart();
  void TakeOver(const RunPast& past);
  ProgressOptions HowToShow() const;
  void ShowProgress(const StepFacts& facts, const StepNumbers& numbers);
  void ReportFreezing(int64_t step);
  void ReportExhaustedRanks(int epoch, const EpochResult& result);
  void ShowWaits();
  // Prints below the progress line.
  template <typename... Args>
  void Print(const absl::FormatSpec<Args...>& format, const Args&... args) {
    progress_->Finish();
    absl::FPrintF(out_, format, args...);
    std::fflush(out_);
  }
  void WriteMetrics(const MetricsFields& fields);
  // `data`: that of the evaluation.
  std::string DescribeQuality(const Evaluation& evaluation, const Dataset& data) const;
  // Writes `fields`, and for language models the loss in bits.
  MetricsFields WithBits(const char* name, double loss, MetricsFields fields) const;
  void WriteStep(const StepFacts& facts, const StepNumbers& numbers);

  std::FILE* const out_;
  const TrainingRun& run_;
  const RunRecorder& recorder_;
  const bool counts_tokens_;  // Instead of samples.
  const int64_t predictions_per_sample_;
  OutputFailures& failures_;
  std::unique_ptr<MetricsWriter> metrics_;  // Null: none.
  Dashboards sinks_;
  std::optional<ProgressLine> progress_;
  ProgressState state_;
  std::vector<int> frozen_;  // In the last step.
  std::vector<LostRank> lost_;
  int epochs_reported_;
  int64_t rank0_predictions_ = 0;  // In the current epoch, as is the next one.
  int64_t rank0_correct_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_RUN_OUTPUT_H_
