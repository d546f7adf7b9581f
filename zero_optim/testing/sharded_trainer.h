// For tests: a rank that trains with a sharded optimizer, and how it must compare with plain
//            training.

#ifndef EVENKEEL_ZERO_OPTIM_TESTING_SHARDED_TRAINER_H_
#define EVENKEEL_ZERO_OPTIM_TESTING_SHARDED_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {

inline const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33};
inline const Sgd kMomentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};
inline const WholeTensors kSmallBuckets = {.bucket_cap = Bytes{256}};

inline void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

inline std::vector<int> Ranks(int world_size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return ranks;
}

// Who reduces the gradients.
enum class Mode { kZeroAlone, kDataParallelFirst, kZeroFirst };
inline constexpr Mode kAllModes[] = {Mode::kZeroAlone, Mode::kDataParallelFirst, Mode::kZeroFirst};
inline const char* ToString(Mode mode) {
  return mode == Mode::kZeroAlone   ? "{&zero}"
         : mode == Mode::kZeroFirst ? "{&zero, &ddp}"
                                    : "{&ddp, &zero}";
}

// A rank with a model, a sharded optimizer, and gradients by `mode`.
struct Trainer {
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Communicator& comm, Mode mode,
                                                         const UpdateRule& rule,
                                                         std::vector<int64_t> sizes = kSizes,
                                                         std::vector<int> frozen = {},
                                                         DType dtype = DType::kFloat32) {
    auto trainer = std::make_unique<Trainer>(std::move(sizes), dtype);
    for (int param : frozen) trainer->model.params().SetTrainable(param, false);
    EK_RETURN_IF_ERROR(trainer->Init(comm, mode, AllInOneGroup(trainer->model.params(), rule)));
    return trainer;
  }
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Communicator& comm, Mode mode,
                                                         const std::vector<ParameterGroup>& groups,
                                                         std::vector<int64_t> sizes = kSizes) {
    auto trainer = std::make_unique<Trainer>(std::move(sizes), DType::kFloat32);
    EK_RETURN_IF_ERROR(trainer->Init(comm, mode, groups));
    return trainer;
  }
  // On the group's device, which is one of these.
  static absl::StatusOr<std::unique_ptr<Trainer>> CreateOn(
      SimulatedDevices& devices, Communicator& comm, Mode mode,
      const std::vector<ParameterGroup>& groups, std::vector<int64_t> sizes = kSizes) {
    EK_ASSIGN_OR_RETURN(Stream stream, devices.CreateStream(comm.device()));
    auto trainer =
        std::make_unique<Trainer>(std::move(sizes), DType::kFloat32, &devices, std::move(stream));
    EK_RETURN_IF_ERROR(trainer->Init(comm, mode, groups));
    return trainer;
  }
  static absl::StatusOr<std::unique_ptr<Trainer>> CreateOn(SimulatedDevices& devices,
                                                           Communicator& comm, Mode mode,
                                                           const UpdateRule& rule,
                                                           std::vector<int64_t> sizes = kSizes) {
    TestModel like(sizes);
    return CreateOn(devices, comm, mode, AllInOneGroup(like.params(), rule), std::move(sizes));
  }

  Trainer(std::vector<int64_t> sizes, DType dtype, SimulatedDevices* devices = nullptr,
          Stream stream = {})
      : stream(std::move(stream)),
        model(std::move(sizes), dtype, devices, this->stream.ref()),
        devices(devices) {}

  absl::Status Init(Communicator& group, Mode who_reduces,
                    const std::vector<ParameterGroup>& groups) {
    comm = &group;
    mode = who_reduces;
    if (mode != Mode::kZeroAlone) {
      EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&group, &model.params(), {},
                                                    {.reducer = {.caps = {Bytes{256}}}}));
    }
    EK_ASSIGN_OR_RETURN(zero,
                        Optimizer::Create(group, model.params(), groups, {.placement = options}));
    return absl::OkStatus();
  }

  std::vector<Joinable*> joinables() const {
    if (mode == Mode::kZeroAlone) return {zero.get()};
    if (mode == Mode::kZeroFirst) return {zero.get(), ddp.get()};
    return {ddp.get(), zero.get()};
  }
  absl::Status Step(int step, const StepOptions& options = {}) {
    if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.params().ClearGradients();
    model.Backward(comm->rank(), step);
    if (mode != Mode::kZeroAlone) EK_RETURN_IF_ERROR(Reduce());
    return zero->Step(options);
  }
  absl::Status Reduce() { return internal::Reduce(*ddp, model.params()); }
  // Until the device has run what is on the stream; nothing on the CPU.
  absl::Status Finish() {
    if (devices == nullptr) return absl::OkStatus();
    return devices->Synchronize(stream.ref(), SteadyNow() + absl::Minutes(1));
  }

  Communicator* comm = nullptr;
  WholeTensors options = kSmallBuckets;  // Before Init().
  Mode mode = Mode::kZeroAlone;
  const Stream stream;
  TestModel model;
  SimulatedDevices* const devices;
  std::unique_ptr<DataParallel> ddp;  // Null if the optimizer reduces.
  std::unique_ptr<Optimizer> zero;
};

// The rank's weights, and the state of all ranks together.
inline absl::Status ExpectEqual(Trainer& trainer, TestModel& plain_model,
                                const PlainTraining& plain) {
  EK_RETURN_IF_ERROR(trainer.Finish());
  EXPECT_TRUE(IsSame(trainer.model, plain_model)) << "rank " << trainer.comm->rank();
  EK_ASSIGN_OR_RETURN(const OptimizerState all, trainer.zero->Consolidate());
  EXPECT_TRUE(IsSame(all, plain.state())) << "rank " << trainer.comm->rank();
  return absl::OkStatus();
}

// The ranks that have inputs in a step of an epoch, when rank r has inputs[r].
inline std::vector<int> ActiveIn(const std::vector<int>& inputs, int step) {
  std::vector<int> active;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    if (step < inputs[rank]) active.push_back(static_cast<int>(rank));
  }
  return active;
}

// Which parameters are frozen in a step: some from the start, some again and again, all that one
// rank owns.
inline bool IsFrozen(int step, int param) {
  switch (param) {
    case 0:
      return step < 2;  // For the first time in step 2.
    case 1:
      return step == 1 || step == 2 || step >= 5;  // The giant.
    case 2:
      return step < 4;
    case 4:
      return step == 3;
    case 5:
      return true;  // Never.
    default:
      return false;
  }
}

inline void Freeze(ParameterSet& params, int step) {
  for (int param = 0; param < params.size(); ++param)
    params.SetTrainable(param, !IsFrozen(step, param));
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_TESTING_SHARDED_TRAINER_H_
