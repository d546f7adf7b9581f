#include "evenkeel/bucket/value_memory.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

bool IsIn(const Memory& memory, const TensorView& value) {
  const auto* const begin = static_cast<const std::byte*>(memory.data.get());
  const auto* const data = static_cast<const std::byte*>(value.data);
  return data >= begin && data + value.bytes() <= begin + memory.bytes;
}

TEST(ValueMemoryTest, ValuesLieInOneBlockOfTheTransport) {
  for (const bool is_shm : {false, true}) {
    auto group = is_shm ? CreateShmGroupInProcess(1, {}) : CreateLocalGroup(1, {});
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<float> a(5000, 1.5f), b(3, 2.5f), none;
    std::vector<double> c(70, 3.5), ignored(9, 4.5);
    std::vector<float> gradient(5000);
    ParameterSet params;
    params.Add("a", absl::MakeSpan(a), absl::MakeSpan(gradient));
    params.Add("b", absl::MakeSpan(b));
    params.Add("none", absl::MakeSpan(none));
    params.Add("c", absl::MakeSpan(c));
    params.Add("a again", absl::MakeSpan(a));
    const int other = params.Add("ignored", absl::MakeSpan(ignored));
    ASSERT_TRUE(params.Ignore(other).ok());

    const absl::StatusOr<Memory> memory = MoveValues(*group->front(), params);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(params.size(), 5);
    for (const char* name : {"a", "b", "c", "a again"}) {
      const TensorView& value = params[params.Find(name)].value;
      EXPECT_TRUE(IsIn(*memory, value)) << name;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(value.data) % 64, 0u) << name;
    }
    EXPECT_EQ(params[other].value.data, ignored.data());
    EXPECT_EQ(params[0].grad.data, gradient.data());
    EXPECT_TRUE(params.Validate().ok()) << params.Validate();
    for (const float value : params[0].value.as<float>()) ASSERT_EQ(value, 1.5f);
    for (const float value : params[params.Find("b")].value.as<float>()) EXPECT_EQ(value, 2.5f);
    for (const double value : params[params.Find("c")].value.as<double>()) EXPECT_EQ(value, 3.5);
    // Shared memory is found at its new place, and no longer at its old one.
    EXPECT_EQ(params.Add("a once more", params[0].value), 0);
    EXPECT_EQ(params.Add("another", absl::MakeSpan(a)), 5);

    group->clear();  // The values outlive it.
    params[0].value.as<float>()[4999] = 7;
    EXPECT_EQ(params[0].value.as<float>()[4999], 7);
  }
}

TEST(ValueMemoryTest, NothingToMoveIsNoError) {
  auto group = *CreateLocalGroup(1, {});
  ParameterSet params;
  const absl::StatusOr<Memory> memory = MoveValues(*group.front(), params);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->bytes, 0);
}

TEST(ValueMemoryTest, OnADeviceTheyMoveOnTheParametersStream) {
  SimulatedDevices devices({.delay = absl::Milliseconds(1)});
  const absl::Status status =
      internal::RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const Stream stream, devices.CreateStream(comm.device()));
        EK_ASSIGN_OR_RETURN(Memory first, comm.Allocate(12));
        EK_ASSIGN_OR_RETURN(const Memory second, comm.Allocate(4));
        const std::vector<float> host = {1.0f, 2.0f, 3.0f};
        EK_RETURN_IF_ERROR(devices.Copy(first.data.get(), host.data(), 12, stream.ref()));
        ParameterSet params;
        params.Add("a", {first.data.get(), 3, DType::kFloat32, comm.device()});
        params.Add("b", {second.data.get(), 1, DType::kFloat32, comm.device()});
        EXPECT_EQ(MoveValues(comm, params).status().code(), absl::StatusCode::kFailedPrecondition);
        EXPECT_EQ(params[0].value.data, first.data.get());
        params.SetStream(stream.ref());
        EK_ASSIGN_OR_RETURN(const Memory memory, MoveValues(comm, params));
        first = {};  // Nothing uses it any more.
        EXPECT_TRUE(IsIn(memory, params[0].value) && IsIn(memory, params[1].value));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(params[1].value.data) % 256, 0u);
        std::vector<float> back(3);
        EK_RETURN_IF_ERROR(devices.Copy(back.data(), params[0].value.data, 12, stream.ref()));
        EK_RETURN_IF_ERROR(devices.Synchronize(stream.ref(), absl::Now() + absl::Seconds(20)));
        EXPECT_EQ(back, host);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
