// Programs in the shape of published ones, and what programs do with gradients and flags from loop
// to loop: with uneven inputs, in float64, against one process that computes the same sums.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
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

const DataParallelOptions kSmall{.first_bucket_bytes = 64, .bucket_bytes = 256};
const Placement kPlacements[] = {Replicated{}, WholeTensors{}, Slices{}};

Tensor LossOf(const Tensor& output) { return output.square().mean(); }

void RequireClose(const std::vector<Tensor>& got, const std::vector<Tensor>& want,
                  const std::string& what) {
  for (size_t i = 0; i < want.size(); ++i) {
    const double far = (got[i] - want[i]).abs().max().item<double>();
    Require(far < 1e-12, what + ": parameter " + std::to_string(i) + " is near: it is off by " +
                             std::to_string(far));
  }
}

// The loss that a process computes in each step: its rank's, or in one process that of all ranks.
struct Part {
  std::vector<int> ranks;
  std::vector<int> steps;  // By rank of the job.
  double share = 1;        // The weight of each loss.

  static Part Alone(const std::vector<int>& steps) {
    Part part{.steps = steps, .share = 1.0 / static_cast<double>(steps.size())};
    part.ranks.resize(steps.size());
    std::iota(part.ranks.begin(), part.ranks.end(), 0);
    return part;
  }
  static Part Of(const Group& group, const std::vector<int>& steps) {
    return {.ranks = {group.rank()}, .steps = steps};
  }
  int Most() const {
    int most = 0;
    for (const int rank : ranks) most = std::max(most, steps[rank]);
    return most;
  }
  // Calls `f` for each rank that has a batch.
  void ForEach(int step, const std::function<void(int rank)>& f) const {
    for (const int rank : ranks)
      if (step < steps[rank]) f(rank);
  }
};

// ---- Gradients that a program keeps ----

Sequential NewNet() {
  torch::manual_seed(1);
  Sequential net(Linear(6, 8), torch::nn::Tanh(), Linear(8, 2));
  net->to(torch::kDouble);
  return net;
}
Tensor InputOf(const Sequential&, int rank, int step) {
  torch::manual_seed(100 * rank + step);
  return torch::randn({4, 6}, torch::kDouble);
}

torch::nn::Embedding NewTable() {
  torch::manual_seed(4);
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  net->to(torch::kDouble);
  return net;
}
Tensor InputOf(const torch::nn::Embedding&, int rank, int step) {
  return torch::tensor({rank, step % 5});
}

struct Keeping {
  bool freezes;  // A parameter, in every third step; its gradient is kept meanwhile.
  bool to_none;  // How gradients are cleared.
  DivideBy divide_by = DivideBy::kWorldSize;
};

// A loop of a program that clears gradients after every third step only.
template <class Net, class Model, class AnyOptimizer>
void KeepInLoop(const Keeping& how, const Part& part, Net& net, Model& model,
                AnyOptimizer& optimizer) {
  for (int step = 0; step < part.Most(); ++step) {
    if (how.freezes) net->parameters()[2].requires_grad_(step % 3 != 1);
    const auto active = std::ranges::count_if(part.steps, [&](int s) { return step < s; });
    const bool is_alone = part.ranks.size() == part.steps.size();
    const double share =
        how.divide_by == DivideBy::kActiveRanks && is_alone ? 1.0 / active : part.share;
    part.ForEach(step,
                 [&](int rank) { (LossOf(model(InputOf(net, rank, step))) * share).backward(); });
    optimizer.step();
    if (step % 3 == 2) optimizer.zero_grad(how.to_none);
  }
}

// Loops end with gradients that were kept, also of a frozen parameter; in the second one rank 0 has
// no batch; after it comes a step without a backward.
const std::vector<std::vector<int>> kLoops = {
    {5, 2, 0}, {0, 4, 1}, {5, 4, 3}, {1, 1, 1}, {1, 0, 3}};

template <class Net, class Model, class AnyOptimizer>
void Keep(const Keeping& how, const std::function<Part(const std::vector<int>&)>& part_of,
          int world, Net& net, Model& model, AnyOptimizer& optimizer,
          const std::function<void(const std::function<void()>&)>& join) {
  for (size_t loop = 0; loop < kLoops.size(); ++loop) {
    const Part part = part_of({kLoops[loop].begin(), kLoops[loop].begin() + world});
    join([&] { KeepInLoop(how, part, net, model, optimizer); });
    if (loop == 1) optimizer.step();
  }
}

// torch's optimizers go on to change a frozen parameter that has a gradient.
struct OnlyTrained {
  void step() {
    std::vector<std::pair<Tensor, Tensor>> hidden;
    for (const Tensor& param : of_torch.param_groups()[0].params())
      if (!param.requires_grad()) hidden.emplace_back(param, param.grad());
    for (const auto& [param, grad] : hidden) param.mutable_grad().reset();
    of_torch.step();
    for (const auto& [param, grad] : hidden) param.mutable_grad() = grad;
  }
  void zero_grad(bool to_none) { of_torch.zero_grad(to_none); }
  torch::optim::Optimizer& of_torch;
};

// `rule_of`: a learning rate, or options; `placement`: none is Joined.
template <class TorchOptimizer, class Rule, class NewNet>
void TestKeeping(Group& group, const Keeping& how, const std::optional<Placement>& placement,
                 const Rule& rule, const NewNet& new_net) {
  auto alone = new_net(), net = new_net();
  TorchOptimizer torch_alone(alone->parameters(), rule);
  OnlyTrained only_trained{torch_alone};
  auto model = [&](const Tensor& input) { return alone->forward(input); };
  Keep(how, Part::Alone, group.size(), alone, model, only_trained,
       [](const auto& loop) { loop(); });
  DataParallel ddp(group, net, kSmall);
  const auto own = [&](const std::vector<int>& steps) { return Part::Of(group, steps); };
  const auto join = [&](const auto& loop) { ddp.join(loop, {.divide_by = how.divide_by}); };
  if (placement.has_value()) {
    Optimizer optimizer(ddp, rule, {.placement = *placement});
    Keep(how, own, group.size(), net, ddp, optimizer, join);
  } else {
    TorchOptimizer of_torch(net->parameters(), rule);
    Joined optimizer(ddp, of_torch);
    Keep(how, own, group.size(), net, ddp, optimizer, join);
  }
  RequireReplicas(group, *net);
  const std::string what =
      c10::str("freezes ", how.freezes, " to none ", how.to_none, " by ",
               static_cast<int>(how.divide_by), " placement ", placement ? placement->index() : 9);
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    const Tensor got = net->parameters()[i].grad(), want = alone->parameters()[i].grad();
    if (want.defined() && want.is_sparse() && want._nnz() == 0) continue;  // Cleared.
    Require(got.defined() == want.defined(), what + ": gradients are kept on all ranks");
    if (got.defined()) RequireClose({got.to_dense()}, {want.to_dense()}, what + ", gradient");
  }
  RequireClose(net->parameters(), alone->parameters(), what);
}

TEST(KeptGradientsTest, AreThoseOfOneProcessFromLoopToLoop) {
  const auto test_all = [](Group& group) {
    const auto of_net = [&](const Keeping& how, const std::optional<Placement>& placement) {
      TestKeeping<torch::optim::AdamW>(group, how, placement, torch::optim::AdamWOptions(0.01),
                                       NewNet);
    };
    of_net({.freezes = true, .to_none = true}, Replicated{});
    of_net({.freezes = true, .to_none = false}, WholeTensors{});
    of_net({.freezes = true, .to_none = true, .divide_by = DivideBy::kActiveRanks}, Replicated{});
    for (const bool to_none : {true, false}) {
      const Keeping how{.freezes = false, .to_none = to_none};
      of_net(how, std::nullopt);
      TestKeeping<torch::optim::SGD>(group, how, Replicated{}, torch::optim::SGDOptions(0.1),
                                     NewTable);
    }
  };
  for (const int world : {1, 2, 3}) EXPECT_EQ(RunRanks(world, test_all), AllPass(world));
}

TEST(KeptGradientsTest, ThoseThatOneRankClearsAtTheEndAreAnErrorOnAllRanks) {
  EXPECT_EQ(RunRanks(3,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net, kSmall);
                       torch::optim::SGD of_torch(net->parameters(), 0.1);
                       Joined optimizer(ddp, of_torch);
                       const auto loop = [&] {
                         if (group.rank() == 0) return;
                         LossOf(ddp(InputOf(net, group.rank(), 0))).backward();
                         optimizer.step();
                         if (group.rank() == 1) optimizer.zero_grad();
                       };
                       RequireError([&] { ddp.join(loop); },
                                    "rank 1: the gradient of \"0.weight\" is missing when join() "
                                    "ends, but rank 2 has kept it");
                     }),
            AllPass(3));
}

TEST(KeptGradientsTest, OfSlicesThatAreUsedUpMustBeClearedInTheNextLoopToo) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       Sequential net = NewNet();
                       DataParallel ddp(group, net, kSmall);
                       Optimizer optimizer(ddp, torch::optim::SGDOptions(0.1),
                                           {.placement = Slices{}});
                       const auto backward = [&](int step) {
                         LossOf(ddp(InputOf(net, group.rank(), step))).backward();
                       };
                       ddp.join([&] {
                         for (int step = 0; step < 1 + 2 * group.rank(); ++step) {
                           optimizer.zero_grad();
                           backward(step);
                           optimizer.step();
                         }
                       });
                       ddp.join([&] {
                         backward(3);
                         RequireError([&] { optimizer.step(); }, "call zero_grad() after step()");
                         optimizer.zero_grad();
                         backward(4);
                         optimizer.step();
                       });
                       RequireReplicas(group, *net);
                     }),
            AllPass(2));
}

// ---- Programs ----
//
// Each is written once. What differs between one process and many are the calls of a Job, and the
// lines that make the objects: less than 14.

struct Job {
  Part part;
  std::function<void(double)> clip;
  std::function<std::shared_ptr<void>()> no_sync = [] { return nullptr; };
  std::function<void(const std::function<void()>&)> join = [](const auto& loop) { loop(); };
};

template <class AnyOptimizer>
Job JobOf(Group& group, const std::vector<int>& steps, DataParallelBase& ddp,
          AnyOptimizer& optimizer) {
  return {.part = Part::Of(group, steps),
          .clip = [&](double norm) { optimizer.clip_grad_norm(norm); },
          .no_sync = [&] { return std::make_shared<DataParallelBase::NoSync>(ddp); },
          .join = [&](const auto& loop) { ddp.join(loop); }};
}
Job JobAlone(const std::vector<int>& steps, const torch::nn::Module& net) {
  return {.part = Part::Alone(steps),
          .clip = [&](double norm) { torch::nn::utils::clip_grad_norm_(net.parameters(), norm); }};
}
template <class Net>
auto ForwardOf(Net& net) {
  return [&](auto&&... args) { return net->forward(std::forward<decltype(args)>(args)...); };
}

// Calls `test` for each number of ranks and each placement.
void ForEachJob(
    const std::function<void(Group&, const std::vector<int>&, const Placement&)>& test) {
  for (const std::vector<int>& steps :
       std::vector<std::vector<int>>{{3}, {3, 3}, {2, 5}, {4, 0, 3}}) {
    const int world = static_cast<int>(steps.size());
    EXPECT_EQ(RunRanks(world,
                       [&](Group& group) {
                         for (const Placement& placement : kPlacements)
                           test(group, steps, placement);
                       }),
              AllPass(world));
  }
}

Tensor Random(int rank, int step, at::IntArrayRef sizes) {
  torch::manual_seed(1000 + 100 * rank + step);
  return torch::randn(sizes, torch::kDouble);
}

// ---- An LSTM that predicts a series, with clipping; its state lives for two batches ----

using Hidden = std::tuple<Tensor, Tensor>;

struct PredictorImpl : torch::nn::Module {
  PredictorImpl() {
    torch::manual_seed(2);
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(2, 5).batch_first(true)));
    last = register_module("last", Linear(5, 2));
    to(torch::kDouble);
  }
  std::tuple<Tensor, Hidden> forward(const Tensor& series, const std::optional<Hidden>& hidden) {
    const auto [output, next] = lstm(series, hidden);
    return {last(output), next};
  }
  torch::nn::LSTM lstm = nullptr;
  Linear last = nullptr;
};
TORCH_MODULE(Predictor);

template <class Model, class AnyOptimizer>
void TrainPredictor(const Job& job, Model&& model, AnyOptimizer& optimizer) {
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  for (int epoch = 0; epoch < 2; ++epoch) {
    job.join([&] {
      std::map<int, std::optional<Hidden>> states;  // By rank.
      for (int step = 0; step < job.part.Most(); ++step) {
        optimizer.zero_grad();
        job.part.ForEach(step, [&](int rank) {
          std::optional<Hidden>& hidden = states[rank];
          if (step % 2 == 0) hidden.reset();
          const Tensor series = Random(rank, step + 10 * epoch, {3, 5, 2});
          const auto [output, next] = model(series.slice(1, 0, 4), hidden);
          hidden = Hidden{std::get<0>(next).detach(), std::get<1>(next).detach()};
          (job.part.share * (output - series.slice(1, 1)).square().mean()).backward();
        });
        job.clip(0.1);
        optimizer.step();
      }
    });
    schedule.step();
  }
}

TEST(ProgramsTest, AnLstmWithClipping) {
  ForEachJob([](Group& group, const std::vector<int>& steps, const Placement& placement) {
    const auto rule = torch::optim::AdamOptions(0.05);
    Predictor alone, net;
    torch::optim::Adam adam(alone->parameters(), rule);
    TrainPredictor(JobAlone(steps, *alone), ForwardOf(alone), adam);
    DataParallel ddp(group, net, kSmall);
    Optimizer optimizer(ddp, rule, {.placement = placement});
    TrainPredictor(JobOf(group, steps, ddp, optimizer), ddp, optimizer);
    RequireReplicas(group, *net);
    RequireClose(net->parameters(), alone->parameters(), "an LSTM");
  });
}

// ---- Actor and critic: episodes of different lengths, a forward of each model per move ----

Sequential NewMlp(int outputs) {
  torch::manual_seed(3 + outputs);
  Sequential net(Linear(3, 6), torch::nn::Tanh(), Linear(6, outputs));
  net->to(torch::kDouble);
  return net;
}

// A state is pushed by each move, until it is far from 0 or 6 moves are over.
template <class Actor, class Critic>
std::pair<Tensor, Tensor> PlayEpisode(int rank, int episode, Actor& actor, Critic& critic) {
  Tensor state = 0.3 * Random(rank, episode, {3});
  const std::vector<double> dice = [&] {
    const Tensor uniform = torch::rand({6}, torch::kDouble);
    return std::vector<double>(uniform.data_ptr<double>(), uniform.data_ptr<double>() + 6);
  }();
  std::vector<Tensor> log_probabilities, values, rewards;
  for (int move = 0; move < 6 && state.abs().max().item<double>() < 1; ++move) {
    const Tensor log_probability = torch::log_softmax(actor(state), 0);
    const int action = dice[move] < log_probability[0].exp().item<double>() ? 0 : 1;
    log_probabilities.push_back(log_probability[action]);
    values.push_back(critic(state)[0]);
    state = 1.2 * state.roll(1) + (action == 0 ? 0.2 : -0.2);
    rewards.push_back(1 - state.square().sum());
  }
  std::vector<Tensor> returns(rewards.size());
  Tensor sum = torch::zeros({}, torch::kDouble);
  for (size_t i = rewards.size(); i-- > 0;) returns[i] = sum = rewards[i] + 0.9 * sum;
  const Tensor advantages = torch::stack(returns) - torch::stack(values);
  return {-(torch::stack(log_probabilities) * advantages.detach()).mean(),
          advantages.square().mean()};
}

template <class Actor, class Critic, class AnyOptimizer>
void TrainActorCritic(const Job& job, Actor&& actor, Critic&& critic, AnyOptimizer& of_actor,
                      AnyOptimizer& of_critic) {
  job.join([&] {
    for (int episode = 0; episode < job.part.Most(); ++episode) {
      of_actor.zero_grad();
      of_critic.zero_grad();
      job.part.ForEach(episode, [&](int rank) {
        const auto [actor_loss, critic_loss] = PlayEpisode(rank, episode, actor, critic);
        (job.part.share * actor_loss).backward();
        (job.part.share * critic_loss).backward();
      });
      of_actor.step();
      of_critic.step();
    }
  });
}

TEST(ProgramsTest, AnActorAndACritic) {
  ForEachJob([](Group& group, const std::vector<int>& steps, const Placement& placement) {
    const auto rule = torch::optim::AdamOptions(0.02);
    Sequential actor_alone = NewMlp(2), critic_alone = NewMlp(1);
    torch::optim::Adam of_actor_alone(actor_alone->parameters(), rule);
    torch::optim::Adam of_critic_alone(critic_alone->parameters(), rule);
    const auto forward_of = [](Sequential& net) {
      return [&](const Tensor& state) { return net->forward(state); };
    };
    TrainActorCritic({.part = Part::Alone(steps)}, forward_of(actor_alone),
                     forward_of(critic_alone), of_actor_alone, of_critic_alone);
    Sequential actor = NewMlp(2), critic = NewMlp(1);
    DataParallel a(group, actor, kSmall), c(group, critic, kSmall);
    Optimizer of_actor(a, rule, {.placement = placement});
    Optimizer of_critic(c, rule, {.placement = placement});
    TrainActorCritic({.part = Part::Of(group, steps),
                      .join =
                          [&](const auto& loop) {
                            join({&a, &c}, loop);
                          }},
                     a, c, of_actor, of_critic);
    RequireReplicas(group, *actor);
    RequireReplicas(group, *critic);
    RequireClose(actor->parameters(), actor_alone->parameters(), "the actor");
    RequireClose(critic->parameters(), critic_alone->parameters(), "the critic");
  });
}

// ---- A GPT with tied weights, two groups of parameters, warm-up, accumulation and clipping ----

struct GptImpl : torch::nn::Module {
  static constexpr int kTokens = 11, kWidth = 8, kContext = 6, kHeads = 2;
  GptImpl() {
    torch::manual_seed(5);
    tokens = register_module("tokens", torch::nn::Embedding(kTokens, kWidth));
    places = register_parameter("places", 0.1 * torch::randn({kContext, kWidth}));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    // Gradients of the keys' biases are 0, and Adam would enlarge what rounding makes of that.
    parts =
        register_module("parts", Linear(torch::nn::LinearOptions(kWidth, 3 * kWidth).bias(false)));
    mixed = register_module("mixed", Linear(kWidth, kWidth));
    wide = register_module("wide", Linear(kWidth, 4 * kWidth));
    narrow = register_module("narrow", Linear(4 * kWidth, kWidth));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& text) {
    Tensor hidden = tokens(text) + places;
    const auto heads = [&](const Tensor& part) {
      return part.view({part.size(0), kContext, kHeads, -1}).transpose(1, 2);
    };
    const auto qkv = parts(norm(hidden)).chunk(3, -1);
    const Tensor attended = torch::scaled_dot_product_attention(
        heads(qkv[0]), heads(qkv[1]), heads(qkv[2]), {}, 0.0, /*is_causal=*/true);
    hidden = hidden + mixed(attended.transpose(1, 2).reshape(hidden.sizes()));
    hidden = hidden + narrow(torch::gelu(wide(hidden)));
    return torch::nn::functional::linear(hidden, tokens->weight);
  }
  torch::nn::Embedding tokens = nullptr;
  Tensor places;
  torch::nn::LayerNorm norm = nullptr;
  Linear parts = nullptr, mixed = nullptr, wide = nullptr, narrow = nullptr;
};
TORCH_MODULE(Gpt);

// Vectors do not decay.
std::vector<torch::optim::OptimizerParamGroup> GptGroups(Gpt& net) {
  std::vector<Tensor> matrices, vectors;
  for (const Tensor& param : net->parameters())
    (param.dim() == 1 ? vectors : matrices).push_back(param);
  const auto rule_of = [](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}).weight_decay(decay));
  };
  return {torch::optim::OptimizerParamGroup(matrices, rule_of(0.1)),
          torch::optim::OptimizerParamGroup(vectors, rule_of(0))};
}

template <class Model, class AnyOptimizer>
void TrainGpt(const Job& job, Model&& model, AnyOptimizer& optimizer) {
  constexpr int kParts = 2;
  for (int epoch = 0; epoch < 2; ++epoch) {
    job.join([&] {
      for (int step = 0; step < job.part.Most(); ++step) {
        for (auto& group : optimizer.param_groups())  // Warm-up.
          group.options().set_lr(0.01 * std::min(1.0, (step + 1 + 2 * epoch) / 4.0));
        const auto backward = [&](int part) {
          job.part.ForEach(step, [&](int rank) {
            torch::manual_seed(10000 * epoch + 1000 * part + 100 * rank + step);
            const Tensor text = torch::randint(GptImpl::kTokens, {2, GptImpl::kContext + 1});
            const Tensor output = model(text.slice(1, 0, GptImpl::kContext));
            const Tensor loss = torch::nn::functional::cross_entropy(output.flatten(0, 1),
                                                                     text.slice(1, 1).flatten());
            (job.part.share * loss / kParts).backward();
          });
        };
        for (int part = 1; part < kParts; ++part) {
          const auto accumulating = job.no_sync();
          backward(part);
        }
        backward(0);
        job.clip(0.5);
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  }
}

TEST(ProgramsTest, AGptWithWarmUpAndAccumulation) {
  ForEachJob([](Group& group, const std::vector<int>& steps, const Placement& placement) {
    Gpt alone, net;
    torch::optim::AdamW adamw(GptGroups(alone), torch::optim::AdamWOptions());
    TrainGpt(JobAlone(steps, *alone), ForwardOf(alone), adamw);
    DataParallel ddp(group, net, {.first_bucket_bytes = 512, .bucket_bytes = 1024});
    Optimizer optimizer(ddp, GptGroups(net), std::make_unique<torch::optim::AdamWOptions>(),
                        {.placement = placement});
    TrainGpt(JobOf(group, steps, ddp, optimizer), ddp, optimizer);
    RequireReplicas(group, *net);
    RequireClose(net->parameters(), alone->parameters(), "a GPT");
  });
}

// ---- Transfer learning: a new head on a frozen trunk, which is trained later ----

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    torch::manual_seed(7);
    trunk = register_module("trunk",
                            Sequential(Linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::ReLU()));
    head = register_module("head", Linear(6, 10));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& input) { return head(trunk->forward(input)); }
  Sequential trunk = nullptr;
  Linear head = nullptr;
};
TORCH_MODULE(Classifier);

Classifier NewClassifier() {
  Classifier net;  // As if it had been loaded.
  for (const Tensor& param : net->parameters()) param.set_requires_grad(false);
  net->head = net->replace_module("head", Linear(6, 3));
  net->head->to(torch::kDouble);
  net->trunk->eval();  // Its statistics stay.
  return net;
}

template <class Model, class AnyOptimizer>
void TrainClassifier(const Job& job, int epoch, Model& model, AnyOptimizer& optimizer) {
  job.join([&] {
    for (int step = 0; step < job.part.Most(); ++step) {
      optimizer.zero_grad();
      job.part.ForEach(step, [&](int rank) {
        const Tensor input = Random(rank, step + 10 * epoch, {5, 4});
        const Tensor loss =
            torch::nn::functional::cross_entropy(model(input), torch::randint(3, {5}));
        (job.part.share * loss).backward();
      });
      optimizer.step();
    }
  });
}

const auto kOfHead = torch::optim::SGDOptions(0.1).momentum(0.9);
const auto kOfAll = torch::optim::AdamWOptions(0.01);

TEST(ProgramsTest, TransferLearningWithANewHead) {
  ForEachJob([](Group& group, const std::vector<int>& steps, const Placement& placement) {
    Classifier alone = NewClassifier(), net = NewClassifier();
    const auto unfreeze = [](Classifier& net) {
      for (const Tensor& param : net->parameters()) param.set_requires_grad(true);
    };
    {
      auto model = ForwardOf(alone);
      torch::optim::SGD sgd(alone->head->parameters(), kOfHead);
      TrainClassifier(JobAlone(steps, *alone), 0, model, sgd);
      unfreeze(alone);
      torch::optim::AdamW adamw(alone->parameters(), kOfAll);
      for (const int epoch : {1, 2}) TrainClassifier(JobAlone(steps, *alone), epoch, model, adamw);
    }
    DataParallel ddp(group, net, kSmall);
    {
      Optimizer optimizer(ddp, {torch::optim::OptimizerParamGroup(net->head->parameters())},
                          std::make_unique<torch::optim::SGDOptions>(kOfHead));
      TrainClassifier(JobOf(group, steps, ddp, optimizer), 0, ddp, optimizer);
    }
    unfreeze(net);
    Optimizer optimizer(ddp, kOfAll, {.placement = placement});
    for (const int epoch : {1, 2})
      TrainClassifier(JobOf(group, steps, ddp, optimizer), epoch, ddp, optimizer);
    RequireReplicas(group, *net);
    RequireClose(net->parameters(), alone->parameters(), "a classifier");
  });
}

}  // namespace
}  // namespace evenkeel::libtorch
