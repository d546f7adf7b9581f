// Optimizers of every placement, and uneven inputs: against one process that computes the same
// sums.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <stdexcept>

#include "evenkeel/bucket/hooks/power_sgd.h"
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

constexpr int kMostSteps = 7;

Sequential NewNet() {
  torch::manual_seed(1);
  return Sequential(Linear(6, 8), torch::nn::Tanh(), Linear(8, 2));
}
Tensor Batch(int rank, int step) {
  torch::manual_seed(100 * rank + step);
  return torch::randn({4, 6});
}
Tensor LossOf(const Tensor& output) { return output.square().mean(); }

// The batches that a rank has.
int StepsOf(int rank) { return std::max(kMostSteps - 2 * rank, 0); }

// Trains in one process what `world` ranks train together.
template <class NewOptimizer>
std::vector<Tensor> TrainAlone(int world, const NewOptimizer& new_optimizer, double clip = 0) {
  Sequential net = NewNet();
  auto optimizer = new_optimizer(net->parameters());
  for (int step = 0; step < kMostSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < world; ++rank)
      if (step < StepsOf(rank)) (LossOf(net->forward(Batch(rank, step))) / world).backward();
    if (clip > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), clip);
    optimizer.step();
  }
  return net->parameters();
}

void RequireClose(const std::vector<Tensor>& got, const std::vector<Tensor>& want,
                  double most = 1e-6) {
  for (size_t i = 0; i < got.size(); ++i) {
    const double far = (got[i] - want[i]).abs().max().item<double>();
    Require(far < most,
            "parameter " + std::to_string(i) + " is near: it is off by " + std::to_string(far));
  }
}

struct Case {
  const char* name;
  Placement placement;
  int world;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name << " " << one.world; }

class Placements : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, Placements,
                         testing::Values(Case{"replicated", Replicated{}, 2},
                                         Case{"replicated", Replicated{}, 3},
                                         Case{"whole", WholeTensors{}, 1},
                                         Case{"whole", WholeTensors{}, 3},
                                         Case{"slices", Slices{}, 1}, Case{"slices", Slices{}, 2},
                                         Case{"slices", Slices{}, 5}));

// Takes this rank's steps in a join.
template <class Ddp, class AnyOptimizer>
void TrainEpoch(Group& group, Ddp& ddp, AnyOptimizer& optimizer) {
  ddp.join([&] {
    for (int step = 0; step < StepsOf(group.rank()); ++step) {
      optimizer.zero_grad();
      LossOf(ddp(Batch(group.rank(), step))).backward();
      optimizer.step();
    }
  });
}

template <class Rule>
void TrainUneven(Group& group, const Placement& placement, const Rule& rule, double clip,
                 const std::vector<Tensor>& want) {
  Sequential net = NewNet();
  DataParallel ddp(group, net, {.first_bucket_bytes = 64, .bucket_bytes = 128});
  Optimizer optimizer(ddp, rule, {.placement = placement});
  const bool used_all = ddp.join([&] {
    for (int step = 0; step < StepsOf(group.rank()); ++step) {
      const Tensor loss = LossOf(ddp(Batch(group.rank(), step)));
      optimizer.zero_grad();
      loss.backward();
      if (clip > 0) optimizer.clip_grad_norm(clip);
      optimizer.step();
      if (clip > 0) Require(optimizer.last_norm() > 0, "the norm is known");
    }
  });
  Require(used_all, "all batches are used");
  RequireReplicas(group, *net);
  RequireClose(net->parameters(), want);
}

TEST_P(Placements, UnevenInputsTrainAsOneProcess) {
  const int world = GetParam().world;
  EXPECT_EQ(RunRanks(world,
                     [&](Group& group) {
                       const auto rule = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
                       const auto want = TrainAlone(world, [&](const auto& params) {
                         return torch::optim::AdamW(params, rule);
                       });
                       TrainUneven(group, GetParam().placement, rule, 0, want);
                     }),
            AllPass(world));
}

TEST_P(Placements, ClippingIsByTheNormOfAllGradients) {
  const int world = GetParam().world;
  EXPECT_EQ(RunRanks(world,
                     [&](Group& group) {
                       const auto rule = torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true);
                       const double clip = 0.01;
                       const auto want = TrainAlone(
                           world,
                           [&](const auto& params) { return torch::optim::SGD(params, rule); },
                           clip);
                       TrainUneven(group, GetParam().placement, rule, clip, want);
                     }),
            AllPass(world));
}

// AdamW with float32 master copies, by torch's operations on whole tensors.
std::vector<Tensor> TrainHalvesAlone(int world, torch::ScalarType dtype,
                                     const torch::optim::AdamWOptions& rule) {
  Sequential net = NewNet();
  net->to(dtype);
  const torch::NoGradGuard no_grad;
  struct State {
    Tensor param, master, first, second;
  };
  std::vector<State> states;
  for (const Tensor& param : net->parameters()) {
    const Tensor master = param.to(torch::kFloat);
    states.push_back({param, master, torch::zeros_like(master), torch::zeros_like(master)});
  }
  const auto [beta1, beta2] = rule.betas();
  for (int step = 0; step < kMostSteps; ++step) {
    std::vector<Tensor> sums(states.size());
    for (int rank = 0; rank < world; ++rank) {
      if (step >= StepsOf(rank)) continue;
      net->zero_grad();
      {
        const at::AutoGradMode enable_grad(true);
        LossOf(net->forward(Batch(rank, step).to(dtype))).backward();
      }
      for (size_t i = 0; i < states.size(); ++i) {
        const Tensor gradient = states[i].param.grad().to(torch::kFloat);
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient;
      }
    }
    const double correction1 = 1 - std::pow(beta1, step + 1);
    const double correction2 = 1 - std::pow(beta2, step + 1);
    for (size_t i = 0; i < states.size(); ++i) {
      auto& [param, master, first, second] = states[i];
      const Tensor gradient = (sums[i] * (1.0 / world)).to(dtype).to(torch::kFloat);
      first.mul_(beta1).add_(gradient, 1 - beta1);
      second.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
      const Tensor bias = torch::full_like(second, std::sqrt(correction2));
      const Tensor denominator = second.sqrt() / bias + rule.eps();
      const Tensor moved = first * -(rule.lr() / correction1) / denominator;
      master = master * (1 - rule.lr() * rule.weight_decay()) + moved;
      param.copy_(master);
    }
  }
  return net->parameters();
}

TEST_P(Placements, ParametersOf16BitsHaveMasterCopies) {
  const int world = GetParam().world;
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    EXPECT_EQ(RunRanks(world,
                       [&](Group& group) {
                         // Most updates are less than half a unit of a bfloat16's last place.
                         const auto rule = torch::optim::AdamWOptions(3e-4).weight_decay(0.1);
                         const auto want = TrainHalvesAlone(world, dtype, rule);
                         Sequential net = NewNet();
                         net->to(dtype);
                         DataParallel ddp(group, net, {.first_bucket_bytes = 64});
                         Optimizer optimizer(ddp, rule, {.placement = GetParam().placement});
                         ddp.join([&] {
                           for (int step = 0; step < StepsOf(group.rank()); ++step) {
                             optimizer.zero_grad();
                             LossOf(ddp(Batch(group.rank(), step).to(dtype))).backward();
                             optimizer.clip_grad_norm(1e6);  // Measures, and changes nothing.
                             optimizer.step();
                             Require(optimizer.last_norm() > 0, "the norm is known");
                           }
                         });
                         RequireReplicas(group, *net);
                         for (size_t i = 0; i < want.size(); ++i)
                           RequireSame(net->parameters()[i], want[i], "a parameter");
                       }),
              AllPass(world));
  }
}

void TestCheckpoints(int world, const Placement& placement, torch::ScalarType dtype) {
  const std::string folder = testing::TempDir() + "/checkpoint" + std::to_string(getpid());
  EXPECT_EQ(RunRanks(world,
                     [&](Group& group) {
                       const auto train = [&](auto& ddp, auto& optimizer, int from, int to) {
                         for (int step = from; step < to; ++step) {
                           optimizer.zero_grad();
                           LossOf(ddp(Batch(group.rank(), step).to(dtype))).backward();
                           optimizer.step();
                         }
                       };
                       const torch::optim::AdamOptions rule(dtype == torch::kFloat ? 0.01 : 3e-4);
                       const OptimizerOptions options{.placement = placement};
                       Sequential net = NewNet(), later = NewNet();
                       net->to(dtype);
                       later->to(dtype);
                       DataParallel ddp(group, net), later_ddp(group, later);
                       Optimizer optimizer(ddp, rule, options), loaded(later_ddp, rule, options);
                       train(ddp, optimizer, 0, 3);
                       optimizer.save_sharded(folder);
                       {
                         const torch::NoGradGuard no_grad;
                         for (size_t i = 0; i < net->parameters().size(); ++i)
                           later->parameters()[i].copy_(net->parameters()[i]);
                       }
                       loaded.load_sharded(folder);
                       train(ddp, optimizer, 3, 5);
                       train(later_ddp, loaded, 3, 5);
                       for (size_t i = 0; i < net->parameters().size(); ++i)
                         RequireSame(later->parameters()[i], net->parameters()[i], "a parameter");
                     }),
            AllPass(world));
  std::filesystem::remove_all(folder);
}

TEST_P(Placements, CheckpointsContinueWithTheSameBits) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf})
    TestCheckpoints(GetParam().world, GetParam().placement, dtype);
}

// Returns whether torch's square root of a second moment is the nearest number. MKL's is on Intel's
// processors; elsewhere it is the number beside it for a fifth of the arguments.
template <class State>
Tensor HasNearestRoot(torch::optim::Optimizer& theirs, const Tensor& param) {
  const Tensor second =
      static_cast<State&>(*theirs.state().at(param.unsafeGetTensorImpl())).exp_avg_sq();
  return second.sqrt() == second.to(torch::kDouble).sqrt().to(torch::kFloat);
}

// Takes steps of ours and of torch::optim, with the same gradients, each from the same parameters.
// Where `is_exact(theirs, param)`, they must give the same bits. Returns the largest difference
// elsewhere, in units of the last place of the largest of a parameter's value before the step, that
// after it, and the step itself.
template <class TorchOptimizer, class Rule, class IsExact>
double MostUlps(Group& group, const Rule& rule, const IsExact& is_exact) {
  Sequential net = NewNet(), alone = NewNet();
  DataParallel ddp(group, net);
  Optimizer ours(ddp, rule);
  TorchOptimizer theirs(alone->parameters(), rule);
  double most = 0;
  for (int step = 0; step < 50; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    LossOf(ddp(Batch(0, step))).backward();
    LossOf(alone->forward(Batch(0, step))).backward();
    std::vector<Tensor> before;
    for (const Tensor& param : net->parameters()) before.push_back(param.detach().clone());
    ours.step();
    theirs.step();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < before.size(); ++i) {
      const Tensor mine = net->parameters()[i], other = alone->parameters()[i];
      const Tensor is_same = torch::logical_or(mine == other, ~is_exact(theirs, other));
      Require(is_same.all().item<bool>(), "step " + std::to_string(step) + " has torch's bits");
      const Tensor values = torch::maximum(before[i].abs(), mine.abs());
      const Tensor large = torch::maximum(values, (mine - before[i]).abs());
      const Tensor unit = torch::exp2(large.log2().floor() - 23);
      most = std::max(most, ((mine - other).abs() / unit).max().item<double>());
      other.copy_(mine);
    }
  }
  return most;
}

TEST(OptimizerTest, AStepHasTheBitsOfTorchWhereTorchRoundsRoots) {
  const auto check = [](double ulps, double most, const std::string& name) {
    Require(ulps <= most, name + " is near: it is off by " + std::to_string(ulps) + " ulp");
  };
  EXPECT_EQ(
      RunRanks(1,
               [&](Group& group) {
                 // Without AVX2, torch does not multiply and add with one rounding.
                 const bool fuses = at::get_cpu_capability() != "DEFAULT";
                 const auto everywhere = [fuses](auto&, const Tensor& param) {
                   return torch::full_like(param, fuses, torch::kBool);
                 };
                 const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
                 check(MostUlps<torch::optim::SGD>(group, sgd, everywhere), 1, "SGD");
                 const auto nesterov = torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true);
                 check(MostUlps<torch::optim::SGD>(group, nesterov, everywhere), 1, "nesterov");
                 const auto adam_is_exact = [&](auto& theirs, const Tensor& param) {
                   return torch::logical_and(
                       everywhere(theirs, param),
                       HasNearestRoot<torch::optim::AdamParamState>(theirs, param));
                 };
                 const auto adam = torch::optim::AdamOptions(0.01);
                 check(MostUlps<torch::optim::Adam>(group, adam, adam_is_exact), 2, "Adam");
                 const auto l2 = torch::optim::AdamOptions(0.01).weight_decay(0.1);
                 check(MostUlps<torch::optim::Adam>(group, l2, adam_is_exact), 2, "Adam with L2");
                 const auto adamw_is_exact = [&](auto& theirs, const Tensor& param) {
                   return torch::logical_and(
                       everywhere(theirs, param),
                       HasNearestRoot<torch::optim::AdamWParamState>(theirs, param));
                 };
                 const auto adamw = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
                 check(MostUlps<torch::optim::AdamW>(group, adamw, adamw_is_exact), 2, "AdamW");
               }),
      AllPass(1));
}

// The core with the same gradients, in buckets of another size.
TEST(OptimizerTest, PowerSgdIsThatOfTheCore) {
  EXPECT_EQ(
      RunRanks(
          2,
          [](Group& group) {
            Sequential net = NewNet(), local = NewNet();
            DataParallel ddp(group, net,
                             {.first_bucket_bytes = 64,
                              .compression = Compression::kPowerSgd,
                              .power_sgd = {.start_step = 1}});
            RequireError(
                [&] { Optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = Slices{}}); },
                "gradients are already reduced by compression or");
            ParameterSet set;
            evenkeel::PowerSgdOptions power{.start_step = 1};
            for (const Tensor& param : local->parameters()) {
              param.mutable_grad() = torch::zeros_like(param);
              set.Add("p" + std::to_string(set.size()), MemoryOf(param), MemoryOf(param.grad()));
              power.shapes.push_back(MatrixOf(param.sizes()));
            }
            auto core = Value(evenkeel::DataParallel::Create(
                group.state()->comm.get(), &set, {}, {}, std::make_unique<PowerSgd>(power)));
            for (int step = 0; step < 4; ++step) {
              net->zero_grad();
              LossOf(ddp(Batch(group.rank(), step))).backward();
              local->zero_grad(/*set_to_none=*/false);
              set.ClearGradients();
              Check(core->BeginStep());
              LossOf(local->forward(Batch(group.rank(), step))).backward();
              for (int i = set.size() - 1; i >= 0; --i) {
                set.SetGradState(i, GradState::kLocal);
                Check(core->GradientReady(i));
              }
              Check(core->FinishStep());
              std::vector<Tensor> got, want;
              for (const Tensor& param : net->parameters()) got.push_back(param.grad());
              for (const Tensor& param : local->parameters()) want.push_back(param.grad());
              RequireClose(got, want);
              const Tensor sizes = torch::linalg_svdvals(got[0]);
              const bool has_rank_1 = (sizes[1] < 1e-5 * sizes[0]).item<bool>();
              Require(has_rank_1 == (step >= 1), "it is compressed from step 1 on");
            }
          }),
      AllPass(2));
}

TEST(OptimizerTest, PowerSgdTrainsUnevenInputs) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net,
                                        {.first_bucket_bytes = 64,
                                         .compression = Compression::kPowerSgd,
                                         .power_sgd = {.rank = 2}});
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.5));
                       const auto loss_now = [&] {
                         const torch::NoGradGuard no_grad;
                         return LossOf(net->forward(Batch(0, 0))).item<double>();
                       };
                       const double before = loss_now();
                       for (int epoch = 0; epoch < 5; ++epoch) {
                         TrainEpoch(group, ddp, optimizer);
                         RequireReplicas(group, *net);
                       }
                       Require(loss_now() < before / 4, "the loss falls");
                     }),
            AllPass(3));
}

void TestSafetensors(const std::string& path) {
  const auto new_net = [](int width) {
    return Sequential(Linear(6, width), torch::nn::BatchNorm1d(width));
  };
  Sequential net = new_net(4), half = new_net(4);
  net->forward(Batch(0, 0));
  const Tensor& linear = net[0]->as<Linear>()->weight;
  linear.set_data(linear.t().contiguous().t());
  save_safetensors(*net, path);
  half->to(torch::kHalf);
  const auto require_loaded = [&](Sequential into, torch::ScalarType dtype) {
    load_safetensors(*into, path);
    for (const auto& item : into->named_parameters())
      RequireSame(item.value(), net->named_parameters()[item.key()].to(dtype), item.key());
    for (const auto& item : into->named_buffers())
      RequireSame(item.value(), net->named_buffers()[item.key()].to(item.value().scalar_type()),
                  item.key());
  };
  require_loaded(new_net(4), torch::kFloat);
  require_loaded(half, torch::kHalf);
  const auto refused = [&](Sequential into, const std::string& part) {
    RequireError([&] { load_safetensors(*into, path); }, part);
  };
  refused(new_net(5), "\"0.bias\" has the sizes [4], but that of the module [5]");
  refused(Sequential(Linear(6, 4)), ", but the module has none");
  refused(Sequential(Linear(6, 4), torch::nn::BatchNorm1d(4), Linear(4, 4)),
          "has no tensor \"2.bias\", but the module has one");
  RequireError([&] { load_safetensors(*net, path + ".none"); }, path + ".none");
}

TEST(OptimizerTest, SafetensorsHaveTheNamesOfStateDict) {
  const std::string path = testing::TempDir() + "/net.safetensors";
  EXPECT_EQ(RunRanks(1, [&](Group&) { TestSafetensors(path); }), AllPass(1));
  std::filesystem::remove(path);
}

TEST(OptimizerTest, SchedulersOfTorchChangeTheRate) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       const auto run = [](auto& optimizer, const auto& step) {
                         torch::optim::StepLR schedule(optimizer, 2, 0.5);
                         for (int epoch = 0; epoch < 5; ++epoch) {
                           optimizer.zero_grad();
                           step(epoch);
                           optimizer.step();
                           schedule.step();
                         }
                       };
                       Sequential net = NewNet(), alone = NewNet();
                       DataParallel ddp(group, net);
                       const torch::optim::SGDOptions rule(0.3);
                       Optimizer optimizer(ddp, rule, {.placement = Slices{}});
                       run(optimizer,
                           [&](int step) { LossOf(ddp(Batch(group.rank(), step))).backward(); });
                       torch::optim::SGD sgd(alone->parameters(), rule);
                       run(sgd, [&](int step) {
                         for (int rank = 0; rank < 2; ++rank)
                           (LossOf(alone->forward(Batch(rank, step))) / 2).backward();
                       });
                       RequireClose(net->parameters(), alone->parameters());
                     }),
            AllPass(2));
}

TEST(OptimizerTest, GroupsHaveTheirOwnSettings) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       const auto groups_of = [](Sequential& net) {
                         const auto all = net->parameters();
                         std::vector<torch::optim::OptimizerParamGroup> groups;
                         groups.emplace_back(std::vector<Tensor>{all[0], all[2]});
                         groups.emplace_back(
                             std::vector<Tensor>{all[1], all[3]},
                             std::make_unique<torch::optim::AdamWOptions>(
                                 torch::optim::AdamWOptions(0.02).weight_decay(0.0)));
                         return groups;
                       };
                       const auto defaults = torch::optim::AdamWOptions(0.01).weight_decay(0.5);
                       Sequential net = NewNet(), alone = NewNet();
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, groups_of(net),
                                           std::make_unique<torch::optim::AdamWOptions>(defaults));
                       torch::optim::AdamW adamw(groups_of(alone), defaults);
                       for (int step = 0; step < 4; ++step) {
                         optimizer.zero_grad();
                         adamw.zero_grad();
                         LossOf(ddp(Batch(group.rank(), step))).backward();
                         for (int rank = 0; rank < 2; ++rank)
                           (LossOf(alone->forward(Batch(rank, step))) / 2).backward();
                         optimizer.step();
                         adamw.step();
                       }
                       RequireClose(net->parameters(), alone->parameters());
                     }),
            AllPass(2));
}

TEST(OptimizerTest, ChangesOfGradientsCountOrAreRefused) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       for (const bool split : {false, true}) {
                         Sequential net = NewNet();
                         DataParallel ddp(group, net);
                         Optimizer optimizer(
                             ddp, torch::optim::SGDOptions(0.1),
                             {.placement = split ? Placement(Slices{}) : Placement(Replicated{})});
                         LossOf(ddp(Batch(group.rank(), 0))).backward();
                         const auto clip = [&] {
                           torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-9);
                         };
                         if (split) {
                           try {
                             clip();
                           } catch (const c10::Error&) {
                             optimizer.zero_grad(/*set_to_none=*/false);
                             LossOf(ddp(Batch(group.rank(), 0))).backward();
                             optimizer.step();
                             continue;
                           }
                           Require(false, "it throws");
                         }
                         clip();
                         const Tensor before = net->parameters()[0].detach().clone();
                         optimizer.step();
                         Require(torch::allclose(before, net->parameters()[0], 0, 1e-8),
                                 "it is clipped");
                       }
                     }),
            AllPass(2));
}

TEST(OptimizerTest, GradientsThatAreNotFiniteSkipTheStep) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, torch::optim::AdamWOptions(0.1),
                                           {.placement = Slices{}});
                       for (int step = 0; step < 3; ++step) {
                         const Tensor before = net->parameters()[0].detach().clone();
                         optimizer.zero_grad();
                         const double scale = step == 1 && group.rank() == 1 ? INFINITY : 1024.0;
                         (LossOf(ddp(Batch(group.rank(), step))) * scale).backward();
                         optimizer.unscale(1 / 1024.0);
                         optimizer.step();
                         Require(optimizer.last_was_skipped() == (step == 1), "step 1 is skipped");
                         Require(torch::equal(before, net->parameters()[0]) == (step == 1),
                                 "a skipped step changes nothing");
                       }
                       RequireReplicas(group, *net);
                     }),
            AllPass(2));
}

TEST(OptimizerTest, JoinedTakesAnyOptimizerOfTorch) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       const torch::optim::RMSpropOptions rule(0.01);
                       const auto want = TrainAlone(3, [&](const auto& params) {
                         return torch::optim::RMSprop(params, rule);
                       });
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       torch::optim::RMSprop rmsprop(net->parameters(), rule);
                       Joined optimizer(ddp, rmsprop);
                       TrainEpoch(group, ddp, optimizer);
                       RequireReplicas(group, *net);
                       RequireClose(net->parameters(), want);
                     }),
            AllPass(3));
}

// ---- What a program does after step() ----

constexpr double kExact = 1e-13;  // For float64.

Sequential NewDoubleNet() {
  Sequential net = NewNet();
  net->to(torch::kDouble);
  return net;
}
Tensor DoubleBatch(int rank, int step) { return Batch(rank, step).to(torch::kDouble); }

// A schedule by steps, weights that are clamped, and their moving average.
class PerStep {
 public:
  PerStep(torch::optim::Optimizer& optimizer, const Sequential& net)
      : optimizer_(optimizer), schedule_(optimizer, 2, 0.7), net_(net) {
    for (const Tensor& param : net_->parameters()) average.push_back(param.detach().clone());
  }
  void Run() {
    schedule_.step();
    for (size_t i = 0; i < average.size(); ++i) {
      const Tensor param = net_->parameters()[i].data();
      average[i].mul_(0.9).add_(param.clamp_(-0.3, 0.3), 0.1);
    }
  }
  void Decay() { schedule_.step(); }
  double rate() const { return optimizer_.param_groups()[0].options().get_lr(); }

  std::vector<Tensor> average;

 private:
  torch::optim::Optimizer& optimizer_;
  torch::optim::StepLR schedule_;
  Sequential net_;
};

const auto kMomentum = torch::optim::SGDOptions(0.3).momentum(0.9);

// Calls `body` with each optimizer: as one that steps, and as one that has rates.
template <class Body>
void ForEachOptimizer(Group& group, const Body& body) {
  for (const Placement& placement :
       {Placement(Replicated{}), Placement(WholeTensors{}), Placement(Slices{})}) {
    Sequential net = NewDoubleNet();
    DataParallel ddp(group, net, {.first_bucket_bytes = 64, .bucket_bytes = 128});
    Optimizer optimizer(ddp, kMomentum, {.placement = placement});
    body(net, ddp, optimizer, optimizer);
  }
  Sequential net = NewDoubleNet();
  DataParallel ddp(group, net);
  torch::optim::SGD sgd(net->parameters(), kMomentum);
  Joined optimizer(ddp, sgd);
  body(net, ddp, optimizer, sgd);
}

// Trains `epochs` in one process, with these batches of each rank.
template <class AfterStep>
void TrainDoublesAlone(const std::vector<int>& batches, int epochs, Sequential net,
                       torch::optim::Optimizer& optimizer, const AfterStep& after_step) {
  const int world = static_cast<int>(batches.size());
  for (int i = 0; i < epochs * *std::max_element(batches.begin(), batches.end()); ++i) {
    const int step = i % *std::max_element(batches.begin(), batches.end());
    optimizer.zero_grad();
    for (int rank = 0; rank < world; ++rank)
      if (step < batches[rank]) (LossOf(net->forward(DoubleBatch(rank, step))) / world).backward();
    optimizer.step();
    after_step();
  }
}

const std::vector<int> kLoops[] = {{4}, {4, 4}, {5, 2}, {2, 5}, {3, 0, 4}};

TEST(OptimizerTest, FunctionsAfterAStepRunOnAllRanks) {
  for (const std::vector<int>& batches : kLoops) {
    const int world = static_cast<int>(batches.size());
    const auto train = [&](Group& group) {
      Sequential alone = NewDoubleNet();
      torch::optim::SGD sgd(alone->parameters(), kMomentum);
      PerStep want(sgd, alone);
      TrainDoublesAlone(batches, 2, alone, sgd, [&] { want.Run(); });
      ForEachOptimizer(group, [&](auto& net, auto& ddp, auto& optimizer, auto& of_torch) {
        PerStep per_step(of_torch, net);
        optimizer.after_step([&] { per_step.Run(); });
        int calls = 0;
        optimizer.after_step([&] { ++calls; });
        for (int epoch = 0; epoch < 2; ++epoch) {
          ddp.join([&] {
            for (int step = 0; step < batches[group.rank()]; ++step) {
              optimizer.zero_grad();
              LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
              optimizer.step();
            }
          });
        }
        RequireReplicas(group, *net);
        RequireClose(net->parameters(), alone->parameters(), kExact);
        RequireClose(per_step.average, want.average, kExact);
        Require(per_step.rate() == want.rate(), "the rate is that of one process");
        Require(calls == 2 * *std::max_element(batches.begin(), batches.end()), "each step calls");
      });
    };
    EXPECT_EQ(RunRanks(world, train), AllPass(world));
  }
}

TEST(OptimizerTest, ARateThatFollowsTheLoopsLastStepIsThatOfAllRanks) {
  for (const std::vector<int>& batches : kLoops) {
    const int world = static_cast<int>(batches.size());
    const bool is_even = std::count(batches.begin(), batches.end(), batches[0]) == world;
    const auto train = [&](Group& group) {
      Sequential alone = NewDoubleNet();
      torch::optim::SGD sgd(alone->parameters(), kMomentum);
      PerStep want(sgd, alone);
      TrainDoublesAlone(batches, is_even ? 2 : 1, alone, sgd, [&] { want.Decay(); });
      ForEachOptimizer(group, [&](auto& net, auto& ddp, auto& optimizer, auto& of_torch) {
        PerStep per_step(of_torch, net);
        for (int epoch = 0; epoch < (is_even ? 2 : 1); ++epoch) {
          ddp.join([&] {
            for (int step = 0; step < batches[group.rank()]; ++step) {
              optimizer.zero_grad();
              LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
              optimizer.step();
              per_step.Decay();
            }
          });
        }
        RequireClose(net->parameters(), alone->parameters(), kExact);
        Require(per_step.rate() == want.rate(), "the rate " + std::to_string(per_step.rate()) +
                                                    " is " + std::to_string(want.rate()));
      });
    };
    EXPECT_EQ(RunRanks(world, train), AllPass(world));
  }
}

TEST(OptimizerTest, ARateThatFollowsTheLastStepBeforeAnEarlyStopStays) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       ForEachOptimizer(group, [&](auto&, auto& ddp, auto& optimizer, auto& rates) {
                         PerStep per_step(rates, NewDoubleNet());
                         ddp.join(
                             [&] {
                               for (int step = 0; step < 3 + 2 * group.rank(); ++step) {
                                 optimizer.zero_grad();
                                 LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
                                 optimizer.step();
                                 per_step.Decay();
                               }
                             },
                             {.stop_early = true});
                         Require(per_step.rate() == 0.3 * 0.7, "the rate after three steps");
                       });
                     }),
            AllPass(2));
}

// In steps that ranks without a batch take, too. With a split state such changes would be lost.
TEST(OptimizerTest, ChangesAfterAStepThatNotAllRanksMakeAreRefused) {
  for (const bool is_at_the_end : {false, true}) {
    for (int kind = 0; kind < (is_at_the_end ? 1 : 4); ++kind) {
      const Endings endings = RunRanks(3, [&](Group& group) {
        int current = 0;
        ForEachOptimizer(group, [&](auto& net, auto& ddp, auto& optimizer, auto&) {
          if (current++ != kind) return;
          ddp.join([&] {
            const int last = group.rank() == 2 ? 2 : 5;
            for (int step = 0; step < last; ++step) {
              optimizer.zero_grad();
              LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
              optimizer.step();
              // The first change is made by all ranks.
              if (step == 1 || step == (is_at_the_end ? 4 : 3))
                net->parameters()[1].data().clamp_(-0.01, 0.01);
            }
          });
        });
      });
      for (const std::string& ending : endings) {
        EXPECT_THAT(ending, testing::HasSubstr("\"0.bias\""));
        EXPECT_THAT(ending, testing::HasSubstr("after_step()"));
      }
    }
  }
}

// Before the loop's end, where all values are compared.
TEST(OptimizerTest, AChangeOfOneRankWithABatchIsFoundByTheOthers) {
  for (int kind = 0; kind < 4; ++kind) {
    const Endings endings = RunRanks(3, [&](Group& group) {
      int current = 0;
      ForEachOptimizer(group, [&](auto& net, auto& ddp, auto& optimizer, auto&) {
        if (current++ != kind) return;
        ddp.join([&] {
          for (int step = 0; step < (group.rank() == 0 ? 1 : 9); ++step) {
            Require(step < 7, "the step after the next one has begun");
            optimizer.zero_grad();
            LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
            optimizer.step();
            if (group.rank() == 2 && step == 3) net->parameters()[1].data().clamp_(-0.01, 0.01);
          }
        });
      });
    });
    for (const std::string& ending : endings)
      EXPECT_THAT(ending, testing::HasSubstr("hash of values")) << kind;
  }
}

TEST(OptimizerTest, RanksWithOtherFunctionsAfterAStepAreNamed) {
  for (const int kind : {0, 3}) {
    const Endings endings = RunRanks(2, [&](Group& group) {
      int current = 0;
      ForEachOptimizer(group, [&](auto&, auto& ddp, auto& optimizer, auto&) {
        if (current++ != kind) return;
        if (group.rank() == 1) optimizer.after_step([] {});
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
          optimizer.step();
        }
      });
    });
    for (const std::string& ending : endings)
      EXPECT_THAT(ending, testing::HasSubstr("functions after the step=1"));
  }
}

TEST(OptimizerTest, AnExceptionAfterAStepReachesAllRanks) {
  for (const int thrower : {0, 1}) {  // Rank 1 has no batch then.
    const Endings endings = RunRanks(2, [&](Group& group) {
      Sequential net = NewDoubleNet();
      DataParallel ddp(group, net);
      Optimizer optimizer(ddp, kMomentum, {.placement = Slices{}});
      int calls = 0;
      optimizer.after_step([&] {
        if (++calls == 3 && group.rank() == thrower) throw std::runtime_error("no disk");
      });
      ddp.join([&] {
        for (int step = 0; step < 5 - 4 * group.rank(); ++step) {
          optimizer.zero_grad();
          LossOf(ddp(DoubleBatch(group.rank(), step))).backward();
          optimizer.step();
        }
      });
    });
    for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr("no disk"));
  }
}

// ---- Settings ----

TEST(OptimizerTest, ParametersThatAreNotReducedAreRefused) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 Sequential net = NewNet(), other(Linear(3, 2));
                 DataParallel ddp(group, net, {.ignored = {"2.bias"}});
                 const auto refused = [&](std::vector<Tensor> params, const std::string& why) {
                   torch::optim::SGD sgd(params, 0.1);
                   RequireError([&] { Joined(ddp, sgd); }, why);
                   RequireError(
                       [&] {
                         Optimizer(ddp, {torch::optim::OptimizerParamGroup(params)},
                                   std::make_unique<torch::optim::SGDOptions>(0.1));
                       },
                       why);
                 };
                 std::vector<Tensor> two = ddp.parameters();
                 two.push_back(other->parameters()[0]);
                 refused(two, "tensor 3 of parameter group 0, of sizes [2, 3], is not a parameter");
                 refused(net->parameters(),
                         "\"2.bias\" of parameter group 0 is in DataParallelOptions::ignored");
                 torch::optim::SGD sgd(ddp.parameters(), 0.1);
                 Joined joined(ddp, sgd);
                 Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
                 net->push_back(Linear(2, 2));  // After DataParallel was made.
                 std::vector<Tensor> later = ddp.parameters();
                 later.push_back(net->parameters()[4]);
                 refused(later, "parameter \"3.weight\" of parameter group 0");
                 // The same at a step.
                 sgd.param_groups()[0].params().push_back(net->parameters()[4]);
                 optimizer.param_groups()[0].params().push_back(net->parameters()[4]);
                 LossOf(ddp(Batch(group.rank(), 0))).backward();
                 RequireError([&] { joined.step(); }, "\"3.weight\"");
                 RequireError([&] { optimizer.step(); }, "\"3.weight\"");
                 // Only one rank has such a parameter.
                 torch::optim::SGD sgd_1(group.rank() == 1 ? later : ddp.parameters(), 0.1);
                 RequireError([&] { Joined(ddp, sgd_1); }, "rank 1: parameter \"3.weight\"");
               }),
      AllPass(2));
}

TEST(OptimizerTest, GroupsOfParametersStayAsTheyWereCreated) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       const std::vector<Tensor> all = ddp.parameters();
                       Optimizer optimizer(ddp,
                                           {torch::optim::OptimizerParamGroup({all[2], all[3]})},
                                           std::make_unique<torch::optim::SGDOptions>(0.1));
                       auto& params = optimizer.param_groups()[0].params();
                       const auto step = [&] {
                         optimizer.zero_grad();
                         LossOf(ddp(Batch(group.rank(), 0))).backward();
                         optimizer.step();
                       };
                       step();
                       params.push_back(all[1]);
                       RequireError(step, "parameter \"0.bias\" was added to parameter group 0");
                       params.pop_back();
                       params.pop_back();
                       RequireError(step, "\"2.bias\" was removed from parameter group 0");
                     }),
            AllPass(2));
}

// An optimizer of a user's.
struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  explicit OwnOptions(double rate = 0.1) : rate(rate) {}
  double rate, decay = 0;
  double get_lr() const override { return rate; }
  void set_lr(double lr) override { rate = lr; }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("decay", c10::IValue(decay));
  }
};
struct OwnOptimizer : torch::optim::Optimizer {
  OwnOptimizer(std::vector<Tensor> params, const OwnOptions& options)
      : Optimizer(std::move(params), std::make_unique<OwnOptions>(options)) {}
  Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      const auto& options = static_cast<OwnOptions&>(group.options());
      for (Tensor& param : group.params())
        if (param.grad().defined()) param.mul_(1 - options.decay).sub_(param.grad(), options.rate);
    }
    return {};
  }
};

template <class TorchOptimizer, class Options>
auto Creates(Options usual, Options other) {
  return [=](const std::vector<Tensor>& params, bool differs) {
    return std::make_unique<TorchOptimizer>(params, differs ? other : usual);
  };
}

TEST(OptimizerTest, JoinedComparesTheOptimizersOfAllRanks) {
  using namespace torch::optim;
  OwnOptions decays;
  decays.decay = 0.1;
  struct OneDiffers {
    std::string text;  // Of the error.
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>, bool)> create;
  };
  const std::vector<OneDiffers> all = {
      {"torch::optim::Adam",
       [](const auto& params, bool differs) -> std::unique_ptr<torch::optim::Optimizer> {
         if (differs) return std::make_unique<Adam>(params, AdamOptions(0.1));
         return std::make_unique<SGD>(params, SGDOptions(0.1));
       }},
      {"momentum=0.8", Creates<SGD>(SGDOptions(0.1).momentum(0.9), SGDOptions(0.1).momentum(0.8))},
      {"nesterov=true",
       Creates<SGD>(SGDOptions(0.1).momentum(0.9), SGDOptions(0.1).momentum(0.9).nesterov(true))},
      {"betas[1]=0.99", Creates<AdamW>(AdamWOptions(0.1), AdamWOptions(0.1).betas({0.9, 0.99}))},
      {"lr_decay=0.1", Creates<Adagrad>(AdagradOptions(0.1), AdagradOptions(0.1).lr_decay(0.1))},
      {"alpha=0.5", Creates<RMSprop>(RMSpropOptions(0.1), RMSpropOptions(0.1).alpha(0.5))},
      {"lr=0.1000000001", Creates<SGD>(SGDOptions(0.1), SGDOptions(0.1000000001))},
      {"hash of serialize()=", Creates<OwnOptimizer>(OwnOptions(), decays)},
      {"the parameter group of \"2.bias\": rank 0 has 0; rank 1 has none",
       [](auto params, bool differs) {
         if (differs) params.pop_back();
         return std::make_unique<SGD>(params, SGDOptions(0.1));
       }},
      {"the number of parameter groups: rank 0 has 1; rank 1 has 2",
       [](auto params, bool differs) {
         std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup(params)};
         if (!differs) return std::make_unique<SGD>(groups, SGDOptions(0.1));
         groups[0].params().pop_back();
         groups.emplace_back(std::vector<Tensor>{params.back()});
         return std::make_unique<SGD>(groups, SGDOptions(0.1));
       }},
  };
  EXPECT_EQ(RunRanks(2,
                     [&](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       const auto require_error = [&](const OneDiffers& one,
                                                      const std::string& text) {
                         const auto of_torch = one.create(net->parameters(), group.rank() == 1);
                         RequireError([&] { Joined(ddp, *of_torch); }, text);
                       };
                       for (const OneDiffers& one : all) {
                         require_error(one, one.text);
                         require_error(one, "rank 1 has");
                       }
                       const auto own = all[7].create(net->parameters(), false);
                       const Joined optimizer(ddp, *own);  // The group goes on.
                     }),
            AllPass(2));
}

TEST(OptimizerTest, JoinedComparesTheSettingsOfAllRanksInEachStep) {
  using torch::optim::RMSpropOptions;
  const auto set_alpha = [](torch::optim::OptimizerParamGroup& group, double alpha) {
    static_cast<RMSpropOptions&>(group.options()).alpha(alpha);
  };
  using Change = std::function<void(std::vector<torch::optim::OptimizerParamGroup>&)>;
  const std::pair<std::string, Change> all[] = {
      {"alpha of group 3=0.5", [&](auto& groups) { set_alpha(groups[3], 0.5); }},
      {"lr of group 0=0.1000000001",
       [](auto& groups) { groups[0].options().set_lr(0.1000000001); }},
      {"hash of the parameter groups=", [](auto& groups) { groups[1].params().pop_back(); }},
      {"hash of all settings=",  // More than a record names.
       [&](auto& groups) {
         for (auto& group : groups) {
           group.options().set_lr(0.2);
           set_alpha(group, 0.5);
         }
       }},
  };
  for (const auto& [text, change] : all) {
    SCOPED_TRACE(text);
    const Endings endings = RunRanks(2, [&, &change = change](Group& group) {
      Sequential net = NewNet();
      DataParallel ddp(group, net);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const Tensor& param : net->parameters()) groups.emplace_back(std::vector<Tensor>{param});
      torch::optim::RMSprop rmsprop(groups, RMSpropOptions(0.1));
      Joined optimizer(ddp, rmsprop);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        LossOf(ddp(Batch(group.rank(), step))).backward();
        if (step == 1 && group.rank() == 1) change(rmsprop.param_groups());
        optimizer.step();
      }
    });
    for (const std::string& ending : endings) {
      EXPECT_THAT(ending, testing::HasSubstr(text));
      EXPECT_THAT(ending, testing::HasSubstr("rank 1 has"));
    }
  }
}

// The closure runs once, before the update; ranks without a batch take part.
TEST(OptimizerTest, AClosureRunsOnceBeforeTheStep) {
  const std::vector<int> batches = {4, 2};
  EXPECT_EQ(RunRanks(2,
                     [&](Group& group) {
                       Sequential alone = NewDoubleNet();
                       torch::optim::SGD sgd(alone->parameters(), kMomentum);
                       TrainDoublesAlone(batches, 1, alone, sgd, [] {});
                       ForEachOptimizer(group, [&](auto& net, auto& ddp, auto& optimizer, auto&) {
                         ddp.join([&] {
                           for (int step = 0; step < batches[group.rank()]; ++step) {
                             Tensor first;
                             const Tensor loss = optimizer.step([&] {
                               optimizer.zero_grad();
                               first = LossOf(ddp(DoubleBatch(group.rank(), step)));
                               first.backward();
                               return first;
                             });
                             Require(loss.is_same(first), "it is the closure's loss");
                           }
                         });
                         RequireClose(net->parameters(), alone->parameters(), kExact);
                       });
                     }),
            AllPass(2));
}

// The next step would round them from master copies without the change.
TEST(OptimizerTest, AFunctionAfterAStepThatChangesParametersOf16BitsIsRefused) {
  EXPECT_EQ(RunRanks(1,
                     [](Group& group) {
                       Sequential net = NewNet();
                       net->to(torch::kBFloat16);
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, kMomentum);
                       bool clamps = false;
                       optimizer.after_step([&] {
                         if (clamps) net->parameters()[0].clamp_(-0.01, 0.01);
                       });
                       const auto step = [&] {
                         optimizer.zero_grad();
                         ddp(torch::ones({2, net->parameters()[0].size(1)}, torch::kBFloat16))
                             .sum()
                             .backward();
                         optimizer.step();
                       };
                       step();
                       clamps = true;
                       RequireError(step, "changed parameter \"0.weight\" of 16 bits");
                     }),
            AllPass(1));
}

TEST(OptimizerTest, LbfgsStepsByItselfAndNotInAJoin) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       const auto rule = torch::optim::LBFGSOptions(0.5).max_iter(8).line_search_fn(
                           "strong_wolfe");
                       Sequential net = NewDoubleNet(), alone = NewDoubleNet();
                       DataParallel ddp(group, net);
                       torch::optim::LBFGS lbfgs(net->parameters(), rule);
                       torch::optim::LBFGS want(alone->parameters(), rule);
                       RequireError([&] { Joined(ddp, lbfgs); },
                                    "LBFGS calls its closure several times in a step");
                       for (int step = 0; step < 3; ++step) {
                         lbfgs.step([&] {
                           lbfgs.zero_grad();
                           const Tensor loss = LossOf(ddp(DoubleBatch(group.rank(), step)));
                           loss.backward();
                           const Tensor mean = loss.detach().clone();
                           group.all_reduce(mean, Reduce::kAverage);
                           return mean;
                         });
                         want.step([&] {
                           want.zero_grad();
                           Tensor loss = torch::zeros({}, torch::kDouble);
                           for (int rank = 0; rank < 2; ++rank)
                             loss = loss + LossOf(alone->forward(DoubleBatch(rank, step))) / 2;
                           loss.backward();
                           return loss;
                         });
                       }
                       RequireReplicas(group, *net);
                       RequireClose(net->parameters(), alone->parameters(), 1e-10);
                     }),
            AllPass(2));
}

TEST(OptimizerTest, AnOptimizerAfterABackwardMovesTheGradients) {
  EXPECT_EQ(
      RunRanks(2,
               [](Group& group) {
                 Sequential net = NewNet();
                 DataParallel ddp(group, net, {.first_bucket_bytes = 64, .bucket_bytes = 128});
                 for (int step = 0; step < 2; ++step) {
                   net->zero_grad();
                   LossOf(ddp(Batch(group.rank(), step))).backward();
                 }
                 Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = Slices{}});
                 optimizer.zero_grad(/*set_to_none=*/false);
                 LossOf(ddp(Batch(group.rank(), 2))).backward();
                 optimizer.step();
                 RequireReplicas(group, *net);
               }),
      AllPass(2));
}

// Rank 1 ends after one batch, with a gradient that it has cleared; rank 0 freezes, accumulates,
// and does not reach all parameters.
template <class NewOptimizer>
void TrainWithChanges(Group& group, const NewOptimizer& new_optimizer) {
  Sequential net = NewNet();
  DataParallel ddp(group, net,
                   {.find_unused = true, .first_bucket_bytes = 64, .bucket_bytes = 128});
  auto optimizer = new_optimizer(ddp, net);
  ddp.join([&] {
    for (int step = 0; step < (group.rank() == 0 ? 9 : 1); ++step) {
      net->parameters()[2].requires_grad_(step % 3 != 1);
      optimizer->zero_grad();
      if (step % 2 == 1) {
        const auto accumulating = ddp.no_sync();
        LossOf(ddp(Batch(group.rank(), step))).backward();
      }
      const Tensor output = ddp(Batch(group.rank(), step));
      if (step % 4 == 2) {
        output.sum().mul(0).backward();
      } else {
        LossOf(output).backward();
      }
      optimizer->step();
    }
    if (group.rank() == 0) return;
    net->parameters()[2].requires_grad_(false);
    optimizer->zero_grad();
    {  // As rank 0 begins its next step.
      const auto accumulating = ddp.no_sync();
      (LossOf(ddp(Batch(1, 0))) * 1000).backward();
    }
    optimizer->zero_grad();  // It does not count.
  });
  RequireReplicas(group, *net);
  for (const Tensor& param : net->parameters())
    Require(param.abs().max().item<double>() < 2, "a gradient that was cleared does not count");
  for (int epoch = 0; epoch < 2; ++epoch) {
    optimizer->zero_grad();
    LossOf(ddp(Batch(group.rank(), epoch))).backward();
    optimizer->step();
  }
  RequireReplicas(group, *net);
}

TEST(OptimizerTest, ExhaustedRanksFollowChanges) {
  const torch::optim::SGDOptions rule(0.05);
  for (const Placement& placement :
       {Placement(Replicated{}), Placement(WholeTensors{}), Placement(Slices{})}) {
    EXPECT_EQ(RunRanks(2,
                       [&](Group& group) {
                         TrainWithChanges(group, [&](auto& ddp, Sequential&) {
                           return std::make_unique<Optimizer>(ddp, rule,
                                                              OptimizerOptions{placement});
                         });
                       }),
              AllPass(2));
  }
  EXPECT_EQ(RunRanks(2,
                     [&](Group& group) {
                       std::unique_ptr<torch::optim::SGD> sgd;
                       TrainWithChanges(group, [&](auto& ddp, Sequential& net) {
                         sgd = std::make_unique<torch::optim::SGD>(net->parameters(), rule);
                         return std::make_unique<Joined>(ddp, *sgd);
                       });
                     }),
            AllPass(2));
}

TEST(OptimizerTest, RatesOfTheLoopsLastStepAreThoseOfAllRanks) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1),
                                           {.placement = Slices{}});
                       for (int epoch = 0; epoch < 2; ++epoch) {
                         ddp.join([&] {
                           for (int step = 0; step < 3 - group.rank(); ++step) {
                             optimizer.param_groups()[0].options().set_lr(0.1 / (step + 1));
                             optimizer.zero_grad();
                             LossOf(ddp(Batch(group.rank(), step))).backward();
                             optimizer.step();
                           }
                         });
                         Require(optimizer.param_groups()[0].options().get_lr() == 0.1 / 3,
                                 "it is the rate of rank 0's last step");
                       }
                       RequireReplicas(group, *net);
                     }),
            AllPass(2));
}

TEST(OptimizerTest, ALoopThatEndsInsideAStepIsToldHowToEndIt) {
  const Endings endings = RunRanks(2, [](Group& group) {
    Sequential net = NewNet();
    DataParallel ddp(group, net);
    RequireError([&] { ddp.join([] {}); }, "needs an Optimizer");
    Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
    ddp.join([&] {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Tensor loss = LossOf(ddp(Batch(group.rank(), step)));
        if (group.rank() == 1 && step == 2) continue;
        loss.backward();
        optimizer.step();
      }
    });
  });
  for (const std::string& ending : endings)
    EXPECT_THAT(ending, testing::HasSubstr("backward was skipped"));
}

TEST(OptimizerTest, GradientsOfSlicesMustBeCleared) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1),
                                           {.placement = Slices{}});
                       LossOf(ddp(Batch(group.rank(), 0))).backward();
                       RequireError([&] { ddp(Batch(group.rank(), 0)); },
                                    "call step() before the next forward");
                       optimizer.step();
                       RequireError([&] { optimizer.step(); }, "step() was called again");
                       RequireError([&] { optimizer.step(); }, "step() was called again");
                       optimizer.zero_grad();
                       optimizer.step();  // As torch's without gradients.
                       LossOf(ddp(Batch(group.rank(), 0))).backward();
                       optimizer.step();
                       const std::string advice = "call zero_grad() after step()";
                       LossOf(ddp(Batch(group.rank(), 0))).backward();  // Adds to what is used up.
                       RequireError([&] { optimizer.step(); }, advice);
                       Require(net->parameters()[0].grad().is_meta(), "it has no values");
                       ddp(Batch(group.rank(), 0));  // A step without a backward.
                       RequireError([&] { optimizer.step(); }, advice);
                       optimizer.zero_grad();
                       LossOf(ddp(Batch(group.rank(), 0))).backward();
                       optimizer.step();
                       {
                         const auto accumulating = ddp.no_sync();
                         const Tensor loss = LossOf(ddp(Batch(group.rank(), 0)));
                         RequireError([&] { loss.backward({}, /*retain_graph=*/true); }, advice);
                         optimizer.zero_grad();
                         loss.backward();
                       }
                       const Tensor loss = LossOf(ddp(Batch(group.rank(), 0)));
                       loss.backward({}, /*retain_graph=*/true);
                       RequireError([&] { loss.backward(); }, "backward outside of a step");
                       optimizer.clip_grad_norm(0);
                       RequireError([&] { optimizer.step(); }, "max_norm is 0");
                       optimizer.step();
                       optimizer.zero_grad();
                       LossOf(ddp(Batch(group.rank(), 0))).backward();
                       optimizer.zero_grad();
                       RequireError([&] { optimizer.step(); }, "was cleared or replaced");
                       // Through data(), which does not count versions; also where a parameter
                       // has one element.
                       for (const Tensor& param : net->parameters()) {
                         optimizer.zero_grad();
                         LossOf(ddp(Batch(group.rank(), 0))).backward();
                         const auto refusal = [](const std::function<void()>& call) {
                           try {
                             call();
                           } catch (const c10::Error& error) {
                             return std::string(error.what_without_backtrace());
                           }
                           return std::string("no error");
                         };
                         const std::string clipped = refusal([&] {
                           torch::nn::utils::clip_grad_value_(std::vector<Tensor>{param}, 0.01);
                         });
                         const std::string scaled = refusal([&] { param.grad().data().mul_(2); });
                         for (const std::string& text : {clipped, scaled})
                           Require(text.find("single memory location") != std::string::npos, text);
                         const std::string read =
                             refusal([&] { (void)param.grad().sum().item<double>(); });
                         Require(read.find("eta tensor") != std::string::npos, read);
                         optimizer.step();
                       }
                       torch::serialize::OutputArchive archive;
                       RequireError([&] { optimizer.save(archive); }, "save_sharded");
                       optimizer.add_param_group(torch::optim::OptimizerParamGroup(
                           {torch::zeros({1}, torch::requires_grad())}));
                       RequireError([&] { optimizer.step(); }, "all groups at creation");
                     }),
            AllPass(2));
}

TEST(OptimizerTest, AStepWithGradientsThatWereOnlyAccumulatedIsRefused) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       const auto test = [&](auto& ddp, auto& optimizer) {
                         {
                           const auto accumulating = ddp.no_sync();
                           LossOf(ddp(Batch(group.rank(), 0))).backward();
                         }
                         RequireError([&] { optimizer.step(); }, "not accumulate");
                         LossOf(ddp(Batch(group.rank(), 1))).backward();
                         optimizer.step();
                       };
                       Sequential net = NewNet(), joined_net = NewNet();
                       DataParallel ddp(group, net), joined_ddp(group, joined_net);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
                       test(ddp, optimizer);
                       torch::optim::SGD sgd(joined_net->parameters(), 0.1);
                       Joined joined(joined_ddp, sgd);
                       test(joined_ddp, joined);
                       RequireReplicas(group, *joined_net);
                       RequireClose(joined_net->parameters(), net->parameters());
                     }),
            AllPass(2));
}

// While it has a gradient of zeros, torch's optimizers go on to change it.
TEST(OptimizerTest, AFrozenParameterStaysUnlessTheOptimizerIsTorchs) {
  const auto train = [](Sequential& net, auto& model, auto& optimizer, int rank) {
    LossOf(model(Batch(rank, 0))).backward();
    optimizer.step();
    const Tensor frozen = net->parameters()[2];
    frozen.requires_grad_(false);
    const Tensor before = frozen.clone();
    for (int step = 1; step < 3; ++step) {
      net->zero_grad(/*set_to_none=*/false);
      LossOf(model(Batch(rank, step))).backward();
      optimizer.step();
    }
    return torch::equal(frozen, before);
  };
  EXPECT_EQ(
      RunRanks(2,
               [&](Group& group) {
                 const auto rule = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
                 for (const Placement& placement :
                      {Placement(Replicated{}), Placement(WholeTensors{}), Placement(Slices{})}) {
                   Sequential net = NewNet();
                   DataParallel ddp(group, net);
                   Optimizer optimizer(ddp, rule, {.placement = placement});
                   Require(train(net, ddp, optimizer, group.rank()), "it stays");
                   RequireReplicas(group, *net);
                 }
                 Sequential net = NewNet(), alone = NewNet();
                 DataParallel ddp(group, net);
                 torch::optim::AdamW adamw(net->parameters(), rule), own(alone->parameters(), rule);
                 Joined joined(ddp, adamw);
                 // Both ranks have the batches of one process.
                 auto model = [&](const Tensor& input) { return alone->forward(input); };
                 Require(!train(net, ddp, joined, 0) && !train(alone, model, own, 0), "it changes");
                 RequireClose(net->parameters(), alone->parameters());
                 RequireReplicas(group, *net);
                 // Exhausted ranks do not receive its gradient.
                 ddp.join([&] {
                   net->zero_grad(/*set_to_none=*/false);
                   LossOf(ddp(Batch(group.rank(), 0))).backward();
                   RequireError([&] { joined.step(); },
                                "\"2.weight\" is frozen, but has a gradient");
                   net->parameters()[2].mutable_grad().reset();
                   joined.step();
                 });
                 RequireReplicas(group, *net);
               }),
      AllPass(2));
}

// Exhausted ranks would not clip theirs.
TEST(OptimizerTest, ChangesOfGradientsInAJoinAreRefused) {
  for (const bool clips : {true, false}) {
    for (const Placement& placement : {Placement(Replicated{}), Placement(WholeTensors{})}) {
      const Endings endings = RunRanks(2, [&](Group& group) {
        Sequential net = NewNet();
        DataParallel ddp(group, net);
        Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = placement});
        ddp.join([&] {
          for (int step = 0; step < StepsOf(group.rank()); ++step) {
            optimizer.zero_grad();
            LossOf(ddp(Batch(group.rank(), step))).backward();
            if (clips) torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-9);
            if (!clips) net->parameters()[1].mutable_grad()[1] += 1;
            optimizer.step();
          }
        });
      });
      for (const std::string& ending : endings)
        EXPECT_THAT(ending, testing::HasSubstr("was changed between backward and step()"));
    }
  }
  const Endings of_sparse = RunRanks(2, [](Group& group) {
    Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true)));
    DataParallel ddp(group, net);
    Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
    ddp.join([&] {
      LossOf(ddp(torch::tensor({group.rank()}))).backward();
      optimizer.step();
      optimizer.zero_grad();
      LossOf(ddp(torch::tensor({group.rank()}))).backward();
      Tensor& grad = net->parameters()[0].mutable_grad();
      grad = grad * 0.5;
      optimizer.step();
    });
  });
  for (const std::string& ending : of_sparse)
    EXPECT_THAT(ending, testing::HasSubstr("was changed between backward and step()"));
  const Endings endings = RunRanks(2, [](Group& group) {
    Sequential net = NewNet();
    DataParallel ddp(group, net);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    Joined optimizer(ddp, sgd);
    ddp.join([&] {
      LossOf(ddp(Batch(group.rank(), 0))).backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1e9);  // Changes nothing.
      optimizer.step();
      optimizer.zero_grad();
      LossOf(ddp(Batch(group.rank(), 1))).backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-9);
      RequireError([&] { optimizer.step(); }, "was changed between backward and step()");
      for (const Tensor& param : net->parameters()) param.mutable_grad().reset();
      RequireError([&] { optimizer.step(); }, "was cleared between backward and step()");
      throw std::runtime_error("the end");
    });
  });
  for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr("the end"));
}

// Exhausted ranks learn which gradients the others have used.
TEST(OptimizerTest, AGradientThatIsClearedInAJoinIsNotUsed) {
  const auto train = [](const auto& backward, const Sequential& net, auto& optimizer, int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      backward(step);
      net->parameters()[1].mutable_grad().reset();
      optimizer.step();
    }
  };
  Sequential alone = NewNet();
  torch::optim::Adam adam(alone->parameters(), 0.1);
  train(
      [&](int step) {
        for (int rank = 0; rank < 2; ++rank)
          if (step < StepsOf(rank)) (LossOf(alone->forward(Batch(rank, step))) / 2).backward();
      },
      alone, adam, kMostSteps);
  for (const Placement& placement : {Placement(Replicated{}), Placement(WholeTensors{})}) {
    EXPECT_EQ(RunRanks(2,
                       [&](Group& group) {
                         Sequential net = NewNet();
                         DataParallel ddp(group, net);
                         Optimizer optimizer(ddp, torch::optim::AdamOptions(0.1),
                                             {.placement = placement});
                         ddp.join([&] {
                           train(
                               [&](int step) { LossOf(ddp(Batch(group.rank(), step))).backward(); },
                               net, optimizer, StepsOf(group.rank()));
                         });
                         RequireReplicas(group, *net);
                         RequireClose(net->parameters(), alone->parameters());
                       }),
              AllPass(2));
  }
}

// Two backwards, each with its own forward, without zero_grad() and no_sync(): the second adds to a
// gradient that has been reduced.
struct KeepingRun {
  bool skips;                            // Rank 0 skips the second of them.
  std::vector<int> ranks;                // Those whose batches this process has.
  std::function<double(int)> weight_of;  // By step, of each of their losses.
};

template <class Net, class Model, class AnyOptimizer>
void TrainKeeping(const KeepingRun& run, Net& net, Model& model, AnyOptimizer& optimizer) {
  for (int step = 0; step < StepsOf(run.ranks[0]); ++step) {
    for (const int rank : run.ranks) {
      if (step >= StepsOf(rank)) continue;
      const Tensor loss = LossOf(model(rank, step)) * run.weight_of(step);
      if (!run.skips || step % 2 == 0 || rank != 0) loss.backward();
    }
    if (step % 2 == 0) continue;
    optimizer.step();
    net->zero_grad(/*set_to_none=*/step % 4 == 1);
  }
}

// `new_net`: a module of doubles; `input_of`: its input, by rank and step.
template <class NewNet, class InputOf, class NewOptimizer>
void TestKeeping(Group& group, bool skips, DivideBy divide_by, const NewNet& new_net,
                 const InputOf& input_of, const NewOptimizer& new_optimizer) {
  auto alone = new_net(), net = new_net();
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto weight_of = [&](int step) {
    const auto has_batch = [&](int rank) { return step < StepsOf(rank); };
    return 1.0 / (divide_by == DivideBy::kWorldSize
                      ? group.size()
                      : std::count_if(ranks.begin(), ranks.end(), has_batch));
  };
  auto model = [&](int rank, int step) { return alone->forward(input_of(rank, step)); };
  DataParallel ddp(group, net, {.first_bucket_bytes = 64, .bucket_bytes = 128});
  auto ddp_model = [&](int rank, int step) { return ddp(input_of(rank, step)); };
  new_optimizer(ddp, alone->parameters(), net->parameters(), [&](auto& own, auto& optimizer) {
    TrainKeeping({skips, ranks, weight_of}, alone, model, own);
    ddp.join(
        [&] {
          const KeepingRun run{skips, {group.rank()}, [](int) { return 1.0; }};
          TrainKeeping(run, net, ddp_model, optimizer);
        },
        {.divide_by = divide_by});
  });
  RequireReplicas(group, *net);
  for (size_t i = 0; i < net->parameters().size(); ++i)
    Require(torch::allclose(net->parameters()[i], alone->parameters()[i], 0, 1e-12),
            c10::str("parameter ", i, " is near; skips ", skips, ", divides by ",
                     static_cast<int>(divide_by)));
}

TEST(OptimizerTest, AGradientThatIsKeptCountsOnceInAJoin) {
  const auto new_net = [] {
    Sequential net = NewNet();
    net->to(torch::kDouble);
    return net;
  };
  const auto input_of = [](int rank, int step) { return Batch(rank, step).to(torch::kDouble); };
  const auto rule = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
  const auto joined = [&](auto& ddp, auto alone, auto params, const auto& train) {
    torch::optim::AdamW own(alone, rule), adamw(params, rule);
    Joined optimizer(ddp, adamw);
    train(own, optimizer);
  };
  const auto placed = [&](const Placement& placement) {
    return [&rule, placement](auto& ddp, auto alone, auto, const auto& train) {
      torch::optim::AdamW own(alone, rule);
      Optimizer optimizer(ddp, rule, {.placement = placement});
      train(own, optimizer);
    };
  };
  const auto new_table = [] {
    torch::manual_seed(4);
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    net->to(torch::kDouble);
    return net;
  };
  const auto row_of = [](int rank, int step) { return torch::tensor({rank, step % 5}); };
  const auto sgd = [](auto& ddp, auto alone, auto, const auto& train) {
    torch::optim::SGD own(alone, 0.1);
    Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
    train(own, optimizer);
  };
  EXPECT_EQ(RunRanks(3,
                     [&](Group& group) {
                       const auto test = [&](bool skips, DivideBy by, const auto& optimizer) {
                         TestKeeping(group, skips, by, new_net, input_of, optimizer);
                       };
                       for (const bool skips : {false, true}) {
                         test(skips, DivideBy::kWorldSize, joined);
                         test(skips, DivideBy::kWorldSize, placed(Replicated{}));
                         test(skips, DivideBy::kWorldSize, placed(WholeTensors{}));
                         TestKeeping(group, skips, DivideBy::kWorldSize, new_table, row_of, sgd);
                       }
                       test(false, DivideBy::kActiveRanks, joined);
                     }),
            AllPass(3));
}

TEST(OptimizerTest, AGradientThatIsKeptIsNotAccumulatedInAJoin) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
                       ddp.join([&] {
                         const auto accumulate = [&] {
                           const auto accumulating = ddp.no_sync();
                           LossOf(ddp(Batch(group.rank(), 1))).backward();
                         };
                         LossOf(ddp(Batch(group.rank(), 0))).backward();
                         optimizer.step();
                         net->zero_grad(/*set_to_none=*/false);
                         accumulate();  // Zeros add nothing.
                         LossOf(ddp(Batch(group.rank(), 0))).backward();
                         RequireError(accumulate, "is left from an earlier reduction");
                         net->zero_grad();
                         optimizer.step();
                       });
                     }),
            AllPass(2));
}

// Each checks, clears and repeats the gradients of its own parameters.
TEST(OptimizerTest, TwoOptimizersInAJoin) {
  const auto rate = [](Tensor param) { return param.dim() == 1 ? 0.5 : 0.1; };
  std::vector<Tensor> want;
  {
    Sequential net = NewNet();
    for (int step = 0; step < kMostSteps; ++step) {
      net->zero_grad();
      for (int rank = 0; rank < 2; ++rank)
        if (step < StepsOf(rank)) (LossOf(net->forward(Batch(rank, step))) / 2).backward();
      const torch::NoGradGuard no_grad;
      for (Tensor& param : net->parameters()) param.sub_(param.grad(), rate(param));
    }
    want = net->parameters();
  }
  const auto train = [&](Group& group, DataParallelBase& ddp, auto& forward, auto& a, auto& b) {
    ddp.join([&] {
      for (int step = 0; step < StepsOf(group.rank()); ++step) {
        LossOf(forward(Batch(group.rank(), step))).backward();
        a.step();
        a.zero_grad();
        b.step();
        b.zero_grad();
      }
    });
  };
  EXPECT_EQ(RunRanks(2,
                     [&](Group& group) {
                       for (const bool is_joined : {false, true}) {
                         Sequential net = NewNet();
                         DataParallel ddp(group, net);
                         std::vector<Tensor> biases, weights;
                         for (const Tensor& param : net->parameters())
                           (param.dim() == 1 ? biases : weights).push_back(param);
                         if (is_joined) {
                           torch::optim::SGD sgd_a(biases, 0.5), sgd_b(weights, 0.1);
                           Joined a(ddp, sgd_a), b(ddp, sgd_b);
                           train(group, ddp, ddp, a, b);
                         } else {
                           using torch::optim::SGDOptions;
                           Optimizer a(ddp, {torch::optim::OptimizerParamGroup(biases)},
                                       std::make_unique<SGDOptions>(0.5));
                           Optimizer b(ddp, {torch::optim::OptimizerParamGroup(weights)},
                                       std::make_unique<SGDOptions>(0.1),
                                       {.placement = WholeTensors{}});
                           train(group, ddp, ddp, a, b);
                         }
                         RequireReplicas(group, *net);
                         RequireClose(net->parameters(), want);
                       }
                     }),
            AllPass(2));
}

TEST(OptimizerTest, AllRanksStopEarlyInTheSameStep) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
                       int steps = 0;
                       const bool used_all = ddp.join(
                           [&] {
                             for (int step = 0; step < StepsOf(group.rank()); ++step) {
                               optimizer.zero_grad();
                               LossOf(ddp(Batch(group.rank(), step))).backward();
                               // Right: no rank takes the steps of others.
                               torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
                               optimizer.step();
                               ++steps;
                             }
                           },
                           {.stop_early = true});
                       Require(!used_all, "batches are left");
                       Require(steps == StepsOf(2), "all take as many steps as rank 2");
                       RequireReplicas(group, *net);
                     }),
            AllPass(3));
}

// Each step ends with other running statistics on each rank.
TEST(OptimizerTest, AJoinEndsWithTheBuffersOfTheLastRankWithABatch) {
  struct Loop {
    std::vector<int> batches;  // By rank.
    bool stop_early;
    int last;
  };
  EXPECT_EQ(
      RunRanks(3,
               [](Group& group) {
                 Sequential net(Linear(6, 4), torch::nn::BatchNorm1d(4));
                 DataParallel ddp(group, net);
                 Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
                 for (const Loop& loop : {Loop{{3, 3, 3}, false, 2}, Loop{{3, 3, 2}, false, 1},
                                          Loop{{3, 3, 3}, true, 2}, Loop{{3, 3, 2}, true, 1}}) {
                   std::vector<Tensor> own;  // After this rank's last step.
                   ddp.join(
                       [&] {
                         for (int step = 0; step < loop.batches[group.rank()]; ++step) {
                           optimizer.zero_grad();
                           LossOf(ddp(Batch(group.rank(), step))).backward();
                           optimizer.step();
                           own.clear();
                           for (const Tensor& buffer : net->buffers())
                             own.push_back(buffer.clone());
                         }
                       },
                       {.stop_early = loop.stop_early});
                   RequireReplicas(group, *net);
                   for (size_t i = 0; i < own.size(); ++i) {
                     group.broadcast(own[i], loop.last);
                     RequireSame(net->buffers()[i], own[i], "a buffer");
                   }
                 }
               }),
      AllPass(3));
}

struct Omission {
  Placement placement;
  bool is_in_join;
  int rank, step;
};

TEST(OptimizerTest, ARankThatOmitsAStepIsNamed) {
  for (const Omission& omission : {Omission{WholeTensors{}, true, 1, 0},
                                   // The last one of its rank.
                                   Omission{Slices{}, true, 2, StepsOf(2) - 1},
                                   Omission{Slices{}, false, 1, kMostSteps - 1}}) {
    const Endings endings = RunRanks(3, [&](Group& group) {
      Sequential net = NewNet();
      DataParallel ddp(group, net);
      Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = omission.placement});
      const auto train = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
          optimizer.zero_grad();
          LossOf(ddp(Batch(group.rank(), step))).backward();
          if (group.rank() != omission.rank || step != omission.step) optimizer.step();
        }
      };
      if (!omission.is_in_join) return train(kMostSteps);
      ddp.join([&] { train(StepsOf(group.rank())); });
    });
    const std::string named = "(rank " + std::to_string(omission.rank) +
                              " has not taken the step of optimizer#0 in which rank";
    for (const std::string& ending : endings) EXPECT_THAT(ending, testing::HasSubstr(named));
  }
}

TEST(OptimizerTest, AnExceptionOrABreakInTheLoop) {
  const auto train = [](bool throws) {
    return RunRanks(3, [throws](Group& group) {
      Sequential net = NewNet();
      DataParallel ddp(group, net);
      Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1), {.placement = Slices{}});
      ddp.join([&] {
        for (int step = 0; step < 20; ++step) {
          if (step == 3 && group.rank() == 1) {
            if (throws) throw std::runtime_error("no batch 3");
            break;
          }
          optimizer.zero_grad();
          LossOf(ddp(Batch(group.rank(), step))).backward();
          optimizer.step();
        }
      });
      RequireReplicas(group, *net);
    });
  };
  EXPECT_EQ(train(false), AllPass(3));
  const Endings endings = train(true);
  EXPECT_EQ(endings[1], "exit 1: rank 1: no batch 3\n");
  for (const int rank : {0, 2}) {
    EXPECT_THAT(endings[rank], testing::HasSubstr("rank 1"));
    EXPECT_THAT(endings[rank], testing::HasSubstr("no batch 3"));
  }
}

TEST(OptimizerTest, UnsupportedSettingsAreRefused) {
  EXPECT_EQ(
      RunRanks(
          1,
          [](Group& group) {
            Sequential net = NewNet();
            RequireError([&] { DataParallel(group, net, {.bucket_bytes = -1}); },
                         "the bucket cap 1 is -1 bytes, but must be at least 0");
            RequireError(
                [&] {
                  DataParallel(group, net,
                               {.compression = Compression::kPowerSgd, .power_sgd = {.rank = 0}});
                },
                "evenkeel: data_parallel#1: PowerSgdOptions::rank is 0");
            DataParallel ddp(group, net);
            RequireError([&] { Optimizer(ddp, torch::optim::AdamOptions(0.1).amsgrad(true)); },
                         "Adam with amsgrad is not supported; use Joined");
            RequireError([&] { Optimizer(ddp, torch::optim::AdamWOptions(0.1).amsgrad(true)); },
                         "AdamW with amsgrad is not supported; use Joined");
            RequireError(
                [&] { Optimizer(ddp, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.1)); },
                "SGD with dampening is not supported; use Joined");
            RequireError([&] { Optimizer(ddp, torch::optim::RMSpropOptions(0.1)); },
                         "use Joined for other optimizers");
            Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1));
            ddp(Batch(0, 0)).sum().backward();
            static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options())
                .momentum(0.5);
            RequireError([&] { optimizer.step(); }, "only the rate may change");
          }),
      AllPass(1));
}

}  // namespace
}  // namespace evenkeel::libtorch
