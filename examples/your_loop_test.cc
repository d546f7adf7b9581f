// The recipes that docs/your_loop.md quotes. Each is compared with one process on the same batches,
// in double, on 1, 2 and 3 ranks of which one has no input and the others end at different steps.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/update_rule.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr double kRate = 0.25;
constexpr int kBatches[] = {5, 0, 7};  // By rank.

double Target(int rank, int batch, int j) { return std::sin(1 + 7.0 * rank + 3.0 * batch + j); }

struct Model {
  std::vector<double> weight = {0.5, -1.5, 2.0, 0.01}, gradient = {0, 0, 0, 0};
  ParameterSet params;

  Model() { params.Add("weight", absl::MakeSpan(weight), absl::MakeSpan(gradient)); }

  // Half the squared distance to the batch's target.
  absl::Status Backward(DataParallel& ddp, int rank, int batch) {
    auto grad = params[0].grad.as<double>();
    for (int j = 0; j < 4; ++j) grad[j] = weight[j] - Target(rank, batch, j);
    params.SetGradState(0, GradState::kLocal);
    return ddp.GradientReady(0);
  }
};

absl::Status TrainStep(Model& model, DataParallel& ddp, Optimizer& optimizer, int rank, int batch) {
  model.params.ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(model.Backward(ddp, rank, batch));
  EK_RETURN_IF_ERROR(ddp.FinishStep());
  return optimizer.Step();
}

// One process: `after` is the program's own code behind each step.
std::vector<double> TrainAlone(
    int world, const std::function<void(std::vector<double>&)>& after,
    const std::function<double(int)>& rate = [](int) { return kRate; },
    const std::function<double(double)>& gradient = [](double value) { return value; }) {
  Model model;
  for (int step = 0; step < *std::max_element(kBatches, kBatches + world); ++step) {
    std::vector<double> sum(4);
    for (int rank = 0; rank < world; ++rank) {
      for (int j = 0; j < 4 && step < kBatches[rank]; ++j)
        sum[j] += model.weight[j] - Target(rank, step, j);
    }
    for (int j = 0; j < 4; ++j) model.weight[j] -= rate(step) * gradient(sum[j] / world);
    after(model.weight);
  }
  return model.weight;
}

void ExpectNear(const std::vector<double>& weight, const std::vector<double>& expected) {
  for (size_t j = 0; j < expected.size(); ++j) EXPECT_NEAR(weight[j], expected[j], 1e-12) << j;
}

void OnRanks(int world, const std::function<absl::Status(Communicator&)>& body) {
  const absl::Status status = RunRanks(world, body);
  EXPECT_TRUE(status.ok()) << status;
}

// ---- Around Step() ----

absl::Status ClipByValue(Optimizer& optimizer) {
  return optimizer.BeforeUpdate([](absl::Span<const GradientPiece> pieces) {
    for (const GradientPiece& piece : pieces) {
      for (double& element : piece.gradient.as<double>()) element = std::clamp(element, -0.5, 0.5);
    }
    return absl::OkStatus();
  });
}

absl::Status Clamp(Optimizer& optimizer, std::vector<double>& weight) {
  return optimizer.AfterUpdate([&weight] {
    for (double& w : weight) w = std::clamp(w, -0.4, 0.4);
    return absl::OkStatus();
  });
}

absl::Status Prune(Optimizer& optimizer, std::vector<double>& weight, std::vector<bool> keeps) {
  return optimizer.AfterUpdate([&weight, keeps = std::move(keeps)] {
    for (size_t j = 0; j < weight.size(); ++j) {
      if (!keeps[j]) weight[j] = 0;
    }
    return absl::OkStatus();
  });
}

absl::Status Average(Optimizer& optimizer, const std::vector<double>& weight,
                     std::vector<double>& average) {
  average = weight;
  return optimizer.AfterUpdate([&] {
    for (size_t j = 0; j < weight.size(); ++j) average[j] = 0.9 * average[j] + 0.1 * weight[j];
    return absl::OkStatus();
  });
}

absl::Status Schedule(Optimizer& optimizer) {
  return optimizer.AfterUpdate([&optimizer] {
    return optimizer.SetLearningRate(kRate / (1 + static_cast<double>(optimizer.steps_finished())));
  });
}

class OwnFunctionTest : public testing::TestWithParam<std::tuple<int, Placement>> {
 protected:
  // Trains with what `add` adds to the optimizer.
  void Run(const std::function<absl::Status(Optimizer&, Model&)>& add,
           const std::function<void(const Model&)>& check) {
    const auto& [world, placement] = GetParam();
    OnRanks(world, [&, placement = placement](Communicator& comm) -> absl::Status {
      Model model;
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params, {}));
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, Sgd{.learning_rate = kRate},
                                                            {.placement = placement}));
      EK_RETURN_IF_ERROR(add(*optimizer, model));
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
            for (int batch = 0; batch < kBatches[comm.rank()]; ++batch) {
              EK_RETURN_IF_ERROR(TrainStep(model, *ddp, *optimizer, comm.rank(), batch));
            }
            return absl::OkStatus();
          }));
      check(model);
      return absl::OkStatus();
    });
  }
  static int world() { return std::get<0>(GetParam()); }
};

TEST_P(OwnFunctionTest, ClipsGradientsOnEveryRank) {
  const std::vector<double> alone = TrainAlone(
      world(), [](std::vector<double>&) {}, [](int) { return kRate; },
      [](double value) { return std::clamp(value, -0.5, 0.5); });
  Run([](Optimizer& optimizer, Model&) { return ClipByValue(optimizer); },
      [&](const Model& model) { ExpectNear(model.weight, alone); });
}

TEST_P(OwnFunctionTest, ClampsOnEveryRank) {
  const std::vector<double> alone = TrainAlone(world(), [](std::vector<double>& weight) {
    for (double& w : weight) w = std::clamp(w, -0.4, 0.4);
  });
  Run([](Optimizer& optimizer, Model& model) { return Clamp(optimizer, model.weight); },
      [&](const Model& model) { ExpectNear(model.weight, alone); });
}

TEST_P(OwnFunctionTest, PrunesOnEveryRank) {
  const std::vector<double> alone =
      TrainAlone(world(), [](std::vector<double>& weight) { weight[1] = weight[3] = 0; });
  Run(
      [](Optimizer& optimizer, Model& model) {
        return Prune(optimizer, model.weight, {true, false, true, false});
      },
      [&](const Model& model) { ExpectNear(model.weight, alone); });
}

TEST_P(OwnFunctionTest, AveragesOnEveryRank) {
  std::vector<double> expected = Model().weight;
  TrainAlone(world(), [&](std::vector<double>& weight) {
    for (size_t j = 0; j < weight.size(); ++j) expected[j] = 0.9 * expected[j] + 0.1 * weight[j];
  });
  std::vector<std::vector<double>> averages(world());
  int next = 0;
  std::mutex mutex;
  Run(
      [&](Optimizer& optimizer, Model& model) {
        const std::lock_guard<std::mutex> lock(mutex);
        return Average(optimizer, model.weight, averages[next++]);
      },
      [](const Model&) {});
  for (const std::vector<double>& average : averages) ExpectNear(average, expected);
}

TEST_P(OwnFunctionTest, SchedulesTheRateOnEveryRank) {
  const std::vector<double> alone = TrainAlone(
      world(), [](std::vector<double>&) {}, [](int step) { return kRate / (1 + step); });
  Run([](Optimizer& optimizer, Model&) { return Schedule(optimizer); },
      [&](const Model& model) { ExpectNear(model.weight, alone); });
}

INSTANTIATE_TEST_SUITE_P(Placements, OwnFunctionTest,
                         testing::Combine(testing::Values(1, 2, 3),
                                          testing::Values(Placement(Replicated{}),
                                                          Placement(WholeTensors{}),
                                                          Placement(Slices{}))),
                         [](const auto& info) {
                           return absl::StrCat("world", std::get<0>(info.param), "_placement",
                                               std::get<1>(info.param).index());
                         });

// ---- Two models ----

absl::Status TrainInTurns(Communicator& comm, Model& first, Model& second, int batches) {
  const Sgd rule{.learning_rate = kRate};
  EK_ASSIGN_OR_RETURN(auto first_ddp, DataParallel::Create(&comm, &first.params, {}));
  EK_ASSIGN_OR_RETURN(auto first_optimizer, Optimizer::Create(*first_ddp, rule));
  EK_ASSIGN_OR_RETURN(auto second_ddp, DataParallel::Create(&comm, &second.params, {}));
  EK_ASSIGN_OR_RETURN(auto second_optimizer,
                      Optimizer::Create(*second_ddp, rule, {.placement = Slices{}}));
  return RunJoined(
      {first_ddp.get(), first_optimizer.get(), second_ddp.get(), second_optimizer.get()}, {},
      [&](JoinScope&) -> absl::Status {
        const int rank = comm.rank();
        for (int batch = 0; batch < batches; ++batch) {
          EK_RETURN_IF_ERROR(TrainStep(first, *first_ddp, *first_optimizer, rank, batch));
          if (batch % 2 == 0) continue;  // The second model trains less often.
          EK_RETURN_IF_ERROR(TrainStep(second, *second_ddp, *second_optimizer, rank, batch));
        }
        return absl::OkStatus();
      });
}

TEST(TwoModelsTest, TrainInTurns) {
  for (const int world : {1, 2, 3}) {
    const std::vector<double> alone = TrainAlone(world, [](std::vector<double>&) {});
    std::vector<double> odd = Model().weight;
    for (int step = 1; step < *std::max_element(kBatches, kBatches + world); step += 2) {
      const std::vector<double> at = odd;
      for (int rank = 0; rank < world; ++rank) {
        for (int j = 0; j < 4 && step < kBatches[rank]; ++j)
          odd[j] -= kRate * (at[j] - Target(rank, step, j)) / world;
      }
    }
    OnRanks(world, [&](Communicator& comm) -> absl::Status {
      Model first, second;
      EK_RETURN_IF_ERROR(TrainInTurns(comm, first, second, kBatches[comm.rank()]));
      ExpectNear(first.weight, alone);
      ExpectNear(second.weight, odd);
      return absl::OkStatus();
    });
  }
}

// ---- An optimizer of your own ----

class OwnOptimizer : public Joinable {
 public:
  OwnOptimizer(Communicator* comm, ParameterSet* params, int param)
      : Joinable(comm, "own_optimizer"), params_(params), param_(param) {}

  absl::Status Step() {  // On a rank with inputs, after FinishStep().
    EK_RETURN_IF_ERROR(Notify().status());
    return Update();
  }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    struct Hook : JoinHook {
      explicit Hook(OwnOptimizer* owner) : owner(owner) {}
      absl::Status MainHook(const StepAnswer&) override { return owner->Update(); }
      OwnOptimizer* const owner;
    };
    return std::make_unique<Hook>(this);  // Exhausted ranks have the reduced gradient, too.
  }
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  const void* trained_set() const override { return params_; }

 private:
  absl::Status Update() {
    const Parameter& param = (*params_)[param_];
    for (int64_t j = 0; j < param.value.count; ++j)
      param.value.as<double>()[j] -= kRate * param.grad.as<double>()[j];
    CountStep("rate=0.25");  // Ranks that step with other settings get an error.
    return absl::OkStatus();
  }

  ParameterSet* const params_;
  const int param_;
};

TEST(OwnOptimizerTest, StepsBesideOursOnEveryRank) {
  for (const int world : {1, 2, 3}) {
    const std::vector<double> alone = TrainAlone(world, [](std::vector<double>&) {});
    OnRanks(world, [&](Communicator& comm) -> absl::Status {
      std::vector<double> weights[2] = {Model().weight, Model().weight}, gradients[2];
      ParameterSet params;
      for (int i = 0; i < 2; ++i) {
        gradients[i].resize(4);
        params.Add(absl::StrCat("p", i), absl::MakeSpan(weights[i]), absl::MakeSpan(gradients[i]));
      }
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}));
      EK_ASSIGN_OR_RETURN(
          auto ours,
          Optimizer::Create(
              *ddp, {{.name = "first", .params = {0}, .rule = Sgd{.learning_rate = kRate}}}));
      OwnOptimizer own(&comm, &params, 1);
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get(), ours.get(), &own}, {}, [&](JoinScope&) -> absl::Status {
            for (int batch = 0; batch < kBatches[comm.rank()]; ++batch) {
              params.ClearGradients();
              EK_RETURN_IF_ERROR(ddp->BeginStep());
              for (int i = 0; i < 2; ++i) {
                for (int j = 0; j < 4; ++j)
                  gradients[i][j] = weights[i][j] - Target(comm.rank(), batch, j);
                params.SetGradState(i, GradState::kLocal);
                EK_RETURN_IF_ERROR(ddp->GradientReady(i));
              }
              EK_RETURN_IF_ERROR(ddp->FinishStep());
              EK_RETURN_IF_ERROR(ours->Step());
              EK_RETURN_IF_ERROR(own.Step());
            }
            return absl::OkStatus();
          }));
      ExpectNear(weights[0], alone);
      ExpectNear(weights[1], alone);
      return absl::OkStatus();
    });
  }
}

// ---- A framework that owns the loop ----

// As a framework has them: they return whether to go on.
struct Callbacks {
  std::function<bool()> on_batch_begin, on_backward_end;
};

void Fit(Model& model, int rank, int batches, const Callbacks& callbacks) {
  for (int batch = 0; batch < batches; ++batch) {
    if (!callbacks.on_batch_begin()) return;
    for (int j = 0; j < 4; ++j) model.gradient[j] = model.weight[j] - Target(rank, batch, j);
    if (!callbacks.on_backward_end()) return;
  }
}

absl::Status FitJoined(Model& model, DataParallel& ddp, Optimizer& optimizer, int batches) {
  return RunJoined({&ddp, &optimizer}, {}, [&](JoinScope& scope) {
    absl::Status status;  // A callback of the framework cannot return it.
    const auto begin = [&] {
      model.params.ClearGradients();
      status = ddp.BeginStep();
      return status.ok();
    };
    const auto step = [&]() -> absl::Status {
      for (int i = 0; i < model.params.size(); ++i) {
        model.params.SetGradState(i, GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp.GradientReady(i));
      }
      EK_RETURN_IF_ERROR(ddp.FinishStep());
      return optimizer.Step();
    };
    Fit(model, scope.communicator().rank(), batches,
        {.on_batch_begin = begin, .on_backward_end = [&] { return (status = step()).ok(); }});
    return status;
  });
}

TEST(FrameworkTest, OwnsTheLoop) {
  for (const int world : {1, 2, 3}) {
    const std::vector<double> alone = TrainAlone(world, [](std::vector<double>&) {});
    OnRanks(world, [&](Communicator& comm) -> absl::Status {
      Model model;
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params, {}));
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, Sgd{.learning_rate = kRate}));
      EK_RETURN_IF_ERROR(FitJoined(model, *ddp, *optimizer, kBatches[comm.rank()]));
      ExpectNear(model.weight, alone);
      return absl::OkStatus();
    });
  }
}

// ---- A backward that only adds ----

void ZeroMissingGradients(ParameterSet& params) {  // After BeginStep().
  for (int i = 0; i < params.size(); ++i) {
    const TensorView& grad = params[i].grad;
    if (params.grad_state(i) == GradState::kNone) std::memset(grad.data, 0, grad.bytes());
  }
}

TEST(AddingBackwardTest, BeginsWithZerosWhereThereIsNoGradient) {
  for (const bool views : {false, true}) {
    const std::vector<double> alone = TrainAlone(3, [](std::vector<double>&) {});
    OnRanks(3, [&](Communicator& comm) -> absl::Status {
      Model model;
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params, {},
                                               {.reducer = {.gradient_as_bucket_view = views}}));
      EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, Sgd{.learning_rate = kRate}));
      EK_RETURN_IF_ERROR(
          RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
            for (int batch = 0; batch < kBatches[comm.rank()]; ++batch) {
              model.params.ClearGradients();
              EK_RETURN_IF_ERROR(ddp->BeginStep());
              ZeroMissingGradients(model.params);
              for (int j = 0; j < 4; ++j)
                model.params[0].grad.as<double>()[j] +=
                    model.weight[j] - Target(comm.rank(), batch, j);
              model.params.SetGradState(0, GradState::kLocal);
              EK_RETURN_IF_ERROR(ddp->GradientReady(0));
              EK_RETURN_IF_ERROR(ddp->FinishStep());
              EK_RETURN_IF_ERROR(optimizer->Step());
            }
            return absl::OkStatus();
          }));
      ExpectNear(model.weight, alone);
      return absl::OkStatus();
    });
  }
}

// ---- Collectives without a DataParallel ----

// A loop without steps of a Joinable: RunJoined() needs one that stands for it.
class Loop : public Joinable {
 public:
  explicit Loop(Communicator* comm) : Joinable(comm, "loop") {}
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }
};

// The mean of each batch's value over the ranks that have one.
absl::Status MeanOfEachBatch(Communicator& comm, int batches, std::vector<double>& means) {
  Loop loop(&comm);
  return RunJoined({&loop}, {}, [&](JoinScope& scope) -> absl::Status {
    for (int batch = 0; batch < batches; ++batch) {
      double value = Target(comm.rank(), batch, 0);
      EK_RETURN_IF_ERROR(scope.AllReduce(absl::MakeSpan(&value, 1), ReduceOp::kAverage));
      means.push_back(value);
    }
    return absl::OkStatus();
  });
}

TEST(ScopeTest, NeedsNoDataParallel) {
  for (const int world : {1, 2, 3}) {
    OnRanks(world, [&](Communicator& comm) -> absl::Status {
      std::vector<double> means, expected;
      EK_RETURN_IF_ERROR(MeanOfEachBatch(comm, kBatches[comm.rank()], means));
      for (int batch = 0; batch < kBatches[comm.rank()]; ++batch) {
        double sum = 0, count = 0;
        for (int rank = 0; rank < world; ++rank) {
          sum += batch < kBatches[rank] ? Target(rank, batch, 0) : 0;
          count += batch < kBatches[rank] ? 1 : 0;
        }
        expected.push_back(sum / count);
      }
      EXPECT_EQ(means.size(), expected.size());
      ExpectNear(means, expected);
      return absl::OkStatus();
    });
  }
}

// ---- Programs as others write them ----

// A C program with one block of memory for all values and one for all gradients. The tensors lie
// side by side, some are empty, and backward adds from the last one to the first.
TEST(ProgramsTest, ACProgramWithOneBlockForAllParameters) {
  const int sizes[] = {3, 0, 5, 1, 2};
  constexpr int kCount = 11;
  const auto gradient = [](const double* value, int i, int rank, int batch) {
    return value[i] - Target(rank, batch, i) + 0.1 * value[(i + 1) % kCount];
  };
  for (const int world : {1, 2, 3}) {
    std::vector<double> alone(kCount, 0.25);
    for (int step = 0; step < *std::max_element(kBatches, kBatches + world); ++step) {
      std::vector<double> sum(kCount);
      for (int rank = 0; rank < world; ++rank) {
        for (int i = 0; i < kCount && step < kBatches[rank]; ++i)
          sum[i] += gradient(alone.data(), i, rank, step);
      }
      for (int i = 0; i < kCount; ++i) alone[i] -= kRate * sum[i] / world;
    }
    for (const Placement& placement :
         {Placement(Replicated{}), Placement(WholeTensors{}), Placement(Slices{})}) {
      OnRanks(world, [&](Communicator& comm) -> absl::Status {
        const std::unique_ptr<double, decltype(&std::free)> values(
            static_cast<double*>(std::malloc(kCount * sizeof(double))), &std::free);
        const std::unique_ptr<double, decltype(&std::free)> grads(
            static_cast<double*>(std::calloc(kCount, sizeof(double))), &std::free);
        std::fill_n(values.get(), kCount, 0.25);
        ParameterSet params;
        std::vector<int> first;
        int at = 0;
        for (const int size : sizes) {
          params.Add(absl::StrCat("layer", first.size()), absl::MakeSpan(values.get() + at, size),
                     absl::MakeSpan(grads.get() + at, size));
          first.push_back(at);
          at += size;
        }
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}));
        EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, Sgd{.learning_rate = kRate},
                                                              {.placement = placement}));
        EK_RETURN_IF_ERROR(
            RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope&) -> absl::Status {
              for (int batch = 0; batch < kBatches[comm.rank()]; ++batch) {
                params.ClearGradients();
                EK_RETURN_IF_ERROR(ddp->BeginStep());
                ZeroMissingGradients(params);
                for (int layer = params.size() - 1; layer >= 0; --layer) {
                  double* const grad = grads.get() + first[layer];
                  for (int i = 0; i < sizes[layer]; ++i)
                    grad[i] += gradient(values.get(), first[layer] + i, comm.rank(), batch);
                  params.SetGradState(layer, GradState::kLocal);
                  EK_RETURN_IF_ERROR(ddp->GradientReady(layer));
                }
                EK_RETURN_IF_ERROR(ddp->FinishStep());
                EK_RETURN_IF_ERROR(optimizer->Step());
              }
              return absl::OkStatus();
            }));
        ExpectNear({values.get(), values.get() + kCount}, alone);
        return absl::OkStatus();
      });
    }
  }
}

// A solver that evaluates a function where it likes, with a line search: each evaluation sums the
// ranks' parts, so all ranks take the same decisions.
TEST(ProgramsTest, ASolverWithALineSearchAndItsOwnAllReduce) {
  // The sum over samples of the fourth power of the distance; its first element is the value.
  const auto part = [](const std::vector<double>& x, int begin, int end) {
    std::vector<double> value_and_gradient(1 + x.size());
    for (int sample = begin; sample < end; ++sample) {
      for (size_t j = 0; j < x.size(); ++j) {
        const double miss = x[j] - Target(0, sample, static_cast<int>(j));
        value_and_gradient[0] += std::pow(miss, 4) / 4;
        value_and_gradient[1 + j] += std::pow(miss, 3);
      }
    }
    return value_and_gradient;
  };
  using Evaluate = std::function<absl::StatusOr<std::vector<double>>(const std::vector<double>&)>;
  const auto minimize = [](const Evaluate& evaluate) -> absl::StatusOr<std::vector<double>> {
    std::vector<double> x = {0.5, -0.5, 1};
    EK_ASSIGN_OR_RETURN(std::vector<double> at, evaluate(x));
    for (int iteration = 0; iteration < 10; ++iteration) {
      for (double rate = 1; rate > 1e-6; rate /= 2) {
        std::vector<double> next = x;
        for (size_t j = 0; j < x.size(); ++j) next[j] -= rate * at[1 + j];
        EK_ASSIGN_OR_RETURN(std::vector<double> there, evaluate(next));
        if (there[0] >= at[0]) continue;
        x = std::move(next);
        at = std::move(there);
        break;
      }
    }
    return x;
  };
  constexpr int kSamples = 17;
  const std::vector<double> alone =
      *minimize([&](const std::vector<double>& x) { return part(x, 0, kSamples); });
  for (const int world : {1, 2, 3}) {
    OnRanks(world, [&](Communicator& comm) -> absl::Status {
      const int begin = kSamples * comm.rank() / world, end = kSamples * (comm.rank() + 1) / world;
      EK_ASSIGN_OR_RETURN(
          const std::vector<double> x,
          minimize([&](const std::vector<double>& at) -> absl::StatusOr<std::vector<double>> {
            std::vector<double> sum = part(at, begin, end);
            EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(sum), ReduceOp::kSum));
            return sum;
          }));
      ExpectNear(x, alone);
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace evenkeel
