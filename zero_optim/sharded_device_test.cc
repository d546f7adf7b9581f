// An optimizer by whole tensors on simulated devices beside the plain training on the CPU.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/testing/sharded_trainer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "evenkeel/zero_optim/update_rule.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kDelay = absl::Microseconds(20);

void RunOn(SimulatedDevices& devices, int world_size,
           absl::FunctionRef<absl::Status(Communicator&)> body,
           std::atomic<int64_t>* work_waits = nullptr) {
  const absl::Status status =
      RunSimulatedRanks(devices, world_size, body, {.work_waits = work_waits});
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedOptimizerOnDevicesTest, IsThePlainTrainingBitForBit) {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const Mode mode : kAllModes) {
      for (const UpdateRule& rule :
           {UpdateRule(Sgd{.learning_rate = 0.1}), UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
        SCOPED_TRACE(absl::StrCat(world_size, " ranks, ", ToString(mode), ", ", ToString(rule)));
        SimulatedDevices devices({.count = world_size, .delay = kDelay});
        RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, mode, rule));
          TestModel plain_model(kSizes);
          PlainTraining plain(&plain_model, rule);
          for (int step = 0; step < 4; ++step) {
            const StepOptions options = {.grad_scale = step == 1 ? 0.3 : 1.0, .skip = step == 2};
            EK_RETURN_IF_ERROR(trainer->Step(step, options));
            plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
          }
          return ExpectEqual(*trainer, plain_model, plain);
        });
      }
    }
  }
}

TEST(ShardedOptimizerOnDevicesTest, NoStepWaitsForADevice) {
  for (const int world_size : {1, 2, 3}) {
    for (const Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(50)});
      std::atomic<int64_t> work_waits = 0;
      RunOn(
          devices, world_size,
          [&](Communicator& comm) -> absl::Status {
            EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, mode, AdamW{}));
            TestModel plain_model(kSizes);
            PlainTraining plain(&plain_model, AdamW{});
            const StepOptions checked{.clip = ClipOptions{.max_norm = 1e9}, .skip_nonfinite = true};
            const auto options = [&](int step) { return step % 2 == 0 ? checked : StepOptions(); };
            // Buckets are made anew when the order of gradients is known.
            for (int step = 0; step < 2; ++step)
              EK_RETURN_IF_ERROR(trainer->Step(step, options(step)));
            EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
            const int64_t waits = devices.host_waits(), works = work_waits;
            EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
            for (int step = 2; step < 7; ++step)
              EK_RETURN_IF_ERROR(trainer->Step(step, options(step)));
            EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
            EXPECT_EQ(devices.host_waits(), waits);
            EXPECT_EQ(work_waits, works);
            EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
            for (int step = 0; step < 7; ++step) {
              plain.Step(Ranks(comm.world_size()), step, 1.0 / comm.world_size(), options(step));
            }
            return ExpectEqual(*trainer, plain_model, plain);
          },
          &work_waits);
    }
  }
}

// Which gradients exist is known on the devices alone; parameter 4 has one on the last rank, 1 on
// none until the end.
TEST(ShardedOptimizerOnDevicesTest, LeavesAloneWhatNoRankHasAGradientOf) {
  for (const int world_size : {1, 2, 3}) {
    SimulatedDevices devices({.count = world_size, .delay = kDelay});
    RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
      const int last = world_size - 1;
      EK_ASSIGN_OR_RETURN(auto trainer,
                          Trainer::CreateOn(devices, comm, Mode::kZeroAlone, kMomentum));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, kMomentum);
      for (int step = 0; step < 5; ++step) {
        const StepOptions options{.skip_nonfinite = step % 2 == 1};
        const auto is_without = [&](int rank, int param) {
          return step < 4 && ((param == 4 && rank != last) || param == 1);
        };
        trainer->model.params().ClearGradients();
        for (int param = 0; param < trainer->model.size(); ++param) {
          trainer->model.PutGradient(comm.rank(), step, param, /*adds=*/false);
          if (is_without(comm.rank(), param)) continue;  // Then nobody looks at its memory.
          trainer->model.params().SetGradState(param, GradState::kLocal);
        }
        EK_RETURN_IF_ERROR(trainer->zero->Step(options));
        std::vector<StateTensor> sums;
        std::vector<std::optional<TensorView>> gradients(kSizes.size());
        sums.reserve(kSizes.size());
        for (int param = 0; param < plain_model.size(); ++param) {
          if (is_without(last, param)) continue;
          sums.emplace_back(DType::kFloat32, kSizes[param]);
          const auto sum = sums.back().view().as<float>();
          for (int rank = 0; rank < world_size; ++rank) {
            StateTensor own(DType::kFloat32, kSizes[param]);
            if (!is_without(rank, param))
              plain_model.ComputeGradient(rank, step, param, own.view());
            for (size_t k = 0; k < sum.size(); ++k)
              sum[k] = rank == 0 ? own.as<float>()[k] : sum[k] + own.as<float>()[k];
          }
          for (float& element : sum) element *= static_cast<float>(1.0 / world_size);
          gradients[param] = sums.back().view();
        }
        plain.Update(gradients, options);
        if (step == 0 || step == 3) {  // Step 3 may have been skipped, step 0 may not.
          EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
          EXPECT_FALSE(all.params.contains(1));
        }
      }
      return ExpectEqual(*trainer, plain_model, plain);
    });
  }
}

TEST(ShardedOptimizerOnDevicesTest, ClipsAndSkipsForAllRanks) {
  for (const int world_size : {1, 2, 3}) {
    for (const double norm : {2.0, kInfinityNorm}) {
      for (const Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
        SimulatedDevices devices({.count = world_size, .delay = kDelay});
        RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, mode, AdamW{}));
          TestModel plain_model(kSizes);
          PlainTraining plain(&plain_model, AdamW{});
          const StepOptions options{.clip = ClipOptions{.max_norm = 0.5, .norm = norm},
                                    .skip_nonfinite = true};
          for (int step = 0; step < 6; ++step) {
            const bool is_bad = step == 0 || step == 3;
            if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(trainer->ddp->BeginStep());
            trainer->model.params().ClearGradients();
            trainer->model.Backward(comm.rank(), step);
            if (is_bad && comm.rank() == world_size - 1) {
              const TensorView gradient = trainer->model.params()[1].grad;
              EK_RETURN_IF_ERROR(devices.Put(trainer->stream.ref(), [gradient] {
                gradient.as<float>()[17] = std::numeric_limits<float>::infinity();
              }));
            }
            if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(trainer->Reduce());
            std::optional<GradientCheck> before;
            if (step == 4) {
              EK_ASSIGN_OR_RETURN(before, trainer->zero->CheckGradients(norm));
            }
            EK_RETURN_IF_ERROR(trainer->zero->Step(options));
            const GradientCheck check = *trainer->zero->last_check();
            if (is_bad) {
              EXPECT_EQ(check, (GradientCheck{kInfinityNorm, false, true}));
            } else {
              plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
              EXPECT_NEAR(check.norm, plain.norm(), 1e-9 * plain.norm());
              EXPECT_EQ(trainer->zero->check_before()->is_skipped, step == 1 || step == 4);
            }
            if (before.has_value()) {
              EXPECT_EQ(before->norm, check.norm);
            }
            EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
          }
          return absl::OkStatus();
        });
      }
    }
  }
}

// State moves between the devices when too little of what a rank owns is trained.
TEST(ShardedOptimizerOnDevicesTest, IsThePlainTrainingWhateverIsFrozenAndMovesState) {
  const std::vector<int64_t> sizes = {40, 41, 42, 43, 44, 45, 46, 47};
  for (const int world_size : {2, 3}) {
    for (const Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
      SimulatedDevices devices({.count = world_size, .delay = kDelay});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(Stream stream, devices.CreateStream(comm.device()));
        Trainer trainer(sizes, DType::kFloat32, &devices, std::move(stream));
        trainer.options.max_imbalance = 1.2;
        EK_RETURN_IF_ERROR(
            trainer.Init(comm, mode, AllInOneGroup(trainer.model.params(), AdamW{})));
        TestModel plain_model(sizes);
        PlainTraining plain(&plain_model, AdamW{});
        std::vector<int> owners, first_owners;
        for (int step = 0; step < 7; ++step) {
          for (ParameterSet* params : {&trainer.model.params(), &plain_model.params()}) {
            for (int i = 0; i < 8; ++i)
              params->SetTrainable(i, step < 2 || step > 5 || first_owners[i] == 0);
          }
          EK_RETURN_IF_ERROR(trainer.Step(step, {.skip_nonfinite = true}));
          plain.Step(Ranks(world_size), step, 1.0 / world_size, {.skip_nonfinite = true});
          owners.clear();
          for (int i = 0; i < 8; ++i) owners.push_back(trainer.zero->owner(i));
          if (step == 0) first_owners = owners;
          if (step == 5) {
            EXPECT_NE(owners, first_owners) << "nothing moved";
          }
        }
        EK_RETURN_IF_ERROR(trainer.zero->Rebalance());
        return ExpectEqual(trainer, plain_model, plain);
      });
    }
  }
}

TEST(ShardedOptimizerOnDevicesTest, RanksWithoutInputsTakeTheSameSteps) {
  for (const std::vector<int>& inputs :
       {std::vector<int>{2, 5}, {0, 3}, {3, 1, 2}, {0, 1, 2, 3, 1}}) {
    for (const Mode mode : kAllModes) {
      const int world_size = static_cast<int>(inputs.size());
      SCOPED_TRACE(absl::StrCat(world_size, " ranks, ", ToString(mode)));
      SimulatedDevices devices({.count = world_size, .delay = kDelay});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, mode, AdamW{}));
        const StepOptions options{.clip = ClipOptions{.max_norm = 1e6}, .skip_nonfinite = true};
        EK_RETURN_IF_ERROR(RunJoined(trainer->joinables(), {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < inputs[comm.rank()]; ++step) {
            EK_RETURN_IF_ERROR(trainer->zero->SetLearningRate(0.1 / (1 + step)));
            EK_RETURN_IF_ERROR(trainer->Step(step, options));
            if (step == 1) EK_RETURN_IF_ERROR(trainer->zero->Consolidate().status());
          }
          return absl::OkStatus();
        }));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, AdamW{});
        for (int step = 0; !ActiveIn(inputs, step).empty(); ++step) {
          EXPECT_TRUE(plain.groups().SetLearningRate(0.1 / (1 + step)).ok());
          plain.Step(ActiveIn(inputs, step), step, 1.0 / world_size, options);
        }
        return ExpectEqual(*trainer, plain_model, plain);
      });
    }
  }
}

TEST(ShardedOptimizerOnDevicesTest, CheckpointsAreTheCpusAtAnyWorldSize) {
  const std::string there = absl::StrCat(testing::TempDir(), "/there");
  const std::string here = absl::StrCat(testing::TempDir(), "/here");
  SimulatedDevices devices({.count = 3, .delay = kDelay});
  OptimizerState saved;
  RunOn(devices, 3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, Mode::kZeroAlone, AdamW{}));
    for (int step = 0; step < 3; ++step)
      EK_RETURN_IF_ERROR(trainer->Step(step, {.skip_nonfinite = true}));
    EK_RETURN_IF_ERROR(trainer->zero->Save(there));
    for (const int to : {2, 0, kAllRanks}) {
      EK_ASSIGN_OR_RETURN(OptimizerState all, trainer->zero->Consolidate(to));
      EXPECT_EQ(all.params.size(), to == kAllRanks || to == comm.rank() ? kSizes.size() : 0);
      if (comm.rank() == 0) saved = std::move(all);
    }
    // In pieces, too.
    int64_t elements = 0;
    EK_RETURN_IF_ERROR(trainer->zero->VisitState(
        1,
        [&](const StateChunk& chunk) {
          elements += chunk.data.count;
          for (const float x : chunk.data.as<float>()) EXPECT_LT(x * x, 100.0f);
          return absl::OkStatus();
        },
        Bytes{64}));
    EXPECT_EQ(elements, comm.rank() == 1 ? 2 * 405 : 0);
    return absl::OkStatus();
  });
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->zero->Load(there));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer->zero->Consolidate());
    EXPECT_TRUE(all == saved);
    return trainer->zero->Save(here);
  });
  OptimizerState last;
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, Mode::kZeroAlone, AdamW{}));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_RETURN_IF_ERROR(trainer->zero->Load(here));
    EK_ASSIGN_OR_RETURN(OptimizerState all, trainer->zero->Consolidate());
    EXPECT_TRUE(all == saved);
    EK_RETURN_IF_ERROR(trainer->Step(1));
    EK_RETURN_IF_ERROR(trainer->zero->LoadState(saved));
    EK_ASSIGN_OR_RETURN(all, trainer->zero->Consolidate());
    EXPECT_TRUE(all == saved);
    EK_RETURN_IF_ERROR(trainer->Step(2));
    EK_ASSIGN_OR_RETURN(all, trainer->zero->Consolidate(0));
    if (comm.rank() == 0) last = std::move(all);
    return trainer->zero->Save(there);
  });
  RunOn(devices, 1,
        [&](Communicator& comm) -> absl::Status {  // An optimizer with all state goes on.
          EK_ASSIGN_OR_RETURN(const Stream stream, devices.CreateStream(comm.device()));
          TestModel model(kSizes, DType::kFloat32, &devices, stream.ref());
          EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), AdamW{}));
          EK_RETURN_IF_ERROR(optimizer->Load(there));
          EXPECT_TRUE(optimizer->state() == last);
          return absl::OkStatus();
        });
}

TEST(ShardedOptimizerOnDevicesTest, AnotherGroupOfTheSameRanksGoesOn) {
  SimulatedDevices devices({.count = 2, .delay = kDelay});
  for (const Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
    RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto next,
                          comm.Split(0, -comm.rank()));  // Where the ranks have other numbers.
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, mode, AdamW{}));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, AdamW{});
      for (int step = 0; step < 3; ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step, {.skip_nonfinite = true}));
        plain.Step({0, 1}, step, 0.5);
      }
      if (trainer->ddp != nullptr) EK_RETURN_IF_ERROR(trainer->ddp->ReplaceGroup(next.get()));
      EK_RETURN_IF_ERROR(trainer->zero->ReplaceGroup(next.get()));
      for (int step = 3; step < 6; ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        plain.Step({0, 1}, step, 0.5);
      }
      EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
      trainer.reset();
      return next->Finalize();
    });
  }
}

// Partly received state can't be used to continue.
TEST(ShardedOptimizerOnDevicesTest, ARankWithoutMemoryForTheStateLosesNothing) {
  SimulatedDevices devices({.count = 3, .delay = kDelay});
  for (int after = 0; after < 4; ++after) {
    RunOn(devices, 3, [&](Communicator& comm) -> absl::Status {
      // The ranks have other numbers in each, and so other shards.
      EK_ASSIGN_OR_RETURN(auto first, comm.Split(0, (comm.rank() + 1) % 3));
      EK_ASSIGN_OR_RETURN(auto second, comm.Split(0, (comm.rank() + 2) % 3));
      EK_ASSIGN_OR_RETURN(auto trainer,
                          Trainer::CreateOn(devices, comm, Mode::kZeroAlone, AdamW{}));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, AdamW{});
      for (int step = 0; step < 3; ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        plain.Step({0, 1, 2}, step, 1.0 / 3);
      }
      EK_RETURN_IF_ERROR(trainer->Finish());
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
      if (comm.rank() == 0)
        devices.FailNext("Allocate", absl::ResourceExhaustedError("no memory"), after);
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
      EXPECT_FALSE(trainer->zero->ReplaceGroup(first.get()).ok()) << after;
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
      if (comm.rank() == 0) devices.FailNext("Allocate", absl::OkStatus());
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
      EK_RETURN_IF_ERROR(trainer->zero->ReplaceGroup(second.get()));
      for (int step = 3; step < 6; ++step) {
        EK_RETURN_IF_ERROR(trainer->Step(step));
        plain.Step({1, 2, 0}, step, 1.0 / 3);  // In the order of the group.
      }
      EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
      trainer.reset();
      return second->Finalize();
    });
  }
}

// The first step skipped, as while a loss scale finds itself; a parameter without a gradient.
// Nothing is lost with either.
TEST(ShardedOptimizerOnDevicesTest, AnotherGroupGoesOnAfterSkippedStepsAlone) {
  SimulatedDevices devices({.count = 2, .delay = kDelay});
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto next, comm.Split(0, -comm.rank()));
    EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, Mode::kZeroAlone, AdamW{}));
    trainer->model.params().ClearGradients();
    trainer->model.Backward(comm.rank(), 0);
    const TensorView gradient = trainer->model.params()[1].grad;
    EK_RETURN_IF_ERROR(devices.Put(trainer->stream.ref(), [gradient] {
      gradient.as<float>()[17] = std::numeric_limits<float>::infinity();
    }));
    EK_RETURN_IF_ERROR(trainer->zero->Step({.skip_nonfinite = true}));
    EXPECT_TRUE(trainer->zero->last_check()->is_skipped);
    EK_RETURN_IF_ERROR(trainer->zero->ReplaceGroup(next.get()));
    TestModel plain_model(kSizes);
    PlainTraining plain(&plain_model, AdamW{});
    EK_RETURN_IF_ERROR(trainer->Step(0));
    plain.Step({0, 1}, 0, 0.5);
    EK_RETURN_IF_ERROR(ExpectEqual(*trainer, plain_model, plain));
    trainer.reset();
    return next->Finalize();
  });
}

// The group ends when the hosts have left a step, and the devices have not.
TEST(ShardedOptimizerOnDevicesTest, AStepThatItsGroupHasCutShortIsNotTakenForDone) {
  for (const Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
    SimulatedDevices devices({.count = 2, .delay = kDelay});
    absl::Notification has_ended;
    std::atomic<int64_t> freed = 0;
    RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto group, comm.Split(0, comm.rank()));
      EK_ASSIGN_OR_RETURN(auto next, comm.Split(0, comm.rank()));
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, *group, mode, AdamW{}));
      for (int step = 0; step < 2; ++step) EK_RETURN_IF_ERROR(trainer->Step(step));
      EK_RETURN_IF_ERROR(trainer->Finish());
      if (comm.rank() == 1) {
        EK_RETURN_IF_ERROR(devices.Put(trainer->stream.ref(), [&has_ended] {
          (void)has_ended.WaitForNotificationWithTimeout(absl::Minutes(1));
          absl::SleepFor(absl::Milliseconds(20));
        }));
      }
      EK_RETURN_IF_ERROR(trainer->Step(2));
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
      group->Abort(absl::CancelledError("enough"));
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
      if (comm.rank() == 1) has_ended.Notify();
      const absl::Status status = trainer->zero->ReplaceGroup(next.get());
      EXPECT_TRUE(absl::StrContains(status.message(), "was in the middle of an update")) << status;
      // The state is not freed while the stream uses it. Gradients, which it used before, may be.
      int64_t held_at_end = 0;
      EK_RETURN_IF_ERROR(devices.Put(trainer->stream.ref(), [&] {
        absl::SleepFor(absl::Milliseconds(20));
        held_at_end = devices.held_bytes(comm.device());
      }));
      trainer->zero.reset();
      EK_RETURN_IF_ERROR(trainer->Finish());
      EXPECT_GT(held_at_end, devices.held_bytes(comm.device()));
      freed += held_at_end - devices.held_bytes(comm.device());
      return absl::OkStatus();
    });
    const int64_t elements = std::accumulate(kSizes.begin(), kSizes.end(), int64_t{0});
    EXPECT_GE(freed, 2 * elements * static_cast<int64_t>(sizeof(float))) << "both moments";
  }
}

// Groups by rules of their own, and one more on the way.
TEST(ShardedOptimizerOnDevicesTest, TakesAGroupMore) {
  SimulatedDevices devices({.count = 2, .delay = kDelay});
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    const std::vector<ParameterGroup> groups = {
        {.name = "a", .params = {0, 1}, .rule = AdamW{}},
        {.name = "b", .params = {4}, .rule = Sgd{.learning_rate = 0.1}}};
    EK_ASSIGN_OR_RETURN(auto trainer,
                        Trainer::CreateOn(devices, comm, Mode::kDataParallelFirst, groups));
    EK_RETURN_IF_ERROR(trainer->Step(0));
    EK_RETURN_IF_ERROR(trainer->zero->AddGroup({.name = "c", .params = {5}, .rule = kMomentum}));
    EK_RETURN_IF_ERROR(trainer->Step(1));
    EK_ASSIGN_OR_RETURN(const OptimizerState state, trainer->zero->Consolidate());
    EXPECT_EQ(state.params.at(0).step, 2);
    EXPECT_EQ(state.params.at(4).step, 2);
    EXPECT_TRUE(state.params.at(4).tensors.empty());
    EXPECT_EQ(state.params.at(5).step, 1);
    EXPECT_EQ(state.params.size(), 4);
    return absl::OkStatus();
  });
}

// Values travel in 16 bits and are rounded from the owner's master copy; an Optimizer beside it has
// the same.
TEST(ShardedOptimizerOnDevicesTest, BFloat16ParametersHaveAMasterCopyAtTheirOwner) {
  constexpr int64_t kCount = 1000, kParams = 3;
  const AdamW rule{.learning_rate = 1e-4};  // Steps far below a bfloat16's last bit.
  for (const int world_size : {1, 2}) {
    SimulatedDevices devices({.count = world_size, .delay = kDelay});
    RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const Stream stream, devices.CreateStream(comm.device()));
      struct Model {
        ParameterSet params;
        std::vector<Memory> memory;
      } sharded, whole;
      for (Model* const model : {&sharded, &whole}) {
        model->params.SetStream(stream.ref());
        for (int p = 0; p < kParams; ++p) {
          for (const bool is_value : {true, false}) {
            EK_ASSIGN_OR_RETURN(Memory memory, devices.Allocate(comm.device(), kCount * 2));
            auto* const elements = static_cast<BFloat16*>(memory.data.get());
            for (int64_t i = 0; i < kCount; ++i) {
              elements[i] =
                  BFloat16(static_cast<float>((i + p) % (is_value ? 37 : 13)) / 11 - 0.5f);
            }
            model->memory.push_back(std::move(memory));
          }
          const auto view = [&](int back) {
            return TensorView(model->memory[model->memory.size() - back].data.get(), kCount,
                              DType::kBFloat16, comm.device());
          };
          model->params.Add(absl::StrCat("w", p), view(2), view(1));
        }
      }
      EK_ASSIGN_OR_RETURN(
          auto zero, Optimizer::Create(comm, sharded.params, rule, {.placement = kSmallBuckets}));
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, whole.params, rule));
      for (int step = 0; step < 20; ++step) {
        for (int p = 0; p < kParams; ++p) {
          sharded.params.SetGradState(p, step % 2 == 0 ? GradState::kLocal : GradState::kReduced);
          whole.params.SetGradState(p, GradState::kReduced);
        }
        EK_RETURN_IF_ERROR(zero->Step());
        EK_RETURN_IF_ERROR(optimizer->Step());
      }
      EK_ASSIGN_OR_RETURN(const OptimizerState all, zero->Consolidate());
      EXPECT_TRUE(all == optimizer->state());
      EXPECT_EQ(all.params.at(0).tensors.size(), 3) << "one is the master copy";
      EK_RETURN_IF_ERROR(devices.Synchronize(stream.ref(), absl::Now() + absl::Minutes(1)));
      for (int p = 0; p < kParams; ++p) {
        const std::span<const uint16_t> a(
            static_cast<const uint16_t*>(sharded.params[p].value.data), kCount);
        const std::span<const uint16_t> b(static_cast<const uint16_t*>(whole.params[p].value.data),
                                          kCount);
        EXPECT_TRUE(std::ranges::equal(a, b)) << p;
      }
      const std::string folder = absl::StrCat(testing::TempDir(), "/bfloat", world_size);
      EK_RETURN_IF_ERROR(zero->Save(folder));
      EK_RETURN_IF_ERROR(zero->LoadState({}));
      EK_RETURN_IF_ERROR(zero->Load(folder));
      EK_ASSIGN_OR_RETURN(const OptimizerState again, zero->Consolidate());
      EXPECT_TRUE(again == all);
      return absl::OkStatus();
    });
  }
}

// State, tables, flags and buckets; a model for tests has the host's memory.
TEST(ShardedOptimizerOnDevicesTest, TheHostTouchesNoMemoryOfADevice) {
  SimulatedDevices devices({.guards_memory = true});
  SimulatedNccl nccl(devices);  // Its collectives run on streams alone.
  const auto group = CreateSimulatedNcclGroup(devices, nccl, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const auto train = [&](Communicator& comm) -> absl::Status {
    for (const Mode mode : {Mode::kZeroAlone, Mode::kDataParallelFirst}) {
      EK_ASSIGN_OR_RETURN(auto trainer, Trainer::CreateOn(devices, comm, mode, AdamW{}));
      const StepOptions checked{.clip = ClipOptions{.max_norm = 0.5}, .skip_nonfinite = true};
      const std::string folder =
          absl::StrCat(testing::TempDir(), "/guarded", mode == Mode::kZeroAlone);
      for (int step = 0; step < 5; ++step) {
        trainer->model.params().SetTrainable(1, step != 2);
        EK_RETURN_IF_ERROR(trainer->Step(step, step == 1 ? StepOptions() : checked));
        EXPECT_EQ(trainer->zero->last_check().has_value(), step != 1);
        if (step != 3) continue;
        EK_RETURN_IF_ERROR(trainer->zero->Save(folder));
        EK_RETURN_IF_ERROR(trainer->zero->Load(folder));
        EK_RETURN_IF_ERROR(trainer->zero->Consolidate().status());
      }
      EK_RETURN_IF_ERROR(trainer->Finish());
    }
    return absl::OkStatus();
  };
  const absl::Status status = train(*(*group)[0]);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedOptimizerOnDevicesTest, SaysWhatDoesNotFit) {
  SimulatedDevices devices;
  RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
    TestModel here(kSizes);
    absl::Status status =
        Optimizer::Create(comm, here.params(), AdamW{}, {.placement = WholeTensors{}}).status();
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "\"p0\" lies on the CPU, but the group's backend is a device's"))
        << status;
    EK_ASSIGN_OR_RETURN(const Stream stream, devices.CreateStream(comm.device()));
    TestModel wide(kSizes, DType::kFloat64, &devices, stream.ref());
    status =
        Optimizer::Create(comm, wide.params(), AdamW{}, {.placement = WholeTensors{}}).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "float32 and bfloat16 parameters on a device"))
        << status;
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel::internal
