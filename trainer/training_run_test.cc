#include "evenkeel/trainer/training_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/idx_dataset.h"
#include "evenkeel/trainer/image_shape.h"
#include "evenkeel/trainer/rank_setup.h"
#include "evenkeel/trainer/stable_random.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/trainer/training_data.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Noise with a bright stripe whose row tells the label.
IdxDataset Striped(int count, uint64_t seed) {
  StableRandom random(seed);
  std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  for (int i = 0; i < count; ++i) {
    const int label = static_cast<int>(random.Below(kClasses));
    labels += static_cast<char>(label);
    for (int pixel = 0; pixel < kImagePixels; ++pixel) {
      images += static_cast<char>(random.Below(128) + (pixel / kImageSide / 2 == label + 2 ? 127 : 0));
    }
  }
  return *IdxDataset::Parse(images, labels);
}

const std::shared_ptr<const TrainingData>& Data() {
  static const auto* const data =
      new std::shared_ptr<const TrainingData>(new TrainingData{Striped(60, 1), Striped(17, 2)});
  return *data;
}

using OnRun = absl::FunctionRef<absl::Status(Communicator&, TrainingRun&)>;

absl::Status OnRanks(int ranks, const TrainFlags& flags, OnRun body) {
  return RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
    EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, Data(), comm.rank(), comm.world_size()));
    EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
    return body(comm, *run);
  });
}

TEST(TrainingRunTest, TellsEveryRankOfEveryStep) {
  const absl::Status status =
      OnRanks(3, {.model = "mlp", .batch_size = 4, .rank_steps = "1,0,3"},
              [](Communicator& comm, TrainingRun& run) -> absl::Status {
                for (int epoch = 0; epoch < 2; ++epoch) {
                  std::vector<std::string> steps;
                  EK_ASSIGN_OR_RETURN(const EpochResult result, run.TrainEpoch(epoch, [&](const StepFacts& facts) {
                    steps.push_back(absl::StrCat(facts.step, " active ", facts.active, " samples ", facts.samples,
                                                 " own ", facts.own_samples));
                    EXPECT_EQ(facts.own.has_value(), facts.own_samples > 0);
                    return absl::OkStatus();
                  }));
                  const int64_t first = 3 * epoch;
                  const int own[] = {comm.rank() == 1 ? 0 : 4, comm.rank() == 2 ? 4 : 0, comm.rank() == 2 ? 4 : 0};
                  EXPECT_THAT(steps, ElementsAre(absl::StrCat(first, " active 2 samples 8 own ", own[0]),
                                                 absl::StrCat(first + 1, " active 1 samples 4 own ", own[1]),
                                                 absl::StrCat(first + 2, " active 1 samples 4 own ", own[2])));
                  EXPECT_EQ(result.training.samples, 16);
                  EXPECT_THAT(result.batches_done, ElementsAre(1, 0, 3));
                  EXPECT_FALSE(result.stopped_early);
                }
                return absl::OkStatus();
              });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TrainingRunTest, LearnsAndTestsTheSameOnAllRanks) {
  std::mutex mutex;
  std::vector<double> losses;
  for (int ranks : {1, 3}) {
    const absl::Status status = OnRanks(
        ranks, {.model = "mlp", .batch_size = 4, .lr = 0.01}, [&](Communicator&, TrainingRun& run) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const Evaluation before, run.Test());
          EXPECT_EQ(before.samples, 17);
          for (int epoch = 0; epoch < 3; ++epoch) {
            EK_RETURN_IF_ERROR(run.TrainEpoch(epoch, [](const StepFacts&) { return absl::OkStatus(); }).status());
          }
          EK_ASSIGN_OR_RETURN(const Evaluation after, run.Test());
          EXPECT_LT(after.loss_mean(), before.loss_mean() / 2);
          const std::lock_guard<std::mutex> lock(mutex);
          losses.push_back(after.loss_mean());
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
  ASSERT_EQ(losses.size(), 4u);
  EXPECT_EQ(losses[1], losses[2]);
  EXPECT_EQ(losses[1], losses[3]);
}

TEST(TrainingRunTest, BuffersAreEqualWhenTheyAreTested) {
  std::mutex mutex;
  std::vector<std::vector<float>> buffers;
  for (const char* join : {"join", "nojoin"}) {
    const absl::Status status =
        OnRanks(2, {.model = "cnn", .batch_size = 4, .rank_steps = "2,2", .join = join == std::string("join")},
                [&](Communicator&, TrainingRun& run) -> absl::Status {
                  EK_RETURN_IF_ERROR(run.TrainEpoch(0, [](const StepFacts&) { return absl::OkStatus(); }).status());
                  EK_RETURN_IF_ERROR(run.Test().status());
                  const std::lock_guard<std::mutex> lock(mutex);
                  const auto values = run.model().buffers()[0].value.as<float>();
                  buffers.emplace_back(values.begin(), values.end());
                  return absl::OkStatus();
                });
    EXPECT_TRUE(status.ok()) << status;
  }
  ASSERT_EQ(buffers.size(), 4u);
  EXPECT_EQ(buffers[0], buffers[1]);
  EXPECT_EQ(buffers[2], buffers[3]);
}

TEST(TrainingRunTest, StopsEarlyInTheSameStepOnAllRanks) {
  const absl::Status status =
      OnRanks(3, {.model = "mlp", .batch_size = 4, .rank_steps = "4,2,3", .stop_early = true},
              [](Communicator&, TrainingRun& run) -> absl::Status {
                EK_ASSIGN_OR_RETURN(const EpochResult result,
                                    run.TrainEpoch(0, [](const StepFacts&) { return absl::OkStatus(); }));
                EXPECT_TRUE(result.stopped_early);
                EXPECT_THAT(result.batches_done, ElementsAre(2, 2, 2));
                return run.Test().status();
              });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TrainingRunTest, AnErrorOfOneRankEndsAll) {
  const absl::Status status =
      OnRanks(2, {.model = "mlp", .batch_size = 4}, [](Communicator& comm, TrainingRun& run) -> absl::Status {
        const absl::Status mine = run.TrainEpoch(0,
                                                 [&](const StepFacts& facts) {
                                                   return comm.rank() == 1 && facts.step == 2
                                                              ? absl::ResourceExhaustedError("disk full")
                                                              : absl::OkStatus();
                                                 })
                                      .status();
        EXPECT_THAT(std::string(mine.message()), HasSubstr("disk full"));
        return mine;
      });
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

}  // namespace
}  // namespace evenkeel
