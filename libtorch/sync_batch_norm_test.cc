// SyncBatchNorm: against one process that has the ranks' batches one after the other.

#include <algorithm>

#include "evenkeel/libtorch.h"
#include "evenkeel/libtorch/testing/ranks.h"
#include "gtest/gtest.h"

namespace evenkeel::libtorch {
namespace {

using torch::Tensor;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNorm3d;
using torch::nn::BatchNormOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

void RequireClose(const Tensor& got, const Tensor& want, const std::string& what,
                  double most = 1e-6) {
  Require(got.sizes() == want.sizes(), what + " has the expected sizes");
  if (got.numel() == 0) return;
  const double unit = std::max(1.0, want.abs().max().item<double>());
  const double far = (got.to(torch::kDouble) - want).abs().max().item<double>();
  Require(far <= most * unit, what + " is near: it is off by " + std::to_string(far));
}

// The parameter in front of the layer needs the gradient of the layer's input.
struct ScaledImpl : torch::nn::Module {
  explicit ScaledImpl(Sequential layers) : body(register_module("body", layers)) {}
  Tensor forward(const Tensor& input) { return body->forward(input * scale); }
  Tensor scale = register_parameter("scale", torch::full({1}, 1.5));
  Sequential body;
};
TORCH_MODULE(Scaled);

struct Case {
  const char* name;
  BatchNormOptions options;
  std::vector<int64_t> sizes;    // Behind the number of samples.
  std::vector<int64_t> samples;  // By rank.
  torch::MemoryFormat format = torch::MemoryFormat::Contiguous;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class Layers : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    All, Layers,
    testing::Values(Case{"even", 3, {3}, {4, 4}}, Case{"uneven", 3, {3}, {5, 2, 1}},
                    Case{"no_samples", 3, {3, 5}, {4, 0, 3}},
                    Case{"no_samples_on_rank_0", 3, {3, 5}, {0, 4}},
                    Case{"no_samples_at_all", 3, {3, 5}, {0, 0}},
                    Case{"images", BatchNormOptions(4).eps(1e-3), {4, 3, 5}, {2, 3}},
                    Case{"channels_last", 4, {4, 3, 5}, {2, 3}, torch::MemoryFormat::ChannelsLast},
                    Case{"volumes", BatchNormOptions(2).momentum(0.3), {2, 3, 2, 2}, {1, 2}},
                    Case{"cumulative", BatchNormOptions(3).momentum(std::nullopt), {3}, {3, 4}},
                    Case{"without_affine", BatchNormOptions(3).affine(false), {3}, {3, 4}},
                    Case{"untracked", BatchNormOptions(3).track_running_stats(false), {3}, {3, 4}},
                    Case{"one_rank", 3, {3}, {6}}));

Scaled NewNet(const Case& one) {
  Sequential layers;
  if (one.sizes.size() < 3) layers->push_back(BatchNorm1d(one.options));
  if (one.sizes.size() == 3) layers->push_back(BatchNorm2d(one.options));
  if (one.sizes.size() == 4) layers->push_back(BatchNorm3d(one.options));
  Scaled net(layers);
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  for (const Tensor& param : net->parameters()) param.uniform_(0.5, 1.5);
  return net;
}

// The layer of torch, in float64, has all samples.
void TestLayer(Group& group, const Case& one, torch::ScalarType dtype, double most) {
  const double world = group.size();
  Scaled alone = NewNet(one), net = NewNet(one);
  convert_sync_batchnorm(*net);
  alone->to(torch::kDouble);
  net->to(dtype);
  DataParallel ddp(group, net);
  int64_t begin = 0;
  for (int rank = 0; rank < group.rank(); ++rank) begin += one.samples[rank];
  std::vector<int64_t> sizes = one.sizes;
  sizes.insert(sizes.begin(), 0);
  for (const int64_t samples : one.samples) sizes[0] += samples;
  const auto own = [&](const Tensor& all) {
    return all.narrow(0, begin, one.samples[group.rank()]);
  };
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(10 + step);
    const Tensor all = (torch::randn(sizes) * 2 + 1).to(dtype), factor = torch::randn(sizes);
    const Tensor input = own(all).contiguous(one.format).requires_grad_();
    const Tensor all_input = all.to(torch::kDouble).requires_grad_();
    alone->zero_grad();
    net->zero_grad();
    const Tensor want = alone->forward(all_input), got = ddp(input);
    Require(got.scalar_type() == dtype, "the output has the type of the input");
    Require(got.numel() == 0 || got.is_contiguous(one.format), "and its memory format");
    RequireClose(got, own(want), "the output", most);
    (want * factor).sum().backward();
    (got * own(factor)).sum().backward();
    RequireClose(input.grad(), own(all_input.grad()), "the gradient of the input", most);
    for (const auto& item : net->named_parameters()) {
      // That of the scale is a sum of terms that cancel out.
      if (dtype == torch::kDouble || item.key() != "scale")
        RequireClose(item.value().grad(), alone->named_parameters()[item.key()].grad() / world,
                     "the gradient of " + item.key(), most);
    }
    for (const auto& item : net->named_buffers())
      if (item.value().defined())
        RequireClose(item.value(), alone->named_buffers()[item.key()], item.key(), most);
    if (step > 0 && !one.options.track_running_stats()) continue;
    alone->eval();
    net->eval();
    const torch::NoGradGuard no_grad;
    RequireClose(net->forward(all), alone->forward(all_input), "in evaluation mode", most);
    alone->train();
    net->train();
  }
  RequireReplicas(group, *net);
}

TEST_P(Layers, TheRanksComputeWhatOneProcessDoes) {
  const auto world = static_cast<int>(GetParam().samples.size());
  EXPECT_EQ(RunRanks(world,
                     [](Group& group) {
                       TestLayer(group, GetParam(), torch::kDouble, 1e-12);
                       TestLayer(group, GetParam(), torch::kFloat, 1e-6);
                       TestLayer(group, GetParam(), torch::kBFloat16, 0.02);
                     }),
            AllPass(world));
}

// Ranks have 4, 2 and 0 batches of different sizes.
int StepsOf(int rank) { return 4 - 2 * rank; }
Tensor Batch(int rank, int step) {
  torch::manual_seed(100 * rank + step);
  return torch::randn({3 + rank + step, 5});
}
Sequential NewDeepNet() {
  torch::manual_seed(2);
  return Sequential(Linear(5, 6), BatchNorm1d(6), torch::nn::Tanh(), Linear(6, 4), BatchNorm1d(4),
                    torch::nn::Tanh());
}

TEST(SyncBatchNormTest, ExhaustedRanksTakePart) {
  const auto rule = torch::optim::SGDOptions(0.1).momentum(0.9);
  for (const Placement& placement : {Placement(Replicated{}), Placement(Slices{})}) {
    EXPECT_EQ(
        RunRanks(3,
                 [&](Group& group) {
                   Sequential alone = NewDeepNet(), net = NewDeepNet();
                   torch::optim::SGD sgd(alone->parameters(), rule);
                   for (int step = 0; step < StepsOf(0); ++step) {
                     std::vector<Tensor> parts;
                     std::vector<int64_t> sizes;
                     for (int rank = 0; rank < 3; ++rank) {
                       if (step >= StepsOf(rank)) continue;
                       parts.push_back(Batch(rank, step));
                       sizes.push_back(parts.back().size(0));
                     }
                     sgd.zero_grad();
                     Tensor loss = torch::zeros({});
                     for (const Tensor& part :
                          alone->forward(torch::cat(parts)).split_with_sizes(sizes))
                       loss = loss + part.square().mean() / 3;
                     loss.backward();
                     sgd.step();
                   }
                   convert_sync_batchnorm(*net);
                   DataParallel ddp(group, net, {.first_bucket_bytes = 64});
                   Optimizer optimizer(ddp, rule, {.placement = placement});
                   ddp.join([&] {
                     for (int step = 0; step < StepsOf(group.rank()); ++step) {
                       optimizer.zero_grad();
                       ddp(Batch(group.rank(), step)).square().mean().backward();
                       optimizer.step();
                     }
                   });
                   RequireReplicas(group, *net);
                   for (const auto& item : net->named_parameters())
                     RequireClose(item.value(), alone->named_parameters()[item.key()], item.key());
                   for (const auto& item : net->named_buffers())
                     RequireClose(item.value(), alone->named_buffers()[item.key()], item.key());
                 }),
        AllPass(3));
  }
}

TEST(SyncBatchNormTest, RefusesWhatItCannotCompute) {
  EXPECT_EQ(RunRanks(2,
                     [](Group& group) {
                       SyncBatchNorm free(3);
                       RequireError(
                           [&] {
                             free->forward(torch::ones({2, 3}));
                           },
                           "before the DataParallel is made");
                       free->eval();
                       free->forward(torch::ones({2, 3}));
                       Scaled net(Sequential(SyncBatchNorm(3)));
                       DataParallel ddp(group, net);
                       RequireError([&] { ddp(torch::ones({2, 4})); }, "of 3 features");
                       const auto second_derivative = [&] {
                         const Tensor output = ddp(torch::rand({2, 3}));
                         torch::autograd::grad({output.square().sum()}, {net->scale}, {}, true,
                                               /*create_graph=*/true);
                       };
                       RequireError(second_derivative, "without create_graph");
                       RequireError([&] { ddp(torch::rand({group.rank(), 3})); }, "needs two");
                       ddp(torch::rand({2, 3})).sum().backward();
                     }),
            AllPass(2));
}

// A layer in a member, one in a list, one in a dictionary.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    using Named = std::vector<std::pair<std::string, std::shared_ptr<Module>>>;
    torch::nn::ModuleDict dict(Named{{"c", BatchNorm3d(2).ptr()}});
    register_module("list", torch::nn::ModuleList(BatchNorm2d(2), Sequential(BatchNorm1d(3))));
    register_module("dict", dict);
  }
  void Keep() { norm = register_module("norm", BatchNorm1d(BatchNormOptions(4).eps(0.5))); }
  BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Mixed);

void TestConversion() {
  Mixed net;
  net->eval();
  const auto before = net->named_parameters(), buffers = net->named_buffers();
  convert_sync_batchnorm(*net);
  int layers = 0;
  for (const auto& module : net->modules()) {
    Require(!module->is_training(), "the mode stays");
    layers += module->as<SyncBatchNorm>() != nullptr ? 1 : 0;
  }
  Require(layers == 3, "each layer is replaced");
  const auto children = net->named_children();
  const auto& list = *children["list"]->as<torch::nn::ModuleList>();
  auto& dict = *children["dict"]->as<torch::nn::ModuleDict>();
  Require(list[0]->as<SyncBatchNorm>() != nullptr, "the list has the new layer");
  Require(dict["c"]->as<SyncBatchNorm>() != nullptr, "the dictionary has the new layer");
  Require(net->named_parameters().keys() == before.keys(), "names stay");
  for (const auto& item : net->named_parameters())
    Require(item.value().is_same(before[item.key()]), item.key() + " stays");
  Require(net->named_buffers().keys() == buffers.keys(), "names stay");
  for (const auto& item : net->named_buffers())
    Require(item.value().is_alias_of(buffers[item.key()]), item.key() + " stays");
}

void TestRefusedConversion() {
  Mixed net;
  net->Keep();
  torch::nn::ModuleList outer(net);
  const auto is_converted = [&] {
    return net->named_modules()["list.0"]->as<SyncBatchNorm>() != nullptr;
  };
  RequireError([&] { convert_sync_batchnorm(*outer); },
               "\"0.norm\", because a member or variable beside");
  RequireError([&] { convert_sync_batchnorm(*outer); }, "declare it there as a SyncBatchNorm");
  Require(!is_converted(), "nothing has changed");
  const auto norm = net->replace_module("norm", SyncBatchNorm(*net->norm));
  Require(norm->options.eps() == 0.5, "the settings stay");
  convert_sync_batchnorm(*outer);
  Require(is_converted(), "it is converted");
  BatchNorm1d layer(3);
  RequireError([&] { convert_sync_batchnorm(*layer); }, "create a SyncBatchNorm from it");
}

TEST(ConvertSyncBatchNormTest, ReplacesLayersOfContainersWithTheirState) {
  EXPECT_EQ(RunRanks(1, [](Group&) { TestConversion(); }), AllPass(1));
}

TEST(ConvertSyncBatchNormTest, RefusesALayerThatAnotherVariableHoldsAndChangesNothing) {
  EXPECT_EQ(RunRanks(1, [](Group&) { TestRefusedConversion(); }), AllPass(1));
}

}  // namespace
}  // namespace evenkeel::libtorch
