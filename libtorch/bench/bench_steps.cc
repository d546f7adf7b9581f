// Times a training step with DataParallel against the same step of one process.
//
//   bazel run //tools:launch -- --nproc=2 -- $PWD/bazel-bin/libtorch/bench/bench_steps --pairs=30
//
// All ranks take both steps in turn, in blocks of 20, so that the cores are equally busy. Prints
// the median of the pairs' ratios, with the 10th and 90th percentile, in Markdown.
// python/bench/bench.py steps is the same with PyTorch's DistributedDataParallel.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "evenkeel/libtorch.h"

namespace {

namespace ekt = evenkeel::libtorch;
using torch::Tensor;

constexpr int kStepsPerBlock = 20;

struct Mlp : torch::nn::Module {
  Mlp() {
    layers = register_module("layers",
                             torch::nn::Sequential(torch::nn::Linear(784, 512), torch::nn::ReLU(),
                                                   torch::nn::Linear(512, 512), torch::nn::ReLU(),
                                                   torch::nn::Linear(512, 10)));
  }
  Tensor forward() { return torch::cross_entropy_loss(layers->forward(images), labels); }
  torch::nn::Sequential layers;
  Tensor images = torch::randn({64, 784}), labels = torch::randint(10, {64}, torch::kLong);
};

struct Gpt : torch::nn::Module {
  static constexpr int kVocabulary = 256, kWidth = 128, kLayers = 4, kHeads = 4, kContext = 128;
  Gpt() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_parameter("positions", torch::zeros({kContext, 1, kWidth}));
    const auto layer = torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads)
                           .dim_feedforward(4 * kWidth)
                           .dropout(0)
                           .activation(torch::kGELU);
    blocks = register_module("blocks", torch::nn::TransformerEncoder(
                                           torch::nn::TransformerEncoderOptions(layer, kLayers)));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
    mask = torch::nn::TransformerImpl::generate_square_subsequent_mask(kContext);
  }
  Tensor forward() {
    const Tensor hidden = tokens(text.slice(0, 0, kContext)) + positions;
    const Tensor logits = head(blocks(hidden, mask));
    return torch::cross_entropy_loss(logits.flatten(0, 1), text.slice(0, 1).flatten());
  }
  torch::nn::Embedding tokens = nullptr;
  Tensor positions, mask;
  torch::nn::TransformerEncoder blocks = nullptr;
  torch::nn::Linear head = nullptr;
  Tensor text = torch::randint(kVocabulary, {kContext + 1, 4}, torch::kLong);
};

double Seconds(const std::function<void()>& step) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kStepsPerBlock; ++i) step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() /
         kStepsPerBlock;
}

double At(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}

template <class Net>
void Measure(ekt::Group& group, const char* name, int pairs) {
  auto alone = std::make_shared<Net>(), together = std::make_shared<Net>();
  ekt::DataParallel ddp(group, together);
  torch::optim::SGD sgd(alone->parameters(), 1e-3), ddp_sgd(together->parameters(), 1e-3);
  const auto local = [&] {
    sgd.zero_grad();
    alone->forward().backward();
    sgd.step();
  };
  const auto distributed = [&] {
    ddp_sgd.zero_grad();
    ddp().backward();
    ddp_sgd.step();
  };
  std::vector<double> ratios, local_times, times;
  for (int pair = 0; pair <= pairs; ++pair) {
    group.barrier();
    const double mine = Seconds(local);
    group.barrier();
    const double with_others = Seconds(distributed);
    if (pair == 0) continue;  // Warms up.
    local_times.push_back(mine);
    times.push_back(with_others);
    ratios.push_back(with_others / mine);
  }
  if (group.rank() != 0) return;
  std::printf("| %s | %.2f ms | %.2f ms | %.2f [%.2f, %.2f] |\n", name, At(local_times, 0.5) * 1e3,
              At(times, 0.5) * 1e3, At(ratios, 0.5), At(ratios, 0.1), At(ratios, 0.9));
}

}  // namespace

int main(int argc, char** argv) {
  int pairs = 30;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    pairs = text.rfind("--pairs=", 0) == 0 ? std::atoi(text.c_str() + 8) : 0;
    if (pairs >= 1) continue;
    std::fprintf(stderr, "bench_steps: expected --pairs=N, got %s\n", argv[i]);
    return 2;
  }
  torch::set_num_threads(1);
  return ekt::run([pairs](ekt::Group& group) {
    if (group.rank() == 0)
      std::printf("| %d ranks | local | DataParallel | ratio |\n|---|---|---|---|\n", group.size());
    Measure<Mlp>(group, "MLP", pairs);
    Measure<Gpt>(group, "GPT", pairs);
  });
}
