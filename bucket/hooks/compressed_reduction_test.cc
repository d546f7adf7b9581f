#include "evenkeel/bucket/hooks/compressed_reduction.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/testing/quadratic.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {48, 5, 600};
const DataParallelOptions kOptions = {.reducer = {.caps = {Bytes{200}, Bytes{2500}}}};

template <typename Half>
class CompressedReductionTest : public testing::Test {
 protected:
  static std::unique_ptr<BucketReduction> Make() {
    return std::make_unique<CompressedReduction>(DTypeOf<Half>::value);
  }
};
using Halves = testing::Types<Float16, BFloat16>;
TYPED_TEST_SUITE(CompressedReductionTest, Halves);

// Scaled in float32, rounded, added up in rank order in float32 (as the local backend does),
// rounded once more.
template <typename Half>
float Expected(const Quadratic& problem, const std::vector<int>& ranks, int world, int batch,
               int param, int j) {
  float sum = 0;
  for (int rank : ranks) {
    sum += static_cast<float>(
        Half(problem.GradientAt(rank, batch, param, j) * static_cast<float>(1.0 / world)));
  }
  return static_cast<float>(Half(sum));
}

TYPED_TEST(CompressedReductionTest, GivesTheSumOfRoundedGradientsBitForBit) {
  for (const int world : {1, 2, 3, 5}) {
    for (const bool views : {false, true}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, views ", views));
      const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
        Quadratic problem(kSizes, comm.rank(), /*noise=*/1.0f);
        DataParallelOptions options = kOptions;
        options.reducer.gradient_as_bucket_view = views;
        EK_ASSIGN_OR_RETURN(
            auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options, this->Make()));
        std::vector<int> all(world), others;
        for (int rank = 0; rank < world; ++rank) all[rank] = rank;
        others.assign(all.begin() + 1, all.end());
        for (int batch = 0; batch < 4; ++batch) {
          if (comm.rank() == 0)
            problem.SetUnused(batch == 2 ? std::vector<int>{0} : std::vector<int>());
          EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.0f));
          for (int p = 0; p < 3; ++p) {
            const bool is_missing = batch == 2 && p == 0;
            if (is_missing && world == 1) {
              EXPECT_EQ(problem.params().grad_state(p), GradState::kNone);
              continue;
            }
            for (int j = 0; j < kSizes[p]; ++j) {
              EXPECT_EQ(
                  problem.Gradient(p)[j],
                  Expected<TypeParam>(problem, is_missing ? others : all, world, batch, p, j));
            }
          }
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TYPED_TEST(CompressedReductionTest, DryRanksAddNothing) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    Quadratic problem(kSizes, comm.rank(), /*noise=*/1.0f);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &problem.params(), {}, kOptions, this->Make()));
    return RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int batch = 0; batch < 2 + 2 * comm.rank(); ++batch) {
        EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.0f));
        const std::vector<int> active = batch < 2   ? std::vector<int>{0, 1, 2}
                                        : batch < 4 ? std::vector<int>{1, 2}
                                                    : std::vector<int>{2};
        for (int p = 0; p < 3; ++p) {
          for (int j = 0; j < kSizes[p]; ++j) {
            EXPECT_EQ(problem.Gradient(p)[j], Expected<TypeParam>(problem, active, 3, batch, p, j));
          }
        }
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TYPED_TEST(CompressedReductionTest, HalvesWhatIsSent) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Quadratic problem(kSizes, comm.rank());
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &problem.params(), {}, kOptions, this->Make()));
    int64_t bytes = 0;
    for (const Collective& what : ddp->reducer().schedule().entries)
      bytes += what.count * SizeOf(what.dtype);
    EXPECT_EQ(bytes, 2 * (48 + 5 + 600 + 3));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A reduce-scatter and an all-gather in place of the all-reduce.
class ScatterAndGather : public BucketReduction {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    const int64_t piece = bucket.data.count / world_;
    return {{.kind = CollectiveKind::kReduceScatter, .dtype = bucket.data.dtype, .count = piece},
            {.kind = CollectiveKind::kAllGather, .dtype = bucket.data.dtype, .count = piece}};
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override {
    pieces_.resize(bucket.bucket_count);
    pieces_[bucket.index].resize(bucket.data.count / world_);
    const TensorView piece(absl::MakeSpan(pieces_[bucket.index]));
    if (round == 0) return RoundBuffers{.in = {bucket.data}, .out = {piece}, .scale = step.scale};
    return RoundBuffers{.in = {piece}, .out = {bucket.data}};
  }
  bool HasThread() const override { return true; }
  int64_t CountMultiple() const override { return world_; }
  void OnGroup(Communicator& comm) override { world_ = comm.world_size(); }

 private:
  int world_ = 1;
  std::vector<std::vector<float>> pieces_;
};

TYPED_TEST(CompressedReductionTest, TakesAReductionOfOtherCollectivesInside) {
  for (const int world : {1, 2, 3}) {
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank(), /*noise=*/1.0f);
      EK_ASSIGN_OR_RETURN(
          auto ddp, DataParallel::Create(
                        &comm, &problem.params(), {}, kOptions,
                        std::make_unique<CompressedReduction>(
                            DTypeOf<TypeParam>::value, std::make_unique<ScatterAndGather>())));
      std::vector<int> all(world);
      for (int rank = 0; rank < world; ++rank) all[rank] = rank;
      for (int batch = 0; batch < 3; ++batch) {
        EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.0f));
        for (int p = 0; p < 3; ++p) {
          for (int j = 0; j < kSizes[p]; ++j) {
            EXPECT_EQ(problem.Gradient(p)[j],
                      Expected<TypeParam>(problem, all, world, batch, p, j));
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Four ranks with 60000 each: the sum is far beyond 65504, the average is not.
TEST(CompressedReductionTest, TheSumOfFloat16DoesNotOverflowWhereTheAverageFits) {
  const absl::Status status = RunTestRanks(4, [&](Communicator& comm) -> absl::Status {
    std::vector<float> value(2, 0.0f), grad = {60000.0f, comm.rank() == 1 ? 4e5f : 0.0f};
    ParameterSet params;
    params.Add("p", absl::MakeSpan(value), absl::MakeSpan(grad));
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &params, {}, {},
                                       std::make_unique<CompressedReduction>(DType::kFloat16)));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    params.SetGradState(0, GradState::kLocal);
    EK_RETURN_IF_ERROR(ddp->GradientReady(0));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EXPECT_EQ(grad[0], 60000.0f);
    EXPECT_TRUE(std::isinf(grad[1]));  // 1e5 does not fit: all ranks see it.
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CompressedReductionTest, TakesFloat64AndLeavesSixteenBitsAlone) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    std::vector<double> wide(3, 0.0), wide_grad(3, 1.0 + comm.rank());
    std::vector<BFloat16> half(3), half_grad(3, BFloat16(3.0f * static_cast<float>(comm.rank())));
    ParameterSet params;
    params.Add("wide", absl::MakeSpan(wide), absl::MakeSpan(wide_grad));
    params.Add("half", absl::MakeSpan(half), absl::MakeSpan(half_grad));
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &params, {}, {},
                                       std::make_unique<CompressedReduction>(DType::kFloat16)));
    for (const Collective& what : ddp->reducer().schedule().entries)
      EXPECT_EQ(SizeOf(what.dtype), 2);
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    for (int p : {1, 0}) {
      params.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp->GradientReady(p));
    }
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    for (double gradient : wide_grad) EXPECT_NEAR(gradient, 2.0, 2e-3);
    for (BFloat16 gradient : half_grad) EXPECT_NEAR(static_cast<float>(gradient), 3.0f, 0.03f);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CompressedReductionTest, RefusesAWireThatIsNotSixteenBitsWide) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Quadratic problem(kSizes, comm.rank());
    return DataParallel::Create(&comm, &problem.params(), {}, kOptions,
                                std::make_unique<CompressedReduction>(DType::kInt8))
        .status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("compressed to int8"));
}

}  // namespace
}  // namespace evenkeel
