#include "evenkeel/trainer/app/choose_device.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/app/train_options.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const absl::StatusOr<int> kNone = absl::FailedPreconditionError("no CUDA device: no driver");

TrainOptions Options(DeviceKind device, std::optional<int> nproc = {},
                     BackendKind backend = BackendKind::kAuto) {
  TrainOptions options;
  options.device = device;
  options.backend = backend;
  options.nproc = nproc.value_or(2);
  options.flags.nproc = nproc;
  return options;
}

struct Case {
  std::string name;
  TrainOptions options;
  absl::StatusOr<int> devices;
  std::optional<int> local_ranks;
  DeviceKind device;  // Wanted, from here on.
  int nproc;
  std::string line;
};

TEST(ChooseDeviceTest, ChoosesWhatThereIs) {
  const Case cases[] = {
      {"no device", Options(DeviceKind::kAuto), kNone, {}, DeviceKind::kCpu, 2, ""},
      {"devices without libraries",
       Options(DeviceKind::kAuto),
       absl::NotFoundError("the GPU cannot be used: cannot load cuDNN"),
       {},
       DeviceKind::kCpu,
       2,
       "the GPU cannot be used: cannot load cuDNN; the run uses the CPU"},
      {"one device",
       Options(DeviceKind::kAuto),
       1,
       {},
       DeviceKind::kCuda,
       1,
       "1 GPU, so the run uses one rank"},
      {"four devices", Options(DeviceKind::kAuto), 4, {}, DeviceKind::kCuda, 4, ""},
      {"fewer ranks", Options(DeviceKind::kAuto, 3), 4, {}, DeviceKind::kCuda, 3, ""},
      {"more ranks",
       Options(DeviceKind::kAuto, 3),
       2,
       {},
       DeviceKind::kCpu,
       3,
       "3 ranks and 2 GPUs, so the run uses the CPU; --nproc=2 would use them"},
      {"more ranks than one",
       Options(DeviceKind::kAuto, 2),
       1,
       {},
       DeviceKind::kCpu,
       2,
       "2 ranks and 1 GPU, so the run uses the CPU; --nproc=1 would use it"},
      {"one rank said", Options(DeviceKind::kAuto, 1), 1, {}, DeviceKind::kCuda, 1, ""},
      {"asked for", Options(DeviceKind::kCuda), 2, {}, DeviceKind::kCuda, 2, ""},
      {"the backend asks",
       Options(DeviceKind::kAuto, {}, BackendKind::kNccl),
       2,
       {},
       DeviceKind::kCuda,
       2,
       ""},
      {"the CPU", Options(DeviceKind::kCpu), 2, {}, DeviceKind::kCpu, 2, ""},
      {"launched", Options(DeviceKind::kAuto), 2, 2, DeviceKind::kCuda, 2, ""},
      {"launched, more", Options(DeviceKind::kCuda), 8, 8, DeviceKind::kCuda, 2, ""},
  };
  for (const Case& c : cases) {
    TrainOptions options = c.options;
    const absl::StatusOr<std::string> line = ChooseDevice(c.devices, c.local_ranks, options);
    ASSERT_TRUE(line.ok()) << c.name << ": " << line.status();
    EXPECT_EQ(*line, c.line) << c.name;
    EXPECT_EQ(options.device, c.device) << c.name;
    EXPECT_EQ(options.nproc, c.nproc) << c.name;
    EXPECT_EQ(options.backend == BackendKind::kNccl, c.device == DeviceKind::kCuda) << c.name;
  }
}

// They say how many ranks there are as well as --nproc does, which then means the default.
TEST(ChooseDeviceTest, BatchesOfEachRankLeaveTheNumberOfRanks) {
  TrainOptions options = Options(DeviceKind::kAuto);
  options.rank_steps = {3, 1};
  EXPECT_TRUE(ChooseDevice(4, {}, options).ok());
  EXPECT_EQ(options.nproc, 2);
  EXPECT_EQ(options.device, DeviceKind::kCuda);
  options.device = DeviceKind::kAuto;
  options.backend = BackendKind::kAuto;
  const absl::StatusOr<std::string> line = ChooseDevice(1, {}, options);
  EXPECT_EQ(line.value_or(""), "2 ranks and 1 GPU, so the run uses the CPU");
  EXPECT_EQ(options.nproc, 2);
  EXPECT_EQ(options.device, DeviceKind::kCpu);
}

// Its parent has said it already, or a launcher has no --nproc.
TEST(ChooseDeviceTest, ALaunchedRankIsToldOfNoFlag) {
  TrainOptions options = Options(DeviceKind::kAuto);
  const absl::StatusOr<std::string> line = ChooseDevice(1, 2, options);
  EXPECT_EQ(line.value_or("an error"), "");
  EXPECT_EQ(options.device, DeviceKind::kCpu);
}

TEST(ChooseDeviceTest, ABackendOfTheCpuAndGoingOnAreTheCpus) {
  TrainOptions shm = Options(DeviceKind::kAuto, {}, BackendKind::kShm);
  EXPECT_FALSE(AsksForDevices(shm));
  EXPECT_TRUE(ChooseDevice(0, {}, shm).ok());
  EXPECT_EQ(shm.device, DeviceKind::kCpu);
  EXPECT_EQ(shm.backend, BackendKind::kShm);
  TrainOptions goes_on = Options(DeviceKind::kAuto);
  goes_on.goes_on = true;
  goes_on.flags.on_failure = "replace";
  EXPECT_FALSE(AsksForDevices(goes_on));
  EXPECT_TRUE(ChooseDevice(0, {}, goes_on).ok());
  EXPECT_EQ(goes_on.device, DeviceKind::kCpu);
  TrainOptions balance = Options(DeviceKind::kAuto);
  balance.flags.balance = true;
  EXPECT_FALSE(AsksForDevices(balance));
  EXPECT_FALSE(AsksForDevices(Options(DeviceKind::kCpu)));
  EXPECT_TRUE(AsksForDevices(Options(DeviceKind::kAuto)));
  EXPECT_TRUE(AsksForDevices(Options(DeviceKind::kCuda)));
}

TEST(ChooseDeviceTest, StateIsShardedInAnyWayOnGpus) {
  TrainOptions options = Options(DeviceKind::kAuto);
  options.sharding = Sharding::kTensors;
  EXPECT_TRUE(AsksForDevices(options));
  EXPECT_TRUE(ChooseDevice(4, {}, options).ok());
  EXPECT_EQ(options.device, DeviceKind::kCuda);
  EXPECT_EQ(options.nproc, 4);
}

TEST(ChooseDeviceTest, OneSentenceSaysWhatIsMissing) {
  const struct {
    TrainOptions options;
    absl::StatusOr<int> devices;
    std::string sentence;
  } cases[] = {
      {Options(DeviceKind::kCuda), kNone, "--device=cuda: no CUDA device: no driver"},
      {Options(DeviceKind::kAuto, {}, BackendKind::kNccl), kNone,
       "--backend=nccl: no CUDA device: no driver"},
      {Options(DeviceKind::kCuda), 0, "--device=cuda: no CUDA device"},
      {Options(DeviceKind::kCuda, 4), 1,
       "--device=cuda: 4 ranks need as many GPUs, but this host has 1"},
      {Options(DeviceKind::kCuda, 4), 3,
       "--device=cuda: 4 ranks need as many GPUs, but this host has 3"},
      {Options(DeviceKind::kCuda, 2, BackendKind::kShm), 2,
       "--device=cuda conflicts with a --backend for the CPU; choose --backend=auto, or "
       "--device=cpu"},
      {Options(DeviceKind::kCpu, 2, BackendKind::kNccl), 2,
       "--backend=nccl is for tensors on a GPU; choose --backend=auto, or --device=cuda"},
  };
  for (const auto& c : cases) {
    TrainOptions options = c.options;
    EXPECT_EQ(ChooseDevice(c.devices, {}, options).status().message(), c.sentence);
  }
  TrainOptions goes_on = Options(DeviceKind::kCuda);
  goes_on.goes_on = true;
  goes_on.flags.on_failure = "replace";
  EXPECT_EQ(ChooseDevice(2, {}, goes_on).status().message(),
            "--on_failure=replace supports only ranks on the CPU; choose --device=cpu");
  TrainOptions precise = Options(DeviceKind::kCuda);
  precise.compute = DType::kFloat64;
  EXPECT_EQ(ChooseDevice(2, {}, precise).status().message(),
            "--compute=float64 supports only ranks on the CPU; choose --device=cpu");
  precise.device = DeviceKind::kAuto;
  EXPECT_TRUE(ChooseDevice(2, {}, precise).ok());
  EXPECT_EQ(precise.device, DeviceKind::kCpu);
}

TEST(ChooseDeviceTest, OnTheCpuOnlyTheGptRounds) {
  for (const ModelKind model : {ModelKind::kMlp, ModelKind::kCnn, ModelKind::kGpt}) {
    TrainOptions options = Options(DeviceKind::kAuto);
    options.model = model;
    options.compute = DType::kBFloat16;
    EXPECT_TRUE(ChooseDevice(2, {}, options).ok());
    options.device = DeviceKind::kCpu;
    options.backend = BackendKind::kAuto;
    EXPECT_EQ(ChooseDevice(2, {}, options).ok(), model == ModelKind::kGpt);
  }
  TrainOptions options = Options(DeviceKind::kAuto);
  options.compute = DType::kBFloat16;
  EXPECT_EQ(ChooseDevice(kNone, {}, options).status().message(),
            "--compute=bfloat16 of --model=cnn requires GPUs, but this run uses the CPU");
}

}  // namespace
}  // namespace evenkeel
