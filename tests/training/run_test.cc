// Tests of whole runs, from flags to the last line: uneven inputs with both divisors, early
// stopping, freezing, metrics.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/sampler.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

constexpr int kHidden = 16;
constexpr int kBatch = 6;
constexpr int kSamples = 60;

struct Optimizer {
  std::string name;
  std::vector<std::string> flags;
  UpdateRule rule;
  double bound;  // On max |a - b| / max |change|, see parity_test.
  DType dtype = DType::kFloat32;
};
const Optimizer kOptimizers[] = {
    {"sgd", {"--optimizer=sgd", "--lr=0.1"}, Sgd{.learning_rate = 0.1}, 2e-4},
    {"momentum",
     {"--optimizer=sgd", "--lr=0.1", "--momentum=0.9"},
     Sgd{.learning_rate = 0.1, .momentum = 0.9},
     2e-4},
    {"adam",
     {"--optimizer=adam", "--lr=0.01", "--compute=float64"},
     Adam{.learning_rate = 0.01},
     1e-7,
     DType::kFloat64},
    {"adamw",
     {"--optimizer=adamw", "--lr=0.01", "--weight_decay=0.1", "--compute=float64"},
     AdamW{.learning_rate = 0.01, .weight_decay = 0.1},
     1e-7,
     DType::kFloat64},
};

std::unique_ptr<Model> Mlp(DType dtype = DType::kFloat32) {
  return *MakeMlp({.hidden = {kHidden}, .dtype = dtype});
}

// A run as it should be: one process that computes each rank's gradient, adds them, divides, and
// steps. Buffers are each rank's own; a step begins with those of the highest rank that has a
// batch.
class PlainRun {
 public:
  PlainRun(const std::string& data, const std::string& init, const UpdateRule& rule,
           std::unique_ptr<Model> model = Mlp())
      : data_(*LoadIdx(data, Split::kTrain)), model_(std::move(model)), rule_(rule) {
    EXPECT_TRUE(LoadModel(init, *model_).ok());
    state_.resize(parameters().size());
    steps_.resize(parameters().size());
    for (int i = 0; i < parameters().size(); ++i) {
      const TensorView& value = parameters()[i].value;
      for (size_t k = 0; k < StateTensorNames(rule).size(); ++k) {
        state_[i].push_back(memory_.Allocate(value.dtype, value.count));
      }
    }
  }

  // `before_step` may freeze parameters.
  void Epoch(
      const std::vector<int>& rank_steps, bool divides_by_initial,
      absl::FunctionRef<void()> before_step = [] {}) {
    std::vector<Buffers> buffers(rank_steps.size(), TakeBuffers());
    for (int batch = 0; batch < std::ranges::max(rank_steps); ++batch) {
      before_step();
      std::vector<int> active;
      for (size_t rank = 0; rank < rank_steps.size(); ++rank) {
        if (batch < rank_steps[rank]) active.push_back(static_cast<int>(rank));
      }
      const size_t divisor = divides_by_initial ? rank_steps.size() : active.size();
      std::ranges::fill(buffers, Buffers(buffers[active.back()]));
      Step(batch, active, 1.0 / static_cast<double>(divisor), buffers);
      SetBuffers(buffers[active.back()]);
    }
  }

  // And the buffers.
  Weights weights() const {
    Weights weights;
    for (int i = 0; i < parameters().size(); ++i) {
      std::vector<double>& values = weights[parameters()[i].name];
      values.resize(parameters()[i].value.count);
      ConvertFloats(parameters()[i].value, TensorView(absl::MakeSpan(values)));
    }
    for (const NamedBuffer& buffer : model_->buffers()) {
      const std::span<const float> values = buffer.value.as<float>();
      weights[buffer.name].assign(values.begin(), values.end());
    }
    return weights;
  }

  ParameterSet& parameters() { return model_->parameters(); }
  const ParameterSet& parameters() const { return model_->parameters(); }

 private:
  using Buffers = std::vector<std::vector<float>>;

  Buffers TakeBuffers() const {
    Buffers taken;
    for (const NamedBuffer& buffer : model_->buffers()) {
      const std::span<const float> values = buffer.value.as<float>();
      taken.emplace_back(values.begin(), values.end());
    }
    return taken;
  }
  void SetBuffers(const Buffers& buffers) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      std::ranges::copy(buffers[i], model_->buffers()[i].value.as<float>().begin());
    }
  }

  void Step(int batch, const std::vector<int>& active, double scale,
            std::vector<Buffers>& buffers) {
    const std::vector<int32_t> order = InOrder(data_.size());
    parameters().ClearGradients();  // The model adds to what is there.
    for (int rank : active) {
      const BatchPlan plan{.samples = data_.size(),
                           .batch_size = kBatch,
                           .rank = rank,
                           .world_size = static_cast<int>(buffers.size())};
      const std::span<const int32_t> samples = BatchSamples(plan, order, batch);
      BatchMemory memory;
      SetBuffers(buffers[rank]);
      ASSERT_TRUE(model_->Forward(data_.Gather(samples, memory), Mode::kTraining).ok());
      ASSERT_TRUE(model_->Backward([](int) { return absl::OkStatus(); }).ok());
      buffers[rank] = TakeBuffers();
    }
    for (int i = 0; i < parameters().size(); ++i) {
      if (!parameters().trainable(i)) continue;
      ApplyUpdate(rule_, ++steps_[i], scale, parameters()[i].value, parameters()[i].grad,
                  state_[i]);
    }
  }

  const ImageDataset data_;
  const std::unique_ptr<Model> model_;
  const UpdateRule rule_;
  TensorMemory memory_;
  std::vector<std::vector<TensorView>> state_;  // By parameter, then tensor.
  std::vector<int64_t> steps_;
};

class RunTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    data_ = new std::string(WriteSmallData("data", {.train = kSamples, .test = 31}));
    init_ = new std::string(TempPath("init.safetensors"));
    const Ended ended =
        Train({"--model=mlp", absl::StrCat("--hidden=", kHidden), "--nproc=1", "--data=" + *data_,
               "--max_steps=1", "--batch_size=10", "--save=" + *init_});
    ASSERT_EQ(ended.code, 0) << ended.err;
  }

  static Ended TrainMlp(const std::vector<std::string>& more, const ProgramOptions& options = {}) {
    std::vector<std::string> flags = {"--model=mlp",
                                      absl::StrCat("--hidden=", kHidden),
                                      "--epochs=2",
                                      "--shuffle=false",
                                      absl::StrCat("--batch_size=", kBatch),
                                      "--data=" + *data_,
                                      "--init=" + *init_,
                                      BackendFlag()};
    flags.insert(flags.end(), more.begin(), more.end());
    const Ended ended = Train(flags, options);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(ended.err, "");
    const std::vector<std::string> lines = Lines(ended.out);
    EXPECT_THAT(lines.empty() ? "" : lines.back(),
                MatchesRegex("test_accuracy=[01]\\.[0-9][0-9][0-9][0-9]"));
    return ended;
  }

  static std::vector<std::string> Join(std::vector<std::string> a,
                                       const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  static std::string* data_;
  static std::string* init_;
};

std::string* RunTest::data_;
std::string* RunTest::init_;

TEST_F(RunTest, UnevenRanksComputeThePlainSums) {
  const std::string save = TempPath("uneven.safetensors");
  for (const Optimizer& optimizer : kOptimizers) {
    for (const std::vector<int>& steps : std::vector<std::vector<int>>{{3, 5}, {0, 2, 3}}) {
      for (const char* divide_by :
           {"initial", "effective", "samples"}) {  // Their batches are equally large.
        if (!TheTestBackend().is_in_full && divide_by != std::string("samples")) continue;
        PlainRun plain(*data_, *init_, optimizer.rule, Mlp(optimizer.dtype));
        for (int epoch = 0; epoch < 2; ++epoch)
          plain.Epoch(steps, divide_by == std::string("initial"));
        const double change = MaxDifference(plain.weights(), ReadWeights(*init_));
        for (const char* zero : {"--shards=slices", "--shards=tensors", "--nozero"}) {
          SCOPED_TRACE(
              absl::StrCat(optimizer.name, ", ", steps.size(), " ranks, ", divide_by, ", ", zero));
          TrainMlp(Join(optimizer.flags,
                        {absl::StrCat("--nproc=", steps.size()),
                         absl::StrCat("--rank_steps=", absl::StrJoin(steps, ",")),
                         absl::StrCat("--divide_by=", divide_by), zero, "--save=" + save}));
          EXPECT_LE(MaxDifference(ReadWeights(save), plain.weights()) / change, optimizer.bound);
        }
      }
    }
  }
}

TEST_F(RunTest, StopsEarlyOnAllRanksAndStillSaves) {
  const std::string save = TempPath("early.safetensors");
  PlainRun plain(*data_, *init_, Sgd{.learning_rate = 0.1});
  plain.Epoch({3, 3}, true);  // And no second epoch.
  const Ended ended = TrainMlp({"--optimizer=sgd", "--lr=0.1", "--nproc=2", "--rank_steps=3,5",
                                "--stop_early", "--save=" + save});
  EXPECT_LE(MaxDifference(ReadWeights(save), plain.weights()) /
                MaxDifference(plain.weights(), ReadWeights(*init_)),
            2e-4);
  EXPECT_THAT(ended.out, HasSubstr("rank 0 has no more input after 3"));
}

TEST_F(RunTest, StoppingEarlyBeforeTheFirstStepLeavesTheWeights) {
  const std::string save = TempPath("zero.safetensors");
  TrainMlp({"--nproc=2", "--rank_steps=2,0", "--stop_early", "--save=" + save});
  EXPECT_EQ(MaxDifference(ReadWeights(save), ReadWeights(*init_)), 0);
}

TEST_F(RunTest, MaxStepsCountsTheGroupsSteps) {
  const std::string save = TempPath("max_steps.safetensors");
  PlainRun plain(*data_, *init_, Sgd{.learning_rate = 0.1});
  plain.Epoch({1, 3}, true);
  plain.Epoch({1, 1}, true);
  TrainMlp({"--optimizer=sgd", "--lr=0.1", "--nproc=2", "--rank_steps=1,3", "--max_steps=4",
            "--divide_by=initial", "--save=" + save});
  EXPECT_LE(MaxDifference(ReadWeights(save), plain.weights()) /
                MaxDifference(plain.weights(), ReadWeights(*init_)),
            2e-4);
}

// Frozen from step 2 until 6: rank 0 is exhausted then (it has two batches), and step 5 is the
// first of epoch 2.
TEST_F(RunTest, FreezesByTheGroupsStepOnDryRanksToo) {
  const std::string save = TempPath("freeze.safetensors");
  for (const char* refresh : {"always", "never", "3"}) {
    if (!TheTestBackend().is_in_full && refresh != std::string("3")) continue;
    for (const char* more : {"--shards=slices", "--shards=tensors", "--nozero", "--grad_view"}) {
      SCOPED_TRACE(absl::StrCat(refresh, " ", more));
      TrainMlp({"--optimizer=sgd", "--lr=0.1", "--momentum=0.9", "--nproc=2", "--rank_steps=2,5",
                "--freeze=fc1@2:6", "--divide_by=initial",
                absl::StrCat("--auto_refresh_trainable=", refresh), more, "--save=" + save});
      // The plain run, step by step.
      PlainRun plain(*data_, *init_, Sgd{.learning_rate = 0.1, .momentum = 0.9});
      int64_t step = 0;
      for (int epoch = 0; epoch < 2; ++epoch) {
        plain.Epoch({2, 5}, true,
                    [&] { plain.parameters().SetTrainable("fc1", step < 2 || step >= 6), ++step; });
      }
      EXPECT_LE(MaxDifference(ReadWeights(save), plain.weights()) /
                    MaxDifference(plain.weights(), ReadWeights(*init_)),
                2e-4);
    }
  }
}

TEST_F(RunTest, ALossThatIsNotFiniteEndsTheRun) {
  const Ended ended =
      Train({"--model=mlp", "--hidden=8", "--nproc=2", "--epochs=20", "--batch_size=5",
             "--optimizer=sgd", "--lr=1e38", "--data=" + *data_, BackendFlag()});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("the loss is "));
  EXPECT_THAT(ended.err, HasSubstr("; try a lower --lr, a longer --warmup or --clip"));
  EXPECT_THAT(ended.out, Not(HasSubstr("test_accuracy")));
}

TEST_F(RunTest, ThreadsThatWaitForEachOtherSleepSoonUnlessTheUserHasChosen) {
  const auto train = [&](const std::string& variable) {
    std::vector<std::string> command = {"/usr/bin/env"};
    for (const char* name : {"GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"})
      command.insert(command.end(), {"-u", name});
    command.insert(command.end(), {"OMP_DISPLAY_ENV=verbose", variable, kTrain, "--model=mlp",
                                   "--hidden=8", "--nproc=1", "--max_steps=1", "--data=" + *data_});
    const Ended ended = evenkeel::Run(command);
    EXPECT_EQ(ended.code, 0) << ended.err;
    return ended.err;
  };
  EXPECT_THAT(train("UNRELATED=1"), HasSubstr("GOMP_SPINCOUNT = '1000'"));
  for (const char* chosen : {"GOMP_SPINCOUNT=77", "OMP_WAIT_POLICY=active", "OMP_NUM_THREADS=1"})
    EXPECT_THAT(train(chosen), Not(HasSubstr("GOMP_SPINCOUNT = '1000'"))) << chosen;
}

TEST_F(RunTest, EverythingMayBeFrozen) {
  const std::string save = TempPath("frozen.safetensors");
  TrainMlp({"--nproc=2", "--rank_steps=2,3", "--freeze=fc@0:", "--save=" + save});
  EXPECT_EQ(MaxDifference(ReadWeights(save), ReadWeights(*init_)), 0);
}

std::vector<nlohmann::json> ReadMetrics(const std::string& path) {
  std::vector<nlohmann::json> lines;
  for (const std::string& line : Lines(ReadText(path)))
    lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST_F(RunTest, MetricsHaveEveryStepAndWhoRanDry) {
  const std::string path = TempPath("metrics.jsonl");
  const Ended ended = TrainMlp({"--nproc=2", "--rank_steps=2,4", "--metrics=" + path});
  std::map<std::string, std::vector<nlohmann::json>> by_event;
  for (const nlohmann::json& line : ReadMetrics(path)) by_event[line.at("event")].push_back(line);

  ASSERT_EQ(by_event["run"].size(), 1u);
  EXPECT_EQ(by_event["run"][0].at("world_size"), 2);
  ASSERT_EQ(by_event["step"].size(),
            8u);  // Rank 0 writes it, and tells of steps it had no batch for.
  for (int i = 0; i < 8; ++i) {
    const nlohmann::json& step = by_event["step"][i];
    const bool is_exhausted = i % 4 >= 2;
    EXPECT_EQ(step.at("step"), i);
    EXPECT_EQ(step.at("epoch"), i / 4);
    EXPECT_EQ(step.at("active"), is_exhausted ? 1 : 2);
    EXPECT_EQ(step.at("samples"), is_exhausted ? kBatch : 2 * kBatch);
    EXPECT_EQ(step.at("loss").is_null(), is_exhausted);
    EXPECT_EQ(step.at("exposed_ms").is_null(), is_exhausted);
    EXPECT_GT(step.at("step_ms"), 0);
    EXPECT_NEAR(step.at("samples_per_second").get<double>() * step.at("step_ms").get<double>(),
                1000 * step.at("samples").get<double>(), 1e-6);
  }
  ASSERT_EQ(by_event["exhausted"].size(), 2u);
  EXPECT_EQ(by_event["exhausted"][1].at("rank"), 0);
  EXPECT_EQ(by_event["exhausted"][1].at("epoch"), 1);
  EXPECT_EQ(by_event["exhausted"][1].at("batches"), 2);
  ASSERT_EQ(by_event["epoch"].size(), 2u);
  EXPECT_EQ(by_event["epoch"][0].at("train_samples"), 6 * kBatch);
  ASSERT_EQ(by_event["test"].size(), 1u);
  EXPECT_EQ(by_event["test"][0].at("samples"), 31);  // Uneven shards: 15 and 16.
  EXPECT_THAT(ended.out,
              HasSubstr(absl::StrFormat("test_accuracy=%.4f",
                                        by_event["test"][0].at("accuracy").get<double>())));
}

TEST_F(RunTest, TensorboardAndPrometheusHearOfTheRun) {
  const std::string events = TempPath("runs/first");
  const std::string prometheus = TempPath("train.prom");
  const Ended ended =
      TrainMlp({"--nproc=2", "--tensorboard=" + events, "--prometheus=" + prometheus});
  const std::string text = ReadText(prometheus);
  EXPECT_THAT(text, HasSubstr("evenkeel_train_up{model=\"mlp\",run=\"train\"} 0\n"));
  constexpr char kAccuracy[] = "\nevenkeel_test_accuracy{model=\"mlp\",run=\"train\"} ";
  ASSERT_THAT(text, HasSubstr(kAccuracy));
  const double accuracy = std::atof(text.c_str() + text.find(kAccuracy) + sizeof(kAccuracy) - 1);
  EXPECT_EQ(Lines(ended.out).back(), absl::StrFormat("test_accuracy=%.4f", accuracy));
  for (const auto& entry : std::filesystem::directory_iterator(events)) {
    const std::string records = ReadText(entry.path().string());
    for (const char* tag : {"train/loss", "train/samples_per_second",
                            "train/exposed_communication_ratio", "test/loss"}) {
      EXPECT_THAT(records, HasSubstr(tag));
    }
    std::filesystem::remove(entry.path());
  }
}

TEST_F(RunTest, EvaluationIsTheSameOverAnyNumberOfRanks) {
  std::vector<std::string> last_lines;
  for (const char* nproc : {"--nproc=1", "--nproc=2", "--nproc=3"}) {
    const std::string metrics = TempPath("metrics.jsonl");
    TrainMlp({nproc, "--lr=0", "--weight_decay=0", "--max_steps=1", "--metrics=" + metrics});
    const nlohmann::json last = ReadMetrics(metrics).back();
    EXPECT_EQ(last.at("samples"), 31);
    last_lines.push_back(absl::StrCat(last.at("correct").get<int>()));
  }
  EXPECT_THAT(last_lines, ElementsAre(last_lines[0], last_lines[0], last_lines[0]));
}

// A cnn is trained, saved, and trained on from what was saved, with ranks of other lengths: the
// weights are those of the plain run, and so are the buffers, which are no rank's own at the end.
// SGD in float32, so the bound is the mlp's; what buffers may differ by is measured by their own
// change.
TEST_F(RunTest, CnnTrainsSavesAndGoesOn) {
  const std::string init = TempPath("cnn_init.safetensors"), save = TempPath("cnn.safetensors");
  const std::vector<std::string> flags = {"--model=cnn",      "--widths=4,8",
                                          "--nproc=2",        "--epochs=1",
                                          "--shuffle=false",  "--optimizer=sgd",
                                          "--lr=0.1",         "--lr_decay=none",
                                          "--warmup=0",       "--divide_by=initial",
                                          "--data=" + *data_, absl::StrCat("--batch_size=", kBatch),
                                          BackendFlag(),      "--save=" + save};
  const auto train = [&](const std::vector<std::string>& more) {
    const Ended ended = Train(Join(flags, more));
    EXPECT_EQ(ended.code, 0) << ended.err;
  };
  train({"--max_steps=1", "--save=" + init});
  PlainRun plain(*data_, init, Sgd{.learning_rate = 0.1}, *MakeCnn({.widths = {4, 8}}));
  const Weights begin = plain.weights();
  std::string from = init;
  for (const std::vector<int>& steps : std::vector<std::vector<int>>{{3, 3}, {3, 1}, {1, 3}}) {
    SCOPED_TRACE(absl::StrJoin(steps, ","));
    train({"--init=" + from, absl::StrCat("--rank_steps=", absl::StrJoin(steps, ","))});
    plain.Epoch(steps, /*divides_by_initial=*/true);
    const Weights saved = ReadWeights(save), expected = plain.weights();
    ASSERT_EQ(saved.size(), expected.size());
    for (const auto& [name, values] : expected) {
      const Weights is = {{name, saved.at(name)}}, was = {{name, begin.at(name)}},
                    should_be = {{name, values}};
      EXPECT_LE(MaxDifference(is, should_be) / MaxDifference(should_be, was), 2e-4) << name;
    }
    from = save;
  }
}

TEST_F(RunTest, RelativePathsMeanTheUsersFolder) {
  const std::string folder = TempPath("user");
  mkdir(folder.c_str(), 0755);
  TrainMlp({"--nproc=2", "--save=w.safetensors"},
           {.environment = {{"BUILD_WORKING_DIRECTORY", folder}}});
  EXPECT_FALSE(ReadWeights(folder + "/w.safetensors").empty());
}

TEST_F(RunTest, EqualSeedsGiveEqualRuns) {
  const std::string a = TempPath("a.safetensors"), b = TempPath("b.safetensors"),
                    c = TempPath("c.safetensors");
  TrainMlp({"--nproc=2", "--shuffle", "--seed=3", "--save=" + a});
  TrainMlp({"--nproc=2", "--shuffle", "--seed=3", "--save=" + b});
  TrainMlp({"--nproc=2", "--shuffle", "--seed=4", "--save=" + c});
  EXPECT_EQ(MaxDifference(ReadWeights(a), ReadWeights(b)), 0);
  EXPECT_GT(MaxDifference(ReadWeights(a), ReadWeights(c)), 0);
}

}  // namespace
}  // namespace evenkeel
