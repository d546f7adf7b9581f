// Slices on simulated devices beside the plain training on the CPU.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

void RunOn(SimulatedDevices& devices, int world_size,
           absl::FunctionRef<absl::Status(Communicator&)> body,
           std::atomic<int64_t>* work_waits = nullptr) {
  const absl::Status status =
      internal::RunSimulatedRanks(devices, world_size, body, {.work_waits = work_waits});
  EXPECT_TRUE(status.ok()) << status;
}

constexpr bool kAllUpdates[] = {kInStep, kInBackward};

SlicedRankOptions On(SimulatedDevices& devices, bool overlaps = false, bool updates = kInStep) {
  return {.placement = {.update_in_backward = updates, .overlap_forward = overlaps},
          .devices = &devices};
}

// Step() takes none after updates in backward.
StepOptions IfInStep(bool updates, const StepOptions& options) {
  return updates == kInStep ? options : StepOptions();
}

TEST(SlicedOptimizerOnDevicesTest, IsThePlainTrainingBitForBit) {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
      for (const bool overlaps : {false, true}) {
        for (const bool updates : kAllUpdates) {
          const bool in_backward = updates == kInBackward;
          SCOPED_TRACE(absl::StrCat(world_size, " ranks, ", ToString(rule),
                                    overlaps ? ", overlaps" : "",
                                    in_backward ? ", in backward" : ""));
          SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
          RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
            SlicedRankOptions rank_options = On(devices, overlaps, updates);
            rank_options.reducer.gradient_as_bucket_view = overlaps;
            EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, rule, rank_options));
            TestModel plain_model(kSizes);
            PlainTraining plain(&plain_model, rule);
            for (int step = 0; step < 5; ++step) {
              const StepOptions options =
                  IfInStep(updates, {.grad_scale = step == 1 ? 0.3 : 1.0, .skip = step == 2});
              EK_RETURN_IF_ERROR(rank->Step(step, options));
              plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
            }
            return ExpectEqual(*rank, plain_model, plain.state());
          });
        }
      }
    }
  }
}

TEST(SlicedOptimizerOnDevicesTest, NoStepWaitsForADevice) {
  for (const auto& [world_size, updates] : {std::pair(1, kInStep),
                                            {2, kInStep},
                                            {3, kInStep},
                                            {1, kInBackward},
                                            {2, kInBackward},
                                            {3, kInBackward}}) {
    SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(50)});
    const bool when = updates;
    std::atomic<int64_t> work_waits = 0;
    RunOn(
        devices, world_size,
        [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(
              auto rank, SlicedRank::Create(comm, AdamW{}, On(devices, /*overlaps=*/false, when)));
          TestModel plain_model(kSizes);
          PlainTraining plain(&plain_model, AdamW{});
          const StepOptions checked{.clip = ClipOptions{.max_norm = 1e9}, .skip_nonfinite = true};
          const auto options = [&](int step) {
            return IfInStep(when, step % 2 == 0 ? checked : StepOptions());
          };
          for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank->Step(step, options(step)));
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          const int64_t waits = devices.host_waits(), works = work_waits;
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          for (int step = 3; step < 9; ++step) EK_RETURN_IF_ERROR(rank->Step(step, options(step)));
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          EXPECT_EQ(devices.host_waits(), waits);
          EXPECT_EQ(work_waits, works);
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          for (int step = 0; step < 9; ++step) {
            plain.Step(Ranks(comm.world_size()), step, 1.0 / comm.world_size(), options(step));
          }
          return ExpectEqual(*rank, plain_model, plain.state());
        },
        &work_waits);
  }
}

// Which gradients exist is known on the devices alone; parameter 4 has one on one rank, 5 on none.
TEST(SlicedOptimizerOnDevicesTest, LeavesAloneWhatNoRankHasAGradientOf) {
  for (const int run : {1, 2, 3, -2, -3}) {
    const int world_size = std::abs(run);
    SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
    RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
      SlicedRankOptions options = On(devices, /*overlaps=*/false, run > 0 ? kInStep : kInBackward);
      options.reducer.find_unused = true;
      EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, kMomentum, options));
      EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(comm, kMomentum, options));
      for (int step = 0; step < 5; ++step) {
        std::set<int> without = {5};
        if (comm.rank() > 0) without.insert(4);
        if (step == 3) without.insert(5);
        if (step == 4) without = {};
        EK_RETURN_IF_ERROR(rank->Step(step, {}, without));
        EK_RETURN_IF_ERROR(whole->Step(step, {}, without));
      }
      EK_RETURN_IF_ERROR(whole->FinishDevice());
      EXPECT_EQ(whole->optimizer->state().params.at(5).step, 1);
      return ExpectEqual(*rank, whole->model, whole->optimizer->state());
    });
  }
}

TEST(SlicedOptimizerOnDevicesTest, ClipsAndSkipsForAllRanks) {
  for (const int world_size : {1, 2, 3}) {
    for (const double norm : {2.0, kInfinityNorm}) {
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, On(devices)));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, AdamW{});
        for (int step = 0; step < 5; ++step) {
          const StepOptions options{.clip = ClipOptions{.max_norm = 0.5, .norm = norm},
                                    .skip_nonfinite = true};
          const bool is_bad = step == 1 || step == 4;
          rank->model.params().ClearGradients();
          EK_RETURN_IF_ERROR(rank->ddp->BeginStep());
          if (is_bad && comm.rank() == 0) {  // Backward then makes a gradient of it that is none.
            EK_RETURN_IF_ERROR(
                devices.Put(rank->stream.ref(), [view = rank->model.params()[1].value] {
                  view.as<float>()[0] += std::numeric_limits<float>::infinity();
                }));
          }
          const float kept = plain_model.params()[1].value.as<float>()[0];
          EK_RETURN_IF_ERROR(rank->Announce(step));
          if (is_bad && comm.rank() == 0) {
            EK_RETURN_IF_ERROR(devices.Put(
                rank->stream.ref(),
                [view = rank->model.params()[1].value, kept] { view.as<float>()[0] = kept; }));
          }
          EK_RETURN_IF_ERROR(rank->optimizer->Step(options));
          const GradientCheck check = *rank->optimizer->last_check();
          if (is_bad) {
            EXPECT_EQ(check, (GradientCheck{kInfinityNorm, false, true}));
          } else {
            plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
            EXPECT_NEAR(check.norm, plain.norm(), 1e-9 * plain.norm());
          }
        }
        return ExpectEqual(*rank, plain_model, plain.state());
      });
    }
  }
}

// State moves between the devices when the buckets change.
TEST(SlicedOptimizerOnDevicesTest, IsThePlainTrainingWhateverIsFrozen) {
  for (const int world_size : {2, 3}) {
    for (const bool updates : kAllUpdates) {
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(
            auto rank, SlicedRank::Create(comm, AdamW{}, On(devices, /*overlaps=*/true, updates)));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, AdamW{});
        for (int step = 0; step < 7; ++step) {
          for (ParameterSet* params : {&rank->model.params(), &plain_model.params()}) {
            params->SetTrainable(1, step < 2 || step > 4);
            params->SetTrainable(6, step > 0);
          }
          const StepOptions options = IfInStep(updates, {.skip_nonfinite = true});
          EK_RETURN_IF_ERROR(rank->Step(step, options));
          plain.Step(Ranks(world_size), step, 1.0 / world_size, options);
        }
        return ExpectEqual(*rank, plain_model, plain.state());
      });
    }
  }
}

// Parameters in a gather keep their memory until it ends, even when the buckets change and however
// late that is.
TEST(SlicedOptimizerOnDevicesTest, GathersOfBucketsThatAreGoneStillArrive) {
  SimulatedDevices devices({.count = 2, .delay = absl::Milliseconds(3)});
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    SlicedRankOptions options = On(devices, /*overlaps=*/true);
    options.frozen = {1};
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, kMomentum, options));
    TestModel plain_model(kSizes);
    plain_model.params().SetTrainable(1, false);
    PlainTraining plain(&plain_model, kMomentum);
    for (int step = 0; step < 4; ++step) {
      for (ParameterSet* params : {&rank->model.params(), &plain_model.params()}) {
        params->SetTrainable(6, step % 2 == 0);
      }
      EK_RETURN_IF_ERROR(rank->Step(step));
      plain.Step({0, 1}, step, 0.5);
    }
    return ExpectEqual(*rank, plain_model, plain.state());
  });
}

// State, tables and flags; a model for tests has the host's memory.
TEST(SlicedOptimizerOnDevicesTest, TheHostTouchesNoMemoryOfADevice) {
  SimulatedDevices devices({.guards_memory = true});
  internal::SimulatedNccl nccl(devices);  // Its collectives run on streams alone.
  const auto group = internal::CreateSimulatedNcclGroup(devices, nccl, 1);
  ASSERT_TRUE(group.ok()) << group.status();
  const auto train = [&]<typename Rank>(std::unique_ptr<Rank> rank,
                                        const std::string& folder) -> absl::Status {
    const StepOptions checked{.clip = ClipOptions{.max_norm = 0.5}, .skip_nonfinite = true};
    for (int step = 0; step < 5; ++step) {
      rank->model.params().SetTrainable(1, step != 2);
      EK_RETURN_IF_ERROR(
          rank->Step(step, step == 1 ? StepOptions() : checked, {step == 3 ? 4 : 5}));
      EXPECT_EQ(rank->optimizer->last_check().has_value(), step != 1);
      if (step == 3) {
        EK_RETURN_IF_ERROR(rank->optimizer->Save(folder));
        EK_RETURN_IF_ERROR(rank->optimizer->Load(folder));
      }
    }
    return rank->FinishDevice();
  };
  const std::string root = absl::StrCat(testing::TempDir(), "/guarded");
  SlicedRankOptions options = On(devices);
  options.reducer.find_unused = true;
  const auto run = [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto sliced, SlicedRank::Create(comm, AdamW{}, options));
    EK_RETURN_IF_ERROR(train(std::move(sliced), root + "_slices"));
    EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(comm, AdamW{}, options));
    return train(std::move(whole), root + "_whole");
  };
  const absl::Status status = run(*(*group)[0]);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SlicedOptimizerOnDevicesTest, CheckpointsAreTheCpusAtAnyWorldSize) {
  const std::string there = absl::StrCat(testing::TempDir(), "/there");
  const std::string here = absl::StrCat(testing::TempDir(), "/here");
  SimulatedDevices devices({.count = 3, .delay = absl::Microseconds(20)});
  OptimizerState saved;
  RunOn(devices, 3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, On(devices)));
    for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank->Step(step));
    EK_RETURN_IF_ERROR(rank->optimizer->Save(there));
    for (int to : {2, 0, kAllRanks}) {
      EK_ASSIGN_OR_RETURN(OptimizerState all, rank->optimizer->Consolidate(to));
      EXPECT_EQ(all.params.size(), to == kAllRanks || to == comm.rank() ? kSizes.size() : 0);
      if (comm.rank() == 0) saved = std::move(all);
    }
    return absl::OkStatus();
  });
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}));
    EK_RETURN_IF_ERROR(rank->optimizer->Load(there));
    EK_ASSIGN_OR_RETURN(const OptimizerState all, rank->optimizer->Consolidate());
    EXPECT_TRUE(all == saved);
    return rank->optimizer->Save(here);
  });
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, SlicedRank::Create(comm, AdamW{}, On(devices)));
    EK_RETURN_IF_ERROR(rank->Step(0));
    EK_RETURN_IF_ERROR(rank->optimizer->Load(here));
    EK_ASSIGN_OR_RETURN(OptimizerState all, rank->optimizer->Consolidate());
    EXPECT_TRUE(all == saved);
    EK_RETURN_IF_ERROR(rank->Step(1));
    EK_RETURN_IF_ERROR(rank->optimizer->LoadState(saved));
    EK_ASSIGN_OR_RETURN(all, rank->optimizer->Consolidate());
    EXPECT_TRUE(all == saved);
    return rank->Step(2);
  });
}

TEST(SlicedOptimizerOnDevicesTest, RanksWithoutInputsTakeTheSameSteps) {
  for (const std::vector<int>& inputs :
       {std::vector<int>{2, 5}, {0, 3}, {3, 1, 2}, {0, 1, 2, 3, 1}}) {
    for (const bool updates : kAllUpdates) {
      const int world_size = static_cast<int>(inputs.size());
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(
            auto rank, SlicedRank::Create(comm, AdamW{}, On(devices, /*overlaps=*/false, updates)));
        const StepOptions options = IfInStep(updates, {.skip_nonfinite = true});
        EK_RETURN_IF_ERROR(RunJoined(rank->joinables(), {}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < inputs[comm.rank()]; ++step)
            EK_RETURN_IF_ERROR(rank->Step(step, options));
          return absl::OkStatus();
        }));
        TestModel plain_model(kSizes);
        PlainTraining plain(&plain_model, AdamW{});
        for (int step = 0;; ++step) {
          std::vector<int> active;
          for (int r = 0; r < world_size; ++r) {
            if (step < inputs[r]) active.push_back(r);
          }
          if (active.empty()) break;
          plain.Step(active, step, 1.0 / world_size, options);
        }
        return ExpectEqual(*rank, plain_model, plain.state());
      });
    }
  }
}

// Also if the old one is destroyed first.
TEST(SlicedOptimizerOnDevicesTest, AnotherGroupOfTheSameRanksGoesOn) {
  SimulatedDevices devices({.count = 2, .delay = absl::Microseconds(20)});
  for (const bool updates : kAllUpdates) {
    RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto first, comm.Split(0, comm.rank()));
      EK_ASSIGN_OR_RETURN(auto next,
                          comm.Split(0, -comm.rank()));  // Where the ranks have other numbers.
      EK_ASSIGN_OR_RETURN(
          auto rank, SlicedRank::Create(*first, AdamW{}, On(devices, /*overlaps=*/false, updates)));
      TestModel plain_model(kSizes);
      PlainTraining plain(&plain_model, AdamW{});
      for (int step = 0; step < 3; ++step) {
        EK_RETURN_IF_ERROR(rank->Step(step));
        plain.Step({0, 1}, step, 0.5);
      }
      EK_RETURN_IF_ERROR(rank->FinishDevice());
      EK_RETURN_IF_ERROR(first->Finalize());
      if (updates) first.reset();
      EK_RETURN_IF_ERROR(rank->ddp->ReplaceGroup(next.get()));
      EK_RETURN_IF_ERROR(rank->optimizer->ReplaceGroup(next.get()));
      for (int step = 3; step < 6; ++step) {
        EK_RETURN_IF_ERROR(rank->Step(step));
        plain.Step({0, 1}, step, 0.5);
      }
      EK_RETURN_IF_ERROR(ExpectEqual(*rank, plain_model, plain.state()));
      rank.reset();
      return next->Finalize();
    });
  }
}

// An Optimizer with all state that updates in backward.
TEST(OptimizerInBackwardOnDevicesTest, IsThePlainTrainingBitForBit) {
  for (const int world_size : {1, 2, 3}) {
    SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
    RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
      const Stream stream = *devices.CreateStream(comm.device());
      TestModel model(kSizes, DType::kFloat32, &devices, stream.ref()), plain_model(kSizes);
      PlainTraining plain(&plain_model, kMomentum);
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params(), {},
                                               {.reducer = {.caps = {Bytes{256}, Bytes{700}}}}));
      EK_ASSIGN_OR_RETURN(auto optimizer,
                          Optimizer::Create(*ddp, kMomentum,
                                            {.placement = Replicated{.update_in_backward = true}}));
      for (int step = 0; step < 4; ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        for (int param = model.size() - 1; param >= 0; --param) {
          model.PutGradient(comm.rank(), step, param, /*adds=*/false);
          model.params().SetGradState(param, GradState::kLocal);
          EK_RETURN_IF_ERROR(ddp->GradientReady(param));
        }
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        plain.Step(Ranks(world_size), step, 1.0 / world_size);
      }
      EK_RETURN_IF_ERROR(devices.Synchronize(stream.ref(), absl::Now() + absl::Minutes(1)));
      EXPECT_TRUE(model.Bytes() == plain_model.Bytes()) << "rank " << comm.rank();
      EXPECT_TRUE(optimizer->state() == plain.state());
      ddp.reset();
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace evenkeel
