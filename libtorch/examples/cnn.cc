// Trains a convolutional network with BatchNorm on Fashion-MNIST.
//
//   cnn --data=fashion --epochs=1 --out=net.pt        # in each rank
//
// `data`: a folder with train-images-idx3-ubyte and the other three files, unpacked.

#include <cstdio>
#include <string>

#include "evenkeel/libtorch.h"

namespace ekt = evenkeel::libtorch;
namespace F = torch::nn::functional;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    features = register_module(
        "features",
        torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).stride(2)),
                              torch::nn::BatchNorm2d(16), torch::nn::ReLU(),
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 5).stride(2)),
                              torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::Flatten()));
    classes = register_module("classes", torch::nn::Linear(32 * 4 * 4, 10));
  }
  torch::Tensor forward(const torch::Tensor& images) { return classes(features->forward(images)); }
  torch::nn::Sequential features;
  torch::nn::Linear classes = nullptr;
};
TORCH_MODULE(Net);

auto Load(const std::string& folder, torch::data::datasets::MNIST::Mode mode) {
  return torch::data::datasets::MNIST(folder, mode)
      .map(torch::data::transforms::Normalize<>(0.286, 0.353))
      .map(torch::data::transforms::Stack<>());
}

double Accuracy(ekt::Group& group, Net& net, const std::string& folder) {
  auto data = Load(folder, torch::data::datasets::MNIST::Mode::kTest);
  const size_t size = data.size().value();
  auto loader = torch::data::make_data_loader(
      std::move(data),
      torch::data::samplers::DistributedSequentialSampler(size, group.size(), group.rank(),
                                                          /*allow_duplicates=*/false),
      256);
  const torch::NoGradGuard no_grad;
  net->eval();
  torch::Tensor right = torch::zeros({1}, torch::kDouble);
  for (auto& batch : *loader) right += net(batch.data).argmax(1).eq(batch.target).sum();
  net->train();
  group.all_reduce(right);
  return right.item<double>() / static_cast<double>(size);
}

void Train(ekt::Group& group, const std::string& folder, int epochs, const std::string& out) {
  torch::manual_seed(1);
  Net net;
  ekt::DataParallel ddp(group, net);
  ekt::Optimizer optimizer(ddp, torch::optim::AdamWOptions(1e-3));
  const auto data = Load(folder, torch::data::datasets::MNIST::Mode::kTrain);
  torch::data::samplers::DistributedRandomSampler sampler(data.size().value(), group.size(),
                                                          group.rank(), /*allow_duplicates=*/false);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    auto loader = torch::data::make_data_loader(data, sampler, 64);
    ddp.join([&] {  // A rank may have a batch more.
      for (auto& batch : *loader) {
        optimizer.zero_grad();
        F::cross_entropy(ddp(batch.data), batch.target).backward();
        optimizer.step();
      }
    });
    const double accuracy = Accuracy(group, net, folder);
    if (group.rank() == 0) std::printf("epoch %d: accuracy %.4f\n", epoch, accuracy);
  }
  if (group.rank() == 0 && !out.empty()) torch::save(net, out);
}

int main(int argc, char** argv) {
  std::string data = "fashion", out;
  int epochs = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.rfind("--data=", 0) == 0) {
      data = text.substr(7);
    } else if (text.rfind("--epochs=", 0) == 0) {
      epochs = std::stoi(text.substr(9));
    } else if (text.rfind("--out=", 0) == 0) {
      out = text.substr(6);
    } else {
      std::fprintf(stderr, "usage: cnn [--data=folder] [--epochs=N] [--out=file]\n");
      return 2;
    }
  }
  torch::set_num_threads(1);  // One per rank.
  return ekt::run([&](ekt::Group& group) { Train(group, data, epochs, out); });
}
