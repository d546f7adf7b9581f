// The record of a run as plain values: the data of its report (html_report.h) and its trace
// (chrome_trace.h).
//
//   RunRecord record{.title = "mlp on 2 ranks", .world_size = 2};
//   record.epochs.push_back({.epoch = 0, .test_accuracy = 0.87});
//   WriteFileAtomically("run.html", {RenderReport(record)});
//   const std::string bytes = Serialize(record);
//
// Unknown values are NaN, empty or negative, as documented at each; the report leaves them out.
//
// Units:   seconds since the run began, without pauses between attempts (a resumed run has
//          several); times of traces are nanoseconds (Unix time) of the host's clock, which ranks
//          of one host share, or of a device's clock aligned with it. Steps are the group's,
//          counted from 0.
// Threads: values and pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_RUN_RECORD_H_
#define EVENKEEL_TRAINER_REPORT_RUN_RECORD_H_

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/join/steps/straggler_report.h"

namespace evenkeel {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// The clock of a time: the host's, or that of a device for work that the host enqueued on its
// stream.
enum class StepClock : uint8_t { kHost, kDevice };
inline const char* NameOf(StepClock clock) { return clock == StepClock::kHost ? "host" : "device"; }

// A step, or the means of `count` consecutive steps from it on. Loss and accuracy are those of one
// rank's batches.
struct StepPoint {
  int64_t step = 0;
  int64_t count = 1;
  double seconds = 0;  // Since the beginning of the run, at the end of the step.
  double loss = kUnknown;
  double accuracy = kUnknown;
  double learning_rate = kUnknown;
  double took = kUnknown;  // Seconds, of one step.
  double exposed =
      kUnknown;  // Seconds of `took` in which this rank waited for gradients after backward.
  double gradient_norm = kUnknown;  // 2-norm, before clipping; unknown without clipping.
  double samples = 0;               // In one step, over all ranks.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.step, self.count, self.seconds, self.loss, self.accuracy, self.learning_rate,
          self.took, self.exposed, self.gradient_norm, self.samples);
  }
};

struct EpochPoint {
  int epoch = 0;
  int64_t step = 0;  // The last one of the epoch.
  double train_loss = kUnknown;
  double test_loss = kUnknown;
  double test_accuracy = kUnknown;
  int64_t first_step = 0;
  std::vector<int64_t>
      batches;             // By rank. A rank with fewer than the others was exhausted for the rest.
  std::vector<int> ranks;  // Those of `batches`, by their numbers in the job's first group.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.epoch, self.step, self.train_loss, self.test_loss, self.test_accuracy,
          self.first_step, self.batches, self.ranks);
  }
};

// An evaluation of the test data, at the end of an epoch or before.
struct TestPoint {
  int64_t step = 0;  // The last step before the evaluation.
  double loss = kUnknown;
  double accuracy = kUnknown;

  static void VisitFields(auto& self, auto& visit) { visit(self.step, self.loss, self.accuracy); }
};

// The consecutive activities of a rank in a sampled step.
enum class SpanKind : uint8_t {
  kData,       // The batch is assembled.
  kBegin,      // The step begins: plan and buffers are the same on all ranks.
  kForward,    //
  kBackward,   // Buckets are launched as they are complete.
  kWait,       // The rest of the reduction.
  kOptimizer,  //
  kFollow,     // The rank is exhausted and shadows the active ranks' step.
};
inline constexpr int kSpanKinds = 7;
absl::string_view NameOf(SpanKind kind);  // "forward"

struct TraceSpan {
  SpanKind kind = SpanKind::kData;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;

  static void VisitFields(auto& self, auto& visit) {
    visit(visit.UpTo(self.kind, SpanKind::kFollow), self.begin_ns, self.end_ns);
  }
};

struct BucketTrace {
  int64_t bytes = 0;
  int64_t ready_ns = 0;    // All its gradients are ready.
  int64_t start_ns = 0;    // It was launched, and the one before it was reduced.
  int64_t reduced_ns = 0;  //

  static void VisitFields(auto& self, auto& visit) {
    visit(self.bytes, self.ready_ns, self.start_ns, self.reduced_ns);
  }
};

struct StepTrace {
  int64_t step = 0;
  int64_t last_gradient_ns = 0;  // Reductions after it were not hidden by backward. 0: no backward.
  std::vector<TraceSpan> spans;  // In order, without overlap.
  std::vector<BucketTrace>
      buckets;  // The measured ones, in the plan's order. None by a device's clock.
  StepClock clock = StepClock::kHost;  // The clock of the times above.
  int64_t host_ns = 0;  // With a device's clock: the time in which the host enqueued the step.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.step, self.last_gradient_ns, self.spans, self.buckets,
          visit.UpTo(self.clock, StepClock::kDevice), self.host_ns);
  }
};

// In bytes.
struct RankMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;  // Also where they are views of buckets.
  int64_t buckets = 0;
  int64_t optimizer = 0;
  int64_t activations = 0;  // With their gradients, for the largest batches so far.
  int64_t data = 0;         // Data sets that are not mapped files.
  int64_t copies = 0;       // For checkpoints that are written in the background.
  int64_t peak_resident =
      0;  // The process's, with its other ranks if those are threads. 0: unknown.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.parameters, self.gradients, self.buckets, self.optimizer, self.activations,
          self.data, self.copies, self.peak_resident);
  }
};

// The parts of RankMemory that the rank holds itself, with their names.
struct MemoryPart {
  const char* name;
  int64_t RankMemory::*bytes;
};
inline constexpr MemoryPart kMemoryParts[] = {
    {"parameters", &RankMemory::parameters},        {"gradients", &RankMemory::gradients},
    {"gradient buckets", &RankMemory::buckets},     {"optimizer state", &RankMemory::optimizer},
    {"activations", &RankMemory::activations},      {"data", &RankMemory::data},
    {"copies for checkpoints", &RankMemory::copies}};
inline int64_t TotalOf(const RankMemory& memory) {
  int64_t total = 0;
  for (const MemoryPart& part : kMemoryParts) total += memory.*part.bytes;
  return total;
}

// The record of one rank.
struct RankRecord {
  int rank = 0;  // Its number in the job's first group.
  std::string host;
  RankMemory memory;
  std::vector<StepTrace> traces;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.rank, self.host, self.memory, self.traces);
  }
};

struct PlannedBucket {
  int64_t bytes = 0;
  std::vector<std::string> parameters;
  friend bool operator==(const PlannedBucket&, const PlannedBucket&) = default;

  static void VisitFields(auto& self, auto& visit) { visit(self.bytes, self.parameters); }
};

// The buckets from `step` on.
struct PlanRecord {
  int64_t step = 0;
  std::vector<PlannedBucket> buckets;

  static void VisitFields(auto& self, auto& visit) { visit(self.step, self.buckets); }
};

// The cost of each rank in the recent steps before `step` (StragglerReport), and its samples in the
// mean of them.
struct CostPoint {
  int64_t step = 0;
  std::map<int, double> costs;    // By rank; of those in the group at that time.
  std::map<int, double> samples;  // Empty unless they are divided by the ranks' speed.
};

// The costs, or the samples, of one rank over time.
struct CostCurve {
  std::vector<std::pair<int64_t, double>> points;  // Step and value, in order.
  double peak = 0;
};
std::map<int, CostCurve> CurvesByRank(const std::vector<CostPoint>& costs,
                                      std::map<int, double> CostPoint::*values);

struct RunEvent {
  int64_t step = 0;
  double seconds = 0;
  std::string kind;  // One word: "lost", "frozen", ...
  std::string text;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.step, self.seconds, self.kind, self.text);
  }
};

struct RunSetting {
  std::string name;
  std::string value;

  static void VisitFields(auto& self, auto& visit) { visit(self.name, self.value); }
};

struct RunRecord {
  std::string title;    // "cnn on Fashion-MNIST"
  std::string summary;  // One line about the training.
  std::string date;
  std::string ending;                 // Why the run stopped early; empty if it did not.
  bool goes_on = false;               // The record is of a part of it; not in a checkpoint.
  std::string unit_name = "samples";  // The unit of throughput: "images" or "tokens".
  double units_per_sample = 1;        // Number of units in a sample.
  double bytes_per_prediction =
      kUnknown;        // For a language model, whose loss is then shown in bits per byte.
  int world_size = 1;  // At the beginning of this attempt.
  int reporter = 0;    // The rank whose losses, accuracies and exposed times the steps have.
  int64_t parameters = 0;
  int64_t begin_ns = 0;  // Unix time.
  double seconds = 0;    // Duration.

  std::vector<StepPoint> steps;
  std::vector<EpochPoint> epochs;
  std::vector<EpochPoint> parts;  // Of epochs, each until a rank was lost: steps and batches alone.
  std::vector<TestPoint> tests;
  std::vector<PlanRecord> plans;  // In order.
  std::vector<RankRecord> ranks;  // The remaining ones at the end.
  std::vector<RunEvent> events;
  // Checkpoints do not contain these two.
  StragglerReport waits;         // Since the last attempt or loss of a rank began.
  std::vector<CostPoint> costs;  // Since the last attempt began.
  std::vector<RunSetting> settings;
  int64_t total_steps = 0;
  int64_t samples_of_tail =
      0;  // In steps for which some rank had no batch; without join they would be dropped.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.title, self.summary, self.date, self.ending, self.unit_name, self.units_per_sample,
          self.bytes_per_prediction, self.world_size, self.reporter, self.parameters, self.begin_ns,
          self.seconds, self.steps, self.epochs, self.parts, self.tests, self.plans, self.ranks,
          self.events, self.settings, self.total_steps, self.samples_of_tail);
  }
};

// Return a record as bytes, for a checkpoint of the run, and read it again: InvalidArgument for
// bytes that are not a record of this version.
std::string Serialize(const RunRecord& record);
absl::StatusOr<RunRecord> ParseRunRecord(absl::string_view bytes);

// Adds `ns` to the absolute times of the rank.
void MoveTimes(RankRecord& rank, int64_t ns);

// Moves the run's beginning to `begin_ns` (Unix time), and with it all absolute times, as if there
// had been no pause.
void MoveBegin(RunRecord& record, int64_t begin_ns);

// Return the record of a run's earlier attempts, `before`, continued by that of the current one.
// The ranks are those of `now`, with the traces and the peaks of ranks of the same number in
// `before`. The plans are without the first one of `now` if it has the buckets of the last one of
// `before`.
std::vector<RankRecord> Continued(const std::vector<RankRecord>& before,
                                  std::vector<RankRecord> now);
std::vector<PlanRecord> Continued(const std::vector<PlanRecord>& before,
                                  const std::vector<PlanRecord>& now);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_RUN_RECORD_H_
