// BalancedSampler: the parameters of one process that has the global batches.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <thread>
#include <vector>

#include "evenkeel/libtorch.h"
#include "evenkeel/libtorch/testing/ranks.h"
#include "gtest/gtest.h"

namespace evenkeel::libtorch {
namespace {

using torch::Tensor;
using torch::nn::Linear;

constexpr int64_t kSamples = 250, kBatch = 48;
// Beside other programs shares may move late.
constexpr int64_t kMostEpochs = 60, kEpochsAfterAMove = 3;

using Example = torch::data::Example<>;

class Rows : public torch::data::Dataset<Rows> {
 public:
  Example get(size_t index) override {
    const double x = static_cast<double>(index) / kSamples;
    return {torch::tensor({x, 1 - x, x * x}, torch::kDouble),
            torch::tensor({std::sin(7 * x)}, torch::kDouble)};
  }
  std::optional<size_t> size() const override { return kSamples; }
};

Linear NewNet() {
  torch::manual_seed(1);
  Linear net(3, 1);
  net->to(torch::kDouble);
  return net;
}

torch::optim::SGDOptions Rule() { return torch::optim::SGDOptions(0.1).momentum(0.9); }

// The parameters of one process.
std::vector<Tensor> Alone(uint64_t seed, int64_t epochs) {
  Linear net = NewNet();
  torch::optim::SGD optimizer(net->parameters(), Rule());
  Rows rows;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(seed + epoch);
    const Tensor order = torch::randperm(kSamples, generator, torch::TensorOptions(torch::kInt64));
    for (int64_t first = 0; first < kSamples; first += kBatch) {
      std::vector<Tensor> data, target;
      for (int64_t i = first; i < std::min(first + kBatch, kSamples); ++i) {
        Example row = rows.get(order[i].item<int64_t>());
        data.push_back(row.data);
        target.push_back(row.target);
      }
      optimizer.zero_grad();
      torch::mse_loss(net(torch::stack(data)), torch::stack(target)).backward();
      optimizer.step();
    }
  }
  return net->parameters();
}

auto LoaderOf(const BalancedSampler& sampler, size_t workers = 0, size_t batch = kBatch) {
  return torch::data::make_data_loader(Rows().map(torch::data::transforms::Stack<>()), sampler,
                                       torch::data::DataLoaderOptions(batch).workers(workers));
}

// Trains an epoch in which rank 0 computes three times as long as the others.
void Train(Group& group, DataParallel<Linear>& ddp, Optimizer& optimizer,
           const BalancedSampler& sampler) {
  const auto loader = LoaderOf(sampler);
  ddp.join(
      [&] {
        for (auto& batch : *loader) {
          optimizer.zero_grad();
          const Tensor outputs = ddp(batch.data);
          std::this_thread::sleep_for(std::chrono::microseconds(300) * batch.data.size(0) *
                                      (group.rank() == 0 ? 3 : 1));
          torch::mse_loss(outputs, batch.target, torch::Reduction::Sum).backward();
          optimizer.step();
        }
      },
      {.divide_by = DivideBy::kSamples});
}

void TestAgainstOneProcess(Group& group, const Placement& placement) {
  Linear net = NewNet();
  DataParallel ddp(group, net);
  Optimizer optimizer(ddp, Rule(), {.placement = placement});
  BalancedSampler sampler(group, kSamples, {.batch = kBatch, .seed = 5});
  int64_t after = 0;
  while (after < kEpochsAfterAMove && sampler.epoch() < kMostEpochs) {
    Train(group, ddp, optimizer, sampler);
    if (sampler.shares()[0] < kBatch / group.size()) ++after;
  }
  Require(after == kEpochsAfterAMove, "the slow rank has fewer samples");
  Require(!sampler.news().empty() && sampler.news().empty(), "changes are news once");
  const std::vector<Tensor> expected = Alone(5, sampler.epoch());
  for (size_t i = 0; i < expected.size(); ++i) {
    const double far = (net->parameters()[i] - expected[i]).abs().max().item<double>();
    Require(far <= 1e-9, "parameters are those of one process: " + std::to_string(far));
  }
}

TEST(BalancedSampler, TrainsAsOneProcessDoes) {
  for (const int world : {2, 3}) {
    for (const Placement& placement : {Placement(Replicated{}), Placement(Slices{})}) {
      EXPECT_EQ(RunRanks(world, [&](Group& group) { TestAgainstOneProcess(group, placement); }),
                AllPass(world));
    }
  }
}

TEST(BalancedSampler, EachSampleOfAnEpochIsThereOnceAlsoAfterLoad) {
  const auto test = [](Group& group) {
    Linear net = NewNet();
    DataParallel ddp(group, net);
    Optimizer optimizer(ddp, Rule());
    const auto used_in = [&](BalancedSampler& sampler, int batches) {
      Tensor used = torch::zeros(kSamples);
      ddp.join(
          [&] {
            for (int i = 0; i < batches; ++i) {
              const auto indices = sampler.next(kBatch);
              if (!indices.has_value()) return;
              for (const size_t index : *indices) used[index] += 1;
              optimizer.zero_grad();
              ddp(torch::ones({1, 3}, torch::kDouble)).sum().backward();
              optimizer.step();
            }
          },
          {.divide_by = DivideBy::kSamples});
      group.all_reduce(used);
      return used;
    };
    const auto as_loaded = [](torch::serialize::OutputArchive& saved) {
      std::stringstream bytes;
      saved.save_to(bytes);
      torch::serialize::InputArchive archive;
      archive.load_from(bytes);
      return archive;
    };
    {
      BalancedSampler sampler(group, kSamples, {.batch = kBatch});
      torch::serialize::OutputArchive before_training;
      sampler.save(before_training);
      torch::serialize::InputArchive archive = as_loaded(before_training);
      sampler.load(archive);
      sampler.reset();
      Require(used_in(sampler, 100).eq(1).all().item<bool>(), "the first epoch is whole");
      Require(sampler.epoch() == 1, "one epoch was used");
    }
    torch::serialize::OutputArchive saved;
    Tensor used;
    {
      BalancedSampler sampler(group, kSamples, {.batch = kBatch});
      sampler.reset();
      Require(used_in(sampler, 100).eq(1).all().item<bool>(), "an epoch has each sample once");
      sampler.reset();
      used = used_in(sampler, 2);
      Require(used.sum().item<int64_t>() == 2 * kBatch, "two batches were used");
      sampler.save(saved);
    }
    torch::serialize::InputArchive archive = as_loaded(saved);
    {
      BalancedSampler other(group, kSamples, {.batch = kBatch, .seed = 1});
      RequireError([&] { other.load(archive); }, "with seed 0, and this one has 1");
    }
    BalancedSampler sampler(group, kSamples, {.batch = kBatch});
    Require(sampler.epoch() == 0, "no epoch was used");
    sampler.load(archive);
    Require(sampler.epoch() == 1, "one epoch was used before");
    sampler.reset();
    used += used_in(sampler, 100);
    Require(used.eq(1).all().item<bool>(), "a resumed epoch has the samples that were left");
    Require(sampler.epoch() == 2, "two epochs were used");
  };
  for (const int world : {1, 3}) EXPECT_EQ(RunRanks(world, test), AllPass(world));
}

TEST(BalancedSampler, RefusesOtherLoadersAndLoops) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 RequireError([&] { BalancedSampler(group, 100 + group.rank(), {.batch = 10}); },
                              "size");
                 RequireError([&] { BalancedSampler(group, 100, {.batch = 1}); }, "batch");
                 Linear net = NewNet();
                 DataParallel ddp(group, net);
                 Optimizer optimizer(ddp, Rule());
                 BalancedSampler sampler(group, kSamples, {.batch = kBatch});
                 sampler.reset();
                 RequireError([&] { sampler.next(kBatch / 2); }, "the loader's batch size is 24");
                 RequireError([&] { sampler.next(kBatch); }, "RunJoined()");
                 const JoinOptions options = {.divide_by = DivideBy::kSamples};
                 ddp.join(
                     [&] {
                       RequireError([&] { LoaderOf(sampler, 1)->begin(); }, "was not used");
                       optimizer.zero_grad();
                       ddp(torch::ones({1, 3}, torch::kDouble)).sum().backward();
                       optimizer.step();
                     },
                     options);
               }),
      AllPass(2));
}

}  // namespace
}  // namespace evenkeel::libtorch
