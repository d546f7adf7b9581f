// Whole training steps on one thread, forward, backward and AdamW, in tokens per second (items).
// pytorch_gpt.py takes the same steps in PyTorch.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

class Training {
 public:
  static absl::StatusOr<Training> Start(const char* preset, GptCompute compute, double dropout,
                                        int64_t vocabulary, int64_t sequences) {
    absl::StatusOr<GptOptions> options = GptPreset(preset);
    if (!options.ok()) return options.status();
    options->compute = compute;
    options->dropout = dropout;
    options->vocabulary = vocabulary;
    absl::StatusOr<std::unique_ptr<Gpt>> model = MakeGpt(*options);
    if (!model.ok()) return model.status();
    return Training(*std::move(model), sequences);
  }

  int64_t tokens() const { return static_cast<int64_t>(inputs_.size()); }
  const Gpt& model() const { return *model_; }

  absl::Status Step() {
    ParameterSet& parameters = model_->parameters();
    parameters.ClearGradients();
    ++step_;
    const TokenBatch batch{inputs_, targets_, model_->options().context};
    const auto result =
        model_->Forward(batch, Mode::kTraining, {.noise = static_cast<uint64_t>(step_)});
    if (!result.ok()) return result.status();
    const absl::Status status = model_->Backward([](int) { return absl::OkStatus(); });
    if (!status.ok()) return status;
    for (int i = 0; i < parameters.size(); ++i) {
      ApplyUpdate(AdamW{}, step_, 1.0, parameters[i].value, parameters[i].grad,
                  {TensorView(absl::MakeSpan(first_[i])), TensorView(absl::MakeSpan(second_[i]))});
    }
    return absl::OkStatus();
  }

 private:
  Training(std::unique_ptr<Gpt> model, int64_t sequences) : model_(std::move(model)) {
    StableRandom random(1);
    const GptOptions& options = model_->options();
    for (int64_t i = 0; i < sequences * options.context; ++i) {
      inputs_.push_back(static_cast<int32_t>(random.Below(options.vocabulary)));
      targets_.push_back(static_cast<int32_t>(random.Below(options.vocabulary)));
    }
    for (int i = 0; i < model_->parameters().size(); ++i) {
      first_.emplace_back(model_->parameters()[i].value.count);
      second_.emplace_back(model_->parameters()[i].value.count);
    }
  }

  std::unique_ptr<Gpt> model_;
  std::vector<int32_t> inputs_, targets_;
  std::vector<std::vector<float>> first_, second_;
  int64_t step_ = 0;
};

void RunSteps(benchmark::State& state, const char* preset, GptCompute compute, double dropout = 0,
              int64_t vocabulary = 256) {
  SetComputeThreads(1);
  absl::StatusOr<Training> training =
      Training::Start(preset, compute, dropout, vocabulary, state.range(0));
  if (!training.ok() || !training->Step().ok()) return state.SkipWithError("the first step failed");
  for (auto _ : state) {
    if (!training->Step().ok()) return state.SkipWithError("a step failed");
  }
  state.SetItemsProcessed(state.iterations() * training->tokens());
  state.counters["activation_MiB"] =
      static_cast<double>(training->model().ActivationBytes()) / (1 << 20);
}

void BM_TinyFloat32(benchmark::State& state) { RunSteps(state, "tiny", GptCompute::kFloat32); }
void BM_TinyBFloat16(benchmark::State& state) { RunSteps(state, "tiny", GptCompute::kBFloat16); }
void BM_MiniFloat32(benchmark::State& state) { RunSteps(state, "mini", GptCompute::kFloat32); }
void BM_MiniBFloat16(benchmark::State& state) { RunSteps(state, "mini", GptCompute::kBFloat16); }
void BM_MiniFloat32Dropout(benchmark::State& state) {
  RunSteps(state, "mini", GptCompute::kFloat32, 0.1);
}
void BM_MiniFloat32Words(benchmark::State& state) {
  RunSteps(state, "mini", GptCompute::kFloat32, 0, 4096);
}
BENCHMARK(BM_TinyFloat32)->Arg(8)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_TinyBFloat16)->Arg(8)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_MiniFloat32)->Arg(8)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_MiniBFloat16)->Arg(8)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_MiniFloat32Dropout)->Arg(8)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_MiniFloat32Words)->Arg(8)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace evenkeel
