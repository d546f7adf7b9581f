#include "evenkeel/trainer/app/rank_setup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/describe_options.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

// `count` black images, all of class 0.
std::unique_ptr<const ImageDataset> Black(int count) {
  std::string images = {0, 0, 8, 3, 0, 0, 0, static_cast<char>(count), 0, 0, 0, 28, 0, 0, 0, 28};
  std::string labels = {0, 0, 8, 1, 0, 0, 0, static_cast<char>(count)};
  return std::make_unique<const ImageDataset>(
      *ParseIdx(images + std::string(count * 784, 0), labels + std::string(count, 0)));
}

absl::StatusOr<std::shared_ptr<const TrainingData>> Data() {
  return std::make_shared<const TrainingData>(
      TrainingData{.train = Black(40), .test = Black(10), .image = ImageShape{}});
}

TrainOptions Options(TrainFlags flags) {
  flags.model = "mlp";
  flags.batch_size = 5;
  return *MakeTrainOptions(flags);
}

TEST(PrepareRankTest, MakesTheModelAndThePlan) {
  const absl::StatusOr<RankSetup> setup = PrepareRank(Options({.hidden = "9"}), Data(), 1, 3);
  ASSERT_TRUE(setup.ok()) << setup.status();
  EXPECT_EQ(setup->model->shape(0)[0], 9);
  EXPECT_THAT(setup->plan.batches, testing::ElementsAre(3, 3, 2));
}

TEST(PrepareRankTest, ErrorOfTheDataIsTheAnswer) {
  EXPECT_EQ(PrepareRank(Options({}), absl::DataLossError("no"), 0, 1).status(),
            absl::DataLossError("no"));
}

TEST(PrepareRankTest, OnlyRankZeroReadsTheWeights) {
  const std::string missing = testing::TempDir() + "/missing.safetensors";
  EXPECT_TRUE(PrepareRank(Options({.init = missing}), Data(), 1, 2).ok());
  const absl::Status status = PrepareRank(Options({.init = missing}), Data(), 0, 2).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--init"));
}

// Root has every permission in /proc, and yet no file can be made there.
TEST(PrepareRankTest, FilesThatCannotBeWrittenAreFoundBeforeTraining) {
  const std::string folder = testing::TempDir() + "/outputs";
  std::filesystem::create_directory(folder);
  const struct {
    TrainFlags flags;
    const char* says;
  } cases[] = {
      {{.save = "/proc/x"}, "--save=/proc/x: cannot write to the folder /proc: "},
      {{.save = "/proc/no/x"}, "--save=/proc/no/x: cannot write to the folder /proc/no: "},
      {{.save = "/dev/null"}, "--save=/dev/null: /dev/null exists and is not a regular file"},
      {{.metrics = "/tmp"}, "--metrics=/tmp: /tmp is a folder"},
      {{.metrics = "/proc/x"}, "--metrics=/proc/x: cannot write to the folder"},
      {{.tensorboard = "/proc"}, "--tensorboard=/proc: cannot write to this folder"},
      {{.prometheus = "/proc/x.prom"}, "--prometheus=/proc/x.prom: cannot write to the folder"},
      {{.report = "/proc/x"}, "--report=/proc/x: cannot write to the folder"},
      {{.trace = "/proc/x"}, "--trace=/proc/x: cannot write to the folder"},
  };
  for (const auto& [flags, says] : cases) {
    const absl::Status status = PrepareRank(Options(flags), Data(), 0, 2).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
    EXPECT_TRUE(PrepareRank(Options(flags), Data(), 1, 2).ok()) << says;
  }
  EXPECT_TRUE(
      PrepareRank(Options({.save = folder + "/w", .metrics = "/dev/stdout"}), Data(), 0, 2).ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(PrepareRankTest, RankZeroMakesTheFolderOfItsEvents) {
  const std::string folder = testing::TempDir() + "/runs/first";
  EXPECT_TRUE(PrepareRank(Options({.tensorboard = folder}), Data(), 1, 2).ok());
  EXPECT_FALSE(std::filesystem::exists(folder));
  EXPECT_TRUE(PrepareRank(Options({.tensorboard = folder}), Data(), 0, 2).ok());
  EXPECT_TRUE(std::filesystem::is_directory(folder));
  absl::Status status = PrepareRank(Options({.tensorboard = "/proc/none"}), Data(), 0, 2).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("--tensorboard=/proc/none: cannot write to this folder"));
  status = PrepareRank(Options({.prometheus = "/proc/no/x.prom"}), Data(), 0, 2).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("--prometheus=/proc/no/x.prom: cannot write to the folder"));
}

TEST(PrepareRankTest, EveryRankNeedsTheFolderOfItsLastCollectives) {
  const std::string folder = testing::TempDir() + "/flight";
  EXPECT_TRUE(PrepareRank(Options({.flight = folder}), Data(), 1, 2).ok());
  EXPECT_TRUE(PrepareRank(Options({.flight = folder}), Data(), 0, 2).ok());  // It is there.
  const absl::Status status = PrepareRank(Options({.flight = "/proc/none"}), Data(), 1, 2).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("--flight (or EVENKEEL_FLIGHT)=/proc/none: cannot write to this folder"));
}

TEST(PrepareRankTest, AGptStartsFromWeightsOfOtherSoftware) {
  TrainOptions options = Options({});
  options.flags.init = "tests/testdata/gpt/hf_tiny.safetensors";
  options.model = ModelKind::kGpt;
  options.gpt = {.context = 15, .layers = 2, .width = 32, .heads = 2};
  const auto data = std::make_shared<const TrainingData>(
      TrainingData{.train = Black(40), .test = Black(10), .vocabulary = 40});
  const absl::StatusOr<RankSetup> setup = PrepareRank(options, data, 0, 2);
  ASSERT_TRUE(setup.ok()) << setup.status();
  options.flags.init.clear();
  const RankSetup fresh = *PrepareRank(options, data, 0, 2);
  EXPECT_NE(setup->model->parameters()[0].value.as<float>()[0],
            fresh.model->parameters()[0].value.as<float>()[0]);
}

// A plan takes no memory, and its check reads no weights.
TEST(CheckRankTest, ComparesTheWeightsOfInitWithAPlan) {
  const std::string path = testing::TempDir() + "/init_of_plan.safetensors";
  ASSERT_TRUE(SaveModel(**MakeMlp({.hidden = {4}}), path).ok());
  const absl::StatusOr<RankSetup> setup =
      CheckRank(Options({.hidden = "4", .init = path}), Data(), 0, 2);
  ASSERT_TRUE(setup.ok()) << setup.status();
  EXPECT_TRUE(setup->model->is_plan());
  EXPECT_EQ(setup->model->parameters()[0].value.data, nullptr);
  EXPECT_THAT(
      std::string(
          CheckRank(Options({.hidden = "5", .init = path}), Data(), 0, 2).status().message()),
      HasSubstr("tensor fc1.weight is float32[4,784], the model has float32[5,784]"));
}

TEST(PrepareRankTest, RefusesToOverwriteTheSharesThatItRepeats) {
  const std::string path = testing::TempDir() + "/shares.jsonl", link = path + ".link";
  ASSERT_TRUE(WriteFileAtomically(path, "{}\n").ok());
  std::filesystem::remove(link);
  std::filesystem::create_symlink(path, link);
  TrainFlags flags{.balance = true, .balance_log = link, .balance_repeat = path};
  EXPECT_THAT(std::string(PrepareRank(Options(flags), Data(), 0, 2).status().message()),
              HasSubstr(absl::StrCat("--balance_log=", link, " and --balance_repeat=", path,
                                     " are the same file")));
  flags.balance_log = path + ".other";
  EXPECT_TRUE(PrepareRank(Options(flags), Data(), 0, 2).ok());
}

TEST(PrepareRankTest, TakesTheSizesOfTheGivenWeights) {
  const std::string path = testing::TempDir() + "/sizes.safetensors";
  ASSERT_TRUE(SaveModel(**MakeMlp({.hidden = {4, 7}}), path).ok());
  EXPECT_THAT(Options({.init = path}).hidden, testing::ElementsAre(4, 7));

  CnnOptions cnn{.widths = {3, 5, 6}, .blocks_per_stage = 2};
  ASSERT_TRUE(SaveModel(**MakeCnn(cnn), path).ok());
  TrainOptions options = *MakeTrainOptions({.model = "cnn", .init = path});
  EXPECT_EQ(options.cnn.widths, cnn.widths);
  EXPECT_EQ(options.cnn.blocks_per_stage, 2);
  cnn = {.widths = {3}};
  ASSERT_TRUE(SaveModel(**MakeCnn(cnn), path).ok());
  options = *MakeTrainOptions({.model = "cnn", .init = path});
  EXPECT_EQ(options.cnn.widths, cnn.widths);

  EXPECT_THAT(std::string(MakeTrainOptions({.model = "mlp", .init = path}).status().message()),
              HasSubstr("sizes.safetensors: has no tensors fc1.weight and fc2.weight"));
}

TEST(PrepareRankTest, StartsFromTheGivenWeights) {
  const std::string path = testing::TempDir() + "/init.safetensors";
  const std::unique_ptr<Model> model = *MakeMlp({.hidden = {4}, .seed = 77});
  ASSERT_TRUE(SaveModel(*model, path).ok());
  const RankSetup setup = *PrepareRank(Options({.hidden = "4", .init = path}), Data(), 0, 2);
  EXPECT_EQ(setup.model->parameters()[0].value.as<float>()[3],
            model->parameters()[0].value.as<float>()[3]);
}

// The names and texts are those in existing checkpoints: another one would be reported as a
// difference, or refused. No value is a default, so that each is seen to come from its flag.
TEST(SettingsOfTest, HasTheFlagsWithASettingInTheirEntries) {
  const TrainOptions options = Options({.hidden = "9",
                                        .test_data = "val_*.bin",
                                        .shuffle = false,
                                        .seed = 7,
                                        .accumulate = 2,
                                        .epochs = 3,
                                        .max_steps = 50,
                                        .rank_steps = "2,1",
                                        .eval_every = 10,
                                        .eval_batches = 6,
                                        .lr_decay = "cosine",
                                        .warmup = 4,
                                        .clip = 0.5,
                                        .divide_by = "effective",
                                        .stop_early = true,
                                        .comm_hook = "bf16",
                                        .freeze = "fc1@3:5"});
  const RankSetup setup = *PrepareRank(options, Data(), 0, 2);
  RunSettings settings = SettingsOf(options, *setup.model, *setup.data, 2);
  EXPECT_EQ(settings.fixed.erase("the model's parameters"), 1u);
  EXPECT_EQ(settings.fixed.erase(kContentSetting), 1u);
  EXPECT_EQ(settings.fixed,
            (RunSettings::Values{{"model", "mlp"},
                                 {"the number of training samples", "40"},
                                 {"predictions per sample", "1"},
                                 {"seed", "7"},
                                 {"shuffle", "false"},
                                 {"optimizer", "adamw with {exp_avg, exp_avg_sq}"}}));
  EXPECT_EQ(settings.dealing, (RunSettings::Values{{"the number of ranks", "2"},
                                                   {"batch_size", "5"},
                                                   {"accumulate", "2"},
                                                   {"rank_steps", "2,1"}}));
  EXPECT_EQ(settings.free,
            (RunSettings::Values{{"augmentation", "shift 0, mirrors false"},
                                 {"balance", "false"},
                                 {"data", kFashionMnistFolder},
                                 {"test_data", "val_*.bin"},
                                 {"eval_batches", "6"},
                                 {"epochs", "3"},
                                 {"max_steps", "50"},
                                 {"the optimizer's settings", ToString(options.rule)},
                                 {"lr_decay", "2"},
                                 {"warmup", "4"},
                                 {"clip", "0.5"},
                                 {"join", "true"},
                                 {"divide_by", "1"},
                                 {"stop_early", "true"},
                                 {"freeze", "fc1@3:5"},
                                 {"comm_hook", "bf16"},
                                 {"bucket sizes", "1048576,26214400"}}));
  // It excludes flags of those above.
  const TrainOptions balance = Options({.balance = true});
  EXPECT_EQ(SettingsOf(balance, *setup.model, *setup.data, 2).free["balance"], "true");
}

// With --nojoin, which excludes flags of the test above and wants as many batches for each rank.
TEST(SettingsOfTest, HasTheHeadsAndTheDropoutOfAGpt) {
  const TrainOptions options = *MakeTrainOptions(
      {.model = "gpt", .preset = "tiny", .heads = 4, .dropout = 0.25, .join = false});
  const auto data = std::make_shared<const TrainingData>(
      TrainingData{.train = Black(48), .test = Black(10), .vocabulary = 40});
  const RankSetup setup = *PrepareRank(options, data, 0, 2);
  RunSettings settings = SettingsOf(options, *setup.model, *setup.data, 2);
  EXPECT_EQ(settings.fixed["model"], "gpt");
  EXPECT_EQ(settings.fixed["heads"], "4");
  EXPECT_EQ(settings.dealing["batch_size"], "8");
  EXPECT_EQ(settings.free["dropout"], "0.25");
  EXPECT_EQ(settings.free["compute"], "float32");
  EXPECT_EQ(settings.free["clip"], "1");
  EXPECT_EQ(settings.free["join"], "false");
  EXPECT_EQ(settings.free["divide_by"], "0");
}

}  // namespace
}  // namespace evenkeel
