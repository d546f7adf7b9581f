#include "evenkeel/trainer/report/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/trainer/report/record_bytes.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_series.h"
#include "evenkeel/trainer/report/testing/example_record.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

// ---- Bytes ----

RankRecord ExampleRank() {
  return {.rank = 3,
          .host = "a\"<b>",
          .process = 42,
          .steps = 10,
          .followed = 4,
          .memory = {.parameters = 1,
                     .gradients = 2,
                     .buckets = 3,
                     .optimizer = 4,
                     .activations = 6,
                     .peak_resident = 5},
          .means = {.steps = 6,
                    .to_first_gradient_us = 1.5,
                    .backward_us = 2.5,
                    .communication_us = 3,
                    .exposed_us = 4,
                    .clock = StepClock::kDevice},
          .traces = {{.step = 2,
                      .last_gradient_ns = 77,
                      .spans = {{.kind = SpanKind::kForward, .begin_ns = 1, .end_ns = 2}},
                      .buckets = {{.bytes = 8, .ready_ns = 1, .start_ns = 2, .reduced_ns = 3}}},
                     {.step = 3, .clock = StepClock::kDevice, .host_ns = 9}}};
}

TEST(RecordBytesTest, ARankComesBackAsItWas) {
  const auto record = ParseRankRecord(Serialize(ExampleRank()));
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->rank, 3);
  EXPECT_EQ(record->host, "a\"<b>");
  EXPECT_EQ(record->followed, 4);
  EXPECT_EQ(record->memory.optimizer, 4);
  EXPECT_EQ(record->memory.peak_resident, 5);
  EXPECT_EQ(record->means.exposed_us, 4);
  EXPECT_EQ(record->means.clock, StepClock::kDevice);
  ASSERT_THAT(record->traces, SizeIs(2));
  EXPECT_EQ(record->traces[0].spans[0].kind, SpanKind::kForward);
  EXPECT_EQ(record->traces[0].buckets[0].reduced_ns, 3);
  EXPECT_EQ(record->traces[0].clock, StepClock::kHost);
  EXPECT_EQ(record->traces[1].host_ns, 9);
}

TEST(RecordBytesTest, ARunComesBackAsItWas) {
  RunRecord run = ExampleRecord(3, /*steps=*/20);
  run.ending = "why";
  run.reporter = 2;
  const auto record = ParseRunRecord(Serialize(run));
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->date, run.date);
  EXPECT_EQ(record->ending, "why");
  EXPECT_EQ(record->reporter, 2);
  EXPECT_EQ(record->begin_ns, run.begin_ns);
  EXPECT_EQ(record->total_steps, 20);
  EXPECT_EQ(record->samples_of_tail, 448);
  ASSERT_THAT(record->steps, SizeIs(20));
  EXPECT_EQ(record->steps[7].loss, run.steps[7].loss);
  ASSERT_THAT(record->epochs, SizeIs(2));
  EXPECT_EQ(record->epochs[1].batches, run.epochs[1].batches);
  EXPECT_EQ(record->steps[7].gradient_norm, run.steps[7].gradient_norm);
  ASSERT_THAT(record->tests, SizeIs(2));
  EXPECT_EQ(record->tests[1].loss, run.tests[1].loss);
  EXPECT_EQ(record->plans[1].buckets, run.plans[1].buckets);
  EXPECT_EQ(Serialize(record->ranks[2]), Serialize(run.ranks[2]));
  EXPECT_EQ(record->events[0].text, kHostile);
  EXPECT_EQ(record->settings[1].value, "64");
}

// The former format had no gradient norms and no bytes of data, and only the tests at the ends of
// epochs.
TEST(RecordBytesTest, TheFormerFormatIsRead) {
  RunRecord run = ExampleRecord(3);
  run.steps.clear();
  run.tests.clear();
  run.ranks.clear();  // They, too, had less.
  std::string bytes = Serialize(run);
  const size_t version = bytes.find("evenkeel run record 2") + 20;
  ASSERT_EQ(bytes[version], '2');
  bytes[version] = '1';
  bytes.resize(bytes.size() - 2 * sizeof(uint32_t));  // The numbers of tests and of parts.
  const auto record = ParseRunRecord(bytes);
  ASSERT_TRUE(record.ok()) << record.status();
  ASSERT_THAT(record->tests, SizeIs(run.epochs.size()));
  EXPECT_EQ(record->tests[1].step, run.epochs[1].step);
  EXPECT_EQ(record->tests[1].loss, run.epochs[1].test_loss);
  EXPECT_EQ(record->settings[1].value, "64");
}

TEST(RecordBytesTest, NoBytesDoHarm) {
  const auto again = [](auto parse) {
    return [parse](absl::string_view bytes) -> absl::StatusOr<std::string> {
      const auto record = parse(bytes);
      if (!record.ok()) return record.status();
      return Serialize(*record);
    };
  };
  Fuzz({Serialize(ExampleRank())}, again(ParseRankRecord), {.rounds = 5000});
  Fuzz({Serialize(ExampleRecord(2, /*steps=*/5))}, again(ParseRunRecord), {.rounds = 2000});
}

// ---- Going on ----

TEST(RunHistoryTest, TimesMoveTogetherAndDurationsStay) {
  RunRecord record = ExampleRecord(2);
  const RunRecord before = record;
  constexpr int64_t kBy = 1'000'000'007;
  MoveBegin(record, before.begin_ns + kBy);
  EXPECT_EQ(record.begin_ns, before.begin_ns + kBy);
  const StepTrace& trace = record.ranks[1].traces[0];
  const StepTrace& old = before.ranks[1].traces[0];
  EXPECT_EQ(trace.last_gradient_ns, old.last_gradient_ns + kBy);
  EXPECT_EQ(trace.spans[2].begin_ns, old.spans[2].begin_ns + kBy);
  EXPECT_EQ(trace.spans[2].end_ns, old.spans[2].end_ns + kBy);
  EXPECT_EQ(trace.buckets[1].reduced_ns, old.buckets[1].reduced_ns + kBy);
  EXPECT_EQ(record.ranks[1].traces.back().last_gradient_ns, 0);  // Not known before, nor now.
}

TEST(RunHistoryTest, RanksGoOnByTheirNumbers) {
  const std::vector<RankRecord> before = {
      {.rank = 0,
       .steps = 10,
       .memory = {.peak_resident = 500},
       .means = {.steps = 2, .backward_us = 1}},
      {.rank = 1, .steps = 10},
      {.rank = 2, .steps = 10, .followed = 3, .traces = {{.step = 2}}}};
  const std::vector<RankRecord> ranks = Continued(
      before, {{.rank = 0, .process = 7, .steps = 5, .means = {.steps = 6, .backward_us = 5}},
               {.rank = 2, .steps = 5, .followed = 1, .traces = {{.step = 12}}},
               {.rank = 3, .steps = 5}});
  ASSERT_THAT(ranks, SizeIs(3));
  EXPECT_EQ(ranks[0].process, 7);
  EXPECT_EQ(ranks[0].steps, 15);
  EXPECT_EQ(ranks[0].memory.peak_resident, 500);
  EXPECT_EQ(ranks[0].means.steps, 8);
  EXPECT_EQ(ranks[0].means.backward_us, 4);
  EXPECT_EQ(ranks[1].followed, 4);
  ASSERT_THAT(ranks[1].traces, SizeIs(2));
  EXPECT_EQ(ranks[1].traces[1].step, 12);
  EXPECT_EQ(ranks[2].steps, 5);
}

// An attempt in which nothing was measured has means of nothing, and those of a host's and a
// device's clock do not mix.
TEST(RunHistoryTest, MeansGoOnAsFarAsTheyCan) {
  const auto backward = [](const RankMeans& before, const RankMeans& now) {
    return Continued({{.means = before}}, {{.means = now}})[0].means.backward_us;
  };
  const RankMeans host{.steps = 2, .backward_us = 3},
      device{.steps = 2, .backward_us = 9, .clock = StepClock::kDevice};
  EXPECT_EQ(backward(host, {}), 3);
  EXPECT_EQ(backward({}, host), 3);
  EXPECT_EQ(backward(device, {}), 9);
  EXPECT_EQ(backward(host, device), 9);
}

TEST(RunHistoryTest, APlanThatGoesOnIsOne) {
  const PlanRecord first{.step = 0, .buckets = {{.bytes = 8}}},
      rebuilt{.step = 1, .buckets = {{.bytes = 4}}};
  PlanRecord resumed = rebuilt, other{.step = 30, .buckets = {{.bytes = 2}}};
  resumed.step = 20;
  const auto steps = [](const std::vector<PlanRecord>& plans) {
    std::vector<int64_t> steps;
    for (const PlanRecord& plan : plans) steps.push_back(plan.step);
    return steps;
  };
  EXPECT_THAT(steps(Continued({first, rebuilt}, {resumed, other})), ElementsAre(0, 1, 30));
  EXPECT_THAT(steps(Continued({first, rebuilt}, {other})), ElementsAre(0, 1, 30));
  EXPECT_THAT(steps(Continued({}, {first})), ElementsAre(0));
  EXPECT_THAT(steps(Continued({first}, {})), ElementsAre(0));
}

TEST(RunHistoryTest, ACurveGoesOnAsIfItHadNotBeenCut) {
  StepSeries whole, first;
  constexpr int64_t kSteps = 9000, kCut = 5003;
  const auto point = [](int64_t step) {
    return StepPoint{.step = step, .loss = 1.0 / static_cast<double>(step + 1)};
  };
  for (int64_t step = 0; step < kSteps; ++step) whole.Add(point(step));
  for (int64_t step = 0; step < kCut; ++step) first.Add(point(step));
  StepSeries second(first.points());
  for (int64_t step = kCut; step < kSteps; ++step) second.Add(point(step));
  ASSERT_EQ(second.points().size(), whole.points().size());
  for (size_t i = 0; i < whole.points().size(); ++i) {
    ASSERT_EQ(second.points()[i].step, whole.points()[i].step);
    ASSERT_EQ(second.points()[i].loss, whole.points()[i].loss);
  }
}

}  // namespace
}  // namespace evenkeel
