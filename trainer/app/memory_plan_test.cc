#include "evenkeel/trainer/app/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/heap_counter.h"
#include "evenkeel/trainer/app/describe_options.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/checkpoint/run_checkpoints.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

// `count` black images, all of class 0.
std::unique_ptr<const ImageDataset> Black(uint8_t count) {
  const char low = static_cast<char>(count);
  std::string images = {0, 0, 8, 3, 0, 0, 0, low, 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, low};
  return std::make_unique<const ImageDataset>(
      *ParseIdx(images + std::string(size_t{count} * 784, 0), labels + std::string(count, 0)));
}

std::shared_ptr<const TrainingData> Images() {
  return std::make_shared<const TrainingData>(
      TrainingData{.train = Black(200), .test = Black(90), .image = ImageShape{}});
}

std::shared_ptr<const TrainingData> Text(int64_t context) {
  const auto text = std::make_shared<const std::string>(21 * TextDataset::kBlock, 'x');
  const auto part = [&](Split split) {
    return std::make_unique<TextDataset>(
        *TextDataset::Make(text, {.context = context, .split = split}));
  };
  return std::make_shared<const TrainingData>(
      TrainingData{.train = part(Split::kTrain),
                   .test = part(Split::kTest),
                   .vocabulary = 256,
                   .tokenizer = std::make_shared<const Tokenizer>(Tokenizer::OfBytes())});
}

struct Case {
  const char* name;
  TrainFlags flags;
};

// Each with a smaller last batch, in training or in evaluation.
std::vector<Case> Cases() {
  return {
      {"mlp", {.model = "mlp", .hidden = "700,300", .batch_size = 48, .zero = false}},
      {"mlp, float64", {.model = "mlp", .hidden = "400", .compute = "float64", .batch_size = 48}},
      {"cnn", {.model = "cnn", .batch_size = 24, .shards = "tensors"}},
      {"cnn, deep",
       {.model = "cnn", .widths = "8,24", .blocks = 3, .batch_size = 17, .optimizer = "sgd"}},
      {"gpt", {.model = "gpt", .context = 64, .batch_size = 6, .max_steps = 2}},
      {"gpt, dropout",
       {.model = "gpt",
        .context = 64,
        .dropout = 0.1,
        .batch_size = 6,
        .max_steps = 2,
        .shards = "tensors"}},
      {"gpt, bfloat16",
       {.model = "gpt",
        .context = 32,
        .compute = "bfloat16",
        .batch_size = 6,
        .max_steps = 2,
        .zero = false}},
  };
}

// Calls `body` after an epoch and its evaluation (with `repeat` before it: steps without one hold
// more), when all ranks hold what they need.
void AfterAnEpoch(int ranks, const TrainOptions& options,
                  const std::shared_ptr<const TrainingData>& data,
                  absl::FunctionRef<void(int rank, const TrainingRun& run)> body,
                  const std::vector<ShareChange>& repeat = {}) {
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, data, comm.rank(), ranks));
    setup.repeat = repeat;
    std::unique_ptr<RunCheckpoints> checkpoints;
    if (!options.checkpoints.folder.empty()) {
      const RunSettings settings = SettingsOf(options, *setup.model, *setup.data, ranks);
      EK_ASSIGN_OR_RETURN(checkpoints,
                          RunCheckpoints::Open(comm, options.checkpoints, settings, *setup.model));
    }
    EK_ASSIGN_OR_RETURN(const auto run,
                        TrainingRun::Create(&comm, options, std::move(setup), checkpoints.get()));
    EK_RETURN_IF_ERROR(
        run->TrainEpoch(0, [](const StepFacts&) { return absl::OkStatus(); }).status());
    if (repeat.empty()) EK_RETURN_IF_ERROR(run->TestEpoch().status());
    EK_RETURN_IF_ERROR(comm.control().Exchange("trained", "", comm.timeout()).status());
    body(comm.rank(), *run);
    return comm.control().Exchange("compared", "", comm.timeout()).status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

RankMemory Plan(const TrainOptions& options, const std::shared_ptr<const TrainingData>& data,
                int rank, int ranks) {
  absl::StatusOr<RankSetup> setup = CheckRank(options, data, rank, ranks);
  EXPECT_TRUE(setup.ok()) << setup.status();
  const absl::StatusOr<RankMemory> memory = PlanMemory(options, rank, ranks, *setup);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *memory;
}

TEST(PlanMemoryTest, EveryPartIsWhatARunHoldsWithinFivePercent) {
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    const TrainOptions options = *MakeTrainOptions(one.flags);
    const auto data = options.model == ModelKind::kGpt ? Text(options.gpt.context) : Images();
    AfterAnEpoch(2, options, data, [&](int rank, const TrainingRun& run) {
      const RankMemory planned = Plan(options, data, rank, 2), held = run.MemoryHeld();
      for (const MemoryPart& part : kMemoryParts) {
        const auto bytes = static_cast<double>(held.*part.bytes);
        EXPECT_NEAR(static_cast<double>(planned.*part.bytes), bytes, 0.05 * bytes)
            << part.name << " of rank " << rank;
      }
    });
  }
}

TEST(PlanMemoryTest, SufficesForTheLargestShares) {
  // Of rank 0. A network of the cnn is kept for each of the last four sizes, and the memory of the
  // mlp grows in steps.
  const std::vector<int64_t> of_rank_0[] = {{32, 30, 28, 26}, {16, 12, 18, 26}};
  for (const char* model : {"mlp", "cnn"}) {
    for (const std::vector<int64_t>& sizes : of_rank_0) {
      SCOPED_TRACE(absl::StrCat(model, " ", sizes[0]));
      const TrainOptions options =
          *MakeTrainOptions({.model = model, .batch_size = 16, .max_steps = 4, .balance = true});
      const auto data = Images();
      TrainOptions without = options;
      without.flags.balance = false;
      const int64_t even = Plan(without, data, 0, 3).activations;
      std::vector<ShareChange> changes;
      for (const int64_t size : sizes) {
        const int64_t other = (48 - size) / 4 * 2;
        changes.push_back(
            {.reduction = std::ssize(changes), .shares = {size, other, 48 - size - other}});
      }
      AfterAnEpoch(
          3, options, data,
          [&](int rank, const TrainingRun& run) {
            const int64_t planned = Plan(options, data, rank, 3).activations;
            EXPECT_GT(planned, even);
            const int64_t held = run.MemoryHeld().activations;
            EXPECT_LE(held, planned);
            if (rank > 0) return;
            EXPECT_GT(static_cast<double>(held), 1.2 * static_cast<double>(even));
          },
          changes);
    }
  }
}

TEST(PlanMemoryTest, CountsTheCopiesForCheckpoints) {
  for (const char* shards : {"slices", "tensors", ""}) {
    SCOPED_TRACE(shards);
    TrainFlags flags = {.model = "gpt", .context = 64, .batch_size = 6, .max_steps = 3};
    if (*shards == 0) {
      flags.zero = false;
    } else {
      flags.shards = shards;
    }
    flags.checkpoint_dir = absl::StrCat(testing::TempDir(), "/copies", shards);
    flags.checkpoint_every = 1;
    const TrainOptions options = *MakeTrainOptions(flags);
    const auto data = Text(options.gpt.context);
    AfterAnEpoch(2, options, data, [&](int rank, const TrainingRun& run) {
      const auto held = static_cast<double>(run.MemoryHeld().copies);
      EXPECT_NEAR(static_cast<double>(Plan(options, data, rank, 2).copies), held, 0.05 * held);
      EXPECT_EQ(held > 0, rank == 0 || flags.zero || rank == options.ModelRank(2));
    });
  }
}

TEST(PlanMemoryTest, TheSumIsWhatTheHeapHoldsWithinFivePercent) {
  if (!HeapIsCounted()) GTEST_SKIP() << "sanitizers have a heap of their own";
  for (const Case& one : Cases()) {
    SCOPED_TRACE(one.name);
    const TrainOptions options = *MakeTrainOptions(one.flags);
    const auto data = options.model == ModelKind::kGpt ? Text(options.gpt.context) : Images();
    double planned = 0;
    for (int rank = 0; rank < 2; ++rank) {
      const RankMemory memory = Plan(options, data, rank, 2);
      planned += static_cast<double>(TotalOf(memory) - memory.data);
    }
    const int64_t before = LiveBytes();
    AfterAnEpoch(2, options, data, [&](int rank, const TrainingRun&) {
      const auto held = static_cast<double>(LiveBytes() - before);
      if (rank == 0) {
        EXPECT_NEAR(planned, held, 0.05 * held);
      }
    });
  }
}

TEST(PlanMemoryTest, TakesNoMemoryAndNoTime) {
  TrainOptions options = *MakeTrainOptions(
      {.model = "gpt", .layers = 48, .width = 1600, .heads = 25, .context = 1024, .batch_size = 8});
  const auto data = Text(1024);
  ResetPeakBytes();
  const int64_t before = LiveBytes();
  const absl::Time start = absl::Now();
  const RankMemory memory = Plan(options, data, 0, 4);
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  EXPECT_LT(PeakBytes() - before, 10 << 20);
  const int64_t parameters = (256 + 1024 + 2) * 1600 + int64_t{48} * (12 * 1600 + 13) * 1600;
  EXPECT_EQ(memory.parameters, 4 * parameters);
  EXPECT_EQ(memory.optimizer, 2 * memory.parameters / 4);
}

TEST(PlanMemoryTest, FrozenParametersHaveNeitherBucketsNorState) {
  const TrainOptions options = *MakeTrainOptions(
      {.model = "mlp", .hidden = "64", .batch_size = 48, .zero = false, .freeze = "fc1@0:"});
  const RankMemory memory = Plan(options, Images(), 0, 2);
  EXPECT_EQ(memory.parameters, 4 * (785 * 64 + 65 * 10));
  EXPECT_EQ(memory.buckets, 4 * 65 * 10);
  EXPECT_EQ(memory.optimizer, 8 * 65 * 10);
}

MemoryNeeds Needs(const std::string& place, int64_t available, int64_t bytes, int64_t swap = 0) {
  return {.place = {place, available, swap}, .bytes = bytes, .certain_bytes = bytes};
}

TEST(JudgeMemoryTest, RanksOfAPlaceShareIt) {
  EXPECT_EQ(JudgeMemory({Needs("a", 100, 44), Needs("b", 100, 44)}).kind, MemoryVerdict::kFits);
  MemoryNeeds namesake = Needs("a", 100, 60);
  namesake.place.boot = "another";
  EXPECT_EQ(JudgeMemory({Needs("a", 100, 60), namesake}).kind, MemoryVerdict::kFits);
  const MemoryVerdict both = JudgeMemory({Needs("a", 100, 60), Needs("a", 100, 60)});
  EXPECT_EQ(both.kind, MemoryVerdict::kTooMuch);
  EXPECT_EQ(both.text, "2 ranks need 120 B, and a has 100 B left");
  EXPECT_EQ(both.ranks, 2);
  EXPECT_EQ(both.available, 100);
}

TEST(JudgeMemoryTest, OnlyWhatCannotFitIsRefused) {
  EXPECT_EQ(JudgeMemory({Needs("a", 100, 95)}).kind, MemoryVerdict::kClose);
  EXPECT_EQ(JudgeMemory({Needs("a", 100, 104)}).kind, MemoryVerdict::kClose);
  EXPECT_EQ(JudgeMemory({Needs("a", 100, 106)}).kind, MemoryVerdict::kTooMuch);
  EXPECT_EQ(JudgeMemory({Needs("a", 100, 106, /*swap=*/50)}).kind, MemoryVerdict::kClose);
  MemoryNeeds estimated = Needs("a", 100, 300);
  estimated.certain_bytes = 90;
  EXPECT_EQ(JudgeMemory({estimated}).kind, MemoryVerdict::kClose);
  EXPECT_EQ(JudgeMemory({Needs("a", -1, 300)}).kind, MemoryVerdict::kFits);  // Unknown.
}

TEST(JudgeMemoryTest, NeedsTravelBetweenRanks) {
  const MemoryNeeds needs = Needs("host a", 1 << 20, 17, 3);
  const auto read = internal::FromBytes<MemoryNeeds>(internal::ToBytes(needs), "needs");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(internal::ToBytes(*read), internal::ToBytes(needs));
  EXPECT_EQ(read->place.name, "host a");
  EXPECT_FALSE(internal::FromBytes<MemoryNeeds>("x", "needs").ok());
}

TEST(DryRunTest, TellsTheNeedTheRestAndTheVerdict) {
  TrainOptions options = *MakeTrainOptions(
      {.model = "mlp", .hidden = "64", .batch_size = 100, .epochs = 3, .dry_run = true});
  const absl::StatusOr<std::string> fits =
      DescribeDryRun(options, Images(), 2, 2, {"the host a", 1 << 30});
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_THAT(*fits, HasSubstr("rank 0 needs "));
  EXPECT_THAT(*fits, HasSubstr("parameters 199 KiB"));
  EXPECT_THAT(*fits,
              HasSubstr(", and the host a has 1.0 GiB left: it fits\n3 steps in 3 epochs\n"));
  const absl::Status none = DescribeDryRun(options, Images(), 2, 2, {"a", 1 << 20}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("not enough memory: 2 ranks need "));
  EXPECT_THAT(std::string(none.message()), HasSubstr("; no --batch_size fits; "));
}

TEST(DryRunTest, ThreadsShareTheData) {
  TrainOptions options = *MakeTrainOptions({.model = "mlp", .hidden = "64", .batch_size = 100});
  const RankMemory memory = Plan(options, Images(), 0, 2);
  const MemoryPlace place{"a", 2 * TotalOf(memory) - memory.data};
  EXPECT_FALSE(DescribeDryRun(options, Images(), 2, 2, place).ok());
  options.backend = BackendKind::kLocal;
  EXPECT_TRUE(DescribeDryRun(options, Images(), 2, 2, place).ok());
}

TEST(DryRunTest, ProposesABatchThatFits) {
  TrainOptions options = *MakeTrainOptions({.model = "gpt", .context = 64, .batch_size = 64});
  options.batch_size = 16;
  const MemoryPlace place{"a", 2 * TotalOf(Plan(options, Text(64), 0, 2)) + 1000};
  options.batch_size = 64;
  const absl::Status status = DescribeDryRun(options, Text(64), 2, 2, place).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("; --batch_size=16 with --accumulate=4 fits"));
}

}  // namespace
}  // namespace evenkeel
