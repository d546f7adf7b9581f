// What a run was, as plain values: all that its report (html_report.h) and its trace (chrome_trace.h) show.
//
//   RunRecord record{.title = "mlp on 2 ranks", .world_size = 2};
//   record.epochs.push_back({.epoch = 0, .test_accuracy = 0.87});
//   WriteFileAtomically("run.html", {RenderReport(record)});
//
// Values that are not known are NaN, empty or negative, as each says; the report leaves them out.
//
// Units:   seconds since the run began, without pauses between attempts (a resumed run has several); times of traces
//          are nanoseconds (Unix time) of the host's clock, which ranks of one host share, or of a device's that was
//          aligned with it. Steps are the group's, counted from 0.
// Threads: values.

#ifndef EVENKEEL_TRAINER_REPORT_RUN_RECORD_H_
#define EVENKEEL_TRAINER_REPORT_RUN_RECORD_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace evenkeel {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Whose time it is: when the host did something, or when a device did what the host had put on its stream.
enum class StepClock : uint8_t { kHost, kDevice };
inline const char* NameOf(StepClock clock) { return clock == StepClock::kHost ? "host" : "device"; }

// A step, or the means of `count` steps in a row that begin with it. Loss and accuracy are those of one rank's batches.
struct StepPoint {
  int64_t step = 0;
  int64_t count = 1;
  double seconds = 0;  // Since the run began, at its end.
  double loss = kUnknown;
  double accuracy = kUnknown;
  double learning_rate = kUnknown;
  double took = kUnknown;     // Seconds, of one step.
  double exposed = kUnknown;  // Seconds of it, that this rank waited for gradients after its backward pass.
  double samples = 0;         // In all ranks' batches of one step.
  double active = 0;          // Ranks that had a batch.
};

struct EpochPoint {
  int epoch = 0;
  int64_t step = 0;  // The last one of the epoch.
  double seconds = 0;
  double train_loss = kUnknown;
  double train_accuracy = kUnknown;
  double test_loss = kUnknown;
  double test_accuracy = kUnknown;
  int64_t first_step = 0;
  std::vector<int64_t> batches;  // That each rank had. Who had fewer than the others was dry for the rest.
  std::vector<int> ranks;        // Whose they are, by the numbers in the job's first group. Empty: 0, 1, 2, ...
};

// What a rank did in a sampled step, one thing after the other.
enum class SpanKind : uint8_t {
  kData,       // Its batch is put together.
  kBegin,      // The step begins: plan and buffers are the same on all ranks.
  kForward,    //
  kBackward,   // Buckets leave as they are complete.
  kWait,       // What is left of the reduction.
  kOptimizer,  //
  kFollow,     // The rank has run dry and takes part in the others' step.
};
inline constexpr int kSpanKinds = 7;

struct TraceSpan {
  SpanKind kind = SpanKind::kData;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

struct BucketTrace {
  int64_t bytes = 0;
  int64_t ready_ns = 0;    // All its gradients are there.
  int64_t start_ns = 0;    // It was launched, and the one before it was reduced.
  int64_t reduced_ns = 0;  //
};

struct StepTrace {
  int64_t step = 0;
  int64_t last_gradient_ns = 0;        // What is reduced after it was not hidden by backward. 0: no backward.
  std::vector<TraceSpan> spans;        // In order, apart from each other.
  std::vector<BucketTrace> buckets;    // In the plan's order; those that were measured. None by a device's clock.
  StepClock clock = StepClock::kHost;  // Of all these.
  int64_t host_ns = 0;                 // By a device's clock: how long the host took to put the step there.
};

// In bytes.
struct RankMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;  // Where they are no views of buckets.
  int64_t buckets = 0;
  int64_t optimizer = 0;
  int64_t activations = 0;    // And their gradients, of the batch sizes that there have been.
  int64_t peak_resident = 0;  // Of the process: its other ranks, if those are threads, included. 0: not known.
};

// Means over the steps that were measured, in microseconds (bucket/stats.h).
struct RankMeans {
  int64_t steps = 0;
  double to_first_gradient_us = 0;
  double backward_us = 0;
  double communication_us = 0;  // NaN by a device's clock: not known.
  double exposed_us = 0;
  StepClock clock = StepClock::kHost;
};

// What one rank knows of itself.
struct RankRecord {
  int rank = 0;  // Its number in the job's first group.
  std::string host;
  int64_t process = 0;
  int64_t steps = 0;     // Of the group, that it took part in,
  int64_t followed = 0;  // those included that it had no batch for.
  RankMemory memory;
  RankMeans means;
  std::vector<StepTrace> traces;
};

struct PlannedBucket {
  int64_t bytes = 0;
  std::vector<std::string> parameters;
  friend bool operator==(const PlannedBucket&, const PlannedBucket&) = default;
};

// The buckets from one step on.
struct PlanRecord {
  int64_t step = 0;
  std::vector<PlannedBucket> buckets;
};

struct RunEvent {
  int64_t step = 0;
  double seconds = 0;
  std::string kind;  // One word: "lost", "frozen", ...
  std::string text;
};

struct RunSetting {
  std::string name;
  std::string value;
};

struct RunRecord {
  std::string title;    // "cnn on Fashion-MNIST"
  std::string summary;  // One line about how it was trained.
  std::string date;
  std::string ending;                      // Why it ended before its end; empty if it did not.
  std::string unit_name = "samples";       // What throughput counts: "images", or "tokens", of which
  double units_per_sample = 1;             // there are so many in a sample.
  double bytes_per_prediction = kUnknown;  // Of a language model; its loss is shown in bits per byte then.
  bool has_accuracy = true;
  int world_size = 1;  // That this attempt at the run began with.
  int reporter = 0;    // The rank whose losses, accuracies and exposed times the steps have.
  int64_t parameters = 0;
  int64_t begin_ns = 0;  // Unix time.
  double seconds = 0;    // That it took.

  std::vector<StepPoint> steps;
  std::vector<EpochPoint> epochs;
  std::vector<PlanRecord> plans;  // In order.
  std::vector<RankRecord> ranks;  // Those that were there at the end.
  std::vector<RunEvent> events;
  std::vector<RunSetting> settings;
  int64_t total_steps = 0;
  int64_t samples = 0;          // In all steps.
  int64_t samples_of_tail = 0;  // In steps for which some rank had no batch: they would have been dropped.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_RUN_RECORD_H_
