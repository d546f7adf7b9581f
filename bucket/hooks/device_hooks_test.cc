// Compressed gradients and mixed precision on simulated devices: the bits of the CPU, and no wait
// for a device.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/hooks/power_sgd.h"
#include "evenkeel/bucket/hooks/quantized_all_reduce.h"
#include "evenkeel/bucket/mixed_precision.h"
#include "evenkeel/bucket/testing/device_toy_model.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::RunSimulatedRanks;
using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8, 200};

struct Case {
  std::string name;
  DType wire = DType::kBFloat16;
  bool views = false;
  bool is_uneven = false;
  bool has_unused = false;
};

ReducerOptions OptionsOf(const Case& c) {
  return {.caps = {Bytes{8}, Bytes{24}},
          .gradient_as_bucket_view = c.views,
          .find_unused = c.has_unused};
}

template <typename Model>
absl::StatusOr<std::vector<std::vector<float>>> Train(Communicator& comm, const Case& c) {
  EK_ASSIGN_OR_RETURN(const auto model, Model::Create(comm, kSizes));
  EK_ASSIGN_OR_RETURN(
      auto ddp,
      DataParallel::Create(&comm, &model->params(), model->buffers(), {.reducer = OptionsOf(c)},
                           std::make_unique<CompressedReduction>(c.wire)));
  ddp->SetOptimizerState({});
  EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
    for (int step = 0; step < (c.is_uneven ? 2 + comm.rank() : 5); ++step) {
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      model->Forward(comm.rank(), step);
      for (int p = model->params().size() - 1; p >= 0; --p) {
        if (c.has_unused && (p == 4 || (comm.rank() + step + p) % 3 == 0)) continue;
        EK_RETURN_IF_ERROR(
            model->BackwardOf(p, comm.rank(), step, [&](int i) { return ddp->GradientReady(i); }));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      model->Descend();
      model->params().ClearGradients();
    }
    return absl::OkStatus();
  }));
  return model->Values();
}

TEST(DeviceHooksTest, CompressedGradientsAreThoseOfTheCpuBitForBit) {
  const Case cases[] = {{.name = "bfloat16"},
                        {.name = "float16", .wire = DType::kFloat16},
                        {.name = "views", .views = true},
                        {.name = "uneven", .is_uneven = true},
                        {.name = "unused", .has_unused = true}};
  for (const Case& c : cases) {
    for (const int world_size : {1, 2, 3, 5}) {
      SCOPED_TRACE(absl::StrCat(c.name, ", ", world_size, " ranks"));
      std::vector<std::vector<std::vector<float>>> on_cpu(world_size), on_device(world_size);
      const absl::Status cpu = RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(on_cpu[comm.rank()], Train<HostToyModel>(comm, c));
        return absl::OkStatus();
      });
      ASSERT_TRUE(cpu.ok()) << cpu;
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(50)});
      const absl::Status device =
          RunSimulatedRanks(devices, world_size, [&](Communicator& comm) -> absl::Status {
            EK_ASSIGN_OR_RETURN(on_device[comm.rank()], Train<DeviceToyModel>(comm, c));
            return absl::OkStatus();
          });
      ASSERT_TRUE(device.ok()) << device;
      EXPECT_EQ(on_device, on_cpu);
    }
  }
}

// A rank that is early has its buckets launched by the thread that brings the others' word: which
// may not wait for them.
TEST(DeviceHooksTest, ALateRankHoldsUpNoWordBetweenTheRanks) {
  SimulatedDevices devices({.count = 2});
  internal::SimulatedNccl nccl(devices);
  auto group = internal::CreateSimulatedNcclGroup(devices, nccl, 2,
                                                  {.communicator = {.timeout = absl::Seconds(10)}});
  ASSERT_TRUE(group.ok()) << group.status();
  absl::Notification early_has_all;
  const absl::Status status = internal::RunGroup(*group, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model->params(), {}, {.reducer = OptionsOf({})},
                                       std::make_unique<CompressedReduction>(DType::kBFloat16)));
    if (comm.rank() == 1) early_has_all.WaitForNotification();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    const auto backward = [&] {
      return model->Backward(0, 0, [&](int i) { return ddp->GradientReady(i); });
    };
    if (comm.rank() == 0) EK_RETURN_IF_ERROR(backward());
    if (comm.rank() == 0) early_has_all.Notify();
    EK_RETURN_IF_ERROR(comm.AgreeAny(true).status());
    if (comm.rank() == 1) EK_RETURN_IF_ERROR(backward());
    return ddp->FinishStep();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Runs steps, and says how often the host waited and what was launched in those after the first
// three.
struct Counted {
  int64_t waits = 0, launches = 0;
};
template <typename Step>
absl::StatusOr<Counted> Count(Communicator& comm, SimulatedDevices& devices,
                              const std::atomic<int64_t>& work_waits, Step step_of) {
  Counted before;
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      EK_RETURN_IF_ERROR(comm.Barrier());
      // Nobody waits in it any more.
      EK_RETURN_IF_ERROR(comm.control().Exchange("all are here", "", comm.timeout()).status());
      before = {work_waits + devices.host_waits(), devices.launches()};
      EK_RETURN_IF_ERROR(comm.control().Exchange("counted", "", comm.timeout()).status());
    }
    EK_RETURN_IF_ERROR(step_of(step));
  }
  EK_RETURN_IF_ERROR(comm.control().Exchange("counted", "", comm.timeout()).status());
  const Counted after = {work_waits + devices.host_waits(), devices.launches()};
  EK_RETURN_IF_ERROR(comm.control().Exchange("counted", "", comm.timeout()).status());
  return Counted{after.waits - before.waits, after.launches - before.launches};
}

TEST(DeviceHooksTest, ACompressedStepWaitsForNoDevice) {
  SimulatedDevices devices({.count = 2, .delay = absl::Milliseconds(1)});
  std::atomic<int64_t> work_waits = 0;
  const absl::Status status = RunSimulatedRanks(
      devices, 2,
      [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(
                                          &comm, &model->params(), {}, {.reducer = OptionsOf({})},
                                          std::make_unique<CompressedReduction>(DType::kBFloat16)));
        EK_ASSIGN_OR_RETURN(
            const Counted counted, Count(comm, devices, work_waits, [&](int step) -> absl::Status {
              EK_RETURN_IF_ERROR(ddp->BeginStep());
              EK_RETURN_IF_ERROR(
                  model->Backward(comm.rank(), step, [&](int i) { return ddp->GradientReady(i); }));
              EK_RETURN_IF_ERROR(ddp->FinishStep());
              model->params().ClearGradients();
              return absl::OkStatus();
            }));
        EXPECT_EQ(counted.waits, 0);
        // Packed and unpacked, narrowed, the flags too, and widened; and each gradient.
        const int64_t buckets = ddp->buckets().size();
        EXPECT_EQ(counted.launches, 2 * 3 * (5 * buckets + model->params().size()));
        return absl::OkStatus();
      },
      {.work_waits = &work_waits});
  EXPECT_TRUE(status.ok()) << status;
}

// The 16-bit weights are taken for the 16-bit gradients: what is cast, widened and added up shows
// in the weights.
template <typename Model>
absl::StatusOr<std::vector<std::vector<float>>> TrainMixed(
    Communicator& comm, Model& model, DType compute,
    const std::function<absl::Status(const TensorView& weight, const TensorView& gradient)>&
        backward,
    const std::function<absl::StatusOr<Counted>(std::function<absl::Status(int)>)>& run,
    Counted* counted) {
  EK_ASSIGN_OR_RETURN(auto ddp,
                      DataParallel::Create(&comm, &model.params(), {}, {.reducer = OptionsOf({})}));
  EK_ASSIGN_OR_RETURN(const auto mixed,
                      MixedPrecision::Create(&model.params(), ddp.get(), {.compute = compute}));
  mixed->SetGradScale(1.0 / (1 + comm.rank()));
  EK_ASSIGN_OR_RETURN(*counted, run([&](int) -> absl::Status {
    for (const StepMode mode : {StepMode::kAccumulate, StepMode::kSync}) {
      EK_RETURN_IF_ERROR(ddp->BeginStep(mode));
      for (int p = model.params().size() - 1; p >= 0; --p) {
        EK_RETURN_IF_ERROR(backward(mixed->Compute(p), mixed->Gradient(p)));
        EK_RETURN_IF_ERROR(mixed->GradientReady(p));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
    }
    model.Descend();
    model.params().ClearGradients();
    return absl::OkStatus();
  }));
  return model.Values();
}

TEST(DeviceHooksTest, MixedPrecisionIsThatOfTheCpuBitForBitAndWaitsForNoDevice) {
  for (const DType compute : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::vector<std::vector<float>>> on_cpu(2), on_device(2);
    const absl::Status cpu = RunRanks(2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto model, HostToyModel::Create(comm, kSizes));
      Counted counted;
      EK_ASSIGN_OR_RETURN(
          on_cpu[comm.rank()],
          TrainMixed(
              comm, *model, compute,
              [](const TensorView& weight, const TensorView& gradient) {
                std::memcpy(gradient.data, weight.data, weight.bytes());
                return absl::OkStatus();
              },
              [](const std::function<absl::Status(int)>& step) -> absl::StatusOr<Counted> {
                for (int i = 0; i < 6; ++i) EK_RETURN_IF_ERROR(step(i));
                return Counted{};
              },
              &counted));
      return absl::OkStatus();
    });
    ASSERT_TRUE(cpu.ok()) << cpu;
    SimulatedDevices devices({.count = 2, .delay = absl::Microseconds(200)});
    std::atomic<int64_t> work_waits = 0;
    const absl::Status device = RunSimulatedRanks(
        devices, 2,
        [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
          Counted counted;
          EK_ASSIGN_OR_RETURN(on_device[comm.rank()],
                              TrainMixed(
                                  comm, *model, compute,
                                  [&](const TensorView& weight, const TensorView& gradient) {
                                    return devices.Copy(gradient.data, weight.data, weight.bytes(),
                                                        model->stream());
                                  },
                                  [&](const std::function<absl::Status(int)>& step) {
                                    return Count(comm, devices, work_waits, step);
                                  },
                                  &counted));
          EXPECT_EQ(counted.waits, 0);
          return absl::OkStatus();
        },
        {.work_waits = &work_waits});
    ASSERT_TRUE(device.ok()) << device;
    EXPECT_EQ(on_device, on_cpu);
  }
}

TEST(DeviceHooksTest, WhatComputesOnTheCpuRefusesDevices) {
  SimulatedDevices devices;
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
        const auto create = [&](std::unique_ptr<BucketReduction> reduction) {
          return DataParallel::Create(&comm, &model->params(), {}, {}, std::move(reduction))
              .status();
        };
        for (const absl::Status& refused : {create(std::make_unique<PowerSgd>(PowerSgdOptions())),
                                            create(std::make_unique<QuantizedAllReduce>())}) {
          EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
          EXPECT_THAT(refused.message(), HasSubstr("on cuda:0"));
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
