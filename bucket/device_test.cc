// Steps on simulated devices: they end with the bits of the same steps on the CPU, and the host
// waits for no device.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
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
const std::vector<Bytes> kSmallCaps = {Bytes{8}, Bytes{24}};

// A rank's final state.
struct Outcome {
  std::vector<std::vector<float>> values;  // And the buffer.
  std::string states;                      // The gradients' states after each step.
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

struct Scenario {
  std::string name;
  ReducerOptions reducer = {};
  std::function<int(int rank)> steps = [](int) { return 6; };
  int backwards = 1;  // Per step: all but the last accumulate.
  std::function<bool(int rank, int step, int param)> uses = [](int, int, int) { return true; };
  std::function<void(int step, ParameterSet&)> before_step = [](int, ParameterSet&) {};
  BufferOptions buffers = {};
  bool asks_for_buffers = false;  // After each second step.
  bool moves = false;             // Memory, before each backward.
};

template <typename Model>
absl::Status Step(DataParallel& ddp, Model& model, const Scenario& scenario, int rank, int step) {
  for (int backward = 0; backward < scenario.backwards; ++backward) {
    const bool is_last = backward == scenario.backwards - 1;
    if (scenario.moves) {
      EK_RETURN_IF_ERROR(model.Move());
      EK_RETURN_IF_ERROR(ddp.RebindBuffer(0, model.buffers()[0]));
    }
    EK_RETURN_IF_ERROR(ddp.BeginStep(is_last ? StepMode::kSync : StepMode::kAccumulate));
    model.Forward(rank, step);
    std::vector<int> unused;
    for (int p = 0; p < model.params().size(); ++p) {
      if (model.params().trainable(p) && !scenario.uses(rank, step, p)) unused.push_back(p);
    }
    if (is_last && scenario.reducer.find_unused) EK_RETURN_IF_ERROR(ddp.MarkUnused(unused));
    for (int p = model.params().size() - 1; p >= 0; --p) {
      if (scenario.uses(rank, step, p)) {
        EK_RETURN_IF_ERROR(model.BackwardOf(p, rank, step * 10 + backward,
                                            [&](int i) { return ddp.GradientReady(i); }));
      }
    }
    EK_RETURN_IF_ERROR(ddp.FinishStep());
  }
  return absl::OkStatus();
}

template <typename Model>
absl::StatusOr<Outcome> RunScenario(Communicator& comm, const Scenario& scenario) {
  EK_ASSIGN_OR_RETURN(const auto model, Model::Create(comm, kSizes, /*seed=*/comm.rank()));
  EK_ASSIGN_OR_RETURN(
      auto ddp, DataParallel::Create(&comm, &model->params(), model->buffers(),
                                     {.reducer = scenario.reducer, .buffers = scenario.buffers}));
  ddp->SetOptimizerState({});
  Outcome outcome;
  EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
    for (int step = 0; step < scenario.steps(comm.rank()); ++step) {
      scenario.before_step(step, model->params());
      EK_RETURN_IF_ERROR(Step(*ddp, *model, scenario, comm.rank(), step));
      for (int p = 0; p < model->params().size(); ++p) {
        absl::StrAppend(&outcome.states, static_cast<int>(model->params().grad_state(p)));
      }
      absl::StrAppend(&outcome.states, " ");
      if (scenario.asks_for_buffers && step % 2 == 1) EK_RETURN_IF_ERROR(ddp->SyncBuffers());
      model->Descend();
      model->params().ClearGradients();
    }
    return absl::OkStatus();
  }));
  EK_ASSIGN_OR_RETURN(outcome.values, model->Values());
  return outcome;
}

std::vector<Scenario> Scenarios() {
  const ReducerOptions plain{.caps = kSmallCaps};
  ReducerOptions views = plain, coalesced = plain, unused = plain, skipped = plain, fixed = plain,
                 delayed = plain;
  views.gradient_as_bucket_view = true;
  coalesced.fusion = Fusion::kCoalesced;
  unused.find_unused = true;
  skipped.find_unused = skipped.skip_unused_buckets = true;
  fixed.static_graph = true;
  delayed.delayed = {"p4", "p3"};
  delayed.delay_until = "p1";
  ReducerOptions unused_views = unused;
  unused_views.gradient_as_bucket_view = true;
  const auto uneven = [](int rank) { return 2 + 2 * rank; };
  const auto some = [](int rank, int step, int param) { return (rank + step + param) % 3 != 0; };
  // Parameter 4 is used by nobody, others by some.
  const auto few = [](int rank, int step, int param) {
    return param != 4 && (rank + step + param) % 4 != 0;
  };
  const auto freezes = [](int step, ParameterSet& params) {
    if (step == 2) params.SetTrainable("p4", false);
    if (step == 3) params.SetTrainable("p0", false);
    if (step == 4) params.SetTrainable("p4", true);
  };
  return {
      {.name = "copy", .reducer = plain},
      {.name = "views", .reducer = views},
      {.name = "coalesced", .reducer = coalesced},
      {.name = "one_bucket", .reducer = {}},
      {.name = "accumulate", .reducer = plain, .backwards = 3},
      {.name = "accumulate_views", .reducer = views, .backwards = 2},
      {.name = "uneven", .reducer = plain, .steps = uneven},
      {.name = "uneven_views", .reducer = views, .steps = uneven},
      {.name = "uneven_accumulate", .reducer = views, .steps = uneven, .backwards = 2},
      {.name = "unused", .reducer = unused, .uses = some},
      {.name = "unused_views", .reducer = unused_views, .uses = few},
      {.name = "unused_uneven", .reducer = unused, .steps = uneven, .uses = few},
      {.name = "skipped", .reducer = skipped, .uses = few},
      {.name = "skipped_uneven", .reducer = skipped, .steps = uneven, .uses = few},
      {.name = "freezing", .reducer = plain, .before_step = freezes},
      {.name = "freezing_views", .reducer = views, .before_step = freezes},
      {.name = "static_graph", .reducer = fixed},
      {.name = "delayed", .reducer = delayed},
      {.name = "moving", .reducer = plain, .steps = uneven, .backwards = 2, .moves = true},
      {.name = "moving_views", .reducer = views, .backwards = 2, .moves = true},
      {.name = "moving_coalesced", .reducer = coalesced, .moves = true},
      {.name = "mean_of_buffers",
       .reducer = plain,
       .steps = uneven,
       .buffers = {.how = BufferSync::kAverage}},
      {.name = "buffers_on_demand",
       .reducer = plain,
       .steps = uneven,
       .buffers = {.how = BufferSync::kAverage, .every = 0},
       .asks_for_buffers = true},
  };
}

class DeviceStepTest : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(DeviceStepTest, EndsWithTheBitsOfTheCpu) {
  const auto& [index, world_size] = GetParam();
  const Scenario scenario = Scenarios()[index];
  std::vector<Outcome> on_cpu(world_size), on_device(world_size);
  const absl::Status cpu = RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(on_cpu[comm.rank()], RunScenario<HostToyModel>(comm, scenario));
    return absl::OkStatus();
  });
  ASSERT_TRUE(cpu.ok()) << cpu;
  for (const absl::Duration delay : {absl::ZeroDuration(), absl::Microseconds(300)}) {
    SimulatedDevices devices({.count = world_size, .delay = delay});
    const absl::Status device =
        RunSimulatedRanks(devices, world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(on_device[comm.rank()], RunScenario<DeviceToyModel>(comm, scenario));
          return absl::OkStatus();
        });
    ASSERT_TRUE(device.ok()) << device;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(on_device[rank].states, on_cpu[rank].states)
          << "rank " << rank << ", delay " << delay;
      EXPECT_EQ(on_device[rank].values, on_cpu[rank].values)
          << "rank " << rank << ", delay " << delay;
    }
    for (int rank = 0; rank < world_size; ++rank)
      EXPECT_EQ(devices.held_bytes(Device::Cuda(rank)), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, DeviceStepTest,
                         testing::Combine(testing::Range(0, static_cast<int>(Scenarios().size())),
                                          testing::Values(1, 2, 3, 5)),
                         [](const testing::TestParamInfo<std::tuple<int, int>>& info) {
                           return absl::StrCat(Scenarios()[std::get<0>(info.param)].name, "_world_",
                                               std::get<1>(info.param));
                         });

// NCCL's launches wait for all ranks, and its sums are not in rank order: of two addends that makes
// no difference.
TEST(DeviceStepOverNcclTest, EndsWithTheBitsOfTheCpu) {
  constexpr int kWorld = 2;
  for (const Scenario& scenario : Scenarios()) {
    SCOPED_TRACE(scenario.name);
    std::vector<Outcome> on_cpu(kWorld), on_device(kWorld);
    const absl::Status cpu = RunRanks(kWorld, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(on_cpu[comm.rank()], RunScenario<HostToyModel>(comm, scenario));
      return absl::OkStatus();
    });
    ASSERT_TRUE(cpu.ok()) << cpu;
    SimulatedDevices devices({.count = kWorld});
    internal::SimulatedNccl nccl(devices);
    auto group = internal::CreateSimulatedNcclGroup(devices, nccl, kWorld);
    ASSERT_TRUE(group.ok()) << group.status();
    const absl::Status device = internal::RunGroup(*group, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(on_device[comm.rank()], RunScenario<DeviceToyModel>(comm, scenario));
      return absl::OkStatus();
    });
    ASSERT_TRUE(device.ok()) << device;
    for (int rank = 0; rank < kWorld; ++rank) {
      EXPECT_EQ(on_device[rank].states, on_cpu[rank].states) << "rank " << rank;
      EXPECT_EQ(on_device[rank].values, on_cpu[rank].values) << "rank " << rank;
    }
    EXPECT_EQ(nccl.garbage(), 0);
  }
}

// Steps in which the host waits for nothing, with what they launch.
void ExpectNoWait(const ReducerOptions& reducer, int launches_per_bucket) {
  constexpr int kWorld = 2, kWarmUp = 3, kSteps = 4;
  SimulatedDevices devices({.count = kWorld, .delay = absl::Milliseconds(1)});
  std::atomic<int64_t> work_waits = 0;
  const absl::Status status = RunSimulatedRanks(
      devices, kWorld,
      [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model->params(),
                                                           model->buffers(), {.reducer = reducer}));
        const Scenario scenario{.reducer = reducer};
        int64_t waits = 0, launches = 0;
        for (int step = 0; step < kWarmUp + kSteps; ++step) {
          if (step == kWarmUp) {
            EK_RETURN_IF_ERROR(comm.Barrier());
            // Nobody waits in it any more.
            EK_RETURN_IF_ERROR(
                comm.control().Exchange("all are here", "", comm.timeout()).status());
            waits = work_waits + devices.host_waits();
            launches = devices.launches();
            EK_RETURN_IF_ERROR(comm.control().Exchange("counted", "", comm.timeout()).status());
          }
          EK_RETURN_IF_ERROR(Step(*ddp, *model, scenario, comm.rank(), step));
          model->params().ClearGradients();
        }
        EK_RETURN_IF_ERROR(comm.control().Exchange("counted", "", comm.timeout()).status());
        EXPECT_EQ(work_waits + devices.host_waits(), waits);
        const int64_t buckets = ddp->buckets().size(), params = model->params().size();
        // A step's own: forward and each gradient; the snapshot of the buffer; the buckets'.
        const int64_t per_step = 1 + params + 1 + launches_per_bucket * buckets;
        EXPECT_GT(buckets, 1);
        EXPECT_EQ(devices.launches() - launches, kWorld * kSteps * per_step);
        return comm.control().Exchange("counted", "", comm.timeout()).status();
      },
      {.work_waits = &work_waits});
  EXPECT_TRUE(status.ok()) << status;
}

TEST(DeviceStepTest, TheHostWaitsForNoDeviceAndABucketIsPackedAndUnpackedInOneLaunchEach) {
  ExpectNoWait({.caps = kSmallCaps}, /*launches_per_bucket=*/2);
}

TEST(DeviceStepTest, OfViewsOnlyTheFlagsAreSet) {
  ExpectNoWait({.caps = kSmallCaps, .gradient_as_bucket_view = true}, /*launches_per_bucket=*/1);
}

TEST(DeviceStepTest, OfCoalescedBucketsOnlyTheFlagsAreSet) {
  ExpectNoWait({.caps = kSmallCaps, .fusion = Fusion::kCoalesced}, /*launches_per_bucket=*/1);
}

TEST(DeviceStepTest, WhereARankFailsAllGetItsSentence) {
  for (const bool views : {false, true}) {
    SimulatedDevices devices({.count = 3, .delay = absl::Microseconds(200)});
    std::vector<absl::Status> results(3);
    const absl::Status status =
        RunSimulatedRanks(devices, 3, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
          const Scenario scenario{
              .reducer = {.caps = kSmallCaps, .gradient_as_bucket_view = views}};
          EK_ASSIGN_OR_RETURN(auto ddp,
                              DataParallel::Create(&comm, &model->params(), model->buffers(),
                                                   {.reducer = scenario.reducer}));
          for (int step = 0; step < 100 && results[comm.rank()].ok(); ++step) {
            if (comm.rank() == 1 && step == 4)
              return results[1] = absl::DataLossError("the disk is gone");
            results[comm.rank()] = Step(*ddp, *model, scenario, comm.rank(), step);
            model->params().ClearGradients();
          }
          return results[comm.rank()];
        });
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    for (const int rank : {0, 2}) {
      EXPECT_EQ(results[rank].code(), absl::StatusCode::kUnavailable) << results[rank];
      EXPECT_THAT(std::string(results[rank].message()), HasSubstr("the disk is gone"));
    }
  }
}

// Two steps, then rank 1 fails in the middle of backward; all go on in the next group, and two more
// steps.
template <typename Model>
absl::Status GoOnElsewhere(Communicator& first, Communicator& second, bool views,
                           Outcome& outcome) {
  const Scenario scenario{.reducer = {.caps = kSmallCaps, .gradient_as_bucket_view = views}};
  const int rank = first.rank();
  EK_ASSIGN_OR_RETURN(const auto model, Model::Create(first, kSizes));
  EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&first, &model->params(), model->buffers(),
                                                     {.reducer = scenario.reducer}));
  const auto steps = [&](int begin, int end) -> absl::Status {
    for (int step = begin; step < end; ++step) {
      EK_RETURN_IF_ERROR(Step(*ddp, *model, scenario, rank, step));
      model->Descend();
      model->params().ClearGradients();
    }
    return absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(steps(0, 3));
  // An abort would end what these steps still have on the devices.
  EK_RETURN_IF_ERROR(model->Values().status());
  EK_RETURN_IF_ERROR(first.control().Exchange("all are here", "", first.timeout()).status());
  absl::Status status = ddp->BeginStep();  // Rank 1 may have failed already.
  if (rank == 1) {
    EK_RETURN_IF_ERROR(status);
    EK_RETURN_IF_ERROR(model->BackwardOf(4, rank, 0, [&](int i) { return ddp->GradientReady(i); }));
    first.Abort(absl::InternalError("the loss is not a number"));
  } else if (status.ok()) {
    model->Forward(rank, 3);
    status = model->Backward(rank, 3, [&](int i) { return ddp->GradientReady(i); });
    status.Update(ddp->FinishStep());
  }
  EXPECT_EQ(status.ok(), rank == 1);
  EK_RETURN_IF_ERROR(model->Move());
  EK_RETURN_IF_ERROR(ddp->RebindBuffer(0, model->buffers()[0]));
  EK_RETURN_IF_ERROR(ddp->ReplaceGroup(&second));
  EK_RETURN_IF_ERROR(steps(4, 6));
  EK_ASSIGN_OR_RETURN(outcome.values, model->Values());
  return absl::OkStatus();
}

TEST(DeviceStepTest, AfterAFailureInBackwardItGoesOnInAnotherGroupAsOnTheCpu) {
  constexpr int kWorld = 3;
  for (const bool views : {false, true}) {
    SimulatedDevices devices({.count = kWorld, .delay = absl::Microseconds(100)});
    std::vector<Outcome> outcomes[2] = {std::vector<Outcome>(kWorld), std::vector<Outcome>(kWorld)};
    for (const bool on_device : {false, true}) {
      auto first =
          on_device ? internal::CreateSimulatedGroup(devices, kWorld) : CreateLocalGroup(kWorld);
      auto second =
          on_device ? internal::CreateSimulatedGroup(devices, kWorld) : CreateLocalGroup(kWorld);
      ASSERT_TRUE(first.ok() && second.ok());
      std::vector<std::thread> ranks;
      for (int r = 0; r < kWorld; ++r) {
        ranks.emplace_back([&, r] {
          Outcome& outcome = outcomes[on_device][r];
          const absl::Status status =
              on_device ? GoOnElsewhere<DeviceToyModel>(*(*first)[r], *(*second)[r], views, outcome)
                        : GoOnElsewhere<HostToyModel>(*(*first)[r], *(*second)[r], views, outcome);
          EXPECT_TRUE(status.ok()) << status;
        });
      }
      for (std::thread& rank : ranks) rank.join();
    }
    EXPECT_EQ(outcomes[0], outcomes[1]);
  }
}

TEST(DeviceStepTest, AFailureOfTheDeviceEndsTheStepOnAllRanks) {
  SimulatedDevices devices({.count = 2});
  std::vector<absl::Status> results(2);
  const absl::Status status =
      RunSimulatedRanks(devices, 2, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
        const Scenario scenario{.reducer = {.caps = kSmallCaps}};
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model->params(), {},
                                                           {.reducer = scenario.reducer}));
        for (int step = 0; step < 3; ++step)
          EK_RETURN_IF_ERROR(Step(*ddp, *model, scenario, comm.rank(), step));
        EK_RETURN_IF_ERROR(comm.Barrier());
        if (comm.rank() == 0) devices.FailNext("Record", absl::InternalError("scripted"));
        EK_RETURN_IF_ERROR(comm.control().Exchange("scripted", "", comm.timeout()).status());
        results[comm.rank()] = Step(*ddp, *model, scenario, comm.rank(), 3);
        devices.FailNext("Record", absl::OkStatus());
        return results[comm.rank()];
      });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& result : results)
    EXPECT_THAT(std::string(result.message()), HasSubstr("scripted"));
}

TEST(DeviceStepTest, WhatCannotBeDoneOnADeviceIsSaid) {
  SimulatedDevices devices;
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto model, DeviceToyModel::Create(comm, kSizes));
        const auto create = [&](const ReducerOptions& reducer) {
          return DataParallel::Create(&comm, &model->params(), {}, {.reducer = reducer}).status();
        };
        EXPECT_THAT(create({.tune = true}).message(), HasSubstr("the host's time"));
        model->params().SetStream({});
        EXPECT_THAT(create({}).message(), HasSubstr("no stream on cuda:0"));
        model->params().SetStream(model->stream());
        EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(24));
        model->params().AddSparse("rows", {memory.data.get(), 6, DType::kFloat32, comm.device()},
                                  2);
        const absl::Status sparse = create({});
        EXPECT_TRUE(absl::IsUnimplemented(sparse)) << sparse;
        EXPECT_THAT(sparse.message(), HasSubstr("\"rows\" is sparse"));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
