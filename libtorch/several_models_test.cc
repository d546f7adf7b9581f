// Several models in one loop, as GANs have them, and the forms that a model may have: against one
// process that computes the same sums.

#include <algorithm>
#include <string>
#include <vector>

#include "evenkeel/libtorch.h"
#include "evenkeel/libtorch/internal.h"
#include "evenkeel/libtorch/testing/ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::libtorch {
namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

Sequential NewNet(int inputs, int outputs) {
  torch::manual_seed(10 * inputs + outputs);
  Sequential net(Linear(inputs, 5), torch::nn::Tanh(), Linear(5, outputs));
  net->to(torch::kDouble);
  return net;
}
Sequential NewGenerator() { return NewNet(3, 4); }
Sequential NewDiscriminator() { return NewNet(4, 1); }

Tensor RandomBatch(int rank, int step, int width) {
  torch::manual_seed(1000 * width + 100 * rank + step);
  return torch::randn({4, width}, torch::kDouble);
}
Tensor LossOf(const Tensor& scores, double label) { return (scores - label).square().mean(); }

void RequireClose(const std::vector<Tensor>& got, const std::vector<Tensor>& want,
                  const std::string& what) {
  for (size_t i = 0; i < got.size(); ++i) {
    const double far = (got[i] - want[i]).abs().max().item<double>();
    Require(far < 1e-12,
            what + ": parameter " + std::to_string(i) + " is off by " + std::to_string(far));
  }
}

// The orders of published programs.
enum class Order {
  kOneBackward,    // The discriminator's losses are added.
  kAccumulates,    // DCGAN: a backward for each of its losses.
  kFreezes,        // pix2pix: the discriminator is frozen while the generator trains.
  kForwardTwice,   // The fakes of the generator's step are computed again.
  kCriticIsAhead,  // WGAN: a step of the generator after every other one of the discriminator.
};
constexpr Order kOrders[] = {Order::kOneBackward, Order::kAccumulates, Order::kFreezes,
                             Order::kForwardTwice, Order::kCriticIsAhead};

void Freeze(Sequential& net, bool is_frozen) {
  for (const Tensor& param : net->parameters()) param.set_requires_grad(!is_frozen);
}

// A step of this program on a rank, with calls in place of the modules. `first`: in place of
// no_sync().
struct Calls {
  std::function<Tensor(const Tensor&)> generator, discriminator;
  std::function<std::shared_ptr<void>()> no_sync = [] { return nullptr; };
};

// The rest of the step computes gradients only; the loss of a rank counts by `share`.
void DiscriminatorBackward(Order order, int rank, int step, double share, const Calls& calls,
                           Tensor& fakes) {
  const Tensor noise = RandomBatch(rank, step, 3), real = RandomBatch(rank, step, 4);
  if (order == Order::kAccumulates) {
    {
      const auto accumulating = calls.no_sync();
      (share * LossOf(calls.discriminator(real), 1)).backward();
    }
    fakes = calls.generator(noise);
    (share * LossOf(calls.discriminator(fakes.detach()), 0)).backward();
    return;
  }
  if (order == Order::kFreezes || order == Order::kOneBackward) {
    fakes = calls.generator(noise);
  } else {
    const torch::NoGradGuard no_grad;
    fakes = calls.generator(noise);
  }
  const Tensor of_real = LossOf(calls.discriminator(real), 1);
  (share * (of_real + LossOf(calls.discriminator(fakes.detach()), 0))).backward();
}

void GeneratorBackward(int rank, int step, double share, const Calls& calls, Tensor fakes) {
  if (!fakes.requires_grad()) fakes = calls.generator(RandomBatch(rank, step, 3));
  (share * LossOf(calls.discriminator(fakes), 1)).backward();
}

bool TrainsGenerator(Order order, int step) {
  return order != Order::kCriticIsAhead || step % 2 == 1;
}

struct Models {
  Sequential generator = NewGenerator(), discriminator = NewDiscriminator();
  std::vector<Tensor> parameters() {
    auto all = generator->parameters();
    for (const Tensor& param : discriminator->parameters()) all.push_back(param);
    return all;
  }
};

const auto kAdamW = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
const auto kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

std::vector<Tensor> TrainAlone(Order order, const std::vector<int>& steps) {
  Models models;
  auto& [generator, discriminator] = models;
  torch::optim::AdamW g_optimizer(generator->parameters(), kAdamW);
  torch::optim::SGD d_optimizer(discriminator->parameters(), kSgd);
  const Calls calls{[&](const Tensor& input) { return generator->forward(input); },
                    [&](const Tensor& input) { return discriminator->forward(input); }};
  const int world = static_cast<int>(steps.size());
  for (int step = 0; step < *std::ranges::max_element(steps); ++step) {
    std::vector<Tensor> fakes(world);
    const auto on_each = [&](const auto& backward) {
      for (int rank = 0; rank < world; ++rank)
        if (step < steps[rank]) backward(rank);
    };
    d_optimizer.zero_grad();
    on_each([&](int rank) {
      DiscriminatorBackward(order, rank, step, 1.0 / world, calls, fakes[rank]);
    });
    d_optimizer.step();
    if (!TrainsGenerator(order, step)) continue;
    g_optimizer.zero_grad();
    on_each([&](int rank) { GeneratorBackward(rank, step, 1.0 / world, calls, fakes[rank]); });
    g_optimizer.step();
  }
  return models.parameters();
}

template <class AnyOptimizer, class OtherOptimizer>
void TrainParallel(Order order, int rank, int steps, Sequential& discriminator,
                   DataParallel<Sequential>& g, DataParallel<Sequential>& d,
                   AnyOptimizer& g_optimizer, OtherOptimizer& d_optimizer) {
  const Calls calls{[&](const Tensor& input) { return g(input); },
                    [&](const Tensor& input) { return d(input); },
                    [&] { return std::make_shared<DataParallelBase::NoSync>(d); }};
  const bool used_all = join({&g, &d}, [&] {
    for (int step = 0; step < steps; ++step) {
      Tensor fakes;
      d_optimizer.zero_grad();
      if (order == Order::kFreezes) {  // After the generator's forward, which begins the step.
        fakes = g(RandomBatch(rank, step, 3));
        Freeze(discriminator, false);
        const Tensor of_real = LossOf(d(RandomBatch(rank, step, 4)), 1);
        (of_real + LossOf(d(fakes.detach()), 0)).backward();
      } else {
        DiscriminatorBackward(order, rank, step, 1, calls, fakes);
      }
      d_optimizer.step();
      if (!TrainsGenerator(order, step)) continue;
      if (order == Order::kFreezes) Freeze(discriminator, true);
      g_optimizer.zero_grad();
      GeneratorBackward(rank, step, 1, calls, fakes);
      g_optimizer.step();
    }
  });
  Require(used_all, "all batches are used");
  for (const Tensor& param : discriminator->parameters())
    Require(param.requires_grad() == (order != Order::kFreezes), "it is as the last step left it");
}

void TrainGan(Group& group, Order order, const std::vector<int>& steps,
              const std::optional<Placement>& placement) {
  Models models;
  auto& [generator, discriminator] = models;
  const DataParallelOptions small{.first_bucket_bytes = 64, .bucket_bytes = 128};
  DataParallel g(group, generator, small), d(group, discriminator, small);
  const auto train = [&](auto& g_optimizer, auto& d_optimizer) {
    TrainParallel(order, group.rank(), steps[group.rank()], discriminator, g, d, g_optimizer,
                  d_optimizer);
  };
  if (placement.has_value()) {
    Optimizer g_optimizer(g, kAdamW, {.placement = *placement});
    Optimizer d_optimizer(d, kSgd, {.placement = *placement});
    train(g_optimizer, d_optimizer);
  } else {
    torch::optim::AdamW adamw(generator->parameters(), kAdamW);
    torch::optim::SGD sgd(discriminator->parameters(), kSgd);
    Joined g_optimizer(g, adamw), d_optimizer(d, sgd);
    train(g_optimizer, d_optimizer);
  }
  RequireReplicas(group, *generator);
  RequireReplicas(group, *discriminator);
  std::string what = "order " + std::to_string(static_cast<int>(order)) + " placement " +
                     (placement.has_value() ? std::to_string(placement->index()) : "none") +
                     " steps";
  for (const int count : steps) what += " " + std::to_string(count);
  RequireClose(models.parameters(), TrainAlone(order, steps), what);
}

TEST(SeveralModelsTest, AGanTrainsAsInOneProcess) {
  const std::vector<std::vector<int>> inputs = {{4}, {3, 3}, {2, 5}, {5, 1, 3}, {0, 2, 4}};
  for (const int world : {1, 2, 3}) {
    EXPECT_EQ(RunRanks(world,
                       [&](Group& group) {
                         for (const auto& steps : inputs) {
                           if (static_cast<int>(steps.size()) != world) continue;
                           for (const Order order : kOrders) {
                             TrainGan(group, order, steps, std::nullopt);
                             TrainGan(group, order, steps, Replicated{});
                             TrainGan(group, order, steps, WholeTensors{});
                             TrainGan(group, order, steps, Slices{});
                           }
                         }
                       }),
              AllPass(world));
  }
}

// The critic of a WGAN may have all steps of a short loop.
TEST(SeveralModelsTest, AModelNeedNotTrainInEachLoop) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       TrainGan(group, Order::kCriticIsAhead, {1, 0}, Replicated{});
                       TrainGan(group, Order::kCriticIsAhead, {1, 1}, std::nullopt);
                     }),
            AllPass(2));
}

// Encoder and decoder, or actor and critic: one backward is the end of both models' steps.
TEST(SeveralModelsTest, OneBackwardTrainsTwoModels) {
  const auto loss_of = [](const Tensor& output) { return output.square().mean(); };
  EXPECT_EQ(RunRanks(3,
                     [&](Group& group) {
                       const std::vector<int> steps = {2, 0, 4};
                       Models got, want;
                       DataParallel encoder(group, got.generator);
                       DataParallel decoder(group, got.discriminator);
                       Optimizer first(encoder, kSgd, {.placement = Slices{}});
                       Optimizer second(decoder, kAdamW);
                       join({&decoder, &encoder}, [&] {
                         for (int step = 0; step < steps[group.rank()]; ++step) {
                           first.zero_grad();
                           second.zero_grad();
                           const Tensor input = RandomBatch(group.rank(), step, 3);
                           loss_of(decoder(encoder(input))).backward();
                           first.step();
                           second.step();
                         }
                       });
                       torch::optim::SGD sgd(want.generator->parameters(), kSgd);
                       torch::optim::AdamW adamw(want.discriminator->parameters(), kAdamW);
                       for (int step = 0; step < 4; ++step) {
                         sgd.zero_grad();
                         adamw.zero_grad();
                         for (int rank = 0; rank < 3; ++rank) {
                           if (step >= steps[rank]) continue;
                           const Tensor code = want.generator->forward(RandomBatch(rank, step, 3));
                           (loss_of(want.discriminator->forward(code)) / 3).backward();
                         }
                         sgd.step();
                         adamw.step();
                       }
                       RequireClose(got.parameters(), want.parameters(), "the models");
                     }),
            AllPass(3));
}

// A step that one model begins may bring another one's gradients to other buckets.
TEST(SeveralModelsTest, GradientsFollowStepsOfOtherModels) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 Models models;
                 auto& [generator, discriminator] = models;
                 DataParallel g(group, generator), d(group, discriminator);
                 for (int step = 0; step < 3; ++step) {
                   generator->zero_grad();
                   g(RandomBatch(group.rank(), step, 3)).square().mean().backward();
                   if (step == 1) generator->parameters()[0].set_requires_grad(false);
                   std::vector<Tensor> before;
                   for (const Tensor& param : generator->parameters())
                     before.push_back(param.grad().defined() ? param.grad().clone() : Tensor());
                   d(RandomBatch(group.rank(), step, 4)).square().mean().backward();
                   const auto& set = g.replica()->set;
                   for (int i = 0; i < set.size(); ++i) {
                     const Tensor& grad = generator->parameters()[i].grad();
                     Require(grad.defined() == before[i].defined(), "it is there as before");
                     if (!grad.defined()) continue;
                     RequireSame(grad, before[i], "a gradient");
                     Require(!generator->parameters()[i].requires_grad() ||
                                 grad.data_ptr() == set[i].grad.data,
                             "the gradient is where the library has it");
                   }
                 }
               }),
      AllPass(2));
}

// The second step of the discriminator brings the generator's gradients to other buckets.
TEST(SeveralModelsTest, GradientsFollowStepsOfOtherModelsInAJoin) {
  const std::vector<int> steps = {1, 3};
  const auto train = [&](const std::vector<int>& ranks, auto& g, auto& d, auto& g_optimizer,
                         auto& d_optimizer) {
    const double share = ranks.size() == 1 ? 1 : 0.5;
    for (int step = 0; step < steps[ranks.back()]; ++step) {
      const auto on_each = [&](const auto& loss_of) {
        for (const int rank : ranks)
          if (step < steps[rank]) (share * loss_of(rank)).backward();
      };
      g_optimizer.zero_grad();
      on_each([&](int rank) { return LossOf(g(RandomBatch(rank, step, 3)), 1); });
      for (const int of : {10, 20}) {
        d_optimizer.zero_grad();
        on_each([&](int rank) { return LossOf(d(RandomBatch(rank, of + step, 4)), 1); });
        d_optimizer.step();
      }
      g_optimizer.step();
    }
  };
  EXPECT_EQ(RunRanks(2,
                     [&](Group& group) {
                       Models got, want;
                       const DataParallelOptions small{.first_bucket_bytes = 64,
                                                       .bucket_bytes = 128};
                       DataParallel g(group, got.generator, small);
                       DataParallel d(group, got.discriminator, small);
                       torch::optim::SGD sgd(got.generator->parameters(), kSgd);
                       Joined g_optimizer(g, sgd);
                       Optimizer d_optimizer(d, kSgd);
                       const std::vector<int> own = {group.rank()};
                       join({&g, &d}, [&] { train(own, g, d, g_optimizer, d_optimizer); });
                       torch::optim::SGD g_alone(want.generator->parameters(), kSgd);
                       torch::optim::SGD d_alone(want.discriminator->parameters(), kSgd);
                       auto g_of = [&](const Tensor& x) { return want.generator->forward(x); };
                       auto d_of = [&](const Tensor& x) { return want.discriminator->forward(x); };
                       train({0, 1}, g_of, d_of, g_alone, d_alone);
                       RequireReplicas(group, *got.generator);
                       RequireClose(got.parameters(), want.parameters(), "the models");
                     }),
            AllPass(2));
}

TEST(SeveralModelsTest, AFunctionAfterAStepMayChangeAnotherModel) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Models models;
                       DataParallel g(group, models.generator), d(group, models.discriminator);
                       Optimizer g_optimizer(g, kSgd), d_optimizer(d, kSgd);
                       g_optimizer.after_step([&] {
                         for (Tensor& param : models.discriminator->parameters())
                           param.clamp_(-0.1, 0.1);
                       });
                       join({&g, &d}, [&] {
                         for (int step = 0; step < 1 + 2 * group.rank(); ++step) {
                           g_optimizer.zero_grad();
                           d_optimizer.zero_grad();
                           LossOf(d(g(RandomBatch(group.rank(), step, 3))), 1).backward();
                           d_optimizer.step();
                           g_optimizer.step();
                         }
                       });
                       RequireReplicas(group, *models.generator);
                       RequireReplicas(group, *models.discriminator);
                     }),
            AllPass(2));
}

TEST(SeveralModelsTest, WhatAJoinLacksIsNamed) {
  EXPECT_EQ(RunRanks(1,
                     [](Group& group) {
                       Models models;
                       DataParallel g(group, models.generator), d(group, models.discriminator);
                       Optimizer optimizer(g, kSgd);
                       RequireError([&] { join({}, [] {}); }, "join() needs a DataParallel");
                       RequireError(
                           [&] {
                             join({&g, &d}, [] {});
                           },
                           "each DataParallel, but that with \"0.weight\" has none");
                       RequireError([&] { join({&g, &g}, [] {}); }, "more than once");
                       Optimizer of_other(d, kSgd);
                       g.join([&] {
                         for (DataParallelBase* model : {&g, &d})
                           RequireError([&] { model->join([] {}); },
                                        "join() was called in the loop of a join()");
                       });
                       d.join([] {});
                     }),
            AllPass(1));
  const Endings endings = RunRanks(2, [](Group& group) {
    Models models;
    DataParallel g(group, models.generator), d(group, models.discriminator);
    Optimizer g_optimizer(g, kSgd), d_optimizer(d, kSgd);
    g.join([&] { d(RandomBatch(group.rank(), 0, 4)).sum().backward(); });
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending, testing::HasSubstr("data_parallel#1 on rank "));
  EXPECT_THAT(endings[0] + endings[1], testing::HasSubstr("or pass it to the join, too"));
}

TEST(SeveralModelsTest, AForwardThatIsLeftNamesItsModel) {
  const Endings endings = RunRanks(1, [](Group& group) {
    Models models;
    DataParallel g(group, models.generator), d(group, models.discriminator);
    Optimizer g_optimizer(g, kSgd), d_optimizer(d, kSgd);
    join({&g, &d}, [&] {
      const Tensor fakes = g(RandomBatch(0, 0, 3));
      d(fakes.detach()).sum().backward();
      d_optimizer.step();
    });
  });
  EXPECT_THAT(endings[0], testing::AllOf(testing::HasSubstr("data_parallel#0"),
                                         testing::HasSubstr("forward under NoGradGuard")));
}

// ---- The forms of a model ----

// As PyTorch's own examples have it: a module that no shared_ptr owns.
struct OnStack : torch::nn::Module {
  OnStack() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 4).sparse(true)));
    norm = register_module("norm", SyncBatchNorm(torch::nn::BatchNormOptions(4)));
    last = register_module("last", Linear(4, 2));
    to(torch::kDouble);
  }
  Tensor encode(const Tensor& rows) { return norm(table(rows)); }
  Tensor forward(const Tensor& rows) { return last(encode(rows)); }
  torch::nn::Embedding table = nullptr;
  SyncBatchNorm norm = nullptr;
  Linear last = nullptr;
};

template <class Forward>
void TrainOnStack(Group& group, OnStack& model, const Forward& forward) {
  DataParallel ddp(group, model);
  static_assert(std::is_same_v<decltype(ddp), DataParallel<OnStack>>);
  Require(&ddp.module() == &model, "it is the module, and not a copy");
  Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = Replicated{}});
  ddp.join([&] {
    for (int step = 0; step < 3 - group.rank(); ++step) {
      optimizer.zero_grad();
      torch::manual_seed(10 * group.rank() + step);
      forward(ddp, torch::randint(6, {8})).square().sum().backward();
      optimizer.step();
    }
  });
  RequireReplicas(group, model);
}

TEST(ModelsTest, AModelMayBeOnTheStack) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       torch::manual_seed(group.rank());
                       OnStack model;
                       const Tensor before = model.last->weight.detach().clone();
                       TrainOnStack(group, model,
                                    [](auto& ddp, const Tensor& rows) { return ddp(rows); });
                       Require(!torch::equal(before, model.last->weight), "it is trained");
                     }),
            AllPass(2));
}

// The example of the docs.
TEST(ModelsTest, AModelMayTrainByAnyOfItsMethods) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       OnStack model;
                       model.last->weight.set_requires_grad(false);
                       model.last->bias.set_requires_grad(false);
                       const Tensor before = model.table->weight.detach().clone();
                       TrainOnStack(group, model, [](auto& ddp, const Tensor& rows) {
                         return ddp.call([&](OnStack& net) { return net.encode(rows); });
                       });
                       Require(!torch::equal(before, model.table->weight), "it is trained");
                       Sequential net = NewGenerator();
                       DataParallel ddp(group, net, {.find_unused = true});
                       ddp.call([&](Sequential& net) {
                            return net[0]->as<Linear>()->forward(RandomBatch(0, 0, 3));
                          })
                           .sum()
                           .backward();
                       Require(!net->parameters()[2].grad().defined(), "the rest is not reached");
                     }),
            AllPass(2));
}

}  // namespace
}  // namespace evenkeel::libtorch
