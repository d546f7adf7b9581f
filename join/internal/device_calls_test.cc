#include "evenkeel/join/internal/device_calls.h"

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAreArray;

constexpr int64_t kSlice = 3;

void RunOnHost(const std::vector<CopySegment>& segments) {
  for (const CopySegment& segment : segments) {
    if (segment.from.data == nullptr) {
      std::memset(segment.to.data, 0, segment.to.bytes());
    } else {
      ASSERT_EQ(segment.to.count, segment.from.count);
      std::memcpy(segment.to.data, segment.from.data, segment.to.bytes());
    }
  }
}

struct Membership {
  std::vector<int> members;
  int world_size = 0;
  size_t packed = 0, unpacked = 0;  // Copies.
};

TEST(SlicesTest, EachGoesToItsPlaceAndNeighboursGoTogether) {
  const Membership cases[] = {
      {{0}, 1, 1, 1},          {{0}, 5, 1, 2},       {{4}, 5, 1, 2},
      {{2}, 5, 1, 3},          {{0, 1, 2}, 3, 1, 1}, {{1, 2, 4}, 5, 2, 4},
      {{0, 2, 4, 6}, 7, 4, 7}, {{0, 4}, 5, 2, 3},    {{1, 3, 4, 5}, 8, 2, 5},
  };
  for (const Membership& test : cases) {
    std::vector<int32_t> whole(kSlice * test.world_size), packed(kSlice * test.members.size(), -1);
    std::iota(whole.begin(), whole.end(), 1);
    const std::vector<int32_t> before = whole;
    const TensorView all = absl::MakeSpan(whole), some = absl::MakeSpan(packed);

    const std::vector<CopySegment> packing = PackedSlices(all, some, test.members, test.world_size);
    EXPECT_EQ(packing.size(), test.packed);
    RunOnHost(packing);
    std::vector<int32_t> expected, spread(whole.size());
    for (const int member : test.members) {
      for (int64_t i = member * kSlice; i < (member + 1) * kSlice; ++i) {
        expected.push_back(before[i]);
        spread[i] = before[i];
      }
    }
    EXPECT_THAT(packed, ElementsAreArray(expected));

    const std::vector<CopySegment> unpacking =
        UnpackedSlices(all, some, test.members, test.world_size);
    EXPECT_EQ(unpacking.size(), test.unpacked);
    RunOnHost(unpacking);
    EXPECT_THAT(whole, ElementsAreArray(spread));
  }
}

TEST(DeviceCallsTest, CopiesMoreSlicesThanALaunchTakes) {
  SimulatedDevices devices({.count = 1});
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto calls, DeviceCalls::Create(comm));
        constexpr int kWorld = 2 * kMostInlineSegments + 3;  // Every other rank is left.
        std::vector<int> members;
        for (int rank = 0; rank < kWorld; rank += 2) members.push_back(rank);
        std::vector<int32_t> host(kWorld);
        std::iota(host.begin(), host.end(), 1);
        EK_ASSIGN_OR_RETURN(const Memory memory,
                            devices.Allocate(comm.device(), sizeof(int32_t) * kWorld));
        const TensorView whole(memory.data.get(), kWorld, DType::kInt32, comm.device());
        EK_RETURN_IF_ERROR(devices.Copy(whole.data, host.data(), whole.bytes(), calls->stream()));
        {
          const DeviceCalls::Use use(*calls, calls->stream());
          EK_ASSIGN_OR_RETURN(const TensorView packed,
                              calls->Scratch(DeviceCalls::kIn, static_cast<int64_t>(members.size()),
                                             DType::kInt32, calls->stream()));
          EK_RETURN_IF_ERROR(
              calls->Copy(PackedSlices(whole, packed, members, kWorld), calls->stream()));
          EK_RETURN_IF_ERROR(devices.Zero(whole.data, whole.bytes(), calls->stream()));
          EK_RETURN_IF_ERROR(
              calls->Copy(UnpackedSlices(whole, packed, members, kWorld), calls->stream()));
        }
        EK_RETURN_IF_ERROR(devices.Copy(host.data(), whole.data, whole.bytes(), calls->stream()));
        EK_RETURN_IF_ERROR(calls->Drain());
        for (int rank = 0; rank < kWorld; ++rank)
          EXPECT_EQ(host[rank], rank % 2 == 0 ? rank + 1 : 0);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Each of two streams far behind the host writes its own number into the memory, and reads it back.
TEST(DeviceCallsTest, AStreamWaitsForWhoeverHadTheMemoryBeforeAndNotTheHost) {
  SimulatedDevices devices({.count = 1, .delay = absl::Milliseconds(1)});
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto calls, DeviceCalls::Create(comm));
        EK_ASSIGN_OR_RETURN(const Stream other, devices.CreateStream(comm.device()));
        std::vector<int32_t> in(100), out(100);
        for (int i = 0; i < 100; ++i) {
          in[i] = i;
          const StreamRef stream = i % 2 == 0 ? other.ref() : calls->stream();
          const DeviceCalls::Use use(*calls, stream);
          // Sometimes there is not enough, and then more than is needed.
          EK_ASSIGN_OR_RETURN(const TensorView scratch,
                              calls->Scratch(DeviceCalls::kOut, 1 + i / 10, DType::kInt32, stream));
          EK_RETURN_IF_ERROR(devices.Copy(scratch.data, &in[i], sizeof(int32_t), stream));
          EK_RETURN_IF_ERROR(devices.Copy(&out[i], scratch.data, sizeof(int32_t), stream));
          EK_RETURN_IF_ERROR(calls->Confirm());
        }
        EXPECT_EQ(devices.host_waits(), 0);
        EK_RETURN_IF_ERROR(calls->Drain());
        EK_RETURN_IF_ERROR(devices.Synchronize(other.ref(), absl::Now() + absl::Minutes(1)));
        EXPECT_THAT(out, ElementsAreArray(in));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel::internal
