// The perceptron on two ranks against recorded runs of PyTorch's DistributedDataParallel, Join and
// ZeroRedundancyOptimizer (tests/testdata/optim): even and uneven inputs with either divisor,
// frozen layers. And on one rank against one process of PyTorch, with the inputs of one rank or of
// both joined.
//
// Every rank must have the recorded losses, and hold the recorded weights after its last step, the
// one that became exhausted as well.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

constexpr int kBatch = 8;
constexpr int kRecordedBatches = 5;

struct ParameterNames {
  const char* ours;
  const char* recorded;
};
constexpr ParameterNames kNames[] = {{"fc1.weight", "0.weight"},
                                     {"fc1.bias", "0.bias"},
                                     {"fc2.weight", "2.weight"},
                                     {"fc2.bias", "2.bias"}};

struct Scenario {
  std::string name;
  std::vector<int> steps;  // By rank.
  bool divides_by_initial = true;
  std::string freeze;
  bool joins_inputs = false;  // Each batch is that of rank 0 and that of rank 1.
  std::string folder = "optim";
};
const Scenario kScenarios[] = {{"single", {5}, true, "", false, "train"},
                               {"single_concat", {5}, true, "", true},
                               {"ddp_even", {5, 5}},
                               {"ddp_uneven_true", {3, 5}},
                               {"ddp_uneven_false", {3, 5}, false},
                               {"freeze", {8, 8}, true, "fc1@3:5"},
                               {"zero_even", {5, 5}}};

struct Recipe {
  std::string name;
  UpdateRule rule;
};
const Recipe kRecipes[] = {{"sgd", Sgd{.learning_rate = 0.05, .momentum = 0.9}},
                           {"adam", Adam{.learning_rate = 1e-3}},
                           {"adamw", AdamW{.learning_rate = 1e-3, .weight_decay = 0.01}}};

struct Setting {
  Scenario scenario;
  Recipe recipe;
  bool is_sharded = false;
  bool gradients_are_views = false;
};

std::string NameOf(const Setting& setting) {
  return absl::StrCat(setting.scenario.name, "_", setting.recipe.name,
                      setting.is_sharded ? "_sharded" : "",
                      setting.gradients_are_views ? "_views" : "");
}

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const Scenario& scenario : kScenarios) {
    for (const Recipe& recipe : kRecipes) {
      if (scenario.name == "zero_even" && recipe.name != "adamw") continue;  // Not recorded.
      for (bool is_sharded : {false, true}) {
        for (bool views : {false, true}) settings.push_back({scenario, recipe, is_sharded, views});
      }
    }
  }
  return settings;
}

template <typename T>
std::vector<T> Elements(const SafetensorsFile& file, const std::string& name) {
  const auto* tensor = file.Find(name);
  if (tensor == nullptr || tensor->dtype != DTypeOf<T>::value) return {};
  std::vector<T> values(tensor->count());
  std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

// The reference for all ranks.
struct Recording {
  SafetensorsFile inputs;
  SafetensorsFile run;
  int steps;
};

absl::StatusOr<Recording> ReadRecording(const Setting& setting) {
  EK_ASSIGN_OR_RETURN(SafetensorsFile inputs,
                      SafetensorsFile::Read("tests/testdata/train/mlp.safetensors"));
  EK_ASSIGN_OR_RETURN(SafetensorsFile run,
                      SafetensorsFile::Read(absl::StrCat("tests/testdata/", setting.scenario.folder,
                                                         "/mlp.", setting.scenario.name, ".",
                                                         setting.recipe.name, ".safetensors")));
  return Recording{std::move(inputs), std::move(run),
                   *std::ranges::max_element(setting.scenario.steps)};
}

// The recording's own bounds: 1e-6 for SGD; three times PyTorch's own rounding where an optimizer
// amplifies it.
double BoundFor(const Recording& recording, const Setting& setting, const char* parameter) {
  if (setting.recipe.name == "sgd") return 1e-6;
  const auto json = nlohmann::json::parse(recording.run.metadata().at("max_abs_diff_vs_float64"));
  return 3 * json.at(parameter).get<double>();
}

// Losses are near 2. Adam moves an element whose gradient is all rounding by up to a learning rate,
// 1e-3, either way; a loss on other inputs, where that element may count, differs by up to 8e-6
// here.
double LossBoundFor(const Setting& setting) { return setting.recipe.name == "sgd" ? 1e-6 : 2e-5; }

void ExpectRecorded(const Recording& recording, const Setting& setting,
                    const ParameterSet& parameters, int step) {
  for (const ParameterNames& names : kNames) {
    const std::span<const float> value = parameters[parameters.Find(names.ours)].value.as<float>();
    const std::vector<float> samples =
        Elements<float>(recording.run, absl::StrCat("sample.", names.recorded));
    const size_t per_step = samples.size() / recording.steps;
    const size_t stride = std::max<size_t>(1, value.size() / 64);
    ASSERT_GE(per_step, 10u);
    double worst = 0;
    for (size_t k = 0; k < per_step; ++k) {
      worst = std::max<double>(worst,
                               std::abs(double{value[k * stride]} - samples[step * per_step + k]));
    }
    EXPECT_LE(worst, BoundFor(recording, setting, names.recorded))
        << names.ours << " after step " << step;
    const std::vector<double> norms =
        Elements<double>(recording.run, absl::StrCat("norm2.", names.recorded));
    double squares = 0;
    for (float element : value) squares += double{element} * element;
    EXPECT_NEAR(std::sqrt(squares), norms.at(step), 1e-5) << names.ours << " after step " << step;
  }
}

// After the last step, each element; not every recording has them.
void ExpectRecordedEnd(const Recording& recording, const Setting& setting,
                       const ParameterSet& parameters) {
  ExpectRecorded(recording, setting, parameters, recording.steps - 1);
  for (const ParameterNames& names : kNames) {
    const std::vector<float> last =
        Elements<float>(recording.run, absl::StrCat("final.", names.recorded));
    if (last.empty()) continue;
    const std::span<const float> value = parameters[parameters.Find(names.ours)].value.as<float>();
    ASSERT_EQ(value.size(), last.size());
    double worst = 0;
    for (size_t k = 0; k < last.size(); ++k)
      worst = std::max<double>(worst, std::abs(double{value[k]} - last[k]));
    EXPECT_LE(worst, BoundFor(recording, setting, names.recorded)) << names.ours << " at the end";
  }
}

// One batch after the other, of one rank or of both.
struct Inputs {
  std::vector<float> images;
  std::vector<uint8_t> labels;
  int batch = 0;
};

Inputs InputsOf(const Recording& recording, const Scenario& scenario, int rank) {
  const std::vector<int> sources =
      scenario.joins_inputs ? std::vector<int>{0, 1} : std::vector<int>{rank};
  Inputs inputs{.batch = kBatch * static_cast<int>(sources.size())};
  for (int batch = 0; batch < kRecordedBatches; ++batch) {
    for (int source : sources) {
      const std::vector<float> x =
          Elements<float>(recording.inputs, absl::StrCat("x.rank", source));
      const std::vector<int64_t> y =
          Elements<int64_t>(recording.inputs, absl::StrCat("y.rank", source));
      const auto image = x.begin() + batch * kBatch * kImagePixels;
      const auto label = y.begin() + batch * kBatch;
      inputs.images.insert(inputs.images.end(), image, image + kBatch * kImagePixels);
      inputs.labels.insert(inputs.labels.end(), label, label + kBatch);
    }
  }
  return inputs;
}

absl::Status TrainRank(Communicator& comm, const Recording& recording, const Setting& setting) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, MakeMlp({.hidden = {64}}));
  ParameterSet& parameters = model->parameters();
  for (const ParameterNames& names : kNames) {
    std::ranges::copy(Elements<float>(recording.inputs, absl::StrCat("init.", names.recorded)),
                      parameters[parameters.Find(names.ours)].value.as<float>().begin());
  }
  const Inputs inputs = InputsOf(recording, setting.scenario, comm.rank());
  const std::vector<double> losses =
      Elements<double>(recording.run, absl::StrCat("loss.rank", comm.rank()));
  EK_ASSIGN_OR_RETURN(const FreezeSchedule freeze, ParseFreezeSchedule(setting.scenario.freeze));

  DataParallelOptions options;
  options.reducer.gradient_as_bucket_view = setting.gradients_are_views;
  options.reducer.caps = {Bytes{1000}};
  EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &parameters, {}, options));
  OptimizerOptions placed;
  if (setting.is_sharded) placed.placement = WholeTensors{};
  EK_ASSIGN_OR_RETURN(const auto optimizer,
                      Optimizer::Create(comm, parameters, setting.recipe.rule, placed));
  EK_RETURN_IF_ERROR(RunJoined(
      {ddp.get(), optimizer.get()},
      {.divide_by = setting.scenario.divides_by_initial ? DivideBy::kInitialWorldSize
                                                        : DivideBy::kActiveRanks},
      [&](JoinScope&) -> absl::Status {
        for (int step = 0; step < setting.scenario.steps[comm.rank()]; ++step) {
          ApplyFreezeSchedule(freeze, step, parameters);
          parameters.ClearGradients();
          EK_RETURN_IF_ERROR(ddp->BeginStep());
          const int first = step % kRecordedBatches * inputs.batch;
          const absl::StatusOr<BatchResult> result = model->Forward(
              std::span(inputs.images).subspan(first * kImagePixels, inputs.batch * kImagePixels),
              std::span(inputs.labels).subspan(first, inputs.batch), Mode::kTraining);
          EK_RETURN_IF_ERROR(result.status());
          EXPECT_NEAR(result->loss_mean, losses.at(step), LossBoundFor(setting))
              << "rank " << comm.rank() << ", step " << step;
          EK_RETURN_IF_ERROR(model->Backward([&](int index) { return ddp->GradientReady(index); }));
          EK_RETURN_IF_ERROR(ddp->FinishStep());
          EK_RETURN_IF_ERROR(optimizer->Step());
          ExpectRecorded(recording, setting, parameters, step);
        }
        return absl::OkStatus();
      }));
  ExpectRecordedEnd(recording, setting, parameters);
  return absl::OkStatus();
}

class RecordedTest : public testing::TestWithParam<Setting> {};

void PrintTo(const Setting& setting, std::ostream* out) { *out << NameOf(setting); }

TEST_P(RecordedTest, RanksAreTheRecordedRun) {
  const absl::StatusOr<Recording> recording = ReadRecording(GetParam());
  ASSERT_TRUE(recording.ok()) << recording.status();
  const int world_size = static_cast<int>(GetParam().scenario.steps.size());
  const absl::Status status = RunRanks(
      world_size, [&](Communicator& comm) { return TrainRank(comm, *recording, GetParam()); });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(All, RecordedTest, testing::ValuesIn(Settings()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace evenkeel
