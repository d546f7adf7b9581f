#include "evenkeel/trainer/app/training_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/sum_over_ranks.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Noise with a bright stripe whose row tells the label.
std::unique_ptr<const ImageDataset> Striped(int count, uint64_t seed) {
  StableRandom random(seed);
  std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  for (int i = 0; i < count; ++i) {
    const int label = static_cast<int>(random.Below(kClasses));
    labels += static_cast<char>(label);
    for (int pixel = 0; pixel < kImagePixels; ++pixel) {
      images +=
          static_cast<char>(random.Below(128) + (pixel / kImageSide / 2 == label + 2 ? 127 : 0));
    }
  }
  return std::make_unique<const ImageDataset>(*ParseIdx(images, labels));
}

const std::shared_ptr<const TrainingData>& Data() {
  static const auto* const data = new std::shared_ptr<const TrainingData>(
      new TrainingData{.train = Striped(60, 1), .test = Striped(17, 2), .image = ImageShape{}});
  return *data;
}

using OnRun = absl::FunctionRef<absl::Status(Communicator&, TrainingRun&)>;

absl::Status OnRanks(int ranks, const TrainFlags& flags, OnRun body) {
  return RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
    EK_ASSIGN_OR_RETURN(RankSetup setup,
                        PrepareRank(options, Data(), comm.rank(), comm.world_size()));
    EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
    return body(comm, *run);
  });
}

TEST(TrainingRunTest, TellsEveryRankOfEveryStep) {
  const absl::Status status = OnRanks(
      3, {.model = "mlp", .batch_size = 4, .rank_steps = "1,0,3"},
      [](Communicator& comm, TrainingRun& run) -> absl::Status {
        for (int epoch = 0; epoch < 2; ++epoch) {
          std::vector<std::string> steps;
          EK_ASSIGN_OR_RETURN(
              const EpochResult result, run.TrainEpoch(epoch, [&](const StepFacts& facts) {
                steps.push_back(absl::StrCat(facts.step, " active ", facts.active, " samples ",
                                             facts.samples, " own ", facts.own_samples));
                EXPECT_EQ(facts.own.has_value(), facts.own_samples > 0);
                EXPECT_GT(facts.took, absl::ZeroDuration());
                EXPECT_GT(facts.took, facts.sync);
                return absl::OkStatus();
              }));
          const int64_t first = 3 * epoch;
          const int own[] = {comm.rank() == 1 ? 0 : 4, comm.rank() == 2 ? 4 : 0,
                             comm.rank() == 2 ? 4 : 0};
          EXPECT_THAT(steps,
                      ElementsAre(absl::StrCat(first, " active 2 samples 8 own ", own[0]),
                                  absl::StrCat(first + 1, " active 1 samples 4 own ", own[1]),
                                  absl::StrCat(first + 2, " active 1 samples 4 own ", own[2])));
          EXPECT_EQ(result.training.predictions, 16);
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
        ranks, {.model = "mlp", .batch_size = 4, .lr = 0.01},
        [&](Communicator&, TrainingRun& run) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const Evaluation before, run.Test());
          EXPECT_EQ(before.predictions, 17);
          for (int epoch = 0; epoch < 3; ++epoch) {
            EK_RETURN_IF_ERROR(
                run.TrainEpoch(epoch, [](const StepFacts&) { return absl::OkStatus(); }).status());
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

std::vector<float> BuffersOf(const Model& model) {
  std::vector<float> all;
  for (const NamedBuffer& buffer : model.buffers()) {
    const auto values = buffer.value.as<float>();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Those with which the next step would begin: the highest rank's after joined steps, rank 0's after
// others. Each rank's are its own until then, unless the loop was uneven: then all have those of
// the ranks that were active to the end.
TEST(TrainingRunTest, ATestIsOfTheBuffersThatTheNextStepWouldBeginWith) {
  const struct {
    bool joins;
    std::string rank_steps;
    int source;
    bool are_own;
  } cases[] = {{true, "2,2,2", 2, false}, {false, "2,2,2", 0, true}, {true, "3,2,1", 0, false}};
  for (const auto& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.joins ? "join " : "nojoin ", c.rank_steps));
    std::mutex mutex;
    std::vector<std::vector<float>> before(3), after(3);
    const absl::Status status = OnRanks(
        3,
        {.model = "cnn",
         .widths = "4,8",
         .batch_size = 4,
         .rank_steps = c.rank_steps,
         .join = c.joins},
        [&](Communicator& comm, TrainingRun& run) -> absl::Status {
          EK_RETURN_IF_ERROR(
              run.TrainEpoch(0, [](const StepFacts&) { return absl::OkStatus(); }).status());
          std::vector<float> own = BuffersOf(run.model());
          EK_ASSIGN_OR_RETURN(const Evaluation first, run.Test());
          // Now all ranks have the same ones, and so the test is what the first one should
          // have been.
          EK_ASSIGN_OR_RETURN(const Evaluation second, run.Test());
          EXPECT_EQ(first.loss_sum, second.loss_sum);
          const std::lock_guard<std::mutex> lock(mutex);
          before[comm.rank()] = std::move(own);
          after[comm.rank()] = BuffersOf(run.model());
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(before[0] != before[1] && before[1] != before[2], c.are_own);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(after[rank], before[c.source]) << rank;
  }
}

TEST(TrainingRunTest, StopsEarlyInTheSameStepOnAllRanks) {
  const absl::Status status = OnRanks(
      3, {.model = "mlp", .batch_size = 4, .rank_steps = "4,2,3", .stop_early = true},
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
      OnRanks(2, {.model = "mlp", .batch_size = 4},
              [](Communicator& comm, TrainingRun& run) -> absl::Status {
                const absl::Status mine =
                    run.TrainEpoch(0,
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

// Ranks that are lost -----------------------------------------------------------------------------

using Weights = std::vector<std::vector<float>>;  // By parameter.

Weights WeightsOf(const Model& model) {
  Weights weights;
  for (int i = 0; i < model.parameters().size(); ++i) {
    const auto value = model.parameters()[i].value.as<float>();
    weights.emplace_back(value.begin(), value.end());
  }
  return weights;
}

struct Trained {
  Weights weights;
  OptimizerState optimizer;
  Evaluation test;
  std::vector<GoneOn> gone_on;
  int64_t samples = 0;  // Trained on in the last epoch, over all ranks that are left.
};

// Where a rank leaves without a word.
enum class Place { kInStep, kBeforeEpoch, kBeforeTest, kAtTheEnd };
struct Loss {
  int rank = 0;
  int64_t step = 0;  // In it; for the other places, of the epoch that begins with it.
  Place place = Place::kInStep;
};

// Trains as the trainer does, without its output.
absl::StatusOr<Trained> TrainWithLosses(TrainingRun& run, int rank,
                                        const std::vector<Loss>& losses) {
  const auto leaves = [&](Place place, int64_t step) {
    for (const Loss& loss : losses) {
      if (loss.rank == rank && loss.place == place && loss.step == step) return true;
    }
    return false;
  };
  const absl::Status gone = absl::CancelledError("gone");
  Trained trained;
  int epoch = run.plan().begin.epoch;
  const auto train_all = [&]() -> absl::Status {
    for (; epoch < run.plan().epochs(); ++epoch) {
      const int64_t first = run.plan().FirstStep(epoch);
      if (leaves(Place::kBeforeEpoch, first)) return gone;
      EK_ASSIGN_OR_RETURN(const EpochResult result,
                          run.TrainEpoch(epoch, [&](const StepFacts& facts) {
                            return leaves(Place::kInStep, facts.step) ? gone : absl::OkStatus();
                          }));
      trained.samples = result.training.predictions;
      if (leaves(Place::kBeforeTest, first)) return gone;
      EK_ASSIGN_OR_RETURN(trained.test, run.Test());
    }
    if (leaves(Place::kAtTheEnd, 0)) return gone;
    EK_RETURN_IF_ERROR(run.AgreeOnState().status());
    EK_ASSIGN_OR_RETURN(trained.optimizer, run.ConsolidateOptimizer());
    return run.communicator().Finalize();
  };
  absl::Status status = train_all();
  while (!status.ok() && !run.failed_locally() && status != gone) {
    const absl::StatusOr<GoneOn> gone_on = run.GoOn(status);
    if (!gone_on.ok()) return gone_on.status();
    trained.gone_on.push_back(*gone_on);
    const absl::StatusOr<int> place = run.FindPlace(epoch);
    status = place.status();
    if (!place.ok()) continue;
    epoch = *place;
    status = train_all();
  }
  if (!status.ok()) return status;
  trained.weights = WeightsOf(run.model());
  return trained;
}

// Compressed gradients train nearly the same weights, equal on all ranks, with every placement.
TEST(TrainingRunTest, TrainsWithCompressedGradients) {
  const auto weights_of = [](TrainFlags flags) {
    std::mutex mutex;
    std::vector<std::vector<float>> weights;
    flags.model = "mlp";
    flags.batch_size = 5;
    flags.epochs = 1;
    const absl::Status status =
        OnRanks(3, flags, [&](Communicator&, TrainingRun& run) -> absl::Status {
          EK_RETURN_IF_ERROR(
              run.TrainEpoch(0, [](const StepFacts&) { return absl::OkStatus(); }).status());
          EK_RETURN_IF_ERROR(run.AgreeOnState().status());
          const std::span<const float> own = run.model().parameters()[0].value.as<float>();
          const std::lock_guard lock(mutex);
          weights.emplace_back(own.begin(), own.end());
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    return weights.at(0);
  };
  const std::vector<float> exact = weights_of({});
  const std::pair<const char*, TrainFlags> kinds[] = {
      {"bf16, slices", {.comm_hook = "bf16"}},
      {"fp16, tensors", {.shards = "tensors", .comm_hook = "fp16"}},
      {"int8", {.zero = false, .comm_hook = "int8"}},
      {"power_sgd",
       {.zero = false, .comm_hook = "power_sgd", .power_sgd_rank = 4, .power_sgd_start = 1}},
  };
  for (const auto& [name, flags] : kinds) {
    SCOPED_TRACE(name);
    const std::vector<float> rounded = weights_of(flags);
    EXPECT_NE(rounded, exact);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      difference += std::pow(rounded[i] - exact[i], 2);
      norm += std::pow(exact[i], 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), 0.2);
  }
}

using Setup = absl::FunctionRef<absl::Status(RankSetup&)>;

// By rank; each is a thread, and ends with its communicator when it leaves.
std::vector<absl::StatusOr<Trained>> TrainOnThreads(
    int ranks, const TrainFlags& flags, const std::vector<Loss>& losses,
    Setup prepare = [](RankSetup&) { return absl::OkStatus(); },
    const OptimizerState* optimizer = nullptr) {
  std::vector<std::unique_ptr<Communicator>> group = *CreateTestGroup(ranks);
  std::vector<absl::StatusOr<Trained>> results(ranks, absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Communicator> comm = std::move(group[rank]);
      results[rank] = [&]() -> absl::StatusOr<Trained> {
        EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
        EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, Data(), rank, ranks));
        EK_RETURN_IF_ERROR(prepare(setup));
        EK_ASSIGN_OR_RETURN(const auto run,
                            TrainingRun::Create(comm.get(), options, std::move(setup)));
        if (optimizer != nullptr) EK_RETURN_IF_ERROR(run->LoadOptimizer(*optimizer));
        return TrainWithLosses(*run, rank, losses);
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// `steps` with `before` ranks, the rest with `after`, each in a group that has never lost anybody.
Trained Reference(const TrainFlags& flags, int before, int64_t steps, int after) {
  TrainFlags first = flags;
  first.max_steps = steps;
  Trained begun;
  if (steps > 0) begun = *TrainOnThreads(before, first, {})[0];
  const auto results = TrainOnThreads(
      after, flags, {},
      [&](RankSetup& setup) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const StepPlan whole, MakeStepPlan({.world_size = before,
                                                                .samples = Data()->train->size(),
                                                                .batch_size = *flags.batch_size,
                                                                .epochs = *flags.epochs}));
        EK_ASSIGN_OR_RETURN(setup.plan, whole.GoOn(whole.PositionAfter(steps), after));
        ParameterSet& parameters = setup.model->parameters();
        for (int i = 0; steps > 0 && i < parameters.size(); ++i) {
          std::memcpy(parameters[i].value.data, begun.weights[i].data(),
                      parameters[i].value.bytes());
        }
        return absl::OkStatus();
      },
      &begun.optimizer);
  for (const auto& result : results) EXPECT_TRUE(result.ok()) << result.status();
  return *results[0];
}

double Difference(const Weights& a, const Weights& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j)
      most = std::max(most, std::abs(double{a[i][j]} - b[i][j]));
  }
  return most;
}

// 60 samples in batches of 3: 5 steps with 4 ranks.
const TrainFlags kMomentum = {.model = "mlp",
                              .hidden = "8",
                              .batch_size = 3,
                              .epochs = 3,
                              .optimizer = "sgd",
                              .momentum = 0.9,
                              .zero = false};
const TrainFlags kAdam = {.model = "mlp",
                          .hidden = "8",
                          .batch_size = 3,
                          .epochs = 3,
                          .optimizer = "adam",
                          .lr = 0.01,
                          .zero = false};

struct LossCase {
  std::string name;
  Loss loss;
  // That all have finished, at most and at least: in a step the lost rank may be ahead of the
  // others.
  int64_t most_steps;
  int64_t least_steps;
};

class LostRankTest : public testing::TestWithParam<LossCase> {};

TEST_P(LostRankTest, TheOthersDoWhatAFreshGroupOfThemWould) {
  for (const TrainFlags& flags : {kMomentum, kAdam}) {
    SCOPED_TRACE(flags.optimizer);
    const std::vector<absl::StatusOr<Trained>> results =
        TrainOnThreads(4, flags, {GetParam().loss});
    int64_t steps = -1;
    Trained expected;
    double one_step = 0;  // The difference that one more step before the loss makes.
    for (int rank = 0; rank < 4; ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank);
      const absl::StatusOr<Trained>& result = results[rank];
      if (rank == GetParam().loss.rank) {
        EXPECT_TRUE(absl::IsCancelled(result.status())) << result.status();
        continue;
      }
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(result->gone_on.size(), 1u);
      EXPECT_THAT(result->gone_on[0].lost, ElementsAre(GetParam().loss.rank));
      if (steps < 0) {
        steps = result->gone_on[0].steps;
        EXPECT_LE(steps, GetParam().most_steps);
        EXPECT_GE(steps, GetParam().least_steps);
        expected = Reference(flags, 4, steps, 3);
        one_step = Difference(Reference(flags, 4, steps + 1, 3).weights, expected.weights);
        EXPECT_GT(one_step, 0);
      }
      EXPECT_EQ(result->gone_on[0].steps, steps);
      if (TheTestBackend().adds_in_rank_order) {
        EXPECT_EQ(Difference(result->weights, expected.weights), 0);
        EXPECT_TRUE(result->optimizer == expected.optimizer);
        EXPECT_EQ(result->test.loss_sum, expected.test.loss_sum);
      } else {
        EXPECT_LE(Difference(result->weights, expected.weights), one_step / 100);
        EXPECT_NEAR(result->test.loss_sum, expected.test.loss_sum, 1e-3 * expected.test.loss_sum);
      }
      EXPECT_EQ(result->samples, 60);  // The last epoch's, in which no rank is lost.
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Losses, LostRankTest,
    testing::Values(
        LossCase{"Rank0InTheFirstStep", {.rank = 0, .step = 0}, 1, 0},
        LossCase{"Rank2InMidEpoch", {.rank = 2, .step = 2}, 3, 2},
        LossCase{"Rank0InMidEpoch", {.rank = 0, .step = 6}, 7, 6},
        LossCase{"Rank3InTheLastStepOfAnEpoch", {.rank = 3, .step = 4}, 5, 4},
        LossCase{
            "Rank1BeforeTheFirstStep", {.rank = 1, .step = 0, .place = Place::kBeforeEpoch}, 0, 0},
        LossCase{"Rank1BetweenEpochs", {.rank = 1, .step = 5, .place = Place::kBeforeEpoch}, 5, 5},
        LossCase{
            "Rank0InAnEvaluation", {.rank = 0, .step = 5, .place = Place::kBeforeTest}, 10, 10}),
    [](const auto& info) { return info.param.name; });

TEST(TrainingRunTest, GoesOnAtItsEndAndAfterSeveralLosses) {
  const std::vector<Loss> losses = {
      {.rank = 3, .step = 1}, {.rank = 0, .step = 6}, {.rank = 2, .place = Place::kAtTheEnd}};
  const std::vector<absl::StatusOr<Trained>> results = TrainOnThreads(4, kMomentum, losses);
  ASSERT_TRUE(results[1].ok()) << results[1].status();
  std::vector<int> lost;
  for (const GoneOn& gone_on : results[1]->gone_on)
    lost.insert(lost.end(), gone_on.lost.begin(), gone_on.lost.end());
  EXPECT_THAT(lost, ElementsAre(3, 0, 2));
}

TEST(TrainingRunTest, NobodyGoesOnWhenNobodyIsLost) {
  // All ranks are there; who would go on would fail again in the same step.
  const std::vector<absl::StatusOr<Trained>> results = [&] {
    std::vector<std::unique_ptr<Communicator>> group = *CreateTestGroup(2);
    std::vector<absl::StatusOr<Trained>> results(2, absl::UnknownError("did not run"));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const TrainOptions options = *MakeTrainOptions(kMomentum);
        auto run = *TrainingRun::Create(group[rank].get(), options,
                                        *PrepareRank(options, Data(), rank, 2));
        if (rank == 1) group[1]->Abort(absl::InternalError("of the group"));
        results[rank] = TrainWithLosses(*run, rank, {});
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }();
  for (const auto& result : results)
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("of the group"));
}

TEST(TrainingRunTest, ALostShardIsRefusedUnlessItMayBeginFresh) {
  for (const char* shards : {"slices", "tensors"}) {
    SCOPED_TRACE(shards);
    TrainFlags flags = kAdam;
    flags.zero = true;
    flags.shards = shards;
    for (const auto& result : TrainOnThreads(3, flags, {{.rank = 1, .step = 2}})) {
      EXPECT_FALSE(result.ok());
      if (!absl::IsCancelled(result.status())) {
        EXPECT_TRUE(absl::IsFailedPrecondition(result.status())) << result.status();
      }
    }
    flags.on_failure = "continue";
    flags.lost_shard = "fresh";
    const auto results = TrainOnThreads(3, flags, {{.rank = 1, .step = 2}});
    ASSERT_TRUE(results[0].ok()) << results[0].status();
    ASSERT_TRUE(results[2].ok()) << results[2].status();
    EXPECT_EQ(Difference(results[0]->weights, results[2]->weights), 0);
  }
}

TEST(TrainingRunTest, BuffersGoOnToo) {
  const TrainFlags flags{.model = "cnn", .batch_size = 4, .epochs = 1, .zero = false};
  const auto results = TrainOnThreads(3, flags, {{.rank = 0, .step = 2}});
  ASSERT_TRUE(results[1].ok()) << results[1].status();
  ASSERT_TRUE(results[2].ok()) << results[2].status();
  EXPECT_EQ(Difference(results[1]->weights, results[2]->weights), 0);
  EXPECT_EQ(results[1]->test.loss_sum, results[2]->test.loss_sum);
}

TEST(SumOverRanksTest, AMissedDeadlineEndsTheGroupOfAllRanks) {
  // In one process, since making a group over a network may take longer than this deadline.
  const absl::Status status = RunRanks(
      2,
      [](Communicator& comm) -> absl::Status {
        if (comm.rank() == 0) {
          const absl::Status status = SumOverRanks(comm, Evaluation{}).status();
          EXPECT_TRUE(absl::IsDeadlineExceeded(comm.status())) << comm.status();
          return status;
        }
        while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(5));
        EXPECT_TRUE(absl::StrContains(comm.status().message(), "evaluation")) << comm.status();
        return comm.status();
      },
      {.timeout = absl::Milliseconds(200)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
}

}  // namespace
}  // namespace evenkeel
