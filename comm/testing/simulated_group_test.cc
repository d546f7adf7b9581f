#include "evenkeel/comm/testing/simulated_group.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

TEST(SimulatedGroupTest, CollectivesFollowStreamsAndStreamsFollowThemWithoutTheHost) {
  for (const int world_size : {1, 2, 5}) {
    SCOPED_TRACE(world_size);
    SimulatedDevices devices({.count = world_size, .delay = absl::Milliseconds(1)});
    std::atomic<int64_t> waits = 0;
    const absl::Status status = RunSimulatedRanks(
        devices, world_size,
        [&](Communicator& comm) -> absl::Status {
          EXPECT_EQ(comm.device(), Device::Cuda(comm.rank()));
          DeviceRuntime& runtime = *comm.runtime();
          EK_ASSIGN_OR_RETURN(const Stream stream, runtime.CreateStream(comm.device()));
          EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(100 * sizeof(float)));
          EK_ASSIGN_OR_RETURN(Channel* const channel, comm.OpenChannel("c"));
          const TensorView data(memory.data.get(), 100, DType::kFloat32, comm.device());
          std::vector<float> host(100, static_cast<float>(comm.rank() + 1)), back(100);
          for (int round = 0; round < 3; ++round) {
            EK_RETURN_IF_ERROR(runtime.Copy(data.data, host.data(), data.bytes(), stream.ref()));
            EK_ASSIGN_OR_RETURN(const Event written, runtime.Record(stream.ref()));
            const CallOptions after = round == 0 ? CallOptions{.after = stream.ref()}
                                                 : CallOptions{.after_event = written};
            const Work work = channel->AllReduce(data, ReduceOp::kSum, after);
            EK_RETURN_IF_ERROR(work.OrderBefore(stream.ref()));
            EK_RETURN_IF_ERROR(runtime.Copy(back.data(), data.data, data.bytes(), stream.ref()));
          }
          EXPECT_EQ(waits, 0);
          EK_RETURN_IF_ERROR(runtime.Synchronize(stream.ref(), Soon()));
          EXPECT_EQ(back,
                    std::vector<float>(100, static_cast<float>(world_size * (world_size + 1)) / 2));
          return absl::OkStatus();
        },
        {.work_waits = &waits});
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(SimulatedGroupTest, StreamsDoNotWaitForWhatTheHostCompares) {
  SimulatedDevices devices({.count = 2, .delay = absl::Milliseconds(1)});
  std::atomic<int64_t> waits = 0;
  SimulatedGroupOptions options{.work_waits = &waits};
  options.comm.verify = VerifyLevel::kEvery;
  const absl::Status status = RunSimulatedRanks(
      devices, 2,
      [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const Stream stream, comm.runtime()->CreateStream(comm.device()));
        EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(4));
        const float one = 1.0f;
        float sum = 0.0f;
        EK_RETURN_IF_ERROR(comm.runtime()->Copy(memory.data.get(), &one, 4, stream.ref()));
        const TensorView data(memory.data.get(), 1, DType::kFloat32, comm.device());
        const Work work = comm.user().AllReduce(data, ReduceOp::kSum, {.after = stream.ref()});
        EK_RETURN_IF_ERROR(work.OrderBefore(stream.ref()));
        EK_RETURN_IF_ERROR(comm.runtime()->Copy(&sum, memory.data.get(), 4, stream.ref()));
        EXPECT_EQ(waits, 0);
        EK_RETURN_IF_ERROR(comm.runtime()->Synchronize(stream.ref(), Soon()));
        EXPECT_EQ(sum, 2.0f);
        return work.Wait();
      },
      options);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SimulatedGroupTest, ARankThatFailsEndsWhatOthersStreamsWaitFor) {
  SimulatedDevices devices({.count = 3});
  const absl::Status status =
      RunSimulatedRanks(devices, 3, [&](Communicator& comm) -> absl::Status {
        if (comm.rank() == 1) return absl::DataLossError("scripted");
        EK_ASSIGN_OR_RETURN(const Stream stream, comm.runtime()->CreateStream(comm.device()));
        EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(4));
        const TensorView data(memory.data.get(), 1, DType::kFloat32, comm.device());
        const Work work = comm.user().AllReduce(data, ReduceOp::kSum, {.after = stream.ref()});
        EK_RETURN_IF_ERROR(work.OrderBefore(stream.ref()));
        EK_RETURN_IF_ERROR(comm.runtime()->Synchronize(stream.ref(), Soon()));
        return work.Wait();
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

TEST(SimulatedGroupTest, SendsMeetWhateverTheirOrder) {
  SimulatedDevices devices({.count = 2});
  const absl::Status status =
      RunSimulatedRanks(devices, 2, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(8));
        auto* const data = static_cast<float*>(memory.data.get());
        data[0] = static_cast<float>(comm.rank());
        const Work sent =
            comm.user().Send({data, 1, DType::kFloat32, comm.device()}, 1 - comm.rank());
        EK_RETURN_IF_ERROR(comm.user()
                               .Recv({data + 1, 1, DType::kFloat32, comm.device()}, 1 - comm.rank())
                               .Wait());
        EXPECT_EQ(data[1], static_cast<float>(1 - comm.rank()));
        return sent.Wait();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SimulatedGroupTest, SurvivorsMeetInAnotherGroup) {
  SimulatedDevices devices({.count = 3});
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> group =
      CreateSimulatedGroup(devices, 3);
  ASSERT_TRUE(group.ok()) << group.status();
  const absl::Status status = RunGroup(*group, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> half, comm.Split(comm.rank() % 2, 0));
    EXPECT_EQ(half->device(), comm.device());
    EK_ASSIGN_OR_RETURN(const Memory memory, half->Allocate(4));
    const TensorView data(memory.data.get(), 1, DType::kFloat32, half->device());
    *static_cast<float*>(memory.data.get()) = 1.0f;
    EK_RETURN_IF_ERROR(half->AllReduce(data, ReduceOp::kSum));
    EXPECT_EQ(*static_cast<float*>(memory.data.get()), static_cast<float>(half->world_size()));
    return half->Finalize();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel::internal
