// GradScaler with every placement: against one process that scales, skips and grows by itself.

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "evenkeel/libtorch.h"
#include "evenkeel/libtorch/testing/ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::libtorch {
namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

constexpr double kClip = 0.05;
const GradScalerOptions kScale{.init_scale = 1024, .growth_interval = 2};
const auto kRule = torch::optim::AdamWOptions(0.05).weight_decay(0.1);

Sequential NewNet(torch::ScalarType dtype) {
  torch::manual_seed(1);
  Sequential net(Linear(6, 8), torch::nn::Tanh(), Linear(8, 2));
  net->to(dtype);
  return net;
}

// A loss of which one rank's gradient is infinite in some steps.
Tensor LossOf(const Tensor& output, int rank, int step) {
  const bool overflows = (rank == 1 && step == 2) || (rank == 0 && step % 3 == 1);
  return output.square().mean() * (overflows ? INFINITY : 1.0);
}
Tensor Batch(int rank, int step, int part, torch::ScalarType dtype) {
  torch::manual_seed(1000 * part + 100 * rank + step);
  return torch::randn({4, 6}, dtype);
}

struct Trained {
  std::vector<Tensor> parameters;
  double scale;
};

// The scale of one process.
struct LossScale {
  double scale;
  int64_t growth_interval;
  int64_t good_steps = 0;
  void Update(bool is_finite) {
    if (!is_finite) {
      scale *= 0.5;
      good_steps = 0;
    } else if (++good_steps == growth_interval) {
      scale *= 2;
      good_steps = 0;
    }
  }
};

// `gradients_of`: the gradients of a rank in a step for this scale.
template <class GradientsOf>
Trained TrainAlone(const std::vector<int>& steps, Sequential net, const GradScalerOptions& options,
                   double clip, const GradientsOf& gradients_of) {
  torch::optim::AdamW optimizer(net->parameters(), kRule);
  LossScale scale{options.init_scale, options.growth_interval};
  for (int step = 0; step < *std::ranges::max_element(steps); ++step) {
    std::vector<Tensor> sums;
    for (const Tensor& param : net->parameters()) sums.push_back(torch::zeros_like(param));
    for (size_t rank = 0; rank < steps.size(); ++rank) {
      if (step >= steps[rank]) continue;
      optimizer.zero_grad();
      gradients_of(net, static_cast<int>(rank), step, scale.scale);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += net->parameters()[i].grad();
    }
    bool is_finite = true;
    for (size_t i = 0; i < sums.size(); ++i) {
      net->parameters()[i].mutable_grad() =
          sums[i] / static_cast<double>(steps.size()) / scale.scale;
      is_finite &= torch::isfinite(sums[i]).all().item<bool>();
    }
    if (is_finite) {
      if (clip > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), clip);
      optimizer.step();
    }
    scale.Update(is_finite);
  }
  return {net->parameters(), scale.scale};
}

void RequireTrained(Group& group, Sequential& net, const GradScaler& scaler, const Trained& want,
                    double bound) {
  RequireReplicas(group, *net);
  Require(scaler.get_scale() == want.scale, "the scale is " + std::to_string(want.scale) +
                                                ": it is " + std::to_string(scaler.get_scale()));
  for (size_t i = 0; i < want.parameters.size(); ++i) {
    const double far = (net->parameters()[i] - want.parameters[i]).abs().max().item<double>();
    Require(far < bound, "parameter " + std::to_string(i) + " is off by " + std::to_string(far));
  }
}

const Placement kPlacements[] = {Replicated{}, WholeTensors{}, Slices{}};

TEST(GradScalerTest, TrainsAsOneProcessWithEveryPlacement) {
  const std::vector<std::vector<int>> inputs = {{7}, {7, 7}, {4, 8}, {6, 3, 7}, {8, 0, 5}};
  for (const int world : {1, 2, 3}) {
    EXPECT_EQ(
        RunRanks(
            world,
            [&](Group& group) {
              for (const auto& steps : inputs) {
                if (static_cast<int>(steps.size()) != world) continue;
                const auto alone = [&](double clip) {
                  return TrainAlone(
                      steps, NewNet(torch::kDouble), kScale, clip,
                      [&](Sequential& net, int rank, int step, double scale) {
                        for (const int part : {0, 1})
                          (scale / 2 *
                           LossOf(net->forward(Batch(rank, step, part, torch::kDouble)), rank,
                                  step))
                              .backward();
                      });
                };
                const auto train = [&](DataParallel<Sequential>& ddp, auto& optimizer,
                                       bool is_joined) {
                  GradScaler scaler(group, kScale);
                  const int rank = group.rank();
                  const auto loop = [&] {
                    for (int step = 0; step < steps[rank]; ++step) {
                      const auto loss_of = [&](int part) {
                        return LossOf(ddp(Batch(rank, step, part, torch::kDouble)), rank, step) / 2;
                      };
                      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
                      {
                        const auto accumulating = ddp.no_sync();
                        scaler.scale(loss_of(0)).backward();
                      }
                      scaler.scale(loss_of(1)).backward();
                      if (step % 2 == 0 || !is_joined) scaler.unscale_(optimizer);
                      if constexpr (requires { optimizer.clip_grad_norm(kClip); })
                        optimizer.clip_grad_norm(kClip);
                      else if (!is_joined)
                        torch::nn::utils::clip_grad_norm_(ddp.parameters(), kClip);
                      scaler.step(optimizer);
                      scaler.update();
                    }
                  };
                  is_joined ? void(ddp.join(loop)) : loop();
                  Sequential net = ddp.module();
                  const bool clips = !std::is_same_v<decltype(optimizer), Joined&> || !is_joined;
                  RequireTrained(group, net, scaler, alone(clips ? kClip : 0), 1e-12);
                };
                const DataParallelOptions small{.first_bucket_bytes = 64, .bucket_bytes = 128};
                for (const Placement& placement : kPlacements) {
                  DataParallel ddp(group, NewNet(torch::kDouble), small);
                  Optimizer optimizer(ddp, kRule, {.placement = placement});
                  train(ddp, optimizer, true);
                }
                for (const bool is_joined : {true, false}) {
                  if (!is_joined && std::ranges::count(steps, steps[0]) < world) continue;
                  DataParallel ddp(group, NewNet(torch::kDouble), small);
                  torch::optim::AdamW of_torch(ddp.parameters(), kRule);
                  Joined optimizer(ddp, of_torch);
                  train(ddp, optimizer, is_joined);
                }
              }
            }),
        AllPass(world));
  }
}

TEST(GradScalerTest, JoinedScalesSparseGradients) {
  const auto new_table = [] {
    torch::manual_seed(4);
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    net->to(torch::kDouble);
    return net;
  };
  EXPECT_EQ(
      RunRanks(
          2,
          [&](Group& group) {
            torch::nn::Embedding alone = new_table(), net = new_table();
            torch::optim::SGD want(alone->parameters(), 0.5);
            DataParallel ddp(group, net);
            torch::optim::SGD of_torch(net->parameters(), 0.5);
            Joined optimizer(ddp, of_torch);
            GradScaler scaler(group, kScale);
            for (int step = 0; step < 2; ++step) {
              want.zero_grad();
              for (const int rank : {0, 1})
                if (step <= rank)
                  (alone->forward(torch::tensor({rank, step})).square().sum() / 2).backward();
              want.step();
            }
            ddp.join([&] {
              for (int step = 0; step <= group.rank(); ++step) {
                optimizer.zero_grad();
                scaler.scale(ddp(torch::tensor({group.rank(), step})).square().sum()).backward();
                scaler.step(optimizer);
                Require(!optimizer.last_was_skipped(), "it is finite");
                scaler.update();
              }
            });
            RequireReplicas(group, *net);
            Require(torch::allclose(net->weight, alone->weight, 0, 1e-12), "as alone");
          }),
      AllPass(2));
}

// At first, gradients overflow in float16.
TEST(GradScalerTest, TrainsHalvesUnderAutocast) {
  const std::vector<int> steps = {6, 9};
  const GradScalerOptions options{.init_scale = 0x1p22, .growth_interval = 4};
  const auto output_of = [](auto&& forward, const Tensor& batch) {
    at::autocast::set_autocast_dtype(at::kCPU, torch::kHalf);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const Tensor output = forward(batch);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    if (output.scalar_type() != torch::kHalf) throw std::runtime_error("it is not float16");
    return output;
  };
  EXPECT_EQ(
      RunRanks(2,
               [&](Group& group) {
                 const auto want = TrainAlone(
                     steps, NewNet(torch::kFloat), options, 0,
                     [&](Sequential& net, int rank, int step, double scale) {
                       const Tensor output =
                           output_of([&](const Tensor& batch) { return net->forward(batch); },
                                     Batch(rank, step, 0, torch::kFloat));
                       (output.square().mean() * torch::tensor(scale, torch::kFloat)).backward();
                     });
                 Require(want.scale < options.init_scale / 4, "steps have overflowed");
                 for (const Placement& placement : kPlacements) {
                   Sequential net = NewNet(torch::kFloat);
                   DataParallel ddp(group, net);
                   Optimizer optimizer(ddp, kRule, {.placement = placement});
                   GradScaler scaler(group, options);
                   ddp.join([&] {
                     for (int step = 0; step < steps[group.rank()]; ++step) {
                       optimizer.zero_grad();
                       const Tensor output =
                           output_of(ddp, Batch(group.rank(), step, 0, torch::kFloat));
                       scaler.scale(output.square().mean()).backward();
                       scaler.step(optimizer);
                       scaler.update();
                     }
                   });
                   RequireTrained(group, net, scaler, want, 1e-5);
                 }
               }),
      AllPass(2));
}

// As of a GAN: each model's gradients overflow in steps of its own, which only its optimizer skips.
// One step sets the scale.
TEST(GradScalerTest, OneScalerServesTwoOptimizers) {
  const std::vector<int> steps = {3, 0, 8};
  constexpr double kNewScale = 48;
  const auto loss_of = [](const Tensor& output, int rank, int step, int of) {
    return output.square().mean() * (step % 3 == of && rank == 2 ? INFINITY : 1.0);
  };
  const auto train = [&](Group& group, const Placement& first, const Placement& second) {
    std::vector<Sequential> alone = {NewNet(torch::kDouble), NewNet(torch::kDouble)};
    std::vector<torch::optim::AdamW> own;
    for (Sequential& net : alone) own.emplace_back(net->parameters(), kRule);
    LossScale want{kScale.init_scale, kScale.growth_interval};
    for (int step = 0; step < 8; ++step) {
      bool is_finite = true;
      for (const int of : {0, 1}) {
        own[of].zero_grad();
        for (int rank = 0; rank < 3; ++rank) {
          if (step >= steps[rank]) continue;
          const Tensor output = alone[of]->forward(Batch(rank, step, of, torch::kDouble));
          (loss_of(output, rank, step, of) / 3).backward();
        }
        bool is_own_finite = true;
        for (const Tensor& param : alone[of]->parameters())
          is_own_finite &= torch::isfinite(param.grad()).all().item<bool>();
        if (is_own_finite) own[of].step();
        is_finite &= is_own_finite;
      }
      step == 5 ? void(want.scale = kNewScale) : want.Update(is_finite);
    }
    std::vector<Sequential> nets = {NewNet(torch::kDouble), NewNet(torch::kDouble)};
    DataParallel a(group, nets[0]), b(group, nets[1]);
    Optimizer a_optimizer(a, kRule, {.placement = first});
    Optimizer b_optimizer(b, kRule, {.placement = second});
    GradScaler scaler(group, kScale);
    const int rank = group.rank();
    join({&a, &b}, [&] {
      for (int step = 0; step < steps[rank]; ++step) {
        const auto backward = [&](auto& model, auto& optimizer, int of) {
          optimizer.zero_grad();
          const Tensor output = model(Batch(rank, step, of, torch::kDouble));
          scaler.scale(loss_of(output, rank, step, of)).backward();
        };
        backward(a, a_optimizer, 0);
        if (step % 2 == 0) scaler.step(a_optimizer);
        backward(b, b_optimizer, 1);
        scaler.step(b_optimizer);
        if (step % 2 == 1) scaler.step(a_optimizer);
        step == 5 ? scaler.update(kNewScale) : scaler.update();
      }
    });
    RequireTrained(group, nets[0], scaler, {alone[0]->parameters(), want.scale}, 1e-12);
    RequireTrained(group, nets[1], scaler, {alone[1]->parameters(), want.scale}, 1e-12);
  };
  EXPECT_EQ(RunRanks(3,
                     [&](Group& group) {
                       train(group, Replicated{}, WholeTensors{});
                       train(group, Slices{}, Slices{});
                     }),
            AllPass(3));
}

TEST(GradScalerTest, MisuseIsNamed) {
  EXPECT_EQ(
      RunRanks(1,
               [](Group& group) {
                 for (const Placement& placement : kPlacements) {
                   Sequential net = NewNet(torch::kFloat);
                   DataParallel ddp(group, net);
                   Optimizer optimizer(ddp, kRule, {.placement = placement});
                   GradScaler scaler(group, kScale);
                   const auto backward = [&] {
                     scaler.scale(ddp(Batch(0, 0, 0, torch::kFloat)).sum()).backward();
                   };
                   RequireError([&] { scaler.update(); }, "without a step()");
                   RequireError([&] { scaler.update(0.0); }, "the scale of GradScaler is 0;");
                   for (const double scale : {1e39, 1e-46})
                     RequireError([&] { scaler.update(scale); }, "it must be from");
                   backward();
                   scaler.unscale_(optimizer);
                   RequireError([&] { scaler.unscale_(optimizer); }, "unscale_() was called twice");
                   try {
                     torch::nn::utils::clip_grad_norm_(net->parameters(), 1);
                     throw std::runtime_error("torch's clipping reads scaled gradients");
                   } catch (const c10::Error&) {
                   }
                   RequireError(backward, "or after unscale_() of GradScaler, no rank has it");
                   scaler.step(optimizer);
                   RequireError([&] { scaler.step(optimizer); }, "step() of GradScaler");
                   const Tensor shown = net->parameters()[0].grad();
                   Require(shown.is_meta() == std::holds_alternative<Slices>(placement),
                           "it is back");
                   if (!shown.is_meta()) {
                     Sequential other = NewNet(torch::kFloat);
                     other->forward(Batch(0, 0, 0, torch::kFloat)).sum().backward();
                     Require(torch::allclose(shown, other->parameters()[0].grad(), 0, 1e-5),
                             "the gradient is that of the loss");
                   }
                   RequireError([&] { scaler.unscale_(optimizer); }, "after step()");
                   scaler.update();
                   optimizer.zero_grad();
                   backward();
                   scaler.unscale_(optimizer);
                   optimizer.zero_grad();
                   RequireError([&] { scaler.step(optimizer); }, "after unscale_() of GradScaler");
                 }
               }),
      AllPass(1));
}

TEST(GradScalerTest, TheStateIsSavedAndTheOptionsAreCompared) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       GradScaler scaler(group, {.init_scale = 4});
                       scaler.load_state({.scale = 32, .growth_tracker = 7});
                       Require(scaler.get_scale() == 32, "the scale is the loaded one");
                       Require(scaler.state().growth_tracker == 7, "and so is the count");
                       RequireError([&] { scaler.load_state({.scale = -1}); }, "it must be from");
                       const Tensor half = torch::full({}, 1000, torch::kHalf);
                       scaler.load_state({.scale = 65536});
                       Require(scaler.scale(half).item<double>() == 65536000, "it is a float32");
                       RequireError([&] { GradScaler(group, {.enabled = group.rank() == 0}); },
                                    "initial_scale: rank 0 has 65536; rank 1 has 1");
                       Sequential net = NewNet(torch::kFloat);
                       DataParallel ddp(group, net);
                       Optimizer optimizer(ddp, kRule);
                       GradScaler off(group, {.enabled = false});
                       const Tensor loss = ddp(Batch(0, 0, 0, torch::kFloat)).sum();
                       Require(off.scale(loss).is_same(loss), "it is not scaled");
                       loss.backward();
                       off.unscale_(optimizer);
                       off.step(optimizer);
                       off.update();
                       Require(off.get_scale() == 1, "the scale stays 1");
                     }),
            AllPass(2));
}

}  // namespace
}  // namespace evenkeel::libtorch
