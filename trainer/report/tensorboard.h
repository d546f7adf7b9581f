// Event files that TensorBoard shows: `tensorboard --logdir=runs`, with a folder in it for each
// run.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<MetricsSink> sink, OpenTensorboard("runs/first"));
//   EK_RETURN_IF_ERROR(sink->Write(/*step=*/12, absl::Now(), scalars));
//
// Each sink writes a file of its own, events.out.tfevents.<time>.<host>.<process>.<number>, in the
// folder, which is created if it does not exist: a run that is resumed, or continued by another
// rank, adds a file, and TensorBoard shows all files of a folder as one run. Names of scalars are
// shown unchanged; the part before a '/' is a group. GoBackTo() makes TensorBoard discard the steps
// from there on.
//
// Records are passed to the system whole and at once: readers see complete records, and a crash of
// the process loses none.
//
// Threads: thread-compatible; sinks have different files.
// Errors:  the file system's own, with the path.
// Source:  TFRecord framing (tensorflow.org/tutorials/load_data/tfrecord); the messages Event,
//          Summary and SessionLog of TensorBoard (tensorboard/compat/proto).

#ifndef EVENKEEL_TRAINER_REPORT_TENSORBOARD_H_
#define EVENKEEL_TRAINER_REPORT_TENSORBOARD_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/report/metrics_sink.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<MetricsSink>> OpenTensorboard(const std::string& folder);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_TENSORBOARD_H_
