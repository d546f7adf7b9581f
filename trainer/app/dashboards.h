// Reports the progress of a run to TensorBoard and Prometheus, as the options ask.
//
//   Dashboards sinks(options, /*counts_tokens=*/false, failures);
//   sinks.OnStep(facts, NumbersOf(facts, 1), absl::Now());
//   sinks.OnTest(facts.step, test, absl::Now());
//   sinks.OnEnd(absl::Now());
//
// Scalars of a step are train/loss, train/accuracy (both of rank 0's batch), train/learning_rate,
// train/exposed_communication_ratio, and train/samples_per_second or, for language models,
// train/tokens_per_second and train/bits_per_token; train/step_seconds, and with clipping
// train/gradient_norm, with --balance train/rank0_samples; after an evaluation test/loss,
// test/accuracy and test/bits_per_token (test_part/... within an epoch with --eval_batches).
// TensorBoard also gets generated texts as `sample`. Every 50 steps train/straggler_cost_ratio and
// train/straggler_rank show the slowest rank. Unknown values are left out.
//
// Threads:   thread-compatible.
// Ownership: `failures` outlives it.
// Errors:    errors of the sinks (report/metrics_sink.h) are noted in `failures`; no sink ends the
//            run.

#ifndef EVENKEEL_TRAINER_APP_DASHBOARDS_H_
#define EVENKEEL_TRAINER_APP_DASHBOARDS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/join/steps/straggler_report.h"
#include "evenkeel/trainer/app/step_facts.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/report/metrics_sink.h"
#include "evenkeel/trainer/report/output_failures.h"

namespace evenkeel {

class Dashboards {
 public:
  Dashboards(const TrainOptions& options, bool counts_tokens, OutputFailures& failures);

  void OnStep(const StepFacts& facts, const StepNumbers& numbers, absl::Time now);
  void OnStragglers(int64_t step, const StragglerReport& recent, absl::Time now);
  // `step` is the last one before the evaluation.
  // `is_part`: only a part of the test data was used; the names then begin with test_part/.
  void OnTest(int64_t step, const Evaluation& test, absl::Time now, bool is_part = false);
  void OnSample(int64_t step, absl::string_view text, absl::Time now);
  // The run repeats the steps from this one on.
  void OnGoBack(int64_t step, absl::Time now);
  void OnEnd(absl::Time now);

 private:
  void Write(int64_t step, absl::Time time, std::span<const Scalar> scalars);
  void Each(absl::FunctionRef<absl::Status(MetricsSink&)> call);

  OutputFailures& failures_;
  std::map<std::string, std::unique_ptr<MetricsSink>> sinks_;  // By flag.
  const bool counts_tokens_;
  const bool balances_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_DASHBOARDS_H_
