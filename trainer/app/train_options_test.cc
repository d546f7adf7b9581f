#include "evenkeel/trainer/app/train_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/text_dataset.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(TrainOptionsTest, DefaultRunIsTheCnnWithAdamWZeroAndJoinOnTwoProcesses) {
  const absl::StatusOr<TrainOptions> options = MakeTrainOptions({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->model, ModelKind::kCnn);
  EXPECT_TRUE(std::holds_alternative<AdamW>(options->rule));
  EXPECT_EQ(options->decay, Decay::kLinear);
  EXPECT_EQ(options->sharding, Sharding::kSlices);
  EXPECT_TRUE(options->flags.join);
  EXPECT_EQ(options->divide_by, DivideBy::kSamples);
  EXPECT_EQ(options->nproc, 2);
  EXPECT_EQ(60000 / options->batch_size % 2, 1);  // The ranks' numbers of batches differ.
  EXPECT_TRUE(options->augment.mirrors);
  EXPECT_THAT(options->bucket_caps, ElementsAre(kDefaultFirstCap, kDefaultCap));
  EXPECT_EQ(options->trainability, TrainabilityPolicy::kAlways);
}

TEST(TrainOptionsTest, BetasAndEpsilon) {
  EXPECT_EQ(MakeTrainOptions(
                {.optimizer = "adam", .lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-6})
                ->rule,
            UpdateRule(Adam{.learning_rate = 0.1, .beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-6}));
  EXPECT_THAT(MakeTrainOptions({.optimizer = "sgd", .beta1 = 0.8}).status().message(),
              HasSubstr("--beta1, --beta2 and --epsilon are for --optimizer=adam and adamw"));
  EXPECT_THAT(MakeTrainOptions({.beta2 = 1.5}).status().message(), HasSubstr("--optimizer: "));
}

TEST(TrainOptionsTest, Evaluations) {
  const TrainOptions options = *MakeTrainOptions({.save = "best.safetensors",
                                                  .eval_every = 50,
                                                  .eval_batches = 3,
                                                  .patience = 4,
                                                  .save_best = true});
  EXPECT_EQ(options.flags.eval_every, 50);
  EXPECT_EQ(options.flags.eval_batches, 3);
  EXPECT_EQ(options.flags.patience, 4);
  EXPECT_TRUE(options.flags.save_best);
  const auto error = [](const TrainFlags& flags) {
    return std::string(MakeTrainOptions(flags).status().message());
  };
  EXPECT_THAT(error({.eval_batches = 3}),
              HasSubstr("--eval_batches has no effect without --eval_every"));
  EXPECT_THAT(error({.save_best = true}), HasSubstr("--save_best writes to --save"));
  EXPECT_THAT(error({.patience = -1}), HasSubstr("--patience"));
  EXPECT_THAT(error({.sample_every = 5}), HasSubstr("--sample_every is for --model=gpt"));
  EXPECT_THAT(error({.tokenizer = "x"}), HasSubstr("--tokenizer is for --model=gpt"));
  EXPECT_THAT(error({.data_kind = "words"}), HasSubstr("--data_kind=words"));
}

TEST(TrainOptionsTest, FlagsBecomeOptions) {
  const TrainOptions options = *MakeTrainOptions({.model = "mlp",
                                                  .hidden = "7,300",
                                                  .rank_steps = "3,0,5",
                                                  .optimizer = "sgd",
                                                  .lr = 0.05,
                                                  .momentum = 0.9,
                                                  .weight_decay = 1e-4,
                                                  .zero = false,
                                                  .backend = "tcp",
                                                  .divide_by = "effective",
                                                  .bucket_cap_mb = 0.5,
                                                  .first_bucket_mb = 0,
                                                  .auto_refresh_trainable = "25",
                                                  .freeze = "fc1@3:5"});
  EXPECT_EQ(options.sharding, Sharding::kNone);
  EXPECT_EQ(options.model, ModelKind::kMlp);
  EXPECT_THAT(options.hidden, ElementsAre(7, 300));
  EXPECT_EQ(options.backend, BackendKind::kTcp);
  EXPECT_THAT(options.rank_steps, ElementsAre(3, 0, 5));
  EXPECT_EQ(options.rule,
            UpdateRule(Sgd{.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 1e-4}));
  EXPECT_EQ(options.divide_by, DivideBy::kActiveRanks);
  EXPECT_THAT(options.bucket_caps, ElementsAre(Bytes{0}, Bytes{1 << 19}));
  EXPECT_EQ(options.trainability, TrainabilityPolicy::kEveryN);
  EXPECT_EQ(options.check_trainable_every, 25);
  EXPECT_EQ(options.freeze, (FreezeSchedule{{"fc1", 3, 5}}));
  EXPECT_EQ(MakeTrainOptions({.auto_refresh_trainable = "never"})->trainability,
            TrainabilityPolicy::kNever);
}

TEST(TrainOptionsTest, DefaultsDependOnModelAndOptimizer) {
  EXPECT_EQ(MakeTrainOptions({.model = "mlp"})->rule,
            UpdateRule(AdamW{.learning_rate = 1e-3, .weight_decay = 0.01}));
  EXPECT_EQ(MakeTrainOptions({.model = "mlp", .optimizer = "adam"})->rule,
            UpdateRule(Adam{.learning_rate = 1e-3}));
  EXPECT_EQ(MakeTrainOptions({.model = "mlp", .optimizer = "sgd"})->rule,
            UpdateRule(Sgd{.learning_rate = 0.1}));
}

TEST(TrainOptionsTest, AGivenLearningRateIsConstantUnlessADecayIsAskedFor) {
  EXPECT_EQ(MakeTrainOptions({.lr = 0.01})->decay, Decay::kLinear);
  EXPECT_FALSE(MakeTrainOptions({.data = "digits"})->augment.mirrors);
  EXPECT_EQ(MakeTrainOptions({.model = "mlp"})->decay, Decay::kNone);
  EXPECT_EQ(MakeTrainOptions({.model = "mlp", .lr = 0.01, .lr_decay = "linear"})->decay,
            Decay::kLinear);
  EXPECT_EQ(MakeTrainOptions({.lr_decay = "none"})->decay, Decay::kNone);
}

TEST(TrainOptionsTest, RanksStopWithALostOneUnlessTheyAreToGoOn) {
  EXPECT_FALSE(MakeTrainOptions({})->goes_on);
  const TrainOptions options = *MakeTrainOptions(
      {.on_failure = "continue", .lost_shard = "fresh", .verify = "every", .flight = "here"});
  EXPECT_TRUE(options.goes_on);
  EXPECT_FALSE(options.replaces);
  EXPECT_TRUE(MakeTrainOptions({.zero = false, .on_failure = "replace"})->replaces);
  EXPECT_TRUE(options.lost_shard_is_fresh);
  EXPECT_EQ(options.verify, VerifyLevel::kEvery);
  EXPECT_EQ(options.flags.flight, "here");
  EXPECT_EQ(MakeTrainOptions({})->verify, std::nullopt);
  EXPECT_EQ(MakeTrainOptions({})->flags.check_replicas, 0);
  EXPECT_EQ(MakeTrainOptions({.check_replicas = 50})->flags.check_replicas, 50);
}

TEST(TrainOptionsTest, AGptHasItsPresetsSizesUnlessTheyAreGiven) {
  const TrainOptions mini = *MakeTrainOptions({.model = "gpt"});
  EXPECT_EQ(mini.gpt.layers, 4);
  EXPECT_EQ(mini.gpt.context, 128);
  EXPECT_EQ(mini.data.context, 128);
  EXPECT_EQ(mini.data.path, kJargonFile);
  EXPECT_EQ(mini.decay, Decay::kCosine);
  EXPECT_EQ(mini.warmup, 100);
  EXPECT_EQ(mini.clip, 1);
  EXPECT_EQ(std::get<AdamW>(mini.rule).weight_decay, 0.1);
  const TrainOptions wide = *MakeTrainOptions({.model = "gpt",
                                               .preset = "tiny",
                                               .width = 96,
                                               .context = 32,
                                               .dropout = 0.25,
                                               .compute = "bfloat16",
                                               .data = "here",
                                               .batch_size = 3,
                                               .accumulate = 5,
                                               .lr_decay = "none",
                                               .warmup = 0,
                                               .clip = 0});
  EXPECT_EQ(wide.gpt.layers, 2);
  EXPECT_EQ(wide.gpt.width, 96);
  EXPECT_EQ(wide.gpt.dropout, 0.25);
  EXPECT_EQ(wide.gpt.compute, GptCompute::kBFloat16);
  EXPECT_EQ(wide.compute, DType::kBFloat16);
  EXPECT_EQ(wide.data.context, 32);
  EXPECT_EQ(wide.data.path, "here");
  EXPECT_EQ(wide.samples_per_step(), 15);
  EXPECT_EQ(wide.clip, 0);
}

TEST(TrainOptionsTest, EveryBadValueIsOneSentenceThatNamesTheFlag) {
  const struct {
    std::string says;
    std::function<void(TrainFlags&)> spoil;
  } kCases[] = {
      {"--model=vgg is not a valid value; choose mlp, cnn, gpt",
       [](TrainFlags& f) { f.model = "vgg"; }},
      {"--preset: huge is not a preset; choose tiny, mini, gpt2",
       [](TrainFlags& f) { f.model = "gpt", f.preset = "huge"; }},
      {"--preset is for --model=gpt, not cnn", [](TrainFlags& f) { f.preset = "tiny"; }},
      {"--dropout is for --model=gpt, not mlp",
       [](TrainFlags& f) { f.model = "mlp", f.dropout = 0.1; }},
      {"--compute=float64 is for --model=mlp, not cnn",
       [](TrainFlags& f) { f.compute = "float64"; }},
      {"--compute=float8 is not a valid value; choose float32, bfloat16, float16, float64",
       [](TrainFlags& f) { f.compute = "float8"; }},
      {"--compute=float16 is for --model=mlp and cnn, not gpt; choose bfloat16",
       [](TrainFlags& f) { f.model = "gpt", f.compute = "float16"; }},
      {"--loss_scale=0.5 is out of range", [](TrainFlags& f) { f.loss_scale = 0.5; }},
      {"--widths is for --model=cnn, not gpt",
       [](TrainFlags& f) { f.model = "gpt", f.widths = "8"; }},
      {"--widths=8,2000 is not a valid value; choose 1 to 1024 channels",
       [](TrainFlags& f) { f.widths = "8,2000"; }},
      {"--widths names 6 layers; the limit is 5", [](TrainFlags& f) { f.widths = "8,8,8,8,8,8"; }},
      {"--sync_batch_norm is for --model=cnn, not mlp",
       [](TrainFlags& f) { f.model = "mlp", f.sync_batch_norm = true; }},
      {"--sync_batch_norm and --accumulate=2 exclude each other",
       [](TrainFlags& f) { f.sync_batch_norm = true, f.accumulate = 2; }},
      {"--sync_batch_norm needs --join",
       [](TrainFlags& f) { f.sync_batch_norm = true, f.join = false; }},
      {"--sync_batch_norm needs --join and --on_failure=stop",
       [](TrainFlags& f) { f.sync_batch_norm = true, f.zero = false, f.on_failure = "continue"; }},
      {"--blocks=0", [](TrainFlags& f) { f.blocks = 0; }},
      {"--mirror is for --model=mlp and cnn, not gpt",
       [](TrainFlags& f) { f.model = "gpt", f.mirror = true; }},
      {"--shift=-1", [](TrainFlags& f) { f.shift = -1; }},
      {"--accumulate=0", [](TrainFlags& f) { f.accumulate = 0; }},
      {"--warmup=-1", [](TrainFlags& f) { f.warmup = -1; }},
      {"--clip=-1", [](TrainFlags& f) { f.clip = -1; }},
      {"--divide_by=samples needs --join",
       [](TrainFlags& f) { f.join = false, f.divide_by = "samples"; }},
      {"--model= is not a valid value", [](TrainFlags& f) { f.model = ""; }},
      {"--hidden=0 is not a valid value; choose 1 to 65536 units",
       [](TrainFlags& f) { f.model = "mlp", f.hidden = "0"; }},
      {"--hidden=65537", [](TrainFlags& f) { f.model = "mlp", f.hidden = "65537"; }},
      {"--hidden=8, is not", [](TrainFlags& f) { f.model = "mlp", f.hidden = "8,"; }},
      {"--hidden=8x is not", [](TrainFlags& f) { f.model = "mlp", f.hidden = "8x"; }},
      {"--hidden names 17 layers; the limit is 16",
       [](TrainFlags& f) { f.model = "mlp", f.hidden = "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"; }},
      {"--hidden is for --model=mlp, not cnn", [](TrainFlags& f) { f.hidden = "64"; }},
      {"--nproc=0", [](TrainFlags& f) { f.nproc = 0; }},
      {"--nproc=-2", [](TrainFlags& f) { f.nproc = -2; }},
      {"--nproc=100000", [](TrainFlags& f) { f.nproc = 100000; }},
      {"--backend=mpi is not a valid value; choose auto, local, shm, tcp, hierarchical, nccl",
       [](TrainFlags& f) { f.backend = "mpi"; }},
      {"--device=tpu is not a valid value; choose auto, cpu, cuda",
       [](TrainFlags& f) { f.device = "tpu"; }},
      {"--epochs=0 is out of range; it must be at least 1", [](TrainFlags& f) { f.epochs = 0; }},
      {"--max_steps=-1", [](TrainFlags& f) { f.max_steps = -1; }},
      {"--batch_size=0", [](TrainFlags& f) { f.batch_size = 0; }},
      {"--batch_size=4294967296", [](TrainFlags& f) { f.batch_size = int64_t{1} << 32; }},
      {"--rank_steps=3,x: \"x\" is not a number of batches",
       [](TrainFlags& f) { f.rank_steps = "3,x"; }},
      {"--rank_steps=3,: \"\"", [](TrainFlags& f) { f.rank_steps = "3,"; }},
      {"--rank_steps=-3", [](TrainFlags& f) { f.rank_steps = "-3"; }},
      {"--optimizer=lion is not a valid value; choose sgd, adam, adamw",
       [](TrainFlags& f) { f.optimizer = "lion"; }},
      {"--lr=-0.1 is out of range; it must be at least 0", [](TrainFlags& f) { f.lr = -0.1; }},
      {"--lr=nan", [](TrainFlags& f) { f.lr = std::nan(""); }},
      {"--lr=inf", [](TrainFlags& f) { f.lr = INFINITY; }},
      {"--lr_decay=square is not a valid value; choose auto, none, linear, cosine",
       [](TrainFlags& f) { f.lr_decay = "square"; }},
      {"--momentum is for --optimizer=sgd", [](TrainFlags& f) { f.momentum = 0.9; }},
      {"--momentum=-1", [](TrainFlags& f) { f.optimizer = "sgd", f.momentum = -1; }},
      {"--weight_decay=-1", [](TrainFlags& f) { f.weight_decay = -1; }},
      {"--divide_by=words is not a valid value; choose initial, effective, samples",
       [](TrainFlags& f) { f.divide_by = "words"; }},
      {"--bucket_cap_mb=-1", [](TrainFlags& f) { f.bucket_cap_mb = -1; }},
      {"--first_bucket_mb=nan", [](TrainFlags& f) { f.first_bucket_mb = std::nan(""); }},
      {"--auto_refresh_trainable=0", [](TrainFlags& f) { f.auto_refresh_trainable = "0"; }},
      {"--auto_refresh_trainable=often", [](TrainFlags& f) { f.auto_refresh_trainable = "often"; }},
      {"--comm_hook=zip is not a valid value; choose none, fp16, bf16, int8, power_sgd",
       [](TrainFlags& f) { f.comm_hook = "zip"; }},
      {"--comm_hook=power_sgd reduces whole gradients, not the equal slices of --zero",
       [](TrainFlags& f) { f.comm_hook = "power_sgd"; }},
      {"--comm_hook=int8 reduces whole gradients", [](TrainFlags& f) { f.comm_hook = "int8"; }},
      {"--power_sgd_rank and --power_sgd_start are for --comm_hook=power_sgd",
       [](TrainFlags& f) { f.comm_hook = "bf16", f.power_sgd_rank = 2; }},
      {"--power_sgd_rank=0 is out of range",
       [](TrainFlags& f) { f.comm_hook = "power_sgd", f.zero = false, f.power_sgd_rank = 0; }},
      {"--comm_hook=fp16 would round the reference computation",
       [](TrainFlags& f) { f.model = "mlp", f.compute = "float64", f.comm_hook = "fp16"; }},
      {"--freeze: \"fc1\" is not of the form", [](TrainFlags& f) { f.freeze = "fc1"; }},
      {"--on_failure=pray is not a valid value; choose stop, continue, replace",
       [](TrainFlags& f) { f.on_failure = "pray"; }},
      {"--shards=halves is not a valid value; choose slices, tensors",
       [](TrainFlags& f) { f.shards = "halves"; }},
      {"--shards=tensors is for --zero",
       [](TrainFlags& f) { f.shards = "tensors", f.zero = false; }},
      {"--lost_shard=guess is not a valid value; choose refuse, fresh",
       [](TrainFlags& f) { f.lost_shard = "guess"; }},
      {"--lost_shard=fresh is for --on_failure=continue with --zero",
       [](TrainFlags& f) { f.lost_shard = "fresh"; }},
      {"--lost_shard=fresh is for --on_failure=continue with --zero",
       [](TrainFlags& f) { f.lost_shard = "fresh", f.on_failure = "continue", f.zero = false; }},
      {"--rank_steps does not apply",
       [](TrainFlags& f) { f.on_failure = "continue", f.rank_steps = "3,5"; }},
      {"needs --join", [](TrainFlags& f) { f.on_failure = "continue", f.join = false; }},
      {"--stop_early would end the run there",
       [](TrainFlags& f) { f.on_failure = "continue", f.stop_early = true; }},
      {"choose --nozero, or --lost_shard=fresh", [](TrainFlags& f) { f.on_failure = "continue"; }},
      {"--on_failure=replace needs --nozero", [](TrainFlags& f) { f.on_failure = "replace"; }},
      {"cannot be combined with --balance",
       [](TrainFlags& f) { f.on_failure = "replace", f.zero = false, f.balance = true; }},
      {"cannot be combined with --comm_hook=int8",
       [](TrainFlags& f) { f.on_failure = "replace", f.zero = false, f.comm_hook = "int8"; }},
      {"--on_failure=replace redistributes the rest of an epoch: it may be uneven",
       [](TrainFlags& f) { f.on_failure = "replace", f.zero = false, f.join = false; }},
      {"choose --backend=auto",
       [](TrainFlags& f) { f.on_failure = "continue", f.backend = "local"; }},
      {"--verify: unknown level of verification \"sometimes\": it is one of off, positions, every",
       [](TrainFlags& f) { f.verify = "sometimes"; }},
      {"--check_replicas=-1 is out of range; it must be at least 0",
       [](TrainFlags& f) { f.check_replicas = -1; }},
      {"--balance_log and --balance_repeat need --balance",
       [](TrainFlags& f) { f.balance_log = "a"; }},
      {"--balance_log and --balance_repeat need --balance",
       [](TrainFlags& f) { f.balance_repeat = "a"; }},
      {"--balance needs --join", [](TrainFlags& f) { f.balance = true, f.join = false; }},
      {"--balance and --stop_early exclude each other",
       [](TrainFlags& f) { f.balance = f.stop_early = true; }},
      {"--balance and --rank_steps exclude each other",
       [](TrainFlags& f) { f.balance = true, f.rank_steps = "3,5"; }},
      {"--balance needs --divide_by=samples, not effective",
       [](TrainFlags& f) { f.balance = true, f.divide_by = "effective"; }},
      {"--balance_repeat needs --on_failure=stop",
       [](TrainFlags& f) {
         f.balance = true, f.balance_repeat = "a", f.zero = false, f.on_failure = "continue";
       }},
      {"--stop_early needs --join", [](TrainFlags& f) { f.stop_early = true, f.join = false; }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.says);
    TrainFlags flags;
    c.spoil(flags);
    const absl::Status status = MakeTrainOptions(flags).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\n")));
  }
}

}  // namespace
}  // namespace evenkeel
