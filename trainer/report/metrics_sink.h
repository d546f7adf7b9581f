// The interface of the outputs for numbers of a training run, besides its own report: TensorBoard
// (tensorboard.h), Prometheus (prometheus.h).
//
//   const Scalar scalars[] = {{"train/loss", 0.61, "Mean loss of rank 0's batch"},
//                             {"train/step", 12, "Steps done"}};
//   EK_RETURN_IF_ERROR(sink.Write(/*step=*/12, absl::Now(), scalars));
//   EK_RETURN_IF_ERROR(sink.Finish(absl::Now()));
//
// Names are words in lower case with '_', and a group before a '/'; the header of each sink
// describes their use.
//
// Order:     steps increase, except those repeated after GoBackTo().
// Threads:   thread-compatible.
// Ownership: texts and values are read until the call returns; names and help texts of scalars may
//            be kept, and are literals.
// Errors:    the file system's own, with the path.

#ifndef EVENKEEL_TRAINER_REPORT_METRICS_SINK_H_
#define EVENKEEL_TRAINER_REPORT_METRICS_SINK_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

struct Scalar {
  absl::string_view name;
  double value = 0;        // Need not be finite.
  absl::string_view help;  // A sentence on one line, without its full stop.
};

class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  MetricsSink(const MetricsSink&) = delete;
  MetricsSink& operator=(const MetricsSink&) = delete;

  virtual absl::Status Write(int64_t step, absl::Time time, std::span<const Scalar> scalars) = 0;
  // Writes a text. Sinks without texts ignore it.
  virtual absl::Status WriteText(int64_t /*step*/, absl::Time /*time*/, absl::string_view /*name*/,
                                 absl::string_view /*text*/) {
    return absl::OkStatus();
  }
  // Invalidates the values of the steps from this one on, which are repeated.
  virtual absl::Status GoBackTo(int64_t /*step*/, absl::Time /*time*/) { return absl::OkStatus(); }
  // Called at the end of the run. A run that fails does not call it.
  virtual absl::Status Finish(absl::Time /*time*/) { return absl::OkStatus(); }

 protected:
  MetricsSink() = default;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_METRICS_SINK_H_
