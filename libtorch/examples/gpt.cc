// Trains a small language model on the bytes of a text: tied weights, unequal parts of the text,
// and optimizer state that is sliced over the ranks.
//
//   gpt --text=README.md --epochs=2 --checkpoint=ckpt       # in each rank

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "evenkeel/libtorch.h"

namespace ekt = evenkeel::libtorch;
namespace F = torch::nn::functional;
using torch::Tensor;

constexpr int kBytes = 256, kWidth = 64, kHeads = 4, kContext = 64, kBatch = 8;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    first_norm =
        register_module("first_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    second_norm =
        register_module("second_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    parts = register_module("parts", torch::nn::Linear(kWidth, 3 * kWidth));
    mixed = register_module("mixed", torch::nn::Linear(kWidth, kWidth));
    wide = register_module("wide", torch::nn::Linear(kWidth, 4 * kWidth));
    narrow = register_module("narrow", torch::nn::Linear(4 * kWidth, kWidth));
  }
  Tensor forward(const Tensor& hidden) {
    const auto heads = [&](const Tensor& part) {
      return part.view({part.size(0), part.size(1), kHeads, -1}).transpose(1, 2);
    };
    const auto qkv = parts(first_norm(hidden)).chunk(3, -1);
    const Tensor attended = torch::scaled_dot_product_attention(
        heads(qkv[0]), heads(qkv[1]), heads(qkv[2]), {}, 0.0, /*is_causal=*/true);
    const Tensor next = hidden + mixed(attended.transpose(1, 2).reshape(hidden.sizes()));
    return next + narrow(torch::gelu(wide(second_norm(next))));
  }
  torch::nn::LayerNorm first_norm = nullptr, second_norm = nullptr;
  torch::nn::Linear parts = nullptr, mixed = nullptr, wide = nullptr, narrow = nullptr;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kBytes, kWidth));
    positions = register_parameter("positions", torch::zeros({kContext, kWidth}));
    blocks = register_module("blocks", torch::nn::Sequential(Block(), Block()));
    const torch::NoGradGuard no_grad;
    tokens->weight.mul_(0.1);
  }
  Tensor forward(const Tensor& text) {  // [batch, kContext] -> [batch, kContext, kBytes]
    return F::linear(blocks->forward(tokens(text) + positions), tokens->weight);
  }
  torch::nn::Embedding tokens = nullptr;
  Tensor positions;
  torch::nn::Sequential blocks;
};
TORCH_MODULE(Gpt);

// [batches, kBatch, kContext + 1] of this rank's part of the text: the higher the rank, the more.
Tensor BatchesOf(const std::string& path, int rank, int size) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read; pass --text=FILE");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const int64_t batches = static_cast<int64_t>(text.size()) / (kBatch * (kContext + 1));
  const int64_t parts = int64_t{size} * (size + 1) / 2;
  const int64_t begin = batches * rank * (rank + 1) / 2 / parts;
  const int64_t end = batches * (rank + 1) * (rank + 2) / 2 / parts;
  const Tensor bytes = torch::zeros({batches, kBatch, kContext + 1}, torch::kByte);
  std::copy_n(text.data(), bytes.numel(), reinterpret_cast<char*>(bytes.data_ptr<uint8_t>()));
  return bytes.slice(0, begin, end).to(torch::kLong);
}

void Train(ekt::Group& group, const std::string& text, int epochs, const std::string& checkpoint) {
  torch::manual_seed(1);
  Gpt net;
  ekt::DataParallel ddp(group, net);
  ekt::Optimizer optimizer(ddp, torch::optim::AdamWOptions(3e-3).weight_decay(0.1),
                           {.placement = ekt::Slices{}});
  torch::optim::StepLR schedule(optimizer, 1, 0.7);
  const Tensor batches = BatchesOf(text, group.rank(), group.size());
  for (int epoch = 0; epoch < epochs; ++epoch) {
    Tensor sums = torch::zeros({2}, torch::kDouble);  // Of losses, and of batches.
    ddp.join([&] {
      for (int64_t i = 0; i < batches.size(0); ++i) {
        const Tensor input = batches[i].slice(1, 0, kContext), target = batches[i].slice(1, 1);
        optimizer.zero_grad();
        const Tensor loss = F::cross_entropy(ddp(input).flatten(0, 1), target.flatten());
        loss.backward();
        optimizer.clip_grad_norm(1.0);
        optimizer.step();
        sums += torch::tensor({loss.item<double>(), 1.0}, torch::kDouble);
      }
    });
    schedule.step();
    group.all_reduce(sums);
    if (group.rank() == 0)
      std::printf("epoch %d: loss %.4f, %.0f batches\n", epoch, (sums[0] / sums[1]).item<double>(),
                  sums[1].item<double>());
  }
  if (!checkpoint.empty()) optimizer.save_sharded(checkpoint);
}

int main(int argc, char** argv) {
  std::string text = "README.md", checkpoint;
  int epochs = 2;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--text=", 0) == 0) {
      text = argument.substr(7);
    } else if (argument.rfind("--epochs=", 0) == 0) {
      epochs = std::stoi(argument.substr(9));
    } else if (argument.rfind("--checkpoint=", 0) == 0) {
      checkpoint = argument.substr(13);
    } else {
      std::fprintf(stderr, "usage: gpt [--text=file] [--epochs=N] [--checkpoint=folder]\n");
      return 2;
    }
  }
  torch::set_num_threads(1);  // One per rank.
  return ekt::run([&](ekt::Group& group) { Train(group, text, epochs, checkpoint); });
}
