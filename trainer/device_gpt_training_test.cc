// Whole training runs of a gpt on simulated devices, a rank on each, against the same runs on the
// host.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int64_t kContext = 8, kVocabulary = 11;

// Sequences that count up from anywhere, three apart.
class Counting : public Dataset {
 public:
  explicit Counting(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  int64_t predictions_per_sample() const override { return kContext; }
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override {
    memory.inputs.clear(), memory.targets.clear();
    for (const int32_t sample : samples) {
      for (int32_t i = 0; i < kContext; ++i) {
        memory.inputs.push_back((sample + 3 * i) % kVocabulary);
        memory.targets.push_back((sample + 3 * (i + 1)) % kVocabulary);
      }
    }
    return TokenBatch{memory.inputs, memory.targets, kContext};
  }

 private:
  const int64_t size_;
};

const std::shared_ptr<const TrainingData>& Data() {
  static const auto* const data = new std::shared_ptr<const TrainingData>(
      new TrainingData{.train = std::make_unique<const Counting>(32),
                       .test = std::make_unique<const Counting>(7),
                       .vocabulary = kVocabulary});
  return *data;
}

TrainFlags Flags() {
  return {.model = "gpt",
          .layers = 2,
          .width = 12,
          .heads = 3,
          .context = kContext,
          .batch_size = 4,
          .lr = 0.003,
          .warmup = 0,
          .zero = false};
}

// Rank 0's results.
struct Seen {
  std::vector<double> losses;
  Evaluation test;
  std::vector<std::vector<float>> values;
};

absl::Status Train(Communicator& comm, const TrainFlags& flags, Seen& seen) {
  EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
  EK_ASSIGN_OR_RETURN(RankSetup setup,
                      PrepareRank(options, Data(), comm.rank(), comm.world_size()));
  if (comm.runtime() != nullptr)
    EK_RETURN_IF_ERROR(MoveToDevice(options, *comm.runtime(), comm.device(), setup));
  EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
  Seen mine;
  for (int epoch = 0; epoch < 2; ++epoch) {
    EK_ASSIGN_OR_RETURN(const EpochResult result,
                        run->TrainEpoch(epoch, [&](const StepFacts& facts) {
                          if (facts.own.has_value()) mine.losses.push_back(facts.own->loss_mean);
                          return absl::OkStatus();
                        }));
    mine.losses.push_back(result.training.loss_mean());
  }
  EK_ASSIGN_OR_RETURN(mine.test, run->Test());
  EK_ASSIGN_OR_RETURN(const HostTensors tensors, run->model().ToHost());
  for (const TensorView& tensor : tensors.values) {
    const std::span<float> values = tensor.as<float>();
    mine.values.emplace_back(values.begin(), values.end());
  }
  if (comm.rank() == 0) seen = std::move(mine);
  return absl::OkStatus();
}

// Adam divides a gradient by its own size: one near 0, as a bias of keys has, moves by up to the
// learning rate whatever rounding made of it. `bound` is of values; of losses a tenth of it.
void ExpectAlike(int ranks, const TrainFlags& flags, double bound) {
  Seen host, device;
  const absl::Status on_host =
      RunRanks(ranks, [&](Communicator& comm) { return Train(comm, flags, host); });
  EXPECT_TRUE(on_host.ok()) << on_host;
  SimulatedDevices devices({.count = ranks});
  const absl::Status on_devices = internal::RunSimulatedRanks(
      devices, ranks, [&](Communicator& comm) { return Train(comm, flags, device); });
  EXPECT_TRUE(on_devices.ok()) << on_devices;
  ASSERT_EQ(device.losses.size(), host.losses.size());
  for (size_t i = 0; i < host.losses.size(); ++i)
    EXPECT_NEAR(device.losses[i], host.losses[i], bound / 10) << i;
  EXPECT_LT(host.losses.back(), host.losses.front());
  EXPECT_EQ(device.test.predictions, host.test.predictions);
  EXPECT_NEAR(device.test.loss_mean(), host.test.loss_mean(), bound / 10);
  ASSERT_EQ(device.values.size(), host.values.size());
  for (size_t t = 0; t < host.values.size(); ++t) {
    double apart = 0;
    for (size_t i = 0; i < host.values[t].size(); ++i) {
      apart = std::max<double>(apart, std::abs(host.values[t][i] - device.values[t][i]));
    }
    EXPECT_LE(apart, bound) << "tensor " << t;
  }
}

TEST(DeviceGptTrainingTest, IsAsOnTheHost) {
  TrainFlags flags = Flags();
  flags.optimizer = "sgd";
  flags.lr = 0.1;
  for (const int ranks : {1, 2}) ExpectAlike(ranks, flags, 1e-4);
}

TEST(DeviceGptTrainingTest, IsAsOnTheHostWithDropoutAccumulationAndAFrozenEmbedding) {
  TrainFlags flags = Flags();
  flags.optimizer = "sgd";
  flags.lr = 0.1;
  flags.dropout = 0.1;
  flags.accumulate = 2;
  flags.freeze = "wpe@1:3";
  flags.clip = 1;
  ExpectAlike(2, flags, 1e-4);
}

TEST(DeviceGptTrainingTest, IsAsOnTheHostInBFloat16WithAdam) {
  TrainFlags flags = Flags();
  flags.compute = "bfloat16";
  // Eight steps of at most the learning rate apart at worst.
  ExpectAlike(2, flags, 8 * 0.003);
}

TEST(DeviceGptTrainingTest, TheHostTouchesNoMemoryOfADevice) {
  for (const bool zero : {false, true}) {
    TrainFlags flags = Flags();
    flags.zero = zero;
    flags.compute = zero ? "bfloat16" : "float32";
    flags.dropout = 0.1;
    flags.accumulate = 2;
    flags.freeze = "wpe@1:3";
    flags.clip = 1;
    SimulatedDevices devices({.guards_memory = true});
    internal::SimulatedNccl nccl(devices);  // Its collectives run on streams alone.
    const auto group = internal::CreateSimulatedNcclGroup(devices, nccl, 1);
    ASSERT_TRUE(group.ok()) << group.status();
    Seen seen;
    const absl::Status status = Train(*(*group)[0], flags, seen);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_FALSE(seen.losses.empty());
  }
}

}  // namespace
}  // namespace evenkeel
