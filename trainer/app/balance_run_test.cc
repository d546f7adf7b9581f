// Runs with --balance: their weights are those of one process on the same global batches, however
// the shares move, and each sample of an epoch is used once.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/share_log.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/train_rank.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kSamples = 61;  // A last batch of one sample: most ranks have none.
constexpr int64_t kContext = 6, kVocabulary = 11;

// Random samples, as images or as texts, each made by its number. Records the samples that are
// taken, and is a model of a slow rank: it takes a time for each, which counts as a part of the
// forward pass. It may fail after a number of samples.
class Noted : public Dataset {
 public:
  Noted(bool is_text, Communicator& comm, absl::Duration per_sample)
      : is_text_(is_text), comm_(comm), per_sample_(per_sample) {}

  int64_t size() const override { return kSamples; }
  int64_t predictions_per_sample() const override { return is_text_ ? kContext : 1; }
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override {
    taken.insert(taken.end(), samples.begin(), samples.end());
    if (std::ssize(taken) > fails_after) throw std::runtime_error("the data is gone");
    const absl::Time end = absl::Now() + per_sample_ * samples.size();
    memory.images.clear(), memory.labels.clear(), memory.inputs.clear(), memory.targets.clear();
    for (const int32_t sample : samples) {
      StableRandom random(sample);
      for (int64_t i = 0; i < (is_text_ ? kContext : 0); ++i) {
        memory.inputs.push_back(static_cast<int32_t>(random.Below(kVocabulary)));
        memory.targets.push_back(static_cast<int32_t>(random.Below(kVocabulary)));
      }
      if (is_text_) continue;
      memory.labels.push_back(static_cast<uint8_t>(random.Below(kClasses)));
      for (int64_t i = 0; i < ImageShape{}.pixels(); ++i)
        memory.images.push_back(static_cast<float>(random.Uniform()));
    }
    const PhaseScope forward(comm_, StepPhase::kForward);
    absl::SleepFor(end - absl::Now());
    if (is_text_) return TokenBatch{memory.inputs, memory.targets, kContext};
    return ImageBatch{memory.images, memory.labels};
  }

  mutable std::vector<int32_t> taken;
  int64_t fails_after = std::numeric_limits<int64_t>::max();

 private:
  const bool is_text_;
  Communicator& comm_;
  const absl::Duration per_sample_;
};

struct Data {
  Data(bool is_text, Communicator& comm, absl::Duration per_sample) {
    auto noted = std::make_unique<Noted>(is_text, comm, per_sample);
    train = noted.get();
    all = std::make_shared<TrainingData>();
    all->train = std::move(noted);
    all->test = std::make_unique<Noted>(is_text, comm, absl::ZeroDuration());
    if (is_text) {
      all->vocabulary = kVocabulary;
    } else {
      all->image = ImageShape{};
    }
  }

  Noted* train;
  std::shared_ptr<TrainingData> all;
};

struct Setting {
  TrainFlags flags;
  std::vector<ShareChange> repeat;
  int lost_rank = -1;  // It leaves after this step.
  int64_t lost_step = 0;
  // Receives the lost rank's samples, by step of the group.
  std::map<int64_t, std::vector<int32_t>>* of_lost = nullptr;
};

struct Trained {
  std::vector<double> weights;
  std::map<int64_t, std::vector<int32_t>> samples;  // Of this rank, by step of the group.
  int64_t steps = 0;
  std::vector<GoneOn> gone_on;

  // In the last whole batch.
  int64_t share() const { return std::ssize(samples.at(steps - 2)); }
};

bool IsText(const TrainFlags& flags) { return flags.model == "gpt"; }

absl::StatusOr<TrainOptions> OptionsOf(const TrainFlags& flags) {
  EK_ASSIGN_OR_RETURN(TrainOptions options, MakeTrainOptions(flags));
  if (!IsText(flags)) return options;
  options.gpt.compute = GptCompute::kFloat64;
  options.gpt.layers = 2;
  options.gpt.width = 8;
  options.gpt.heads = 2;
  options.gpt.context = kContext;
  return options;
}

absl::StatusOr<Trained> TrainRun(TrainingRun& run, const Noted& data, const Setting& setting) {
  const absl::Status gone = absl::CancelledError("gone");
  Trained trained;
  const bool is_lost = run.communicator().rank() == setting.lost_rank;
  int epoch = 0;
  const auto train_all = [&]() -> absl::Status {
    for (; epoch < run.plan().epochs(); ++epoch) {
      const auto on_step = [&](const StepFacts& facts) {
        EXPECT_EQ(static_cast<int64_t>(data.taken.size()), facts.own_samples);
        trained.samples[facts.step] = std::exchange(data.taken, {});
        trained.steps = facts.step + 1;
        return is_lost && facts.step == setting.lost_step ? gone : absl::OkStatus();
      };
      EK_RETURN_IF_ERROR(run.TrainEpoch(epoch, on_step).status());
    }
    return run.AgreeOnState().status();
  };
  absl::Status status = train_all();
  while (!status.ok() && status != gone) {
    EK_ASSIGN_OR_RETURN(const GoneOn gone_on, run.GoOn(status));
    trained.gone_on.push_back(gone_on);
    trained.samples.erase(trained.samples.lower_bound(gone_on.steps), trained.samples.end());
    data.taken.clear();
    EK_ASSIGN_OR_RETURN(epoch, run.FindPlace(epoch));
    status = train_all();
  }
  if (is_lost && setting.of_lost != nullptr) *setting.of_lost = trained.samples;
  EK_RETURN_IF_ERROR(status);
  for (int i = 0; i < run.model().parameters().size(); ++i) {
    const auto value = run.model().parameters()[i].value.as<double>();
    trained.weights.insert(trained.weights.end(), value.begin(), value.end());
  }
  return trained;
}

// By rank.
std::vector<absl::StatusOr<Trained>> Train(int ranks, const Setting& setting,
                                           absl::Duration slow_by = absl::ZeroDuration()) {
  std::vector<std::unique_ptr<Communicator>> group = *CreateTestGroup(ranks);
  std::vector<absl::StatusOr<Trained>> results(ranks, absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Communicator> comm = std::move(group[rank]);
      const Data data(IsText(setting.flags), *comm, rank == 0 ? slow_by : slow_by / 8);
      results[rank] = [&]() -> absl::StatusOr<Trained> {
        EK_ASSIGN_OR_RETURN(const TrainOptions options, OptionsOf(setting.flags));
        EK_ASSIGN_OR_RETURN(RankSetup setup, PrepareRank(options, data.all, rank, ranks));
        setup.repeat = setting.repeat;
        EK_ASSIGN_OR_RETURN(const auto run,
                            TrainingRun::Create(comm.get(), options, std::move(setup)));
        return TrainRun(*run, *data.train, setting);
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// Other shares every three steps, for batches of 4 samples per rank and pass.
std::vector<ShareChange> Moving(int64_t ranks, int64_t passes) {
  std::vector<ShareChange> changes;
  for (int64_t i = 0; i < 20; ++i) {
    ShareChange change{.reduction = 3 * i, .shares = std::vector<int64_t>(ranks, 4 * passes)};
    const int64_t moved = passes * ((2 * i + 3) % 7 - 3);  // 0, 2, -3, -1, 1, 3, -2, ...
    change.shares[i % ranks] += moved;
    change.shares[(i + 1) % ranks] -= moved;
    changes.push_back(change);
  }
  return changes;
}

// Checks that the ranks used each sample of each whole epoch once.
void ExpectEachSampleOnce(const std::vector<absl::StatusOr<Trained>>& ranks) {
  std::map<int64_t, std::vector<int32_t>> by_step;
  for (const auto& rank : ranks) {
    if (!rank.ok()) continue;
    for (const auto& [step, samples] : rank->samples)
      by_step[step].insert(by_step[step].end(), samples.begin(), samples.end());
  }
  std::vector<int32_t> all(kSamples), epoch;
  std::iota(all.begin(), all.end(), 0);
  for (const auto& [step, samples] : by_step) {
    epoch.insert(epoch.end(), samples.begin(), samples.end());
    if (std::ssize(epoch) < kSamples) continue;
    std::ranges::sort(epoch);
    EXPECT_EQ(epoch, all) << "in the epoch that ends with step " << step;
    epoch.clear();
  }
  EXPECT_TRUE(epoch.empty()) << epoch.size() << " samples too many";
}

double Difference(const Trained& a, const Trained& b) {
  double most = 0, largest = 0;
  for (size_t i = 0; i < a.weights.size(); ++i) {
    most = std::max(most, std::abs(a.weights[i] - b.weights[i]));
    largest = std::max(largest, std::abs(b.weights[i]));
  }
  return most / largest;
}

TrainFlags MlpFlags() {
  return {.model = "mlp", .hidden = "8", .compute = "float64", .batch_size = 4, .epochs = 3};
}
TrainFlags GptFlags() {
  return {.model = "gpt",
          .preset = "tiny",
          .dropout = 0.2,
          .batch_size = 4,
          .epochs = 3,
          .lr_decay = "none",
          .warmup = 0};
}

TEST(BalanceRunTest, MovingSharesTrainWhatOneProcessDoes) {
  for (const TrainFlags& model : {MlpFlags(), GptFlags()}) {
    for (const int ranks : {2, 3}) {
      for (const int64_t passes : {1, 2}) {
        for (const absl::string_view shards : {"", "slices", "tensors"}) {
          if (!shards.empty() && passes == 2) continue;
          SCOPED_TRACE(
              absl::StrCat(model.model, " ", ranks, " ranks ", passes, " passes ", shards));
          Setting setting{.flags = model, .repeat = Moving(ranks, passes)};
          setting.flags.zero = !shards.empty();
          if (!shards.empty()) setting.flags.shards = std::string(shards);
          if (shards == "tensors") setting.flags.clip = 0.05;  // Shorter than the gradients.
          setting.flags.accumulate = passes;
          Setting alone = setting;
          alone.flags.batch_size = 4 * ranks * passes;
          alone.flags.accumulate = 1;
          alone.repeat.clear();
          setting.flags.balance = true;
          const auto expected = Train(1, alone);
          ASSERT_TRUE(expected[0].ok()) << expected[0].status();
          const auto results = Train(ranks, setting);
          for (const auto& result : results) {
            ASSERT_TRUE(result.ok()) << result.status();
            EXPECT_EQ(result->steps, expected[0]->steps);
            EXPECT_LE(Difference(*result, *expected[0]), 1e-10);
            std::set<size_t> sizes;
            for (const auto& [step, samples] : result->samples) sizes.insert(samples.size());
            EXPECT_GE(sizes.size(), 4u) << "The shares did not move.";
          }
          ExpectEachSampleOnce(results);
        }
      }
    }
  }
}

// Also with even shares: the noise of a sample is that of its place in the batch of all ranks.
TEST(BalanceRunTest, DropoutDoesNotDependOnTheRankOrThePass) {
  Setting alone{.flags = GptFlags()};
  alone.flags.batch_size = 12;
  const auto expected = Train(1, alone);
  ASSERT_TRUE(expected[0].ok()) << expected[0].status();
  Setting in_passes = alone;
  in_passes.flags.batch_size = 3;
  in_passes.flags.accumulate = 4;
  EXPECT_LE(Difference(*Train(1, in_passes)[0], *expected[0]), 1e-10);
  Setting on_ranks = alone;
  on_ranks.flags.batch_size = 4;
  EXPECT_LE(Difference(*Train(3, on_ranks)[0], *expected[0]), 1e-10);
  Setting other_noise = alone;
  other_noise.flags.dropout = 0.1;
  EXPECT_GE(Difference(*Train(1, other_noise)[0], *expected[0]), 1e-4);
}

TEST(BalanceRunTest, ASlowRankGetsFewerSamples) {
  Setting setting{.flags = MlpFlags()};
  setting.flags.epochs = 40;
  Setting alone = setting;
  alone.flags.batch_size = 8;
  setting.flags.balance = true;
  const auto results = Train(2, setting, /*slow_by=*/absl::Milliseconds(2));
  const auto expected = Train(1, alone);
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_LE(Difference(*result, *expected[0]), 1e-10);
  }
  EXPECT_LE(results[0]->share(), 2);
  EXPECT_EQ(results[0]->share() + results[1]->share(), 8);
  ExpectEachSampleOnce(results);
}

TEST(BalanceRunTest, TheOthersGoOnWithEvenShares) {
  for (const int lost : {0, 2}) {
    SCOPED_TRACE(lost);
    Setting setting{.flags = MlpFlags(), .lost_rank = lost, .lost_step = 3};
    setting.repeat = Moving(3, 1);
    setting.flags.zero = false;
    setting.flags.balance = true;
    std::map<int64_t, std::vector<int32_t>> of_lost;
    setting.of_lost = &of_lost;
    auto results = Train(3, setting);
    EXPECT_TRUE(absl::IsCancelled(results[lost].status())) << results[lost].status();
    std::vector<Trained> left;
    for (const auto& result : results) {
      if (result.ok()) left.push_back(*result);
    }
    ASSERT_EQ(left.size(), 2u);
    EXPECT_EQ(left[0].gone_on.size(), 1u);
    EXPECT_EQ(Difference(left[0], left[1]), 0);
    for (const Trained& rank : left) EXPECT_EQ(rank.share(), 4);
    of_lost.erase(of_lost.lower_bound(left[0].gone_on[0].steps), of_lost.end());
    results[lost] = Trained{.samples = std::move(of_lost)};
    ExpectEachSampleOnce(results);
  }
}

// The whole trainer ------------------------------------------------------------------------------

struct Outcome {
  absl::Status status;           // The first error of a rank that is not lost.
  std::string weights;           // The bytes of --save.
  std::string text;              // The output.
  std::vector<int32_t> samples;  // Those that the ranks used, in no order.
};

struct Ranks {
  int count = 2;
  int lost = -1;  // It fails after 14 samples.
  // The paths of --balance_log on the ranks from 1 on, which have no --balance_repeat then.
  std::optional<std::string> others_log;
};

// Rank 1 is slow.
Outcome RunTrainer(TrainFlags flags, const Ranks& ranks = {}) {
  flags.save = absl::StrCat(testing::TempDir(), "/weights.safetensors");
  std::remove(flags.save.c_str());
  const std::string path = testing::TempDir() + "/out.txt";
  std::FILE* const out = std::fopen(path.c_str(), "w");
  std::vector<std::unique_ptr<Communicator>> group = *CreateLocalGroup(ranks.count);
  std::vector<absl::Status> statuses(ranks.count);
  Outcome outcome;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks.count; ++rank) {
    threads.emplace_back([&, rank, flags]() mutable {
      const bool is_measured = flags.balance_repeat.empty();
      if (rank > 0 && ranks.others_log.has_value()) {
        flags.balance_log = *ranks.others_log;
        flags.balance_repeat.clear();
      }
      const std::unique_ptr<Communicator> comm = std::move(group[rank]);
      const Data data(
          IsText(flags), *comm,
          is_measured ? absl::Microseconds(rank == 1 ? 2000 : 250) : absl::ZeroDuration());
      if (rank == ranks.lost) data.train->fails_after = 14;
      statuses[rank] = [&]() -> absl::Status {
        EK_ASSIGN_OR_RETURN(const TrainOptions options, OptionsOf(flags));
        return TrainRank(*comm, options, std::shared_ptr<const TrainingData>(data.all),
                         {.out = out, .log = out})
            .status;
      }();
      const std::lock_guard lock(mutex);
      outcome.samples.insert(outcome.samples.end(), data.train->taken.begin(),
                             data.train->taken.end());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::fclose(out);
  for (int rank = 0; rank < ranks.count; ++rank)
    if (rank != ranks.lost) outcome.status.Update(statuses[rank]);
  outcome.weights = ReadFile(flags.save).value_or("");
  outcome.text = ReadFile(path).value_or("");
  return outcome;
}

std::string PathOf(absl::string_view name) {
  std::string path = absl::StrCat(testing::TempDir(), "/", name);
  std::filesystem::remove_all(path);
  return path;
}

TrainFlags LoggedFlags(std::string log) {
  TrainFlags flags = GptFlags();
  flags.epochs = 40;
  flags.balance = true;
  flags.balance_log = std::move(log);
  return flags;
}

TEST(BalanceRunTest, ALogRepeatsARunBitForBit) {
  TrainFlags flags = LoggedFlags(PathOf("shares.jsonl"));
  const Outcome first = RunTrainer(flags);
  ASSERT_TRUE(first.status.ok()) << first.status;
  const std::string log = *ReadFile(flags.balance_log);
  const std::vector<std::string> lines = absl::StrSplit(log, '\n');
  ASSERT_GE(lines.size(), 4u) << "The shares did not change:\n" << log;
  EXPECT_THAT(lines[0], HasSubstr(R"("ranks":2,"threads":)"));
  EXPECT_EQ(lines[1], R"({"step":0,"shares":[4,4]})");

  TrainFlags again = flags;
  again.balance_repeat = flags.balance_log;
  again.balance_log = PathOf("again.jsonl");
  // The paths of rank 0 count.
  const Outcome second = RunTrainer(again, {.others_log = ""});
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_TRUE(second.weights == first.weights);
  EXPECT_EQ(*ReadFile(again.balance_log), log);

  // Measured shares differ from even ones, which the same bits would hide.
  flags.balance = false;
  flags.balance_log = "";
  EXPECT_FALSE(RunTrainer(flags).weights == first.weights);
}

TEST(BalanceRunTest, ALogGoesOnWhereARunIsResumed) {
  TrainFlags flags = LoggedFlags(PathOf("resumed.jsonl"));
  flags.checkpoint_dir = PathOf("checkpoints");
  flags.max_steps = 43;
  const Outcome first = RunTrainer(flags);
  ASSERT_TRUE(first.status.ok()) << first.status;
  // As if the first run had gone on after its last checkpoint, and was killed then.
  ASSERT_TRUE(WriteShares(flags.balance_log, 50, {1, 7}).ok());
  flags.max_steps = 0;
  const Outcome resumed = RunTrainer(flags);
  ASSERT_TRUE(resumed.status.ok()) << resumed.status;
  EXPECT_THAT(*ReadFile(flags.balance_log), HasSubstr(R"({"step":43,"shares":[4,4]})"));
  // The first run ended within an epoch. Both together used each sample once in each epoch.
  std::map<int32_t, int> uses;
  for (const Outcome* run : {&first, &resumed})
    for (const int32_t sample : run->samples) ++uses[sample];
  ASSERT_EQ(std::ssize(uses), kSamples);
  // Each rank of each run has also read the data once for its hash in the checkpoint.
  for (const auto& [sample, count] : uses) EXPECT_EQ(count, *flags.epochs + 4) << sample;

  TrainFlags again = flags;
  again.balance_repeat = std::exchange(again.balance_log, "");
  again.checkpoint_dir = "";
  EXPECT_TRUE(RunTrainer(again).weights == resumed.weights);

  // The repeated run may be resumed, too.
  again.checkpoint_dir = PathOf("others");
  again.max_steps = 30;
  ASSERT_TRUE(RunTrainer(again).status.ok());
  again.max_steps = 0;
  EXPECT_TRUE(RunTrainer(again).weights == resumed.weights);
}

TEST(BalanceRunTest, ALogOfAnotherRunIsRefused) {
  TrainFlags flags = LoggedFlags(PathOf("other.jsonl"));
  flags.epochs = 1;
  ASSERT_TRUE(RunTrainer(flags).status.ok());
  const std::string log = *ReadFile(flags.balance_log);
  TrainFlags again = flags;
  again.balance_repeat = flags.balance_log;
  again.balance_log = "";
  again.seed = 3;
  EXPECT_THAT(std::string(RunTrainer(again).status.message()),
              HasSubstr("is of a run with seed 0, but this run has 3"));
  again.seed = 0;
  EXPECT_THAT(std::string(RunTrainer(again, {.count = 3}).status.message()),
              HasSubstr("is of a run with ranks 2, but this run has 3"));
  flags.seed = 3;
  EXPECT_THAT(
      std::string(RunTrainer(flags).status.message()),
      HasSubstr("is of a run with seed 0, but this run has 3; pass another --balance_log, or "
                "delete the file"));

  // A rank was lost.
  ASSERT_TRUE(WriteShares(flags.balance_log, 5, {4}).ok());
  EXPECT_THAT(std::string(RunTrainer(again).status.message()),
              HasSubstr("divides the batch between 1 rank, but this run has 2 (after step 5)"));
  const std::pair<std::string, std::string> others[] = {
      {"", "is not a --balance_log file"},
      {log + "{\"step\":-1,\"shares\":[4,4]}\n", "has a damaged line: {\"step\":-1"},
      {log + "{\"step\":7,\"shares\":4}\n", "has a damaged line"},
      {log + "{\"step\":9223372036854775808,\"shares\":[4,4]}\n", "has a damaged line"},
      {log + "{\"step\":7,\"shares\":[4,2147483648]}\n", "has a damaged line"},
      {log + "{step}\n", "has a damaged line: {step}"},
      {log + "{\"step\":7,\"sha\n", "has a damaged line: {\"step\":7,\"sha"},
      {log + "{\"step\":7,\"shares\":[4,5]}\n", "4,5 after 7 reductions"},
  };
  for (const auto& [text, says] : others) {
    ASSERT_TRUE(WriteFileAtomically(again.balance_repeat, text).ok());
    EXPECT_THAT(std::string(RunTrainer(again).status.message()), HasSubstr(says)) << text;
  }
  // A line that a killed run did not finish is ignored, and the next run replaces it.
  ASSERT_TRUE(WriteFileAtomically(again.balance_repeat, log + "{\"step\":7,\"sha").ok());
  EXPECT_TRUE(RunTrainer(again).status.ok());
  flags.seed = 0;
  flags.balance_log = again.balance_repeat;
  EXPECT_TRUE(RunTrainer(flags).status.ok());
  EXPECT_THAT(*ReadFile(flags.balance_log), Not(HasSubstr("sha{")));
  EXPECT_TRUE(RunTrainer(again).status.ok());
}

TEST(BalanceRunTest, ALogEndsWithALossAndIsNotRepeated) {
  for (const int count : {2, 3}) {
    for (const int lost : {0, 1}) {
      SCOPED_TRACE(absl::StrCat("rank ", lost, " of ", count));
      TrainFlags flags = LoggedFlags(PathOf("lost.jsonl"));
      flags.epochs = 5;
      flags.zero = false;
      flags.on_failure = "continue";
      const Outcome first = RunTrainer(flags, {.count = count, .lost = lost});
      ASSERT_TRUE(first.status.ok()) << first.status;
      const std::string log = *ReadFile(flags.balance_log);
      EXPECT_THAT(log, EndsWith(count == 2 ? "\"shares\":[4]}\n" : "\"shares\":[4,4]}\n"));
      flags.on_failure = "stop";
      flags.balance_repeat = std::exchange(flags.balance_log, "");
      EXPECT_THAT(
          std::string(RunTrainer(flags, {.count = count}).status.message()),
          HasSubstr(absl::StrCat("divides the batch between ", count == 2 ? "1 rank" : "2 ranks",
                                 ", but this run has ", count)));
    }
  }
}

TEST(BalanceRunTest, ALogThatTheNextRankZeroCannotWriteDoesNotEndTheRun) {
  TrainFlags flags = LoggedFlags(PathOf("gone.jsonl"));
  flags.epochs = 5;
  flags.zero = false;
  flags.on_failure = "continue";
  const Outcome run = RunTrainer(flags, {.count = 3, .lost = 0, .others_log = testing::TempDir()});
  ASSERT_TRUE(run.status.ok()) << run.status;
  EXPECT_THAT(run.text, HasSubstr("--balance_log: "));
  EXPECT_THAT(run.text, HasSubstr("; the run continues (reported once)"));
}

TEST(BalanceRunTest, OneRunAtATimeWritesALog) {
  TrainFlags flags = LoggedFlags(PathOf("held.jsonl"));
  flags.max_steps = 2;
  internal::UniqueFd held(open(flags.balance_log.c_str(), O_RDWR | O_CREAT, 0600));
  ASSERT_EQ(flock(held.get(), LOCK_EX), 0);
  const absl::Status status = RunTrainer(flags).status;
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat(flags.balance_log, ": another run is writing to it")));
  held = internal::UniqueFd();
  EXPECT_TRUE(RunTrainer(flags).status.ok());
}

TEST(BalanceRunTest, AChangeIsReportedInItsStep) {
  TrainFlags flags = LoggedFlags(PathOf("news.jsonl"));
  flags.max_steps = 10;
  ASSERT_TRUE(RunTrainer(flags).status.ok());
  ASSERT_TRUE(WriteShares(flags.balance_log, 0, {4, 4}).ok());
  ASSERT_TRUE(WriteShares(flags.balance_log, 3, {6, 2}).ok());
  flags.balance_repeat = std::exchange(flags.balance_log, "");
  EXPECT_THAT(RunTrainer(flags).text, HasSubstr("ranks compute 6,2 of 8 samples (4,4 before)"));
}

TEST(BalanceRunTest, OneRankHasNothingToBalance) {
  TrainFlags flags = LoggedFlags(PathOf("one.jsonl"));
  flags.epochs = 1;
  const Outcome balanced = RunTrainer(flags, {.count = 1});
  ASSERT_TRUE(balanced.status.ok()) << balanced.status;
  flags.balance_repeat = std::exchange(flags.balance_log, "");
  EXPECT_TRUE(RunTrainer(flags, {.count = 1}).weights == balanced.weights);
  flags.balance = false;
  flags.balance_repeat = "";
  EXPECT_TRUE(RunTrainer(flags, {.count = 1}).weights == balanced.weights);
}

}  // namespace
}  // namespace evenkeel
