// Tells TensorBoard and Prometheus how a run goes, where the options ask for that.
//
//   RunSinks sinks(options, "cnn", /*counts_tokens=*/false, failures);
//   sinks.OnStep(facts, NumbersOf(facts, 1), absl::Now());
//   sinks.OnEpoch(facts.step, test, absl::Now());
//   sinks.OnEnd(absl::Now());
//
// Scalars of a step are train/loss, train/accuracy (both of rank 0's batch), train/learning_rate,
// train/exposed_communication_ratio, and train/samples_per_second or, for language models, train/tokens_per_second and
// train/bits_per_token; after an epoch test/loss, test/accuracy and test/bits_per_token. Every 100 steps there is a
// histogram of what buckets took on their way, communication/bucket_microseconds, out of the steps that the reducer
// measures. What is not known of a step is left out.
//
// Threads:   thread-compatible.
// Ownership: `failures` outlives it.
// Errors:    those of the sinks (report/metrics_sink.h) are noted in `failures`; no sink ends the run.

#ifndef EVENKEEL_TRAINER_RUN_SINKS_H_
#define EVENKEEL_TRAINER_RUN_SINKS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/output_failures.h"
#include "evenkeel/trainer/report/metrics_sink.h"
#include "evenkeel/trainer/step_numbers.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_run.h"

namespace evenkeel {

class RunSinks {
 public:
  static constexpr int64_t kHistogramEvery = 100;

  RunSinks(const TrainOptions& options, const std::string& model, bool counts_tokens, OutputFailures& failures);

  void OnStep(const StepFacts& facts, const StepNumbers& numbers, absl::Time now);
  // `step` is the last one of the epoch.
  void OnEpoch(int64_t step, const Evaluation& test, absl::Time now);
  // Steps from this one on are taken again.
  void OnGoBack(int64_t step, absl::Time now);
  void OnEnd(absl::Time now);

 private:
  void Each(absl::FunctionRef<absl::Status(MetricsSink&)> call);
  void WriteHistogram(int64_t step, absl::Time now);

  OutputFailures& failures_;
  std::map<std::string, std::unique_ptr<MetricsSink>> sinks_;  // By flag.
  const bool counts_tokens_;
  std::vector<double> bucket_us_;  // Of the steps since the last histogram.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RUN_SINKS_H_
