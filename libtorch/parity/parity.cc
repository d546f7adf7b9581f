// Trains a model with DataParallel, and writes what became of it, for parity.py, which trains the
// same model with PyTorch's own.
//
//   parity --model=cnn --steps=2000 --out=/tmp/cnn     # in each rank
//
// Rank 0 writes the bytes of all parameters and buffers.

#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "evenkeel/libtorch.h"

namespace {

namespace ekt = evenkeel::libtorch;
namespace F = torch::nn::functional;
using torch::Tensor;

struct Net : torch::nn::Module {
  virtual Tensor loss(const Tensor& input, int step, int rank) = 0;
  virtual Tensor batch() = 0;
  // DataParallel's forward.
  Tensor forward(const Tensor& input, int step, int rank) { return loss(input, step, rank); }
};

struct Mlp : Net {
  explicit Mlp(bool skips) : skips(skips) {
    first = register_module("first", torch::nn::Linear(20, 64));
    second = register_module("second", torch::nn::Linear(64, 64));
    third = register_module("third", torch::nn::Linear(64, 10));
  }
  Tensor batch() override { return torch::randn({8, 20}); }
  Tensor loss(const Tensor& input, int step, int rank) override {
    Tensor hidden = torch::relu(first(input));
    if (!skips || (step + rank) % 3 != 0) hidden = torch::relu(second(hidden));
    return third(hidden).square().mean();
  }
  const bool skips;
  torch::nn::Linear first = nullptr, second = nullptr, third = nullptr;
};

struct Cnn : Net {
  Cnn() {
    first =
        register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    second =
        register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).padding(1)));
    last = register_module("last", torch::nn::Linear(8, 10));
  }
  Tensor batch() override { return torch::randn({4, 3, 8, 8}); }
  Tensor loss(const Tensor& input, int, int) override {
    const Tensor hidden = torch::relu(second(torch::relu(norm(first(input)))));
    return last(hidden.mean({2, 3})).square().mean();
  }
  torch::nn::Conv2d first = nullptr, second = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  torch::nn::Linear last = nullptr;
};

struct Gpt : Net {
  Gpt() {
    words = register_module("words", torch::nn::Embedding(50, 32));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    queries = register_module("queries", torch::nn::Linear(32, 96));
    out = register_module("out", torch::nn::Linear(32, 32));
  }
  Tensor batch() override { return torch::randint(50, {4, 12}, torch::kLong); }
  Tensor loss(const Tensor& input, int, int) override {
    const Tensor hidden = words(input);
    const auto parts = queries(norm(hidden)).chunk(3, -1);
    const Tensor scores = torch::matmul(parts[0], parts[1].transpose(1, 2)) * 0.1;
    const Tensor mixed = hidden + out(torch::matmul(torch::softmax(scores, -1), parts[2]));
    const Tensor logits = F::linear(mixed, words->weight);  // Tied.
    return F::cross_entropy(logits.reshape({-1, 50}), input.reshape({-1}));
  }
  torch::nn::Embedding words = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear queries = nullptr, out = nullptr;
};

std::shared_ptr<Net> NewNet(const std::string& model) {
  std::shared_ptr<Net> net;
  if (model == "cnn" || model == "channels_last") net = std::make_shared<Cnn>();
  if (model == "gpt") net = std::make_shared<Gpt>();
  if (net == nullptr) net = std::make_shared<Mlp>(model == "unused");
  torch::manual_seed(1);
  const torch::NoGradGuard no_grad;
  for (Tensor& param : net->parameters()) {
    param.copy_(torch::randn(param.sizes()) * 0.1);
    if (model == "channels_last" && param.dim() == 4)
      param.set_data(param.contiguous(torch::MemoryFormat::ChannelsLast));
  }
  return net;
}

void Write(const torch::nn::Module& net, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  const auto write = [&](const Tensor& tensor) {
    const Tensor flat = tensor.detach().contiguous();
    file.write(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
  };
  for (const Tensor& tensor : net.parameters()) write(tensor);
  for (const Tensor& tensor : net.buffers()) write(tensor);
}

void Train(ekt::Group& group, const std::string& model, int steps, const std::string& out) {
  const std::shared_ptr<Net> net = NewNet(model);
  ekt::DataParallel ddp(group, net,
                        {.find_unused = model == "unused" || model == "freeze",
                         .first_bucket_bytes = 1000,
                         .bucket_bytes = 5000});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    if (model == "freeze") net->parameters()[2].requires_grad_(step / 50 % 2 == 0);
    optimizer.zero_grad();
    const auto backward = [&](int part) {
      torch::manual_seed(1000 * (step + 1) + 10 * group.rank() + part);
      Tensor input = net->batch();
      if (model == "channels_last") input = input.contiguous(torch::MemoryFormat::ChannelsLast);
      ddp(input, step, group.rank()).backward();
    };
    if (model == "accumulate") {
      const auto accumulating = ddp.no_sync();
      backward(1);
    }
    backward(0);
    optimizer.step();
  }
  if (group.rank() == 0) Write(*net, out);
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    if (text.rfind("--", 0) != 0 || equals == std::string::npos) {
      std::fprintf(stderr, "parity: expected --name=value, got %s\n", argv[i]);
      return 2;
    }
    flags[text.substr(2, equals - 2)] = text.substr(equals + 1);
  }
  torch::set_num_threads(1);
  return ekt::run([&](ekt::Group& group) {
    Train(group, flags["model"], std::stoi(flags["steps"]), flags["out"]);
  });
}
