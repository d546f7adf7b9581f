// Where a step begins and ends: the table of libtorch.h, a test per row. And the kinds of
// gradients.

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
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

const DataParallelOptions kSmallBuckets{.first_bucket_bytes = 64, .bucket_bytes = 256};
DataParallelOptions FindUnused() {
  DataParallelOptions options = kSmallBuckets;
  options.find_unused = true;
  return options;
}

// A model whose gradient is its input: the average over the ranks can be read off.
struct ScalesImpl : torch::nn::Module {
  explicit ScalesImpl(int count = 3) {
    for (int i = 0; i < count; ++i)
      scales.push_back(register_parameter("scale" + std::to_string(i), torch::ones({4})));
  }
  Tensor forward(const Tensor& input, std::vector<int> used = {0, 1, 2}) {
    Tensor sum = torch::zeros({});
    for (const int i : used) sum = sum + (scales.at(i) * input).sum();
    return sum;
  }
  std::vector<Tensor> scales;
};
TORCH_MODULE(Scales);

Tensor InputOf(int rank) { return torch::full({4}, rank + 1.0); }
Tensor MeanInput(const Group& group) { return torch::full({4}, (group.size() + 1) / 2.0); }

class Worlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(All, Worlds, testing::Values(1, 2, 3, 5));

TEST_P(Worlds, TheEndOfBackwardIsTheAverageOverTheRanks) {
  EXPECT_EQ(RunRanks(GetParam(),
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       for (int step = 0; step < 3; ++step) {
                         net->zero_grad();
                         ddp(InputOf(group.rank())).backward();
                         for (const Tensor& scale : net->scales)
                           RequireSame(scale.grad(), MeanInput(group), "the gradient");
                       }
                     }),
            AllPass(GetParam()));
}

TEST_P(Worlds, ParametersAndBuffersAreThoseOfRank0) {
  EXPECT_EQ(RunRanks(GetParam(),
                     [](Group& group) {
                       torch::manual_seed(group.rank());
                       Sequential net(Linear(3, 4), torch::nn::BatchNorm1d(4));
                       DataParallel ddp(group, net);
                       RequireReplicas(group, *net);
                       for (int step = 0; step < 2; ++step) {
                         const Tensor before = torch::randn({5, 3});
                         ddp(before).sum().backward();
                       }
                       // The buffers of the last step are each rank's own, until the next begins.
                       ddp.begin();
                       for (const auto& buffer : net->buffers()) {
                         Tensor first = buffer.clone();
                         group.broadcast(first);
                         RequireSame(buffer, first, "a buffer");
                       }
                       ddp(torch::randn({5, 3})).sum().backward();
                     }),
            AllPass(GetParam()));
}

TEST(StepsTest, TwoForwardsBeforeOneBackwardAreOneStep) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       for (int step = 0; step < 2; ++step) {
                         net->zero_grad();
                         const Tensor input = InputOf(group.rank());
                         (ddp(input) + ddp(input)).backward();
                         RequireSame(net->scales[0].grad(), 2 * MeanInput(group), "the gradient");
                       }
                     }),
            AllPass(2));
}

TEST(StepsTest, ForwardUnderNoGradOrInEvaluationModeBeginsNone) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       for (int step = 0; step < 2; ++step) {
                         if (group.rank() == 0) {
                           const torch::NoGradGuard no_grad;
                           ddp(InputOf(0));
                           Require(!ddp.replica()->is_open(), "no step has begun");
                         }
                         if (group.rank() == 1) {
                           net->eval();
                           ddp(InputOf(1));
                           Require(!ddp.replica()->is_open(), "no step has begun");
                           net->train();
                         }
                         net->zero_grad();
                         ddp(InputOf(group.rank())).backward();
                         RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
                       }
                     }),
            AllPass(2));
}

TEST(StepsTest, BackwardInEvaluationModeBeginsAStepLate) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       net->eval();
                       for (int step = 0; step < 3; ++step) {
                         net->zero_grad(/*set_to_none=*/step == 1);
                         ddp(InputOf(group.rank())).backward();
                         for (const Tensor& scale : net->scales)
                           RequireSame(scale.grad(), MeanInput(group), "the gradient");
                       }
                     }),
            AllPass(2));
}

TEST(StepsTest, AForwardWithoutBackwardLeavesTheStepToTheNextForward) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       for (int step = 0; step < 2; ++step) {
                         net->zero_grad();
                         if (group.rank() == 1) ddp(InputOf(7));  // Its loss is skipped.
                         ddp(InputOf(group.rank())).backward();
                         RequireSame(net->scales[2].grad(), MeanInput(group), "the gradient");
                       }
                     }),
            AllPass(2));
}

TEST(StepsTest, TheOptimizerEndsAStepWithoutBackward) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(1.0));
                       for (int step = 0; step < 2; ++step) {
                         optimizer.zero_grad();
                         const Tensor loss = ddp(InputOf(group.rank()));
                         if (group.rank() == 0) loss.backward();
                         optimizer.step();
                         // Half of rank 0's gradient, which is 1.
                         RequireSame(net->scales[0], torch::full({4}, 1 - 0.5 * (step + 1)),
                                     "the value");
                       }
                       RequireReplicas(group, *net);
                     }),
            AllPass(2));
}

// Where and how a program clears gradients.
struct Clearing {
  enum Where { kBeforeForward, kBeforeBackward, kAfterBackward } where;
  enum How { kOptimizer, kLoop, kZeros } how;

  template <class AnyOptimizer>
  void Clear(torch::nn::Module& net, AnyOptimizer& optimizer) const {
    if (how == kOptimizer) optimizer.zero_grad();
    if (how == kZeros) net.zero_grad(/*set_to_none=*/false);
    for (const Tensor& param : net.parameters())
      if (how == kLoop) param.mutable_grad().reset();
  }
};

struct ClearingRun {
  Clearing clearing;
  bool find_unused;
  std::vector<int> ranks;  // Those whose batches this process has.
  double weight;           // Of each of their losses.
};

torch::optim::SGDOptions ClearingRule() {
  return torch::optim::SGDOptions(0.002).momentum(0.5).weight_decay(0.1);
}

Scales ClearingNet() {
  Scales net;
  net->to(torch::kDouble);
  return net;
}

// A backward is skipped by all ranks, then by one; with `find_unused` others reach some parameters;
// one parameter is frozen for a step; one step accumulates.
template <class Model, class AnyOptimizer, class NoSync>
void TrainClearing(const ClearingRun& run, Scales& net, Model& model, AnyOptimizer& optimizer,
                   const NoSync& no_sync) {
  const auto used = [&](int rank, int step) {
    if (!run.find_unused || step == 0 || step == 7) return std::vector<int>{0, 1, 2};
    if (step == 1 || step == 5) return std::vector<int>{0};
    return step == 4 && rank > 0 ? std::vector<int>{2} : std::vector<int>{0, 1};
  };
  const auto clear = [&](Clearing::Where where) {
    if (run.clearing.where == where) run.clearing.Clear(*net, optimizer);
  };
  const auto backward = [&](int step) {
    std::vector<std::pair<int, Tensor>> losses;
    for (const int rank : run.ranks) {
      const Tensor input = torch::full({4}, 1 + 0.1 * rank + 0.3 * step, torch::kDouble);
      losses.emplace_back(rank, model(input, used(rank, step)).square() * run.weight);
    }
    clear(Clearing::kBeforeBackward);
    for (const auto& [rank, loss] : losses)
      if (step != 2 && (step != 3 || rank != 1)) loss.backward();
  };
  for (int step = 0; step < 7; ++step) {
    // With a gradient, zeros included, torch's optimizers would go on to change it.
    if (run.clearing.where != Clearing::kAfterBackward && run.clearing.how != Clearing::kZeros)
      net->scales[1].requires_grad_(step != 4);
    clear(Clearing::kBeforeForward);
    if (step == 5) {
      [[maybe_unused]] const auto accumulating = no_sync();
      backward(7);
    }
    backward(step);
    if (step == 1 || step == 5) clear(Clearing::kAfterBackward);
    optimizer.step();
  }
}

void RequireNear(const std::vector<Tensor>& got, const std::vector<Tensor>& want,
                 const std::string& what) {
  for (size_t i = 0; i < want.size(); ++i) {
    const double far = (got[i] - want[i]).abs().max().item<double>();
    Require(far < 1e-12,
            c10::str(what, ": parameter ", i, " is near ", want[i], ": it is ", got[i]));
  }
}

void TestClearing(Group& group, const Clearing& clearing, bool find_unused,
                  const std::optional<Placement>& placement) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  Scales alone = ClearingNet(), net = ClearingNet();
  {
    torch::optim::SGD sgd(alone->parameters(), ClearingRule());
    const auto model = [&](const auto&... args) { return alone->forward(args...); };
    TrainClearing({clearing, find_unused, ranks, 1.0 / group.size()}, alone, model, sgd,
                  [] { return 0; });
  }
  DataParallel ddp(group, net, find_unused ? FindUnused() : kSmallBuckets);
  const ClearingRun run{clearing, find_unused, {group.rank()}, 1.0};
  const auto no_sync = [&] { return ddp.no_sync(); };
  if (placement.has_value()) {
    Optimizer optimizer(ddp, ClearingRule(), {.placement = *placement});
    TrainClearing(run, net, ddp, optimizer, no_sync);
  } else {
    torch::optim::SGD sgd(net->parameters(), ClearingRule());
    Joined optimizer(ddp, sgd);
    TrainClearing(run, net, ddp, optimizer, no_sync);
  }
  RequireNear(net->parameters(), alone->parameters(),
              c10::str("cleared at ", clearing.where, " by ", clearing.how, ", find_unused ",
                       find_unused, ", optimizer ", placement ? placement->index() : 3));
}

TEST(StepsTest, GradientsMayBeClearedAnywhere) {
  for (const int world : {1, 2, 3}) {
    EXPECT_EQ(
        RunRanks(
            world,
            [](Group& group) {
              for (const auto where : {Clearing::kBeforeForward, Clearing::kBeforeBackward,
                                       Clearing::kAfterBackward}) {
                for (const auto how : {Clearing::kOptimizer, Clearing::kLoop, Clearing::kZeros}) {
                  for (const bool find_unused : {false, true}) {
                    const Clearing clearing{where, how};
                    TestClearing(group, clearing, find_unused, std::nullopt);
                    TestClearing(group, clearing, find_unused, Replicated{});
                    TestClearing(group, clearing, find_unused, WholeTensors{});
                    // See GradientsOfSlicesMustBeCleared.
                    if (where != Clearing::kAfterBackward)
                      TestClearing(group, clearing, find_unused, Slices{});
                  }
                }
              }
            }),
        AllPass(world));
  }
}

TEST(StepsTest, AGradientThatOneRankClearsIsAnError) {
  for (const bool is_joined : {false, true}) {
    const Endings endings = RunRanks(2, [&](Group& group) {
      Scales net;
      DataParallel ddp(group, net, kSmallBuckets);
      const auto train = [&](auto& optimizer) {
        ddp(InputOf(group.rank())).backward();
        if (group.rank() == 1) net->scales[2].mutable_grad().reset();
        optimizer.step();
        ddp(InputOf(group.rank())).backward();
      };
      if (!is_joined) {
        Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
        return train(optimizer);
      }
      torch::optim::SGD sgd(net->parameters(), 0.1);
      Joined optimizer(ddp, sgd);
      train(optimizer);
    });
    for (const std::string& ending : endings)
      EXPECT_THAT(ending, testing::HasSubstr("rank 1 has missing gradients=1 "));
  }
}

// A table whose gradients are sparse, and a parameter that each step uses.
struct TableImpl : torch::nn::Module {
  TableImpl()
      : table(register_module(
            "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true)))) {
    scale = register_parameter("scale", torch::ones({2}));
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    table->weight.fill_(0.5);
  }
  Tensor forward(int rank, int step) {
    const Tensor row = step % 3 == 1 ? torch::ones({2}, torch::kDouble)
                                     : table(torch::tensor({rank, (step + 1) % 5})).sum(0);
    return (row * scale).square().sum();
  }
  torch::nn::Embedding table{nullptr};
  Tensor scale;
};
TORCH_MODULE(Table);

TEST(StepsTest, SparseGradientsMayBeClearedBeforeBackward) {
  const auto train = [](Table& net, auto& optimizer, const auto& losses_of, bool to_none) {
    for (int step = 0; step < 6; ++step) {
      const std::vector<Tensor> losses = losses_of(step);
      net->zero_grad(to_none);
      if (step != 3)
        for (const Tensor& loss : losses) loss.backward();
      optimizer.step();
    }
  };
  const auto test = [&](Group& group, bool to_none) {
    const torch::optim::SGDOptions rule(0.1);
    Table alone, net;
    torch::optim::SGD sgd(alone->parameters(), rule);
    const auto all = [&](int step) {
      return std::vector<Tensor>{alone->forward(0, step) / 2, alone->forward(1, step) / 2};
    };
    train(alone, sgd, all, to_none);
    DataParallel ddp(group, net, FindUnused());
    Optimizer optimizer(ddp, rule);
    const auto own = [&](int step) { return std::vector<Tensor>{ddp(group.rank(), step)}; };
    train(net, optimizer, own, to_none);
    RequireNear(net->parameters(), alone->parameters(), c10::str("to none: ", to_none));
  };
  EXPECT_EQ(RunRanks(2,
                     [&](Group& group) {
                       test(group, true);
                       test(group, false);
                     }),
            AllPass(2));
}

TEST(StepsTest, AGradientThatIsReplacedBeforeBackwardCounts) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, FindUnused());
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(1.0));
                       ddp(InputOf(group.rank())).backward();
                       const Tensor loss = ddp(InputOf(group.rank()), std::vector<int>{0});
                       for (const Tensor& scale : net->scales)
                         scale.mutable_grad() = torch::full({4}, 0.25);
                       net->scales[2].mutable_grad().reset();
                       loss.backward();
                       optimizer.step();
                       const Tensor left = torch::full({4}, 0.75);
                       RequireSame(net->scales[0], left - MeanInput(group), "a reached value");
                       RequireSame(net->scales[1], left, "a value that backward misses");
                       RequireSame(net->scales[2], torch::ones({4}), "a value without a gradient");
                     }),
            AllPass(2));
}

TEST(StepsTest, AForwardOfTheModuleItselfIsRefused) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net);
                       const Tensor loss = net->forward(InputOf(group.rank()));
                       RequireError([&] { loss.backward(); }, "backward outside of a step");
                     }),
            AllPass(2));
}

TEST(StepsTest, AStepThatTheOptimizerEndsHasWhatWasAccumulated) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(1.0));
                       ddp(InputOf(group.rank())).backward();
                       for (int step = 0; step < 2; ++step) {
                         optimizer.zero_grad(/*set_to_none=*/false);
                         {
                           const auto accumulating = ddp.no_sync();
                           ddp(InputOf(group.rank())).backward();
                         }
                         const Tensor loss = ddp(InputOf(group.rank()));
                         if (group.rank() == 0) loss.backward();
                         optimizer.step();
                         RequireSame(net->scales[1], torch::full({4}, 1 - 2.0 * (step + 1)),
                                     "the value");
                       }
                     }),
            AllPass(2));
}

TEST(StepsTest, AnUnseenOutputIsNamed) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net, FindUnused());
    const Tensor side = net->scales[1].sum();  // Not of forward.
    (ddp(InputOf(group.rank()), std::vector<int>{0}) + side).backward();
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending,
                testing::AllOf(testing::HasSubstr("scale1"), testing::HasSubstr("forward")));
}

TEST(StepsTest, TwoTensorsWithOneMemoryAreRefused) {
  EXPECT_EQ(RunRanks(1,
                     [](Group& group) {
                       Scales net;
                       net->scales[1].set_data(net->scales[0]);
                       RequireError([&] { DataParallel ddp(group, net); }, "the same memory");
                     }),
            AllPass(1));
}

TEST(StepsTest, AnExceptionThatIsCaughtLetsGoOfTheModule) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    try {
      DataParallel ddp(group, net, kSmallBuckets);
      ddp(InputOf(group.rank())).backward();
      throw std::runtime_error("a check failed");
    } catch (const std::runtime_error&) {
    }
    RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
    net->forward(InputOf(0)).backward();
    DataParallel again(group, net, kSmallBuckets);
    net->zero_grad();
    again(InputOf(group.rank())).backward();
    RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
  });
  EXPECT_EQ(endings, AllPass(2));
}

TEST(StepsTest, AnExceptionEndsTheGroupWithoutRunToo) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    const auto begin = std::chrono::steady_clock::now();
    try {
      DataParallel ddp(group, net, kSmallBuckets);
      for (int step = 0; step < 5; ++step) {
        if (step == 3 && group.rank() == 1) throw std::runtime_error("a check failed");
        net->zero_grad();
        ddp(InputOf(0)).backward();
      }
    } catch (const std::runtime_error&) {
      if (group.rank() == 0) {
        Require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(4),
                "rank 1 does not have to exit for this");
        throw;
      }
      group.~Group();  // As if it had been made without run().
      sleep(5);
      _exit(3);
    }
  });
  EXPECT_THAT(endings[0], testing::HasSubstr("rank 1"));
  EXPECT_THAT(endings[0], testing::Not(testing::HasSubstr("does not hold")));
}

TEST(StepsTest, ASecondBackwardIsRefused) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net, kSmallBuckets);
    const Tensor loss = ddp(InputOf(group.rank()));
    loss.backward({}, /*retain_graph=*/true);
    const Tensor first = net->scales[0].grad().clone();
    RequireError([&] { loss.backward(); }, "backward outside of a step");
    RequireSame(net->scales[0].grad(), first, "the gradient after the error");
    // It was wrong by itself: the group continues.
    net->zero_grad();
    ddp(InputOf(group.rank())).backward();
    RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
  });
  EXPECT_EQ(endings, AllPass(2));
}

TEST(StepsTest, NoSyncAddsUp) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       const Tensor input = InputOf(group.rank());
                       for (int step = 0; step < 3; ++step) {
                         net->zero_grad(/*set_to_none=*/step != 1);
                         {
                           const auto accumulating = ddp.no_sync();
                           ddp(input).backward();
                           const Tensor loss = ddp(input);
                           loss.backward({}, /*retain_graph=*/true);
                           loss.backward();
                           RequireSame(net->scales[0].grad(), 3 * input, "the local gradient");
                         }
                         ddp(input).backward();
                         RequireSame(net->scales[0].grad(), 4 * MeanInput(group), "the gradient");
                       }
                     }),
            AllPass(3));
}

TEST(StepsTest, GradOfAGradientNeitherBeginsNorEndsAStep) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 Sequential net(Linear(3, 4), torch::nn::Tanh(), Linear(4, 1));
                 DataParallel ddp(group, net, kSmallBuckets);
                 const auto penalty = [&](auto& model, const Tensor& input) {
                   const Tensor output = model(input).sum();
                   const Tensor grad = torch::autograd::grad({output}, {input}, {}, true, true)[0];
                   return output + grad.square().sum();
                 };
                 torch::manual_seed(3);
                 const Tensor all = torch::randn({2, 5, 3});
                 net->zero_grad();
                 penalty(ddp, all[group.rank()].clone().requires_grad_()).backward();
                 std::vector<Tensor> got;
                 for (const Tensor& param : net->parameters()) got.push_back(param.grad().clone());
                 // The same with one process.
                 auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
                 copy->zero_grad();
                 auto one = [&](const Tensor& input) { return copy->forward(input); };
                 for (int rank = 0; rank < 2; ++rank)
                   (penalty(one, all[rank].clone().requires_grad_()) / 2).backward();
                 for (size_t i = 0; i < got.size(); ++i)
                   Require(torch::allclose(got[i], copy->parameters()[i].grad(), 1e-5, 1e-6),
                           "the gradient penalty is that of one process");
               }),
      AllPass(2));
}

// Computes a part of a model again in backward, and does not keep its activations meanwhile.
using Part = std::function<Tensor(const Tensor&)>;
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Part* part,
                        const Tensor& input) {
    context->saved_data["part"] = reinterpret_cast<int64_t>(part);
    context->save_for_backward({input});
    return (*part)(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto* part = reinterpret_cast<const Part*>(context->saved_data["part"].toInt());
    const Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode enable_grad(true);
    torch::autograd::backward({(*part)(input)}, {grads[0]});
    return {Tensor(), input.grad()};
  }
};

struct StackImpl : torch::nn::Module {
  StackImpl() {
    torch::manual_seed(3);
    for (size_t i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Linear(4, 4)));
      parts.push_back([this, i](const Tensor& input) { return layers[i](input).tanh(); });
    }
    all = [this](const Tensor& input) { return parts[3](parts[2](parts[1](parts[0](input)))); };
  }
  // A part per letter: "r" computes the next layer again, "R" all of them, "2" the second layer,
  // each in backward; "-" keeps the activations of the next layer.
  Tensor forward(const Tensor& input, const std::string& plan) {
    Tensor now = input;
    size_t next = 0;
    for (const char letter : plan) {
      if (letter == '-') {
        now = parts.at(next++)(now);
      } else {
        const Part& part = letter == 'R' ? all : parts.at(letter == '2' ? 1 : next++);
        now = Recompute::apply(&part, now);
      }
    }
    return now.square().sum();
  }
  std::vector<Linear> layers;
  std::vector<Part> parts;
  Part all;
};
TORCH_MODULE(Stack);

Tensor StackInput(int rank, int step) {
  torch::manual_seed(10 * rank + step);
  return torch::randn({3, 4}).requires_grad_();
}

TEST(StepsTest, PartsThatAreComputedAgainInBackwardTrainAsTheWhole) {
  for (const char* plan : {"r---", "-r--", "---r", "rr-r", "rrrr", "R"}) {
    SCOPED_TRACE(plan);
    EXPECT_EQ(RunRanks(2,
                       [plan](Group& group) {
                         Stack net, plain;
                         DataParallel ddp(group, net, kSmallBuckets);
                         DataParallel plain_ddp(group, plain, kSmallBuckets);
                         const torch::optim::SGDOptions rule(0.1);
                         Optimizer optimizer(ddp, rule, {.placement = Slices{}});
                         Optimizer plain_optimizer(plain_ddp, rule);
                         const auto step = [&](auto& one, auto& its, const std::string& how,
                                               int count) {
                           its.zero_grad();
                           {
                             const auto accumulating = one.no_sync();
                             one(StackInput(group.rank(), count + 5), how).backward();
                           }
                           one(StackInput(group.rank(), count), how).backward();
                           Require(!one.replica()->is_open(), "the step has ended");
                           its.step();
                         };
                         for (int count = 0; count < 3; ++count) {
                           step(ddp, optimizer, plan, count);
                           step(plain_ddp, plain_optimizer, "----", count);
                         }
                         for (size_t i = 0; i < net->parameters().size(); ++i)
                           RequireSame(net->parameters()[i], plain->parameters()[i], "the value");
                       }),
              AllPass(2));
  }
}

TEST(StepsTest, PartsThatAreComputedAgainMustNotShareParameters) {
  for (const char* plan : {"-r--2", "rrrr2"}) {
    SCOPED_TRACE(plan);
    const Endings endings = RunRanks(2, [plan](Group& group) {
      Stack net;
      DataParallel ddp(group, net, kSmallBuckets);
      ddp(StackInput(group.rank(), 0), plan).backward();
    });
    for (const std::string& ending : endings)
      EXPECT_THAT(ending, testing::AllOf(testing::HasSubstr("\"layer"),
                                         testing::HasSubstr("\" twice in one step: ")));
  }
  const Endings endings = RunRanks(2, [](Group& group) {
    Stack net;
    DataParallel ddp(group, net, FindUnused());
    ddp(StackInput(group.rank(), 0), "-r--").backward();
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending, testing::HasSubstr("no part of it may be computed again in backward"));
  const Endings complete = RunRanks(2, [](Group& group) {
    Stack net;
    DataParallel ddp(group, net, kSmallBuckets);
    ddp(StackInput(group.rank(), 0), "-R").backward();  // Begins with all parameters.
  });
  for (const std::string& ending : complete)
    EXPECT_THAT(ending, testing::HasSubstr("runs backward outside of a step"));
}

// The end of the outermost backward, which reaches no parameter itself, is seen at the next call.
TEST(StepsTest, AMissingGradientOfPartsThatAreComputedAgainIsAnError) {
  const auto train = [](auto finish) {
    const Endings endings = RunRanks(2, [finish](Group& group) {
      Stack net;
      DataParallel ddp(group, net, kSmallBuckets);
      Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
      ddp(StackInput(group.rank(), 0), "rr").backward();
      finish(ddp, optimizer);
    });
    for (const std::string& ending : endings) {
      EXPECT_THAT(ending, testing::HasSubstr("layer"));
      EXPECT_THAT(ending, testing::HasSubstr("gradient"));
    }
  };
  train([](auto& ddp, Optimizer&) { ddp(StackInput(0, 0), "----"); });
  train([](auto&, Optimizer& optimizer) { optimizer.step(); });
}

TEST(StepsTest, GradOfAGradientInsideABackward) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 Scales net;
                 DataParallel ddp(group, net, kSmallBuckets);
                 for (int step = 0; step < 2; ++step) {
                   net->zero_grad();
                   const Tensor input = InputOf(group.rank()).requires_grad_();
                   const Tensor loss = ddp(input);
                   double squares = 0;
                   loss.register_hook([&](const Tensor&) {
                     const at::AutoGradMode enable_grad(true);
                     const Tensor again = (net->scales[0] * input).sum();
                     const auto grads = torch::autograd::grad({again}, {net->scales[0], input});
                     squares = grads[0].square().sum().template item<double>();
                   });
                   loss.backward();
                   Require(squares == 4 * (group.rank() + 1) * (group.rank() + 1),
                           "grad() has the gradient");
                   RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
                 }
               }),
      AllPass(2));
}

TEST(StepsTest, ABackwardInAHookBelongsToTheStep) {
  const auto train = [](const std::vector<int>& used, const std::vector<int>& reached) {
    return RunRanks(2, [&](Group& group) {
      Scales net;
      DataParallel ddp(group, net, kSmallBuckets);
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        const Tensor input = InputOf(group.rank());
        const Tensor loss = ddp(input, used);
        loss.register_hook([&](const Tensor&) {
          const at::AutoGradMode enable_grad(true);
          net->forward(2 * input, reached).backward();
        });
        loss.backward();
        for (const int i : used)
          RequireSame(net->scales[i].grad(), MeanInput(group), "the gradient");
        for (const int i : reached)
          RequireSame(net->scales[i].grad(), 2 * MeanInput(group), "that of the hook");
      }
    });
  };
  EXPECT_EQ(train({0, 2}, {1}), AllPass(2));
  EXPECT_EQ(train({0}, {2, 1}), AllPass(2));
  for (const std::string& ending : train({0, 1, 2}, {0}))
    EXPECT_THAT(ending, testing::HasSubstr("backward reached \"scale0\" twice in one step"));
  for (const std::string& ending : train({0, 1, 2}, {0, 1, 2}))
    EXPECT_THAT(ending, testing::HasSubstr("runs backward outside of a step"));
  for (const std::string& ending : train({0}, {2}))
    EXPECT_THAT(ending,
                testing::AllOf(testing::HasSubstr("scale1"), testing::HasSubstr("gradient")));
}

TEST(StepsTest, ABackwardAfterAnExceptionInBackwardIsRefused) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Stack net;
    DataParallel ddp(group, net, kSmallBuckets);
    const Part part = net->parts[1];
    int calls = 0;
    net->parts[1] = [&calls, part](const Tensor& input) {
      if (++calls == 2) throw std::runtime_error("no more memory");  // In backward.
      return part(input);
    };
    try {
      ddp(StackInput(group.rank(), 0), "-r--").backward();
      Require(false, "it throws");
    } catch (const std::runtime_error& error) {
      Require(std::string(error.what()).find("no more memory") != std::string::npos, error.what());
    }
    ddp(StackInput(group.rank(), 0), "-r--").backward();
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending, testing::HasSubstr("again after an exception in this step's backward"));
}

TEST(StepsTest, AnExceptionInAHookReachesThePeersWithItsText) {
  const Endings endings = RunRanks(3, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net, kSmallBuckets);
    if (group.rank() == 1)
      net->scales[1].register_hook([](const Tensor&) { throw std::runtime_error("no more disk"); });
    for (int step = 0; step < 10; ++step) {
      net->zero_grad();
      ddp(InputOf(group.rank())).backward();
    }
  });
  for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr("no more disk"));
  EXPECT_THAT(endings[0], testing::HasSubstr("rank 1"));
}

TEST(StepsTest, AThrownExceptionReachesThePeersWithItsText) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net, kSmallBuckets);
    Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = Slices{}});
    for (int step = 0; step < 10; ++step) {
      if (group.rank() == 1 && step == 4) throw std::runtime_error("bad record 17");
      optimizer.zero_grad();
      ddp(InputOf(group.rank())).backward();
      optimizer.step();
    }
  });
  EXPECT_EQ(endings[1], "exit 1: rank 1: bad record 17\n");
  EXPECT_THAT(endings[0], testing::HasSubstr("bad record 17"));
  EXPECT_THAT(endings[0], testing::HasSubstr("rank 1"));
}

TEST(StepsTest, ASignalWritesFlightRecordsAndTheJobGoesOn) {
  const std::string folder = testing::TempDir() + "/flight";
  std::filesystem::create_directory(folder);
  ASSERT_EQ(setenv("EVENKEEL_FLIGHT", folder.c_str(), 1), 0);
  const Endings endings = RunRanks(2, [&](Group& group) {
    torch::Tensor value = torch::ones(3);
    group.all_reduce(value, Reduce::kSum);
    Require(kill(getpid(), SIGUSR1) == 0, "the signal");
    const std::string path = absl::StrCat(folder, "/world.rank", group.rank(), ".json");
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (!std::filesystem::exists(path)) {
      Require(absl::Now() < deadline, path);
      absl::SleepFor(absl::Milliseconds(1));
    }
    group.all_reduce(value, Reduce::kSum);
    Require(value[0].item<float>() == 4, "the sum");
  });
  unsetenv("EVENKEEL_FLIGHT");
  EXPECT_EQ(endings, AllPass(2));
}

// Without an exception in flight, the DataParallel is destroyed inside a step before there is a
// reason.
TEST(StepsTest, AReasonForLeavingAStepReachesThePeers) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    const auto train = [&] {
      DataParallel ddp(group, net, kSmallBuckets);
      for (int step = 0; step < 10; ++step) {
        net->zero_grad();
        const Tensor loss = ddp(InputOf(group.rank()));
        if (group.rank() == 1 && step == 4) return false;
        loss.backward();
      }
      return true;
    };
    if (!train()) throw std::runtime_error("my data file is broken");
  });
  EXPECT_EQ(endings[1], "exit 1: rank 1: my data file is broken\n");
  EXPECT_THAT(endings[0], testing::HasSubstr("rank 1 failed: my data file is broken"));
}

TEST(StepsTest, TextsHaveNoNamesOfCodes) {
  const std::function<void(Group&, DataParallel<Scales>&)> causes[] = {
      [](Group& group, auto&) { group.abort("the cause"); },
      [](Group&, auto&) { throw std::runtime_error("the cause"); },
      [](Group&, auto& ddp) { ddp.join([] { throw std::runtime_error("the cause"); }); },
      [](Group&, auto& ddp) { ddp.join([] { TORCH_CHECK(false, "the cause"); }); },
      [](Group&, auto& ddp) { ddp.join([&] { Refuse("the cause"); }); },
      // An error of the core.
      [](Group&, auto& ddp) {
        ddp.join([&] { Check(absl::FailedPreconditionError("the cause")); });
      },
      [](Group&, auto& ddp) { ddp.join([&] { ddp(torch::full({4}, INFINITY)).backward(); }); },
  };
  for (const auto& cause : causes) {
    const Endings endings = RunRanks(2, [&](Group& group) {
      Scales net;
      DataParallelOptions options = kSmallBuckets;
      options.check_finite = true;
      DataParallel ddp(group, net, options);
      Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
      if (group.rank() == 1) cause(group, ddp);
      ddp.join([&] {
        for (int step = 0; step < 100; ++step) ddp(InputOf(0)).backward();
      });
    });
    EXPECT_THAT(endings[0], testing::AnyOf(testing::HasSubstr("the cause"),
                                           testing::HasSubstr("gradient of parameter")));
    for (const std::string& ending : endings) {
      EXPECT_THAT(ending, testing::Not(testing::IsEmpty()));
      EXPECT_THAT(ending, testing::Not(testing::ContainsRegex("[A-Z][A-Z_]+: ")));
      EXPECT_THAT(ending, testing::Not(testing::HasSubstr("libtorch::Error")));
    }
  }
}

TEST(StepsTest, AnErrorAboutMetaTensorsWithoutSlicesIsTorchsAlone) {
  const Endings endings = RunRanks(2, [&](Group& group) {
    Scales net;
    DataParallel ddp(group, net);
    Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
    ddp(InputOf(group.rank())).backward();
    if (group.rank() == 1) torch::empty({1}, torch::kMeta).item();
    optimizer.step();
    group.barrier();
  });
  EXPECT_THAT(endings[0], testing::AllOf(testing::ContainsRegex("rank 1 failed.*Meta tensor"),
                                         testing::Not(testing::HasSubstr("Slices"))));
}

// torch's error about tensors on the device meta comes behind it.
TEST(StepsTest, ClippingByTorchWithSlicesSaysWhatToCall) {
  const Endings endings = RunRanks(2, [&](Group& group) {
    Scales net;
    DataParallel ddp(group, net);
    Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = Slices{}});
    ddp(InputOf(group.rank())).backward();
    if (group.rank() == 1) torch::nn::utils::clip_grad_norm_(net->parameters(), 1);
    optimizer.step();
  });
  EXPECT_THAT(endings[0], testing::ContainsRegex("rank 1 failed[^:]*: with the placement Slices, "
                                                 "grad.. has no values.*: clip by "
                                                 "Optimizer::clip_grad_norm.*torch: "));
}

TEST(StepsTest, AKilledRankIsNamedWithinSeconds) {
  const auto begin = std::chrono::steady_clock::now();
  const Endings endings = RunRanks(3, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net, kSmallBuckets);
    try {
      for (int step = 0;; ++step) {
        if (step == 5 && group.rank() == 2) raise(SIGKILL);
        net->zero_grad();
        ddp(InputOf(group.rank())).backward();
      }
    } catch (const Error& error) {
      Require(error.kind == "lost" && error.ranks == std::vector<int>{2}, error.what());
      throw;
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_THAT(endings[0], testing::HasSubstr("rank 2 of 3 is lost"));
  EXPECT_THAT(endings[1], testing::HasSubstr("rank 2 of 3 is lost"));
}

TEST(StepsTest, EachBackendTrains) {
  setenv("EVENKEEL_HOST_PARTS", "2", 1);  // For the hierarchical one.
  for (const char* backend : {"tcp", "hierarchical"}) {
    const GroupOptions options{.backend = backend};
    EXPECT_EQ(RunRanks(
                  4,
                  [backend](Group& group) {
                    Require(group.backend() == backend, group.backend());
                    Scales net;
                    DataParallel ddp(group, net, kSmallBuckets);
                    Optimizer optimizer(ddp, torch::optim::AdamOptions(0.1),
                                        {.placement = Slices{}});
                    ddp.join([&] {
                      for (int step = 0; step < 3 + group.rank(); ++step) {
                        optimizer.zero_grad();
                        ddp(InputOf(group.rank())).backward();
                        optimizer.step();
                      }
                    });
                    RequireReplicas(group, *net);
                  },
                  options),
              AllPass(4));
  }
  unsetenv("EVENKEEL_HOST_PARTS");
}

TEST(StepsTest, DifferentModulesAreNamedOnAllRanks) {
  const Endings endings = RunRanks(3, [](Group& group) {
    Sequential net(Linear(3, group.rank() == 2 ? 5 : 4));
    try {
      DataParallel ddp(group, net);
    } catch (const Error& error) {
      for (const char* part : {"0.weight", "float32[4, 3]", "float32[5, 3]"})
        Require(std::string(error.what()).find(part) != std::string::npos, error.what());
      Require(error.kind.empty(), "the group goes on");
      group.barrier();
      throw;
    }
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending, testing::HasSubstr("parameter 0: rank 2 has \"0.weight\" float32[5, 3]; "
                                           "ranks 0,1 have \"0.weight\" float32[4, 3]"));
}

TEST(StepsTest, AMissingGradientIsAnError) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net);
    ddp(InputOf(group.rank()), std::vector<int>{0, 2}).backward();
  });
  for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr("scale1"));
}

TEST(StepsTest, AnUnusedParameterWithoutElementsIsNotMissing) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       for (const bool is_split : {false, true}) {
                         Scales net;
                         net->register_parameter("none", torch::empty({0, 3}));
                         DataParallel ddp(group, net);
                         Optimizer optimizer(ddp, torch::optim::SGDOptions(1),
                                             {.placement = is_split ? Placement(Slices{})
                                                                    : Placement(Replicated{})});
                         for (int step = 0; step < 2; ++step) {
                           optimizer.zero_grad();
                           ddp(InputOf(group.rank())).backward();
                           optimizer.step();
                         }
                         Require(torch::allclose(net->scales[0], torch::full({4}, -2.0)),
                                 "two steps of the mean of 1 and 2");
                       }
                     }),
            AllPass(2));
}

TEST(StepsTest, RanksMayUseDifferentParameters) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, FindUnused());
                       for (int step = 0; step < 3; ++step) {
                         net->zero_grad();
                         const int own = group.rank() == 0 ? 0 : 2;
                         ddp(InputOf(group.rank()), std::vector<int>{own}).backward();
                         Require(torch::allclose(net->scales[0].grad(), torch::full({4}, 1.0 / 3)),
                                 "it is that of rank 0");
                         Require(torch::allclose(net->scales[2].grad(), torch::full({4}, 5.0 / 3)),
                                 "it is that of the others");
                         Require(!net->scales[1].grad().defined(), "no rank has a gradient");
                       }
                     }),
            AllPass(3));
}

TEST(StepsTest, FreezingTakesEffectInTheNextStep) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.5).momentum(0.9));
                       for (int step = 0; step < 6; ++step) {
                         net->scales[1].requires_grad_(step % 3 == 0);
                         optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
                         const Tensor before = net->scales[1].detach().clone();
                         ddp(InputOf(group.rank())).backward();
                         RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
                         optimizer.step();
                         Require(torch::equal(before, net->scales[1]) == (step % 3 != 0),
                                 "a frozen parameter stays");
                       }
                       RequireReplicas(group, *net);
                     }),
            AllPass(2));
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() : embedding(register_module("embedding", torch::nn::Embedding(7, 4))) {
    register_parameter("head", embedding->weight);
  }
  Tensor forward(const Tensor& words) {
    return torch::matmul(embedding(words), embedding->weight.t());
  }
  torch::nn::Embedding embedding;
};
TORCH_MODULE(Tied);

TEST(StepsTest, TiedWeightsAreOneParameter) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Tied net;
                       DataParallel ddp(group, net);
                       Require(ddp.parameters().size() == 1, "there is one parameter");
                       for (int step = 0; step < 2; ++step) {
                         net->zero_grad();
                         ddp(torch::arange(7)).square().sum().backward();
                         RequireReplicas(group, *net);
                       }
                       Tensor own = net->embedding->weight.grad().clone();
                       group.all_reduce(own, Reduce::kAverage);
                       RequireSame(own, net->embedding->weight.grad(), "the gradient");
                     }),
            AllPass(2));
}

TEST(StepsTest, TheSumOfBoolsIsOr) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       // A true may be any byte but 0: the sum of these is 0 in a byte.
                       Tensor bools = torch::tensor({0, 128}, torch::kByte).view(torch::kBool);
                       group.all_reduce(bools);
                       const Tensor want = torch::tensor({false, true});
                       Require(torch::equal(bools.view(torch::kByte).ne(0), want),
                               "true or true is true");
                       group.all_reduce(bools, Reduce::kMin);
                       Require(torch::equal(bools.view(torch::kByte).ne(0), want),
                               "true and true is true");
                       RequireError([&] { group.all_reduce(bools, Reduce::kAverage); },
                                    "all_reduce() got bools to average");
                     }),
            AllPass(2));
}

TEST(StepsTest, AnAverageOfIntegersIsRoundedTowardZero) {
  EXPECT_EQ(
      RunRanks(
          3,
          [](Group& group) {
            for (const auto dtype :
                 {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong}) {
              const bool is_signed = dtype != torch::kByte;
              // The sums of the first do not fit into 8 bits.
              Tensor numbers = torch::tensor({120, is_signed ? -2 : 2, 5}, dtype);
              numbers[1] *= group.rank();
              numbers[2] += group.rank() == 2;
              group.all_reduce(numbers, Reduce::kAverage);
              RequireSame(numbers, torch::tensor({120, is_signed ? -2 : 2, 5}, dtype), "the mean");
            }
            Tensor negative = torch::tensor({-group.rank() - (group.rank() > 0)});
            group.all_reduce(negative, Reduce::kAverage);
            RequireSame(negative, torch::tensor({-1}), "the mean of 0, -2 and -3");
          }),
      AllPass(3));
}

TEST(StepsTest, SparseEmbeddings) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       torch::nn::Embedding net(torch::nn::EmbeddingOptions(6, 2).sparse(true));
                       net->weight.set_data(torch::randn({2, 6}).t());  // Rows have gaps.
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(1.0));
                       const Tensor before = net->weight.detach().clone();
                       for (int step = 0; step < 2; ++step) {
                         optimizer.zero_grad();
                         ddp(torch::tensor({0, 1 + group.rank()})).sum().backward();
                         const Tensor want = torch::tensor({1.0, 0.5, 0.5, 0.0, 0.0, 0.0});
                         Require(net->weight.grad().is_sparse(), "the gradient is sparse");
                         RequireSame(net->weight.grad().to_dense(),
                                     want.unsqueeze(1).expand({6, 2}).contiguous(), "the gradient");
                         optimizer.step();
                       }
                       Require(torch::allclose(net->weight[0], before[0] - 2), "row 0 is updated");
                       RequireSame(net->weight[5], before[5], "row 5");
                       RequireReplicas(group, *net);
                     }),
            AllPass(2));
}

TEST(StepsTest, ChangedSparseGradientsCount) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 2).sparse(true));
                       DataParallel ddp(group, net, FindUnused());
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(1.0));
                       const Tensor before = net->weight.detach().clone();
                       ddp(torch::tensor({1})).sum().backward();
                       net->weight.mutable_grad() = net->weight.grad() * 0.5;
                       optimizer.step();
                       Require(torch::allclose(net->weight[1], before[1] - 0.5),
                               "half of it counts");
                       optimizer.zero_grad(/*set_to_none=*/false);
                       const Tensor unchanged = net->weight.detach().clone();
                       ddp.begin();  // No rank reaches the table.
                       optimizer.step();
                       RequireSame(net->weight, unchanged, "the table");
                     }),
            AllPass(2));
}

TEST(StepsTest, ChannelsLast) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 3));
                 net->to(torch::kDouble);
                 net->weight.set_data(net->weight.contiguous(torch::MemoryFormat::ChannelsLast));
                 DataParallel ddp(group, net);
                 torch::manual_seed(5);
                 const Tensor all = torch::randn({2, 1, 3, 6, 6}, torch::kDouble);
                 ddp(all[group.rank()]).square().mean().backward();
                 const Tensor got = net->weight.grad().clone();
                 Require(net->weight.grad().is_contiguous(torch::MemoryFormat::ChannelsLast),
                         "the gradient has the strides of its parameter");
                 auto copy = std::dynamic_pointer_cast<torch::nn::Conv2dImpl>(net->clone());
                 copy->zero_grad();
                 for (int rank = 0; rank < 2; ++rank)
                   (copy->forward(all[rank]).square().mean() / 2).backward();
                 Require(torch::allclose(got, copy->weight.grad()), "it is that of one process");
               }),
      AllPass(2));
}

// Elements are sent in the order of memory.
TEST_P(Worlds, StridesAreThoseOfRank0) {
  EXPECT_EQ(
      RunRanks(GetParam(),
               [](Group& group) {
                 const auto convert = [](Tensor tensor) {
                   tensor.set_data(tensor.contiguous(torch::MemoryFormat::ChannelsLast));
                 };
                 for (const int other : {0, group.size() - 1}) {  // The rank whose strides differ.
                   torch::manual_seed(7 + group.rank());
                   torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 2));
                   net->register_buffer("kernel", torch::randn({2, 3, 2, 2}));
                   net->to(torch::kDouble);
                   if (group.rank() == other) convert(net->weight);
                   if (group.rank() == other) convert(net->buffers()[0]);
                   Tensor weight = net->weight.detach().clone(), buffer = net->buffers()[0].clone();
                   group.broadcast(weight);
                   group.broadcast(buffer);
                   DataParallel ddp(group, net);
                   RequireSame(net->weight, weight, "the weight");
                   RequireSame(net->buffers()[0], buffer, "the buffer");
                   for (const Tensor& tensor : {net->weight, net->buffers()[0]})
                     Require(
                         tensor.is_contiguous(torch::MemoryFormat::ChannelsLast) == (other == 0),
                         "the strides are those of rank 0");
                   Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1).momentum(0.9));
                   torch::nn::Conv2d alone(torch::nn::Conv2dOptions(3, 4, 2));
                   alone->weight.set_data(weight.clone());
                   alone->bias.set_data(net->bias.detach().clone());
                   torch::optim::SGD sgd(alone->parameters(),
                                         torch::optim::SGDOptions(0.1).momentum(0.9));
                   torch::manual_seed(5);
                   const Tensor all = torch::randn({group.size(), 1, 3, 4, 4}, torch::kDouble);
                   for (int step = 0; step < 2; ++step) {
                     optimizer.zero_grad();
                     ddp(all[group.rank()]).square().sum().backward();
                     optimizer.step();
                     sgd.zero_grad();
                     for (int rank = 0; rank < group.size(); ++rank)
                       (alone->forward(all[rank]).square().sum() / group.size()).backward();
                     sgd.step();
                   }
                   RequireNear(net->parameters(), alone->parameters(), c10::str("rank ", other));
                   RequireReplicas(group, *net);
                 }
               }),
      AllPass(GetParam()));
}

TEST(StepsTest, CollectivesAreInTheOrderOfElementsWhateverTheStrides) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       const Tensor want = torch::arange(24, torch::kDouble).view({1, 2, 3, 4});
                       for (const int other : {0, 1}) {
                         const auto format = group.rank() == other
                                                 ? torch::MemoryFormat::ChannelsLast
                                                 : torch::MemoryFormat::Contiguous;
                         Tensor sum = want.clone(format), sent = want.clone(format);
                         const auto strides = sum.strides().vec();
                         group.all_reduce(sum);
                         RequireSame(sum, 3 * want, "the sum");
                         Require(sum.strides() == at::IntArrayRef(strides), "strides stay");
                         if (group.rank() != 1) sent.zero_();
                         sent.requires_grad_();  // As a parameter.
                         group.broadcast(sent, 1);
                         RequireSame(sent, want, "what rank 1 has");
                       }
                       RequireError([&] { group.all_reduce(want.select(2, 1)); }, "has gaps");
                     }),
            AllPass(3));
}

TEST(StepsTest, MovedMemoryIsFollowedAndOtherTypesAreRefused) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(1.0));
                       ddp(InputOf(group.rank())).backward();
                       optimizer.step();
                       net->scales[0].set_data(net->scales[0].clone());
                       optimizer.zero_grad();
                       ddp(InputOf(group.rank())).backward();
                       optimizer.step();
                       RequireSame(net->scales[0], torch::full({4}, 1 - 2 * 1.5), "the value");
                       net->to(torch::kDouble);
                       RequireError([&] { ddp(InputOf(group.rank())); }, "scale0");
                     }),
            AllPass(2));
}

TEST(StepsTest, CompressedGradients) {
  for (const Compression how :
       {Compression::kFloat16, Compression::kBFloat16, Compression::kInt8}) {
    EXPECT_EQ(RunRanks(2,
                       [how](Group& group) {
                         Scales net;
                         DataParallel ddp(group, net, {.compression = how});
                         for (int step = 0; step < 2; ++step) {
                           net->zero_grad();
                           ddp(InputOf(group.rank())).backward();
                           Require(torch::allclose(net->scales[1].grad(), MeanInput(group), 0.02),
                                   "the gradient is near the average");
                         }
                       }),
              AllPass(2));
  }
}

TEST(StepsTest, AStragglerIsNamedWithItsPhase) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       Scales net;
                       DataParallel ddp(group, net, kSmallBuckets);
                       std::string news;
                       for (int step = 0; step < 520; ++step) {
                         {
                           auto loading = group.phase(Phase::kInput);
                           if (group.rank() == 2)
                             std::this_thread::sleep_for(std::chrono::milliseconds(20));
                         }
                         net->zero_grad();
                         ddp(InputOf(group.rank())).backward();
                         news += group.straggler_news();
                       }
                       Require(news.starts_with("rank 2 cost the group ") &&
                                   news.ends_with(" % of the last 500 steps: input"),
                               "the news is not: " + news);
                       Require(group.straggler_table().find("optimizer") != std::string::npos,
                               group.straggler_table());
                     }),
            AllPass(3));
}

TEST(StepsTest, AGradientThatIsNotFiniteIsNamed) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    DataParallelOptions options = kSmallBuckets;
    options.check_finite = true;
    DataParallel ddp(group, net, options);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const float factor = step == 1 && group.rank() == 1 ? INFINITY : 1.0f;
      try {
        ddp(InputOf(group.rank()) * factor).backward();
      } catch (const Error& error) {
        Require(error.kind == "failed" && error.ranks == std::vector<int>{1}, error.what());
        throw;
      }
    }
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending, testing::AllOf(testing::HasSubstr("rank 1: the gradient of parameter "),
                                       testing::HasSubstr("not finite in step 2: element 0 of 4")));
}

TEST(StepsTest, GradientsOutliveTheirDataParallel) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Scales net;
                       {
                         DataParallel ddp(group, net, kSmallBuckets);
                         ddp(InputOf(group.rank())).backward();
                       }
                       RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
                       net->forward(InputOf(0)).backward();  // No hook is left.
                       RequireSame(net->scales[0].grad(), MeanInput(group) + 1, "the gradient");
                       DataParallel again(group, net, kSmallBuckets);
                       net->zero_grad();
                       again(InputOf(group.rank())).backward();
                       RequireSame(net->scales[0].grad(), MeanInput(group), "the gradient");
                     }),
            AllPass(2));
}

}  // namespace
}  // namespace evenkeel::libtorch
