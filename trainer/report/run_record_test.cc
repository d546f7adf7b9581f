#include "evenkeel/trainer/report/run_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/trainer/report/step_series.h"
#include "evenkeel/trainer/report/testing/example_record.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

// ---- Bytes ----

using internal::ToBytes;

absl::StatusOr<RankRecord> ParseRank(absl::string_view bytes) {
  return internal::FromBytes<RankRecord>(bytes, "a rank's record");
}

RankRecord ExampleRank() {
  return {.rank = 3,
          .host = "a\"<b>",
          .memory = {.parameters = 1,
                     .gradients = 2,
                     .buckets = 3,
                     .optimizer = 4,
                     .activations = 6,
                     .data = 7,
                     .copies = 8,
                     .peak_resident = 5},
          .traces = {{.step = 2,
                      .last_gradient_ns = 77,
                      .spans = {{.kind = SpanKind::kForward, .begin_ns = 1, .end_ns = 2}},
                      .buckets = {{.bytes = 8, .ready_ns = 1, .start_ns = 2, .reduced_ns = 3}}},
                     {.step = 3, .clock = StepClock::kDevice, .host_ns = 9}}};
}

TEST(RecordBytesTest, ARankComesBackAsItWas) {
  const auto record = ParseRank(ToBytes(ExampleRank()));
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->rank, 3);
  EXPECT_EQ(record->host, "a\"<b>");
  EXPECT_EQ(record->memory.optimizer, 4);
  EXPECT_EQ(record->memory.peak_resident, 5);
  EXPECT_EQ(record->memory.data, 7);
  EXPECT_EQ(record->memory.copies, 8);
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
  EXPECT_EQ(ToBytes(record->ranks[2]), ToBytes(run.ranks[2]));
  EXPECT_EQ(record->events[0].text, kHostile);
  EXPECT_EQ(record->settings[1].value, "64");
}

TEST(RecordBytesTest, AnotherFormatIsRefused) {
  std::string bytes = Serialize(ExampleRecord(3));
  const size_t version = bytes.find("evenkeel run record 4") + 20;
  ASSERT_EQ(bytes[version], '4');
  for (const char other : {'2', '3', '5'}) {
    bytes[version] = other;
    EXPECT_EQ(ParseRunRecord(bytes).status(),
              absl::InvalidArgumentError("this is not an evenkeel run record 4"));
  }
}

TEST(RunRecordTest, AnEpochWithoutTheRanksOfItsBatchesIsRefused) {
  RunRecord record = ExampleRecord(2, /*steps=*/5);
  record.epochs.at(0).ranks.pop_back();
  const absl::Status status = ParseRunRecord(Serialize(record)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("has 1 ranks and the batches of 2"));
}

TEST(RecordBytesTest, NoBytesDoHarm) {
  const auto again = [](auto parse, auto serialize) {
    return [=](absl::string_view bytes) -> absl::StatusOr<std::string> {
      const auto record = parse(bytes);
      if (!record.ok()) return record.status();
      return serialize(*record);
    };
  };
  Fuzz({ToBytes(ExampleRank())}, again(ParseRank, ToBytes<RankRecord>), {.rounds = 5000});
  Fuzz({Serialize(ExampleRecord(2, /*steps=*/5))}, again(ParseRunRecord, Serialize),
       {.rounds = 2000});
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
  const std::vector<RankRecord> before = {{.rank = 0, .memory = {.peak_resident = 500}},
                                          {.rank = 1},
                                          {.rank = 2, .traces = {{.step = 2}}}};
  const std::vector<RankRecord> ranks =
      Continued(before, {{.rank = 0, .host = "new", .memory = {.data = 5, .peak_resident = 400}},
                         {.rank = 2, .traces = {{.step = 12}}},
                         {.rank = 3}});
  ASSERT_THAT(ranks, SizeIs(3));
  EXPECT_EQ(ranks[0].host, "new");
  EXPECT_EQ(ranks[0].memory.data, 5);
  EXPECT_EQ(ranks[0].memory.peak_resident, 500);
  ASSERT_THAT(ranks[1].traces, SizeIs(2));
  EXPECT_EQ(ranks[1].traces[1].step, 12);
  EXPECT_EQ(ranks[2].rank, 3);
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
