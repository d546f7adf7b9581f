// An Optimizer on simulated devices beside the plain training on the CPU.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 5033};
const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};

std::vector<UpdateRule> OneOfEach() {
  return {Sgd{.learning_rate = 0.1}, kMomentum,
          Sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true}, Adam{.weight_decay = 0.1},
          AdamW{}};
}

std::vector<int> Ranks(int world_size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return ranks;
}

// One rank: a model on its device, and the plain training of the group beside it.
struct Rank {
  Rank(Communicator& comm, SimulatedDevices& devices)
      : comm(comm),
        devices(devices),
        stream(*devices.CreateStream(comm.device())),
        model(kSizes, DType::kFloat32, &devices, stream.ref()) {}

  absl::Status Create(const std::vector<ParameterGroup>& groups) {
    plain = std::make_unique<PlainTraining>(&plain_model, groups);
    EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_ASSIGN_OR_RETURN(optimizer, Optimizer::Create(comm, model.params(), groups));
    return absl::OkStatus();
  }
  absl::Status Create(const UpdateRule& rule) {
    return Create(AllInOneGroup(model.params(), rule));
  }

  absl::Status Reduce(int step) {
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.params().ClearGradients();
    model.Backward(comm.rank(), step);
    return internal::Reduce(*ddp, model.params());
  }
  absl::Status Step(int step, const StepOptions& options = {}) {
    EK_RETURN_IF_ERROR(Reduce(step));
    return optimizer->Step(options);
  }
  void PlainStep(int step, const StepOptions& options = {}) {
    plain->Step(Ranks(comm.world_size()), step, 1.0 / comm.world_size(), options);
  }
  // The host waits.
  absl::Status ExpectEqual() {
    EK_RETURN_IF_ERROR(devices.Synchronize(stream.ref(), absl::Now() + absl::Minutes(1)));
    EXPECT_TRUE(model.Bytes() == plain_model.Bytes()) << "rank " << comm.rank();
    EXPECT_TRUE(optimizer->state() == plain->state()) << "rank " << comm.rank();
    return absl::OkStatus();
  }

  Communicator& comm;
  SimulatedDevices& devices;
  const Stream stream;
  TestModel model;
  TestModel plain_model{kSizes};
  std::unique_ptr<PlainTraining> plain;
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;
};

void RunOn(SimulatedDevices& devices, int world_size,
           absl::FunctionRef<absl::Status(Communicator&)> body,
           std::atomic<int64_t>* work_waits = nullptr) {
  const absl::Status status =
      internal::RunSimulatedRanks(devices, world_size, body, {.work_waits = work_waits});
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OptimizerOnADeviceTest, IsThePlainTrainingBitForBit) {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const UpdateRule& rule : OneOfEach()) {
      SCOPED_TRACE(absl::StrCat(world_size, " ranks, ", ToString(rule)));
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        Rank rank(comm, devices);
        EK_RETURN_IF_ERROR(rank.Create(rule));
        for (int step = 0; step < 4; ++step) {
          EK_RETURN_IF_ERROR(rank.Step(step, {.grad_scale = 0.5, .skip = step == 2}));
          rank.PlainStep(step, {.grad_scale = 0.5, .skip = step == 2});
        }
        return rank.ExpectEqual();
      });
    }
  }
}

TEST(OptimizerOnADeviceTest, FunctionsBeforeTheUpdateAndDroppedGradientsCount) {
  for (const int world_size : {1, 3}) {
    for (const Placement& placement :
         {Placement(Replicated{}), Placement(WholeTensors{}), Placement(Slices{})}) {
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        Rank rank(comm, devices);
        EK_RETURN_IF_ERROR(rank.Create(kMomentum));
        EK_ASSIGN_OR_RETURN(auto optimizer,
                            Optimizer::Create(*rank.ddp, kMomentum, {.placement = placement}));
        EK_RETURN_IF_ERROR(
            optimizer->BeforeUpdate([&](absl::Span<const GradientPiece> pieces) -> absl::Status {
              for (const GradientPiece& piece : pieces) {
                EK_RETURN_IF_ERROR(devices.Put(rank.stream.ref(), [view = piece.gradient] {
                  for (float& element : view.as<float>()) element *= 0.5f;
                }));
              }
              return absl::OkStatus();
            }));
        for (int step = 0; step < 5; ++step) {
          EK_RETURN_IF_ERROR(rank.Reduce(step));
          if (step == 2) rank.model.params().SetGradState(1, GradState::kNone);
          for (ParameterSet* const params : {&rank.model.params(), &rank.plain_model.params()})
            if (step == 3) params->SetTrainable(5, false);
          rank.plain_model.params().SetTrainable(1, step != 2);
          EK_RETURN_IF_ERROR(optimizer->Step());
          rank.PlainStep(step, {.grad_scale = 0.5});
        }
        EK_RETURN_IF_ERROR(optimizer->WaitForAll());
        EK_RETURN_IF_ERROR(devices.Synchronize(rank.stream.ref(), absl::Now() + absl::Minutes(1)));
        EXPECT_TRUE(rank.model.Bytes() == rank.plain_model.Bytes())
            << "placement " << placement.index() << ", rank " << comm.rank();
        return absl::OkStatus();
      });
    }
  }
}

TEST(OptimizerOnADeviceTest, ClipsAndSkipsAsTheCpuDoes) {
  for (const int world_size : {1, 2, 3}) {
    for (const double norm : {2.0, kInfinityNorm}) {
      SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
      RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
        Rank rank(comm, devices);
        EK_RETURN_IF_ERROR(rank.Create(AdamW{}));
        for (int step = 0; step < 6; ++step) {
          const bool is_bad = step == 0 || step == 3;
          const StepOptions options{.grad_scale = 0.5,
                                    .clip = ClipOptions{.max_norm = 0.25, .norm = norm},
                                    .skip_nonfinite = true};
          EK_RETURN_IF_ERROR(rank.ddp->BeginStep());
          rank.model.params().ClearGradients();
          rank.model.Backward(comm.rank(), step);
          if (is_bad && comm.rank() == comm.world_size() - 1) {
            const TensorView gradient = rank.model.params()[1].grad;
            EK_RETURN_IF_ERROR(devices.Put(rank.stream.ref(), [gradient] {
              gradient.as<float>()[17] = std::numeric_limits<float>::infinity();
            }));
          }
          EK_RETURN_IF_ERROR(internal::Reduce(*rank.ddp, rank.model.params()));
          EK_RETURN_IF_ERROR(rank.optimizer->Step(options));
          if (is_bad) {
            EXPECT_EQ(rank.optimizer->last_check(), (GradientCheck{kInfinityNorm, false, true}));
          } else {
            rank.PlainStep(step, options);
            EXPECT_NEAR(rank.optimizer->last_check()->norm, rank.plain->norm(),
                        1e-9 * rank.plain->norm());
            EXPECT_TRUE(rank.optimizer->last_check()->is_finite);
            EXPECT_EQ(rank.optimizer->check_before()->is_skipped, step == 1 || step == 4);
          }
          EK_RETURN_IF_ERROR(rank.ExpectEqual());
        }
        const auto before = rank.model.Bytes();
        rank.model.Backward(0, 7);
        for (int i = 0; i < rank.model.size(); ++i)
          rank.model.params().SetGradState(i, GradState::kReduced);
        EK_ASSIGN_OR_RETURN(const GradientCheck now, rank.optimizer->CheckGradients());
        EXPECT_GT(now.norm, 1.0);
        EXPECT_TRUE(rank.model.Bytes() == before);
        return absl::OkStatus();
      });
    }
  }
}

// A parameter never updated has no state, though its memory existed before the device found out.
TEST(OptimizerOnADeviceTest, ASkippedFirstStepLeavesNoState) {
  SimulatedDevices devices;
  RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
    Rank rank(comm, devices);
    EK_RETURN_IF_ERROR(rank.Create(AdamW{}));
    EK_RETURN_IF_ERROR(devices.Put(rank.stream.ref(), [view = rank.model.params()[4].value] {
      view.as<float>()[0] = std::numeric_limits<float>::quiet_NaN();  // And so is its gradient.
    }));
    EK_RETURN_IF_ERROR(rank.Step(0, {.skip_nonfinite = true}));
    EXPECT_TRUE(rank.optimizer->state().params.empty());
    EXPECT_EQ(rank.optimizer->state_bytes(), 0);
    EK_ASSIGN_OR_RETURN(const StatePieces pieces, rank.optimizer->Pieces());
    EXPECT_TRUE(pieces.pieces.empty());
    return absl::OkStatus();
  });
}

TEST(OptimizerOnADeviceTest, LeavesAloneWhatIsFrozenOrHasNoGradient) {
  SimulatedDevices devices({.delay = absl::Microseconds(50)});
  RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
    Rank rank(comm, devices);
    EK_RETURN_IF_ERROR(rank.Create(kMomentum));
    for (int step = 0; step < 6; ++step) {
      const bool freezes = step == 2 || step == 3;
      for (TestModel* model : {&rank.model, &rank.plain_model}) {
        model->params().SetTrainable(1, !freezes);
        model->params().SetTrainable(4, false);
      }
      EK_RETURN_IF_ERROR(rank.Step(step));
      rank.PlainStep(step);
    }
    EK_RETURN_IF_ERROR(rank.ExpectEqual());
    EXPECT_EQ(rank.optimizer->state().params.at(1).step, 4);
    EXPECT_FALSE(rank.optimizer->state().params.contains(4));
    return absl::OkStatus();
  });
}

TEST(OptimizerOnADeviceTest, HasNothingToDoWhereAllIsIgnored) {
  SimulatedDevices devices;
  RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const Stream stream, devices.CreateStream(comm.device()));
    TestModel model(kSizes, DType::kFloat32, &devices, stream.ref());
    EK_RETURN_IF_ERROR(model.params().Ignore("").status());
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Optimizer> optimizer,
                        Optimizer::Create(comm, model.params(), AdamW{}));
    EK_RETURN_IF_ERROR(optimizer->Step({.skip_nonfinite = true}));
    EXPECT_TRUE(optimizer->state().params.empty());
    return absl::OkStatus();
  });
}

// A launch that prepares, one that updates, and two more where the step measures. Groups of one
// kind go together.
TEST(OptimizerOnADeviceTest, AStepIsAFewLaunchesAndNoHostWait) {
  for (const int world_size : {1, 2}) {
    SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(100)});
    std::atomic<int64_t> work_waits = 0;
    RunOn(
        devices, world_size,
        [&](Communicator& comm) -> absl::Status {
          Rank rank(comm, devices);
          EK_RETURN_IF_ERROR(
              rank.Create({{.name = "a", .params = {0, 1, 2}, .rule = AdamW{}},
                           {.name = "b", .params = {3, 4, 5}, .rule = AdamW{.weight_decay = 0}}}));
          EK_RETURN_IF_ERROR(rank.Step(0));
          const StepOptions checked{.clip = ClipOptions(), .skip_nonfinite = true};
          EK_RETURN_IF_ERROR(rank.Step(1, checked));
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          const int64_t waits = devices.host_waits(), launches = devices.launches(),
                        works = work_waits;
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          for (int step = 2; step < 5; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
          for (int step = 5; step < 8; ++step) EK_RETURN_IF_ERROR(rank.Step(step, checked));
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          EXPECT_EQ(devices.host_waits(), waits);
          EXPECT_EQ(work_waits, works);
          EXPECT_EQ(devices.launches() - launches, world_size * (3 * (2 + 2) + 3 * (4 + 2)))
              << "two are the DataParallel's";
          EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Minutes(1)));
          for (int step = 0; step < 8; ++step) {
            rank.PlainStep(step, step == 1 || step > 4 ? checked : StepOptions());
          }
          return rank.ExpectEqual();
        },
        &work_waits);
  }
}

TEST(OptimizerOnADeviceTest, CheckpointsAreTheCpusFiles) {
  for (const UpdateRule& rule : {UpdateRule(kMomentum), UpdateRule(AdamW{})}) {
    const std::string there = absl::StrCat(testing::TempDir(), "/there", ToString(rule).size());
    const std::string here = absl::StrCat(testing::TempDir(), "/here", ToString(rule).size());
    SimulatedDevices devices({.delay = absl::Microseconds(50)});
    OptimizerState saved, again;
    RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
      Rank rank(comm, devices);
      EK_RETURN_IF_ERROR(rank.Create(rule));
      for (int step = 0; step < 3; ++step)
        EK_RETURN_IF_ERROR(rank.Step(step, {.skip_nonfinite = true}));
      EK_RETURN_IF_ERROR(rank.optimizer->Save(there));
      saved = rank.optimizer->state();
      for (int step = 3; step < 5; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
      again = rank.optimizer->state();
      return absl::OkStatus();
    });
    EXPECT_EQ(saved.params.at(0).step, 3);
    absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
      TestModel model(kSizes);
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), rule));
      EK_RETURN_IF_ERROR(optimizer->Load(there));
      EXPECT_TRUE(optimizer->state() == saved);
      return optimizer->Save(here);
    });
    EXPECT_TRUE(status.ok()) << status;
    RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
      Rank rank(comm, devices);
      EK_RETURN_IF_ERROR(rank.Create(rule));
      for (int step = 0; step < 3; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
      for (int step = 0; step < 3; ++step) rank.PlainStep(step);
      EK_RETURN_IF_ERROR(rank.optimizer->LoadState({}));
      EXPECT_TRUE(rank.optimizer->state() == OptimizerState());
      EK_RETURN_IF_ERROR(rank.optimizer->Load(here));
      EXPECT_TRUE(rank.optimizer->state() == saved);
      for (int step = 3; step < 5; ++step) {
        EK_RETURN_IF_ERROR(rank.Step(step));
        rank.PlainStep(step);
      }
      EXPECT_TRUE(rank.optimizer->state() == again);
      return rank.ExpectEqual();
    });
  }
}

std::vector<int> ActiveIn(const std::vector<int>& inputs, int step) {
  std::vector<int> active;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    if (step < inputs[rank]) active.push_back(static_cast<int>(rank));
  }
  return active;
}

TEST(OptimizerOnADeviceTest, RanksWithoutInputsTakeTheSameSteps) {
  for (const std::vector<int>& inputs : {std::vector<int>{2, 5}, {0, 3}, {3, 1, 2}, {0, 4, 0}}) {
    const int world_size = static_cast<int>(inputs.size());
    SimulatedDevices devices({.count = world_size, .delay = absl::Microseconds(20)});
    RunOn(devices, world_size, [&](Communicator& comm) -> absl::Status {
      Rank rank(comm, devices);
      EK_RETURN_IF_ERROR(rank.Create(AdamW{}));
      const StepOptions options{.clip = ClipOptions{.max_norm = 1e6}, .skip_nonfinite = true};
      EK_RETURN_IF_ERROR(
          RunJoined({rank.optimizer.get(), rank.ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
            for (int step = 0; step < inputs[comm.rank()]; ++step) {
              EK_RETURN_IF_ERROR(rank.optimizer->SetLearningRate(0.1 / (1 + step)));
              EK_RETURN_IF_ERROR(rank.Step(step, options));
            }
            return absl::OkStatus();
          }));
      for (int step = 0; !ActiveIn(inputs, step).empty(); ++step) {
        EXPECT_TRUE(rank.plain->groups().SetLearningRate(0.1 / (1 + step)).ok());
        rank.plain->Step(ActiveIn(inputs, step), step, 1.0 / world_size, options);
      }
      return rank.ExpectEqual();
    });
  }
}

// One group more on the way, and the state of all made equal to rank 0's.
TEST(OptimizerOnADeviceTest, TakesAGroupMore) {
  SimulatedDevices devices({.count = 2});
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    Rank rank(comm, devices);
    EK_RETURN_IF_ERROR(rank.Create({{.name = "a", .params = {0, 1}, .rule = AdamW{}}}));
    EK_RETURN_IF_ERROR(rank.Step(0));
    EK_RETURN_IF_ERROR(rank.optimizer->AddGroup({.name = "b", .params = {5}, .rule = kMomentum}));
    EK_RETURN_IF_ERROR(rank.Step(1));
    const OptimizerState state = rank.optimizer->state();
    EXPECT_EQ(state.params.at(0).step, 2);
    EXPECT_EQ(state.params.at(5).step, 1);
    EXPECT_EQ(state.params.size(), 3);
    return absl::OkStatus();
  });
}

TEST(OptimizerOnADeviceTest, BFloat16ParametersHaveAMasterCopy) {
  SimulatedDevices devices;
  RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
    const Stream stream = *devices.CreateStream(comm.device());
    constexpr int64_t kCount = 1000;
    EK_ASSIGN_OR_RETURN(const Memory values, devices.Allocate(comm.device(), kCount * 2));
    EK_ASSIGN_OR_RETURN(const Memory gradients, devices.Allocate(comm.device(), kCount * 2));
    auto* const value = static_cast<BFloat16*>(values.data.get());
    auto* const gradient = static_cast<BFloat16*>(gradients.data.get());
    std::vector<float> plain(kCount), plain_gradient(kCount), first(kCount), second(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      value[i] = BFloat16(static_cast<float>(i % 37) / 11);
      gradient[i] = BFloat16(static_cast<float>(i % 13) / 7 - 1);
      plain[i] = static_cast<float>(value[i]);
      plain_gradient[i] = static_cast<float>(gradient[i]);
    }
    ParameterSet params;
    params.SetStream(stream.ref());
    params.Add("w", TensorView(value, kCount, DType::kBFloat16, comm.device()),
               TensorView(gradient, kCount, DType::kBFloat16, comm.device()));
    const AdamW rule{.learning_rate = 1e-4};  // Steps far below a bfloat16's last bit.
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, params, rule));
    for (int step = 1; step <= 20; ++step) {
      params.SetGradState(0, GradState::kLocal);
      EK_RETURN_IF_ERROR(optimizer->Step());
      ApplyUpdate(rule, step, 1.0, absl::MakeSpan(plain), absl::MakeSpan(plain_gradient),
                  {absl::MakeSpan(first), absl::MakeSpan(second)});
    }
    const OptimizerState state = optimizer->state();
    const auto master = state.params.at(0).tensors.at("master").as<float>();
    for (int64_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(master[i], plain[i]) << i;
      EXPECT_EQ(value[i].bits, BFloat16(plain[i]).bits) << i;
    }
    EXPECT_EQ(optimizer->state_bytes(), 3 * 4 * kCount);
    const std::string folder = absl::StrCat(testing::TempDir(), "/bfloat");
    EK_RETURN_IF_ERROR(optimizer->Save(folder));
    EK_RETURN_IF_ERROR(optimizer->LoadState({}));
    EK_RETURN_IF_ERROR(optimizer->Load(folder));
    EXPECT_TRUE(optimizer->state() == state);
    return absl::OkStatus();
  });
}

TEST(OptimizerOnADeviceTest, DamagedReplicasAreNamed) {
  for (const Placement& placement :
       {Placement(Replicated{}), Placement(WholeTensors{}), Placement(Slices{}),
        Placement(Slices{.overlap_forward = true})}) {
    SCOPED_TRACE(absl::StrCat("placement ", placement.index()));
    SimulatedDevices devices({.count = 3, .delay = absl::Microseconds(20)});
    RunOn(devices, 3, [&](Communicator& comm) -> absl::Status {
      Rank rank(comm, devices);
      EK_ASSIGN_OR_RETURN(rank.ddp, DataParallel::Create(&comm, &rank.model.params(), {},
                                                         {.check_replicas = {.every = 1}}));
      EK_ASSIGN_OR_RETURN(rank.optimizer, Optimizer::Create(*rank.ddp, AdamW{},
                                                            {.placement = placement,
                                                             .check_replicas = {.every = 1}}));
      for (int step = 0; step < 4; ++step)
        EK_RETURN_IF_ERROR(rank.Step(step, {.skip_nonfinite = true}));
      if (placement.index() == 0 && comm.rank() == 2) {
        OptimizerState state = rank.optimizer->state();
        state.params[4].tensors["exp_avg"].view().as<float>()[3] += 1;
        EK_RETURN_IF_ERROR(rank.optimizer->LoadState(state));
      }
      if (placement.index() == 0) {
        const std::string message(rank.Step(4).message());
        EXPECT_TRUE(absl::StrContains(message, "after step 5: \"p4: exp_avg\"")) << message;
        EXPECT_TRUE(absl::StrContains(message, "differs on rank 2")) << message;
      }
      EK_RETURN_IF_ERROR(rank.optimizer->WaitForAll());
      if (comm.rank() == 1) {
        const TensorView value = rank.model.params()[1].value;
        EK_RETURN_IF_ERROR(
            devices.Put(rank.stream.ref(), [value] { value.as<float>()[299] += 1; }));
      }
      const std::string message(rank.ddp->BeginStep().message());
      EXPECT_TRUE(absl::StrContains(message, "\"p1\" (tensor 1) differs on rank 1")) << message;
      return devices.Synchronize(rank.stream.ref(), absl::Now() + absl::Minutes(1));
    });
  }
}

TEST(OptimizerOnADeviceTest, ReplicasAreComparedAfterTheUpdatesInBackward) {
  SimulatedDevices devices({.count = 2, .delay = absl::Milliseconds(1)});
  RunOn(devices, 2, [&](Communicator& comm) -> absl::Status {
    Rank rank(comm, devices);
    EK_ASSIGN_OR_RETURN(rank.ddp, DataParallel::Create(&comm, &rank.model.params(), {}));
    EK_ASSIGN_OR_RETURN(rank.optimizer,
                        Optimizer::Create(*rank.ddp, AdamW{},
                                          {.placement = Replicated{.update_in_backward = true},
                                           .check_replicas = {.every = 1}}));
    for (int step = 0; step < 6; ++step) EK_RETURN_IF_ERROR(rank.Reduce(step));
    EK_RETURN_IF_ERROR(devices.Synchronize(rank.stream.ref(), absl::Now() + absl::Minutes(1)));
    for (const auto& [param, state] : rank.optimizer->state().params)
      EXPECT_EQ(state.step, 6) << "parameter " << param;
    return absl::OkStatus();
  });
}

TEST(OptimizerOnADeviceTest, SaysWhatDoesNotFit) {
  SimulatedDevices devices;
  RunOn(devices, 1, [&](Communicator& comm) -> absl::Status {
    TestModel here(kSizes);
    absl::Status status = Optimizer::Create(comm, here.params(), AdamW{}).status();
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "\"p0\" lies on the CPU, but the group's backend is a device's"))
        << status;
    const Stream stream = *devices.CreateStream(comm.device());
    TestModel lost(kSizes, DType::kFloat32, &devices, {nullptr, comm.device()});
    status = Optimizer::Create(comm, lost.params(), AdamW{}).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "SetStream()")) << status;
    TestModel wide(kSizes, DType::kFloat64, &devices, stream.ref());
    status = Optimizer::Create(comm, wide.params(), AdamW{}).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "float32 and bfloat16 parameters on a device"))
        << status;
    return absl::OkStatus();
  });
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    const Stream stream = *devices.CreateStream(Device::Cuda(0));
    TestModel model(kSizes, DType::kFloat32, &devices, stream.ref());
    return Optimizer::Create(comm, model.params(), AdamW{}).status();
  });
  EXPECT_TRUE(
      absl::StrContains(status.message(), "lies on cuda:0, but the group's backend is the CPU's"))
      << status;
}

}  // namespace
}  // namespace evenkeel
