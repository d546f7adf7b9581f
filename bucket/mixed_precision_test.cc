#include "evenkeel/bucket/mixed_precision.h"

#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 7, 1, 5, 2};
constexpr float kRate = 0.25f;

// The gradient of a 16-bit backward: a function of the 16-bit weight, rounded to 16 bits.
template <typename Half>
Half HalfGradient(Half weight, int rank, int batch, int param, int j, float loss_scale = 1.0f) {
  const float gradient =
      0.25f * static_cast<float>(weight) + ToyModel::Noise(rank, batch, param, j);
  return Half(gradient * loss_scale);
}

template <typename Half>
absl::Status Backward(MixedPrecision& mixed, ParameterSet& params, int rank, int batch,
                      float loss_scale = 1.0f) {
  for (int p = params.size() - 1; p >= 0; --p) {
    const std::span<Half> weight = mixed.Compute(p).as<Half>();
    if (!params.trainable(p)) continue;
    const std::span<Half> gradient = mixed.Gradient(p).as<Half>();
    for (size_t j = 0; j < weight.size(); ++j) {
      gradient[j] = HalfGradient(weight[j], rank, batch, p, static_cast<int>(j), loss_scale);
    }
    EK_RETURN_IF_ERROR(mixed.GradientReady(p));
  }
  return absl::OkStatus();
}

void Descend(ParameterSet& params) {
  for (int p = 0; p < params.size(); ++p) {
    if (params.grad_state(p) == GradState::kNone) continue;
    const std::span<float> value = params[p].value.as<float>(), grad = params[p].grad.as<float>();
    for (size_t j = 0; j < value.size(); ++j) value[j] -= kRate * grad[j];
  }
}

// One process, the same casts: every rank's 16-bit gradients of two micro-batches are added up in
// float32, then scaled, narrowed where they are compressed, added in rank order and applied to the
// float32 weights.
template <typename Half>
std::vector<std::vector<float>> Alone(int world, int steps, bool compressed, float loss_scale) {
  std::vector<std::vector<float>> weights = ToyModel(kSizes).values();
  for (int step = 0; step < steps; ++step) {
    for (int p = 0; p < static_cast<int>(kSizes.size()); ++p) {
      for (int j = 0; j < kSizes[p]; ++j) {
        const Half low(weights[p][j]);
        float sum = 0;
        for (int rank = 0; rank < world; ++rank) {
          float own = 0;
          for (int micro = 0; micro < 2; ++micro) {
            const Half gradient = HalfGradient(low, rank, 2 * step + micro, p, j, loss_scale);
            own += static_cast<float>(gradient) * (1.0f / loss_scale);
          }
          const float scale = static_cast<float>(1.0 / world);
          sum += compressed ? static_cast<float>(Half(own * scale)) : own;
        }
        const float gradient =
            compressed ? static_cast<float>(Half(sum)) : sum * static_cast<float>(1.0 / world);
        weights[p][j] -= kRate * gradient;
      }
    }
  }
  return weights;
}

template <typename Half>
class MixedPrecisionTest : public testing::Test {};
using Halves = testing::Types<Float16, BFloat16>;
TYPED_TEST_SUITE(MixedPrecisionTest, Halves);

TYPED_TEST(MixedPrecisionTest, TrainsAsOneProcessWithTheSameCastsDoes) {
  constexpr int kSteps = 6;
  for (const int world : {1, 2, 3, 5}) {
    for (const bool compressed : {false, true}) {
      for (const bool views : {false, true}) {
        SCOPED_TRACE(absl::StrCat(world, " ranks, compressed ", compressed, ", views ", views));
        const float loss_scale = views ? 64.0f : 1.0f;
        const auto alone = Alone<TypeParam>(world, kSteps, compressed, loss_scale);
        const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
          ToyModel model(kSizes);
          std::unique_ptr<BucketReduction> reduction;
          if (compressed)
            reduction = std::make_unique<CompressedReduction>(DTypeOf<TypeParam>::value);
          const DataParallelOptions options = {
              .reducer = {.caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = views}};
          EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, options,
                                                             std::move(reduction)));
          EK_ASSIGN_OR_RETURN(auto mixed,
                              MixedPrecision::Create(&model.params(), ddp.get(),
                                                     {.compute = DTypeOf<TypeParam>::value}));
          mixed->SetGradScale(1.0 / loss_scale);
          for (int step = 0; step < kSteps; ++step) {
            model.params().ClearGradients();
            for (int micro = 0; micro < 2; ++micro) {
              EK_RETURN_IF_ERROR(
                  ddp->BeginStep(micro == 0 ? StepMode::kAccumulate : StepMode::kSync));
              EK_RETURN_IF_ERROR(Backward<TypeParam>(*mixed, model.params(), comm.rank(),
                                                     2 * step + micro, loss_scale));
              EK_RETURN_IF_ERROR(ddp->FinishStep());
            }
            Descend(model.params());
          }
          // Six updates of gradients below 2, each of which may be rounded to the next of 11 or 8
          // bits.
          EXPECT_THAT(
              model.values(),
              SameSums(alone,
                       kSteps * kRate * (std::is_same_v<TypeParam, Float16> ? 0x1p-10f : 0x1p-7f)));
          EXPECT_EQ(mixed->casts(), kSteps * static_cast<int64_t>(kSizes.size()));
          return absl::OkStatus();
        });
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

TEST(MixedPrecisionTest, CastsAFrozenParameterOnceAndAgainAfterItWasTrained) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    model.params().SetTrainable(1, false);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_ASSIGN_OR_RETURN(auto mixed, MixedPrecision::Create(&model.params(), ddp.get(), {}));
    const auto step = [&](int batch) -> absl::StatusOr<int64_t> {
      const int64_t before = mixed->casts();
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      for (int p = 0; p < 5; ++p) mixed->Compute(p);
      EK_RETURN_IF_ERROR(Backward<BFloat16>(*mixed, model.params(), comm.rank(), batch));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      Descend(model.params());
      for (int p = 0; p < 5; ++p) {
        const BFloat16 expected(model.values()[p][0]);
        EXPECT_EQ(mixed->Compute(p).as<BFloat16>()[0].bits, expected.bits) << p;
      }
      return mixed->casts() - before;
    };
    EXPECT_EQ(*step(0), 5 + 4);
    EXPECT_EQ(*step(1), 4);
    model.params().SetTrainable(1, true);
    EXPECT_EQ(*step(2), 1 + 5);  // Newly trained: others may have trained it before.
    model.params().SetTrainable(1, false);
    EXPECT_EQ(*step(3), 5);  // It was trained until now.
    EXPECT_EQ(*step(4), 4);
    mixed->ValuesChanged();
    EXPECT_EQ(*step(5), 5 + 4);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A rank that became exhausted took no part in forward, and others trained on: its copies are not
// what they were.
TEST(MixedPrecisionTest, ADryRankComputesWithTheNewWeightsAfterwards) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    ddp->SetOptimizerState({});
    EK_ASSIGN_OR_RETURN(auto mixed, MixedPrecision::Create(&model.params(), ddp.get(), {}));
    for (int p = 0; p < 5; ++p) mixed->Compute(p);
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int batch = 0; batch < 2 * comm.rank(); ++batch) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        EK_RETURN_IF_ERROR(Backward<BFloat16>(*mixed, model.params(), comm.rank(), batch));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        Descend(model.params());
      }
      return absl::OkStatus();
    }));
    for (int p = 0; p < 5; ++p) {
      for (int j = 0; j < kSizes[p]; ++j) {
        EXPECT_EQ(mixed->Compute(p).as<BFloat16>()[j].bits, BFloat16(model.values()[p][j]).bits)
            << p;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(MixedPrecisionTest, LeavesIgnoredParametersAlone) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    std::vector<float> norm(3, 1.0f), norm_grad(3), weight(2, 1.0f), weight_grad(2);
    std::vector<BFloat16> low(2, BFloat16(1.0f)), low_grad(2);
    ParameterSet params;
    params.Add("norm", absl::MakeSpan(norm), absl::MakeSpan(norm_grad));
    params.Add("weight", absl::MakeSpan(weight), absl::MakeSpan(weight_grad));
    params.Add("low", absl::MakeSpan(low), absl::MakeSpan(low_grad));
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}));
    EK_ASSIGN_OR_RETURN(auto mixed,
                        MixedPrecision::Create(&params, ddp.get(), {.ignored = {"norm"}}));
    for (const int p : {0, 2}) {
      EXPECT_TRUE(mixed->is_ignored(p));
      EXPECT_EQ(mixed->Compute(p), params[p].value);
      EXPECT_EQ(mixed->Gradient(p), params[p].grad);
    }
    EXPECT_EQ(mixed->Compute(1).dtype, DType::kBFloat16);
    EXPECT_EQ(mixed->Gradient(1).dtype, DType::kBFloat16);

    EK_RETURN_IF_ERROR(ddp->BeginStep());
    norm_grad = {1.0f, 2.0f, 3.0f + static_cast<float>(comm.rank())};
    low_grad.assign(2, BFloat16(1.0f));
    for (BFloat16& gradient : mixed->Gradient(1).as<BFloat16>()) gradient = BFloat16(INFINITY);
    for (int p = 0; p < 3; ++p) EK_RETURN_IF_ERROR(mixed->GradientReady(p));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EXPECT_EQ(norm_grad, (std::vector<float>{1.0f, 2.0f, 3.5f}));
    EXPECT_TRUE(std::isinf(weight_grad[0]));  // An overflow stays visible.
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(MixedPrecisionTest, RefusesWhatIsWrong) {
  const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    const auto create = [&](MixedPrecisionOptions options) {
      return std::string(MixedPrecision::Create(&model.params(), ddp.get(), std::move(options))
                             .status()
                             .message());
    };
    EXPECT_THAT(create({.compute = DType::kFloat32}), HasSubstr("cannot compute in float32"));
    EXPECT_THAT(create({.ignored = {"p9"}}), HasSubstr("no parameter \"p9\""));
    EK_ASSIGN_OR_RETURN(auto mixed, MixedPrecision::Create(&model.params(), ddp.get(), {}));
    EXPECT_THAT(std::string(mixed->GradientReady(0).message()),
                HasSubstr("before Gradient(): write its gradient to the memory"));
    EXPECT_FALSE(mixed->GradientReady(77).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
