// The traffic of an optimizer by slices, and its timing.

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Returns the bytes that one rank must send at least since `first`, by kind of collective.
std::map<CollectiveKind, int64_t> BytesSince(Communicator& comm, int64_t first) {
  const int64_t others = comm.world_size() - 1;
  std::map<CollectiveKind, int64_t> bytes;
  for (const FlightEntry& entry : comm.flight().Entries()) {
    if (entry.number < first) continue;
    const int64_t size = entry.what.count * SizeOf(entry.what.dtype);
    const bool is_whole = entry.what.kind == CollectiveKind::kAllReduce;  // In two halves.
    bytes[entry.what.kind] += is_whole ? 2 * others * size / comm.world_size()
                              : entry.what.kind == CollectiveKind::kRecv ? 0
                              : entry.what.kind == CollectiveKind::kSend ? size
                                                                         : others * size;
  }
  return bytes;
}

// (N - 1) / N of gradients and parameters, padding included; the all-reduce is a float per
// parameter.
TEST(SlicedTrafficTest, SendsGradientsAndParametersOnce) {
  for (int world_size : {2, 3, 5}) {
    for (const bool updates : {kInStep, kInBackward}) {
      RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(
            auto rank,
            SlicedRank::Create(comm, AdamW{}, {.placement = {.update_in_backward = updates}}));
        for (int step = 0; step < 2; ++step) EK_RETURN_IF_ERROR(rank->Step(step));
        const int64_t first = comm.flight().issued();
        EK_RETURN_IF_ERROR(rank->Step(2));
        int64_t padded = 0, buckets = 0;
        for (const BucketInfo& bucket : rank->ddp->buckets())
          padded += bucket.data.bytes(), ++buckets;
        int64_t bytes = 0;
        for (int64_t size : kSizes) bytes += 4 * size;
        EXPECT_LT(padded, bytes + buckets * 16 * 4 * world_size);
        const auto sent = BytesSince(comm, first);
        const int64_t share = (world_size - 1) * padded / world_size;
        const int64_t flags =
            2 * (world_size - 1) * static_cast<int64_t>(kSizes.size()) * 4 / world_size;
        EXPECT_EQ(sent.at(CollectiveKind::kReduceScatter), share);
        EXPECT_EQ(sent.at(CollectiveKind::kAllGather), share);
        EXPECT_LE(sent.at(CollectiveKind::kAllReduce), flags);
        EXPECT_EQ(sent.size(), 3u);  // And nothing else.
        return absl::OkStatus();
      });
    }
  }
}

// The step after the first has new buckets: what changes hands travels, and only that.
TEST(SlicedTrafficTest, MovesOnlyTheStateThatChangesHands) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    EK_RETURN_IF_ERROR(rank->Step(0));
    int64_t first = comm.flight().issued();
    EK_RETURN_IF_ERROR(rank->Step(1));
    const std::map<CollectiveKind, int64_t> moved = BytesSince(comm, first);
    EXPECT_GT(moved.at(CollectiveKind::kSend), 0);
    EXPECT_LT(moved.at(CollectiveKind::kSend), 2 * 4 * 555 / 2);
    first = comm.flight().issued();
    EK_RETURN_IF_ERROR(rank->Step(2));
    EXPECT_FALSE(BytesSince(comm, first).contains(CollectiveKind::kSend));
    return absl::OkStatus();
  });
}

// In the first step of the plan by order, with the last gradient still to come: the first bucket's
// parameters have changed on this rank, and it has sent its slice.
TEST(SlicedTrafficTest, UpdatesTheFirstBucketBeforeTheLastGradientIsThere) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(
        auto rank, SlicedRank::Create(comm, AdamW{}, {.placement = {.update_in_backward = true}}));
    EK_RETURN_IF_ERROR(rank->Step(0));
    const int64_t first = comm.flight().issued();
    ParameterSet& params = rank->model.params();
    params.ClearGradients();
    EK_RETURN_IF_ERROR(rank->ddp->BeginStep());
    EXPECT_GT(rank->ddp->buckets().size(), 2u);
    absl::Time last_gradient;
    for (int param = params.size() - 1; param >= 0; --param) {
      rank->model.ComputeGradient(comm.rank(), 1, param, params[param].grad);
      params.SetGradState(param, GradState::kLocal);
      while (
          param == 0 &&
          !BytesSince(comm, first).contains(CollectiveKind::kAllGather)) {  // It comes by itself.
        EK_RETURN_IF_ERROR(comm.status());
        absl::SleepFor(absl::Milliseconds(1));
      }
      last_gradient = SteadyNow();
      EK_RETURN_IF_ERROR(rank->ddp->GradientReady(param));
    }
    EK_RETURN_IF_ERROR(rank->ddp->FinishStep());
    EK_RETURN_IF_ERROR(rank->optimizer->Step());
    for (const FlightEntry& entry : comm.flight().Entries()) {
      if (entry.number < first || entry.what.kind != CollectiveKind::kAllGather ||
          entry.what.index != 0)
        continue;
      EXPECT_LT(entry.issued, last_gradient);
    }
    return absl::OkStatus();
  });
}

// Step() is back before another rank has sent its slices, and so is the next BeginStep(); WaitFor()
// and the next reduction are not.
TEST(SlicedTrafficTest, OverlapsWithTheNextForwardIfAsked) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(
        auto rank, SlicedRank::Create(comm, AdamW{}, {.placement = {.overlap_forward = true}}));
    internal::TestModel plain_model(kSizes);
    internal::PlainTraining plain(&plain_model, AdamW{});
    EK_RETURN_IF_ERROR(rank->ddp->BeginStep());
    for (int step = 0; step < 3; ++step) {
      EK_RETURN_IF_ERROR(rank->Announce(step));
      const std::string topic = absl::StrCat("begun/", step);
      // Rank 1 begins its Step() only when rank 0 has done with its own, and begun the next step.
      if (comm.rank() == 1)
        EK_RETURN_IF_ERROR(comm.control().Receive(topic, comm.timeout()).status());
      EK_RETURN_IF_ERROR(rank->optimizer->Step());
      rank->model.params().ClearGradients();
      if (step < 2) EK_RETURN_IF_ERROR(rank->ddp->BeginStep());
      if (comm.rank() == 0) comm.control().Send(1, topic, "");
      plain.Step(Ranks(2), step, 0.5);
      for (int param = 0; param < plain_model.size(); ++param) {
        EK_RETURN_IF_ERROR(rank->optimizer->WaitFor(param));
        const TensorView mine = rank->model.params()[param].value,
                         other = plain_model.params()[param].value;
        EXPECT_TRUE(std::ranges::equal(mine.as<float>(), other.as<float>())) << param;
      }
    }
    return ExpectEqual(*rank, plain_model, plain.state());
  });
}

}  // namespace
}  // namespace evenkeel
