// Tied weights: the same memory under several names is one parameter.

#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TensorView View(std::vector<float>& floats) { return TensorView(absl::MakeSpan(floats)); }

TEST(SharedParametersTest, TheSameMemoryIsOneParameterWithTwoNames) {
  std::vector<float> embedding(6), grad(6), bias(2);
  ParameterSet params;
  EXPECT_EQ(params.Add("encoder.embedding", View(embedding)), 0);
  EXPECT_EQ(params.Add("decoder.bias", View(bias)), 1);
  EXPECT_EQ(params.Add("decoder.projection", View(embedding), View(grad)), 0);
  EXPECT_EQ(params.size(), 2);
  EXPECT_EQ(params.mask().size(), 2);
  EXPECT_EQ(params.Find("encoder.embedding"), 0);
  EXPECT_EQ(params.Find("decoder.projection"), 0);
  EXPECT_EQ(params[0].grad, View(grad)) << "The first name came without memory for it.";
  EXPECT_TRUE(params.Validate().ok()) << params.Validate();
  EXPECT_THAT(params.shared_names(), testing::SizeIs(1));
}

TEST(SharedParametersTest, APrefixOfAnyNameFreezesIt) {
  std::vector<float> embedding(6), bias(2);
  ParameterSet params;
  params.Add("encoder.embedding", View(embedding));
  params.Add("decoder.bias", View(bias));
  params.Add("decoder.projection", View(embedding));
  params.Add("decoder.again", View(embedding));
  EXPECT_EQ(params.SetTrainable("decoder.", false), 2) << "Each counts once.";
  EXPECT_FALSE(params.trainable(0));
  EXPECT_FALSE(params.trainable(1));
  EXPECT_EQ(params.SetTrainable("encoder.", true), 1);
  EXPECT_TRUE(params.trainable(0));
}

TEST(SharedParametersTest, ParametersWithoutElementsAreNotShared) {
  ParameterSet params;
  std::vector<float> one(1);
  EXPECT_EQ(params.Add("a", TensorView()), 0);
  EXPECT_EQ(params.Add("b", TensorView()), 1);
  EXPECT_EQ(params.Add("c", TensorView(one.data(), 0, DType::kFloat32)), 2);
  EXPECT_EQ(params.Add("d", TensorView(one.data(), 0, DType::kFloat32)), 3);
  EXPECT_TRUE(params.Validate().ok()) << params.Validate();
}

TEST(SharedParametersTest, MemoryThatOverlapsWithoutBeingTheSameIsRefused) {
  std::vector<float> memory(8), other(8);
  const TensorView all = View(memory);
  struct Case {
    TensorView value, grad;
    std::string message;  // Empty: fine.
  };
  const TensorView bytes(memory.data(), 4, DType::kFloat64);
  const Case cases[] = {
      {all.Slice(4, 4), {}, ""},
      {all.Slice(3, 4),
       {},
       "the memory of the value of \"a\" (float32[4]) overlaps that of the value of \"b\" "
       "(float32[4])"},
      {all.Slice(0, 3), {}, "overlaps that of the value of \"b\" (float32[3])"},
      {all, {}, "the value of \"b\" (float32[8])"},
      {bytes, {}, "the value of \"b\" (float64[4])"},
      {all.Slice(4, 4), View(other).Slice(4, 4), ""},
      {all.Slice(4, 4), View(other).Slice(2, 4),
       "the gradient of \"a\" (float32[4]) overlaps that of the gradient of \"b\""},
      {all.Slice(4, 4), View(other).Slice(0, 4), "overlaps that of the gradient of \"b\""},
      {all.Slice(4, 4), all.Slice(4, 4),
       "the value of \"b\" (float32[4]) overlaps that of the gradient of \"b\""},
      {{memory.data(), 4, DType::kFloat32, Device::Cuda(1)}, {}, ""},  // Another memory.
  };
  for (const Case& c : cases) {
    ParameterSet params;
    params.Add("a", all.Slice(0, 4), View(other).Slice(0, 4));
    EXPECT_EQ(params.Add("b", c.value, c.grad), 1);
    const absl::Status status = params.Validate();
    if (c.message.empty()) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"b\""));
  }
}

TEST(SharedParametersTest, NamesAndGradientsMustFit) {
  std::vector<float> shared(4), grad(4), other_grad(4), more(4);
  ParameterSet names;
  names.Add("a", View(shared));
  names.Add("b", View(more));
  names.Add("b", View(shared));
  EXPECT_EQ(names.Validate(),
            absl::InvalidArgumentError("parameters 0 and 1 are both named \"b\""));

  ParameterSet grads;
  grads.Add("a", View(shared), View(grad));
  grads.Add("b", View(shared), View(other_grad));
  EXPECT_EQ(grads.Validate(),
            absl::InvalidArgumentError(
                "parameters \"a\" and \"b\" are the same memory, their gradients are not"));
}

// y = W2 h, h = W1 x with W1 = W2 = W (a diagonal): both uses add to W's gradient, whose bucket
// leaves after the second.
class TiedModel {
 public:
  TiedModel()
      : weight_({1.5f, -0.5f, 2.0f}),
        grad_(3, -77.0f),
        bias_({0.25f, 0.5f, 0.75f}),
        bias_grad_(3, -77.0f) {
    params_.Add("encoder.weight", View(weight_), View(grad_));
    params_.Add("bias", View(bias_), View(bias_grad_));
    params_.Add("decoder.weight", View(weight_), View(grad_));
  }
  ParameterSet& params() { return params_; }
  const std::vector<float>& weight() const { return weight_; }

  absl::Status Backward(int rank, int step, absl::FunctionRef<absl::Status(int)> announce) {
    const int decoder = params_.Find("decoder.weight"), bias = params_.Find("bias");
    const int encoder = params_.Find("encoder.weight");
    for (size_t j = 0; j < weight_.size(); ++j) {
      const float x = ToyModel::Noise(rank, step, 1, static_cast<int>(j));
      Accumulate(decoder, j, weight_[j] * x);
      Accumulate(bias, j, 1.0f + x);
    }
    params_.SetGradState(decoder, GradState::kLocal);
    params_.SetGradState(bias, GradState::kLocal);
    EK_RETURN_IF_ERROR(announce(bias));
    for (size_t j = 0; j < weight_.size(); ++j) {
      Accumulate(encoder, j, weight_[j] * ToyModel::Noise(rank, step, 1, static_cast<int>(j)));
    }
    return announce(encoder);
  }

  void Descend() {
    for (int p = 0; p < params_.size(); ++p) {
      for (int64_t j = 0; j < params_[p].value.count; ++j) {
        params_[p].value.as<float>()[j] -= 0.25f * params_[p].grad.as<float>()[j];
      }
    }
  }

 private:
  void Accumulate(int param, size_t j, float gradient) {
    float& at = params_[param].grad.as<float>()[j];
    at = params_.grad_state(param) == GradState::kNone ? gradient : at + gradient;
  }
  std::vector<float> weight_, grad_, bias_, bias_grad_;
  ParameterSet params_;
};

class TiedWeightsTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(std::get<0>(GetParam()), body);
    EXPECT_TRUE(status.ok()) << status;
  }
  DataParallelOptions Options() const {
    return {.reducer = {.caps = {Bytes{8}}, .gradient_as_bucket_view = std::get<1>(GetParam())}};
  }
};

// Returns the result of one process that sees every rank's inputs.
std::vector<float> AloneWith(int ranks, int steps) {
  TiedModel model;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> sums(2, std::vector<float>(3));
    for (int rank = 0; rank < ranks; ++rank) {
      model.params().ClearGradients();
      (void)model.Backward(rank, step, [](int) { return absl::OkStatus(); });
      for (int p = 0; p < 2; ++p) {
        for (int j = 0; j < 3; ++j) sums[p][j] += model.params()[p].grad.as<float>()[j];
      }
    }
    for (int p = 0; p < 2; ++p) {
      for (int j = 0; j < 3; ++j)
        model.params()[p].grad.as<float>()[j] = sums[p][j] * (1.0f / ranks);
    }
    model.Descend();
  }
  return model.weight();
}

TEST_P(TiedWeightsTest, TrainAsOneProcessTrainsThem) {
  Run([&](Communicator& comm) -> absl::Status {
    TiedModel model;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    for (int step = 0; step < 4; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(
          model.Backward(comm.rank(), step, [&](int param) { return ddp->GradientReady(param); }));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      model.Descend();
    }
    EXPECT_THAT(ddp->reducer().plan().buckets, ElementsAre(ElementsAre(1), ElementsAre(0)));
    EXPECT_THAT(model.weight(),
                testing::Pointwise(testing::FloatEq(), AloneWith(comm.world_size(), 4)));
    return absl::OkStatus();
  });
}

// A rank that has no gradient for it gets the others', be it asked for by the one name or the
// other.
TEST_P(TiedWeightsTest, ARankThatUsesNeitherNameGetsTheOthersGradient) {
  Run([&](Communicator& comm) -> absl::Status {
    TiedModel model;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
    for (int step = 0; step < 3; ++step) {
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      const bool is_used = comm.rank() > 0 || comm.world_size() == 1;
      if (is_used) {
        EK_RETURN_IF_ERROR(model.Backward(comm.rank(), step,
                                          [&](int param) { return ddp->GradientReady(param); }));
      } else {
        EK_RETURN_IF_ERROR(ddp->NoGradient(model.params().Find("decoder.weight")));
        EK_RETURN_IF_ERROR(ddp->NoGradient(model.params().Find("bias")));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      EXPECT_EQ(model.params().grad_state(0), GradState::kReduced);
      for (int j = 0; j < 3; ++j) {
        float sum = 0;
        for (int rank = comm.world_size() == 1 ? 0 : 1; rank < comm.world_size(); ++rank) {
          sum += 2 * model.weight()[j] * ToyModel::Noise(rank, step, 1, j);
        }
        EXPECT_NEAR(model.params()[0].grad.as<float>()[j], sum / comm.world_size(), 1e-6);
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(TiedWeightsTest, RanksThatTieDifferentlyLearnIt) {
  absl::Status status =
      RunTestRanks(std::get<0>(GetParam()), [&](Communicator& comm) -> absl::Status {
        std::vector<float> a(3), b(3), grads(6);
        ParameterSet params;
        params.Add("a", View(a), View(grads).Slice(0, 3));
        params.Add("b", View(b), View(grads).Slice(3, 3));
        params.Add(comm.rank() == 0 ? "c" : "d", View(a));
        const absl::Status made = DataParallel::Create(&comm, &params, {}, Options()).status();
        if (comm.world_size() == 1) return made;
        EXPECT_EQ(made.code(), absl::StatusCode::kInvalidArgument);
        const int others = comm.world_size() - 1;
        EXPECT_THAT(std::string(made.message()),
                    HasSubstr("parameter 0: rank 0 has \"a\" = \"c\" float32[3]; rank"));
        EXPECT_THAT(std::string(made.message()),
                    HasSubstr(absl::StrCat(others == 1 ? " has" : " have",
                                           " \"a\" = \"d\" float32[3]: the ranks disagree")));
        return comm.Barrier();
      });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, TiedWeightsTest,
                         testing::Combine(testing::Values(1, 2, 3, 5),
                                          testing::Values(false, true)));

}  // namespace
}  // namespace evenkeel
