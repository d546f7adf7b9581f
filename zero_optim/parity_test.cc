// Recorded runs of PyTorch, replayed: a small perceptron, trained by this library's optimizers.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/recorded_run.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::RecordedRun;

constexpr int kBatch = 8, kBatches = 5, kIn = 784, kHidden = 64, kOut = 10;
constexpr const char* kNames[] = {"0.weight", "0.bias", "2.weight", "2.bias"};

struct Recipe {
  const char* name;
  UpdateRule rule;
};
const Recipe kRecipes[] = {{"sgd", Sgd{.learning_rate = 0.05, .momentum = 0.9}},
                           {"adam", Adam{.learning_rate = 1e-3}},
                           {"adamw", AdamW{.learning_rate = 1e-3, .weight_decay = 0.01}}};

// Linear(784, 64), ReLU, Linear(64, 10), mean cross-entropy; sums in double.
class Perceptron {
 public:
  explicit Perceptron(const RecordedRun& run) {
    for (int i = 0; i < 4; ++i) {
      values_[i] = run.Get<float>(absl::StrCat("init.", kNames[i]));
      gradients_[i].resize(values_[i].size());
      params_.Add(kNames[i], absl::MakeSpan(values_[i]), absl::MakeSpan(gradients_[i]));
    }
    for (int rank = 0; rank < 2; ++rank) {
      inputs_[rank] = run.Get<float>(absl::StrCat("x.rank", rank));
      labels_[rank] = run.Get<int64_t>(absl::StrCat("y.rank", rank));
    }
  }

  ParameterSet& params() { return params_; }
  const std::vector<float>& value(int param) const { return values_[param]; }

  // Gradients of the trained parameters on one batch, as the rank's own.
  void Backward(int rank, int batch) {
    std::array<std::vector<double>, 4> sums;
    for (int i = 0; i < 4; ++i) sums[i].resize(values_[i].size());
    for (int b = 0; b < kBatch; ++b) {
      const int sample = batch * kBatch + b;
      BackwardSample(&inputs_[rank][sample * kIn], static_cast<int>(labels_[rank][sample]), sums);
    }
    params_.ClearGradients();
    for (int i = 0; i < 4; ++i) {
      if (!params_.trainable(i)) continue;
      std::ranges::copy(sums[i], gradients_[i].begin());
      params_.SetGradState(i, GradState::kLocal);
    }
  }

 private:
  void BackwardSample(const float* x, int label, std::array<std::vector<double>, 4>& sums) {
    const auto& [w1, b1, w2, b2] = values_;
    double hidden[kHidden], logits[kOut], largest = -INFINITY, total = 0;
    for (int h = 0; h < kHidden; ++h) {
      double sum = b1[h];
      for (int k = 0; k < kIn; ++k) sum += double{w1[h * kIn + k]} * x[k];
      hidden[h] = std::max(sum, 0.0);
    }
    for (int o = 0; o < kOut; ++o) {
      logits[o] = b2[o];
      for (int h = 0; h < kHidden; ++h) logits[o] += w2[o * kHidden + h] * hidden[h];
      largest = std::max(largest, logits[o]);
    }
    for (double logit : logits) total += std::exp(logit - largest);
    double hidden_gradient[kHidden] = {};
    for (int o = 0; o < kOut; ++o) {
      const double gradient =
          (std::exp(logits[o] - largest) / total - (o == label ? 1 : 0)) / kBatch;
      sums[3][o] += gradient;
      for (int h = 0; h < kHidden; ++h) {
        sums[2][o * kHidden + h] += gradient * hidden[h];
        hidden_gradient[h] += gradient * w2[o * kHidden + h];
      }
    }
    for (int h = 0; h < kHidden; ++h) {
      if (hidden[h] <= 0) continue;
      sums[1][h] += hidden_gradient[h];
      for (int k = 0; k < kIn; ++k) sums[0][h * kIn + k] += hidden_gradient[h] * x[k];
    }
  }

  std::array<std::vector<float>, 4> values_, gradients_;
  std::array<std::vector<float>, 2> inputs_;
  std::array<std::vector<int64_t>, 2> labels_;
  ParameterSet params_;
};

absl::StatusOr<RecordedRun> ReadInputs() {
  return RecordedRun::Read("tests/testdata/train/mlp.safetensors");
}

// The samples of each step are within the recording's bound. SGD 1e-6; an element whose gradient is
// near epsilon amplifies rounding in Adam, so there it is three times what PyTorch's own rounding
// did.
void ExpectRecorded(const Perceptron& model, const RecordedRun& run, const Recipe& recipe,
                    int step) {
  for (int i = 0; i < 4; ++i) {
    const std::vector<float> samples = run.Get<float>(absl::StrCat("sample.", kNames[i]));
    const std::vector<float>& value = model.value(i);
    const size_t stride = std::max<size_t>(1, value.size() / 64);
    const size_t per_step = std::min<size_t>(value.size(), 64);
    const double bound =
        recipe.name == std::string("sgd") ? 1e-6 : 3 * run.MaxDiffVsFloat64(kNames[i]);
    ASSERT_GE(samples.size(), (step + 1) * per_step);
    double worst = 0;
    for (size_t k = 0; k < per_step; ++k) {
      worst = std::max(worst, std::abs(double{samples[step * per_step + k]} - value[k * stride]));
    }
    EXPECT_GT(bound, 0);
    EXPECT_LE(worst, bound) << kNames[i] << " after step " << step;
  }
}

TEST(ParityTest, OneProcessIsTheRecordedRun) {
  for (const Recipe& recipe : kRecipes) {
    SCOPED_TRACE(recipe.name);
    const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const RecordedRun inputs, ReadInputs());
      EK_ASSIGN_OR_RETURN(const RecordedRun run,
                          RecordedRun::Read(absl::StrCat("tests/testdata/train/mlp.single.",
                                                         recipe.name, ".safetensors")));
      Perceptron model(inputs), sharded_model(inputs);
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), recipe.rule));
      EK_ASSIGN_OR_RETURN(auto sharded, Optimizer::Create(comm, sharded_model.params(), recipe.rule,
                                                          {.placement = WholeTensors{}}));
      for (int step = 0; step < kBatches; ++step) {
        model.Backward(0, step);
        sharded_model.Backward(0, step);
        EK_RETURN_IF_ERROR(optimizer->Step());
        EK_RETURN_IF_ERROR(sharded->Step());
        ExpectRecorded(model, run, recipe, step);
        ExpectRecorded(sharded_model, run, recipe, step);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

struct Scenario {
  std::string name;
  std::vector<int> steps;  // Per rank.
  bool freezes = false;
  JoinOptions join;
};

void ExpectRecordedScenario(const Scenario& scenario, const Recipe& recipe) {
  SCOPED_TRACE(absl::StrCat(scenario.name, " ", recipe.name));
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const RecordedRun inputs, ReadInputs());
    EK_ASSIGN_OR_RETURN(const RecordedRun run,
                        RecordedRun::Read(absl::StrCat("tests/testdata/optim/mlp.", scenario.name,
                                                       ".", recipe.name, ".safetensors")));
    Perceptron model(inputs);
    EK_ASSIGN_OR_RETURN(auto zero, Optimizer::Create(comm, model.params(), recipe.rule,
                                                     {.placement = WholeTensors{}}));
    EK_RETURN_IF_ERROR(RunJoined({zero.get()}, scenario.join, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < scenario.steps[comm.rank()]; ++step) {
        model.params().SetTrainable("0.", !scenario.freezes || (step != 3 && step != 4));
        model.Backward(comm.rank(), step % kBatches);
        EK_RETURN_IF_ERROR(zero->Step());
        ExpectRecorded(model, run, recipe, step);
      }
      return absl::OkStatus();
    }));
    // Also on the rank that had fewer inputs.
    ExpectRecorded(model, run, recipe, *std::ranges::max_element(scenario.steps) - 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ParityTest, TwoRanksShardedAreTheRecordedRuns) {
  for (const Recipe& recipe : kRecipes)
    ExpectRecordedScenario({.name = "ddp_even", .steps = {5, 5}}, recipe);
  ExpectRecordedScenario({.name = "zero_even", .steps = {5, 5}}, kRecipes[2]);
}

TEST(ParityTest, UnevenInputsAreTheRecordedRunsWithEitherDivisor) {
  for (const Recipe& recipe : kRecipes) {
    for (bool by_initial : {true, false}) {
      ExpectRecordedScenario({.name = by_initial ? "ddp_uneven_true" : "ddp_uneven_false",
                              .steps = {3, 5},
                              .join = {.divide_by = by_initial ? DivideBy::kInitialWorldSize
                                                               : DivideBy::kActiveRanks}},
                             recipe);
    }
  }
}

TEST(ParityTest, FreezingIsTheRecordedRun) {
  for (const Recipe& recipe : kRecipes) {
    ExpectRecordedScenario({.name = "freeze", .steps = {8, 8}, .freezes = true}, recipe);
  }
}

}  // namespace
}  // namespace evenkeel
