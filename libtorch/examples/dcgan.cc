// Trains a DCGAN, two models in one loop, on unequal parts of Fashion-MNIST.
//
//   dcgan --data=fashion --images=6000 --epochs=2        # in each rank
//
// `data`: a folder with train-images-idx3-ubyte and the other three files, unpacked.

#include <cstdio>
#include <string>

#include "evenkeel/libtorch.h"

namespace ekt = evenkeel::libtorch;
namespace F = torch::nn::functional;
using torch::Tensor;
using torch::nn::BatchNorm2d;
using torch::nn::Conv2d;
using torch::nn::ConvTranspose2d;
using torch::nn::LeakyReLU;
using torch::nn::Sequential;

constexpr int kNoise = 32, kBatch = 50;

auto Halved(int inputs, int outputs, int kernel) {
  return torch::nn::Conv2dOptions(inputs, outputs, kernel).stride(2).padding(1).bias(false);
}

Sequential NewGenerator() {  // [batch, kNoise, 1, 1] -> [batch, 1, 28, 28]
  const auto first = torch::nn::ConvTranspose2dOptions(kNoise, 64, 4).bias(false);
  const auto scaled = [](int inputs, int outputs, int kernel) {
    return torch::nn::ConvTranspose2dOptions(inputs, outputs, kernel).stride(2).padding(1);
  };
  return Sequential(ConvTranspose2d(first), BatchNorm2d(64), torch::nn::ReLU(),
                    ConvTranspose2d(scaled(64, 32, 3)), BatchNorm2d(32), torch::nn::ReLU(),
                    ConvTranspose2d(scaled(32, 16, 4)), BatchNorm2d(16), torch::nn::ReLU(),
                    ConvTranspose2d(scaled(16, 1, 4)), torch::nn::Sigmoid());
}

Sequential NewDiscriminator() {  // [batch, 1, 28, 28] -> [batch]
  const auto leaky = torch::nn::LeakyReLUOptions().negative_slope(0.2);
  return Sequential(Conv2d(Halved(1, 16, 4)), LeakyReLU(leaky), Conv2d(Halved(16, 32, 4)),
                    BatchNorm2d(32), LeakyReLU(leaky), Conv2d(Halved(32, 64, 3)), BatchNorm2d(64),
                    LeakyReLU(leaky), Conv2d(torch::nn::Conv2dOptions(64, 1, 4)),
                    torch::nn::Flatten(torch::nn::FlattenOptions().start_dim(0)));
}

// This rank's part of the first `count` images: the higher the rank, the more.
Tensor ImagesOf(const std::string& folder, int64_t count, int rank, int size) {
  const int64_t parts = int64_t{size} * (size + 1) / 2;
  return torch::data::datasets::MNIST(folder).images().slice(
      0, count * rank * (rank + 1) / 2 / parts, count * (rank + 1) * (rank + 2) / 2 / parts);
}

Tensor LossOf(const Tensor& scores, double label) {
  return F::binary_cross_entropy_with_logits(scores, torch::full_like(scores, label));
}

void Train(ekt::Group& group, const std::string& folder, int64_t count, int epochs) {
  torch::manual_seed(1);
  Sequential generator = NewGenerator(), discriminator = NewDiscriminator();
  ekt::DataParallel g(group, generator), d(group, discriminator);
  const auto rule = torch::optim::AdamOptions(2e-3).betas({0.5, 0.999});
  ekt::Optimizer g_optimizer(g, rule), d_optimizer(d, rule, {.placement = ekt::WholeTensors{}});
  const Tensor images = ImagesOf(folder, count, group.rank(), group.size());
  torch::manual_seed(2 + group.rank());  // Each rank has noise of its own.
  for (int epoch = 0; epoch < epochs; ++epoch) {
    auto loader = torch::data::make_data_loader(
        torch::data::datasets::TensorDataset(images).map(
            torch::data::transforms::Stack<torch::data::TensorExample>()),
        torch::data::samplers::RandomSampler(images.size(0)), kBatch);
    Tensor sums = torch::zeros({3}, torch::kDouble);  // Of both losses, and of batches.
    ekt::join({&g, &d}, [&] {
      for (auto& batch : *loader) {
        // The discriminator, by images and by fakes.
        d_optimizer.zero_grad();
        const Tensor real_loss = LossOf(d(batch.data), 1);
        const Tensor fakes = g(torch::randn({batch.data.size(0), kNoise, 1, 1}));
        const Tensor d_loss = real_loss + LossOf(d(fakes.detach()), 0);
        d_loss.backward();
        d_optimizer.step();
        // The generator. What it gives the discriminator is cleared before that one's next step.
        g_optimizer.zero_grad();
        const Tensor g_loss = LossOf(d(fakes), 1);
        g_loss.backward();
        g_optimizer.step();
        sums += torch::tensor({d_loss.item<double>(), g_loss.item<double>(), 1.0}, torch::kDouble);
      }
    });
    group.all_reduce(sums);
    const torch::NoGradGuard no_grad;
    const Tensor fakes = generator->forward(torch::randn({256, kNoise, 1, 1}));
    const Tensor mean = torch::stack({fakes.mean(0), images.mean(0)});
    group.all_reduce(mean, ekt::Reduce::kAverage);
    if (group.rank() == 0)
      std::printf("epoch %d: losses %.3f and %.3f, the mean fake is off by %.3f\n", epoch,
                  (sums[0] / sums[2]).item<double>(), (sums[1] / sums[2]).item<double>(),
                  (mean[0] - mean[1]).abs().mean().item<double>());
  }
}

int main(int argc, char** argv) {
  std::string data = "fashion";
  int64_t images = 6000;
  int epochs = 2;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.rfind("--data=", 0) == 0) {
      data = text.substr(7);
    } else if (text.rfind("--images=", 0) == 0) {
      images = std::stoll(text.substr(9));
    } else if (text.rfind("--epochs=", 0) == 0) {
      epochs = std::stoi(text.substr(9));
    } else {
      std::fprintf(stderr, "usage: dcgan [--data=folder] [--images=N] [--epochs=N]\n");
      return 2;
    }
  }
  torch::set_num_threads(1);  // One per rank.
  return ekt::run([&](ekt::Group& group) { Train(group, data, images, epochs); });
}
