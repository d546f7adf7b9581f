#include "evenkeel/trainer/report/stream_clock.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/report/run_record.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;

constexpr Device kDevice = Device::Cuda(0);
constexpr absl::Duration kLong = absl::Milliseconds(20);
absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// A stream that is held by work until the host, which has put a whole step behind it, lets it go
// on.
class StreamClockTest : public testing::Test {
 protected:
  void SetUp() override {
    stream_ = *devices_.CreateStream(kDevice);
    other_ = *devices_.CreateStream(kDevice);
  }

  void Hold(const Stream& stream, absl::Notification& until) {
    ASSERT_TRUE(devices_.Put(stream.ref(), [&until] { until.WaitForNotification(); }).ok());
  }
  // Releases the stream that was held since `before` after that long.
  void LetGo(const Event& before, absl::Notification& held) {
    ASSERT_TRUE(devices_.Synchronize(before, Soon()).ok());
    absl::SleepFor(kLong);
    held.Notify();
  }
  // The parts of a step, the first of which is held.
  StreamMarks Take(StreamClock& clock, const std::vector<SpanKind>& kinds,
                   absl::Notification& held) {
    Hold(stream_, held);
    for (const SpanKind kind : kinds) EXPECT_TRUE(clock.Mark(kind).ok());
    return clock.End();
  }
  StreamStep Read(StreamClock& clock, const StreamMarks& marks) {
    EXPECT_TRUE(clock.Wait(marks, Soon()).ok());
    EXPECT_TRUE(*clock.HasPassed(marks));
    absl::StatusOr<StreamStep> step = clock.Read(marks);
    EXPECT_TRUE(step.ok()) << step.status();
    return *step;
  }

  SimulatedDevices devices_;
  Stream stream_, other_;
};

std::vector<SpanKind> KindsOf(const StreamStep& step) {
  std::vector<SpanKind> kinds;
  for (const TraceSpan& span : step.spans) kinds.push_back(span.kind);
  return kinds;
}

absl::Duration LengthOf(const TraceSpan& span) {
  return absl::Nanoseconds(span.end_ns - span.begin_ns);
}

// The host has put everything there, and told nobody of any time, before the device begins.
TEST_F(StreamClockTest, APartHasTheTimeThatTheDeviceTookForIt) {
  const std::vector<SpanKind> kinds = {SpanKind::kBegin,    SpanKind::kData, SpanKind::kForward,
                                       SpanKind::kBackward, SpanKind::kWait, SpanKind::kOptimizer};
  for (const SpanKind slow : kinds) {
    StreamClock clock(devices_, stream_.ref());
    ASSERT_TRUE(clock.Start().ok());
    clock.Begin(StreamClock::Detail::kParts);
    absl::Notification held;
    for (const SpanKind kind : kinds) {
      if (kind == slow) Hold(stream_, held);
      ASSERT_TRUE(clock.Mark(kind).ok());
    }
    const StreamMarks marks = clock.End();
    EXPECT_FALSE(*clock.HasPassed(marks));
    EXPECT_EQ(clock.Read(marks).status().code(), absl::StatusCode::kFailedPrecondition);
    Event before = marks.before;
    for (size_t i = 0; marks.parts[i].kind != slow; ++i) before = marks.parts[i].end;
    LetGo(before, held);
    const StreamStep step = Read(clock, marks);
    ASSERT_EQ(KindsOf(step), kinds);
    absl::Duration sum;
    for (const TraceSpan& span : step.spans) {
      if (span.kind == slow) {
        EXPECT_GE(LengthOf(span), kLong);
      }
      if (&span != &step.spans.front()) {
        EXPECT_EQ(span.begin_ns, (&span - 1)->end_ns);
      }
      sum += LengthOf(span);
    }
    EXPECT_EQ(sum, step.took);
    EXPECT_EQ(step.last_gradient_ns, step.spans[3].end_ns);
    EXPECT_EQ(step.exposed, LengthOf(step.spans[4]));
  }
}

// Work on another stream shows as the time that this one waits for it, and in no other part.
TEST_F(StreamClockTest, TheWaitIsWhatTheStreamWaitsForAnother) {
  StreamClock clock(devices_, stream_.ref());
  ASSERT_TRUE(clock.Start().ok());
  absl::Notification held;
  Hold(other_, held);
  const absl::StatusOr<Event> reduced = devices_.Record(other_.ref());
  clock.Begin(StreamClock::Detail::kSummary);
  for (const SpanKind kind :
       {SpanKind::kBegin, SpanKind::kData, SpanKind::kForward, SpanKind::kBackward}) {
    ASSERT_TRUE(clock.Mark(kind).ok());
  }
  ASSERT_TRUE(reduced.ok() && devices_.Wait(stream_.ref(), *reduced).ok());
  ASSERT_TRUE(clock.Mark(SpanKind::kWait).ok());
  ASSERT_TRUE(clock.Mark(SpanKind::kOptimizer).ok());
  const StreamMarks marks = clock.End();
  LetGo(/*before=*/marks.parts.front().end, held);
  const StreamStep step = Read(clock, marks);
  EXPECT_THAT(KindsOf(step),
              ElementsAre(SpanKind::kBackward, SpanKind::kWait, SpanKind::kOptimizer))
      << "a summary";
  EXPECT_GE(step.exposed, kLong);
  EXPECT_GE(step.took, step.exposed);
}

TEST_F(StreamClockTest, StepsFollowEachOtherAndTheHostWaitsForNone) {
  StreamClock clock(devices_, stream_.ref());
  const int64_t begin_ns = absl::ToUnixNanos(SteadyNow());
  ASSERT_TRUE(clock.Start().ok());
  ASSERT_TRUE(clock.Align(Soon()).ok());
  const int64_t waits = devices_.host_waits();
  std::vector<StreamMarks> all;
  absl::Notification held[3];
  for (absl::Notification& first : held) {
    clock.Begin(StreamClock::Detail::kParts);
    all.push_back(
        Take(clock, {SpanKind::kForward, SpanKind::kBackward, SpanKind::kOptimizer}, first));
  }
  EXPECT_EQ(devices_.host_waits(), waits);
  for (size_t i = 0; i < all.size(); ++i) LetGo(all[i].before, held[i]);
  std::vector<StreamStep> steps;
  for (const StreamMarks& marks : all) steps.push_back(Read(clock, marks));
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_GE(steps[i].took, kLong) << i;
    EXPECT_GE(steps[i].spans.front().begin_ns,
              begin_ns - 1'000'000);  // The two clocks may differ a little.
    EXPECT_LE(steps[i].spans.back().end_ns, absl::ToUnixNanos(SteadyNow()));
    EXPECT_GE(steps[i].spans.back().end_ns, all[i].issued_ns);
  }
}

// As after a step that failed.
TEST_F(StreamClockTest, AStepMayBeLeftOut) {
  StreamClock clock(devices_, stream_.ref());
  ASSERT_TRUE(clock.Start().ok());
  absl::Notification held[2];
  clock.Begin(StreamClock::Detail::kParts);
  (void)Take(clock, {SpanKind::kForward}, held[0]);
  held[0].Notify();
  clock.Begin(StreamClock::Detail::kParts);
  const StreamMarks second = Take(clock, {SpanKind::kForward}, held[1]);
  LetGo(second.before, held[1]);
  const StreamStep step = Read(clock, second);
  EXPECT_GE(step.took, kLong);
  EXPECT_GE(step.spans.back().end_ns, second.issued_ns);
}

}  // namespace
}  // namespace evenkeel
