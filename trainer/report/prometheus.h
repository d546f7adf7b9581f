// A text file with the state of a training run, which Prometheus' node_exporter reads from a
// folder, for dashboards and alarms.
//
//   std::unique_ptr<MetricsSink> sink =
//       OpenPrometheus("/var/lib/node_exporter/train.prom", "cnn");
//   EK_RETURN_IF_ERROR(sink->Write(/*step=*/12, absl::Now(), scalars));
//
//   # HELP evenkeel_train_loss Mean loss of rank 0's batch
//   # TYPE evenkeel_train_loss gauge
//   evenkeel_train_loss{model="cnn",run="train"} 0.61
//
// A scalar "train/loss" is the gauge evenkeel_train_loss, with the name of the model and that of
// the file as labels. The file has the last value of each scalar, and three more:
// evenkeel_train_step, counted from 0; evenkeel_train_up, 1 until Finish() sets it to 0; and
// evenkeel_train_last_update_timestamp_seconds, which stops increasing when a run fails.
//
// It is written under another name and renamed, so that readers see complete files; at most once
// per `period`, and at the end. node_exporter reads files whose names end with .prom, in
// --collector.textfile.directory.
//
// Threads: thread-compatible.
// Errors:  the file system's own, with the path.
// Source:  prometheus.io/docs/instrumenting/exposition_formats.

#ifndef EVENKEEL_TRAINER_REPORT_PROMETHEUS_H_
#define EVENKEEL_TRAINER_REPORT_PROMETHEUS_H_

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/trainer/report/metrics_sink.h"

namespace evenkeel {

std::unique_ptr<MetricsSink> OpenPrometheus(std::string path, absl::string_view model,
                                            absl::Duration period = absl::Seconds(5));

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_PROMETHEUS_H_
