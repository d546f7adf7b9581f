#include "evenkeel/trainer/report/testing/example_record.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

constexpr int64_t kBegin = 1'700'000'000'000'000'000;
constexpr int64_t kMs = 1'000'000;

StepTrace ExampleStep(int64_t step, int64_t lag) {
  const int64_t begin = kBegin + step * 10 * kMs + lag;
  StepTrace trace{.step = step, .last_gradient_ns = begin + 7 * kMs};
  int64_t at = begin;
  for (int kind = 0; kind + 1 < kSpanKinds; ++kind) {
    const int64_t length = kind == static_cast<int>(SpanKind::kBackward) ? 4 * kMs : kMs;
    trace.spans.push_back(
        {.kind = static_cast<SpanKind>(kind), .begin_ns = at, .end_ns = at + length});
    at += length;
  }
  trace.buckets = {{.bytes = 4096,
                    .ready_ns = begin + 4 * kMs,
                    .start_ns = begin + 4 * kMs,
                    .reduced_ns = begin + 6 * kMs},
                   {.bytes = 1 << 20,
                    .ready_ns = begin + 5 * kMs,
                    .start_ns = begin + 6 * kMs,
                    .reduced_ns = begin + 8 * kMs}};
  return trace;
}

RankRecord ExampleRank(int rank) {
  RankRecord record{.rank = rank,
                    .host = kHostile,
                    .memory = {.parameters = 1 << 20,
                               .gradients = 1 << 20,
                               .buckets = 1 << 20,
                               .optimizer = (2 << 20) / (rank + 1),
                               .peak_resident = 300 << 20}};
  for (const int64_t step : {2, 3, 50}) record.traces.push_back(ExampleStep(step, rank * kMs / 2));
  if (rank > 0) {
    record.traces.push_back(
        {.step = 99,
         .spans = {{.kind = SpanKind::kFollow, .begin_ns = kBegin, .end_ns = kBegin + 9 * kMs}}});
  }
  return record;
}

EpochPoint ExampleEpoch(int epoch, int64_t first_step, int64_t steps, int ranks) {
  EpochPoint point{.epoch = epoch,
                   .step = first_step + steps - 1,
                   .train_loss = 0.8 - 0.1 * epoch,
                   .test_loss = 0.7 - 0.1 * epoch,
                   .test_accuracy = 0.82 + 0.02 * epoch,
                   .first_step = first_step};
  for (int rank = 0; rank < ranks; ++rank) {
    point.batches.push_back(std::max<int64_t>(0, steps - 7 * rank));
    point.ranks.push_back(rank);
  }
  return point;
}

}  // namespace

RunRecord ExampleRecord(int ranks, int64_t steps) {
  RunRecord record{.title = absl::StrCat("cnn ", kHostile),
                   .summary = absl::StrCat("AdamW, ", kHostile),
                   .date = "2024-01-01 12:00:00 UTC",
                   .unit_name = "images",
                   .world_size = ranks,
                   .parameters = 272474,
                   .begin_ns = kBegin,
                   .seconds = 0.01 * static_cast<double>(steps),
                   .total_steps = steps,
                   .samples_of_tail = ranks > 1 ? 448 : 0};
  for (int64_t step = 0; step < steps; ++step) {
    const auto x = static_cast<double>(step);
    record.steps.push_back(
        {.step = step,
         .seconds = 0.01 * (x + 1),
         .loss = step % 17 == 3 ? kUnknown : 2.3 * std::exp(-x / 50) + 0.3 + 0.1 * std::sin(7 * x),
         .accuracy = 1 - std::exp(-x / 80),
         .learning_rate = 0.004 * (1 - x / static_cast<double>(steps)),
         .took = 0.01,
         .exposed = 0.0005,
         .gradient_norm = 1 + 0.5 * std::cos(x),
         .samples = 64.0 * ranks});
  }
  record.epochs = {ExampleEpoch(0, 0, steps / 2, ranks),
                   ExampleEpoch(1, steps / 2, steps - steps / 2, ranks)};
  for (const EpochPoint& epoch : record.epochs)
    record.tests.push_back({epoch.step, epoch.test_loss, epoch.test_accuracy});
  record.plans = {
      {.step = 0, .buckets = {{.bytes = 4096 + (1 << 20), .parameters = {"fc1.weight", kHostile}}}},
      {.step = 1,
       .buckets = {
           {.bytes = 4096, .parameters = {kHostile}},
           {.bytes = 1 << 20, .parameters = std::vector<std::string>(20, "layer.weight")}}}};
  for (int rank = 0; rank < ranks; ++rank) record.ranks.push_back(ExampleRank(rank));
  record.events = {{.step = 40, .seconds = 0.4, .kind = kHostile, .text = kHostile}};
  record.settings = {{.name = kHostile, .value = kHostile}, {.name = "batch", .value = "64"}};
  return record;
}

RunRecord RecordOfLostRank() {
  RunRecord record = ExampleRecord(3);
  for (int i = 0; i < 5; ++i) {
    record.costs.push_back({.step = 49 + 50 * i, .costs = {{0, 0}, {1, 0.01}}});
    if (i < 3) record.costs.back().costs[2] = 0.05;
  }
  EpochPoint& last = record.epochs.back();
  record.parts = {last};
  record.parts[0].step = 159;
  record.parts[0].batches = {60, 60, 60};
  last.first_step = 160;
  last.ranks = {0, 1};
  last.batches = {40, 33};
  record.ranks.pop_back();
  record.events.push_back({.step = 160, .kind = "lost", .text = "rank 2"});
  return record;
}

}  // namespace evenkeel
