// Where a step begins and ends: the table of libtorch.h, a test per row. And the kinds of
// gradients.

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

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
                           Require(!ddp.replica()->is_open, "no step has begun");
                         }
                         if (group.rank() == 1) {
                           net->eval();
                           ddp(InputOf(1));
                           Require(!ddp.replica()->is_open, "no step has begun");
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
    RequireError([&] { loss.backward(); }, "backward outside of a step");
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
      Require(std::string(error.what()).find("0.weight") != std::string::npos, error.what());
      throw;
    }
  });
  for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr("rank 2"));
}

TEST(StepsTest, AMissingGradientIsAnError) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Scales net;
    DataParallel ddp(group, net);
    ddp(InputOf(group.rank()), std::vector<int>{0, 2}).backward();
  });
  for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr("scale1"));
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

TEST(StepsTest, SparseEmbeddings) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       torch::nn::Embedding net(torch::nn::EmbeddingOptions(6, 2).sparse(true));
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
                                       testing::HasSubstr("not finite in step 1: element 0 of 4")));
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
