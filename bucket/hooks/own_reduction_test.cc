// A reduction of a user's own, to be copied; and what becomes of one that is wrong.

#include <algorithm>
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
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {48, 5, 600};
const DataParallelOptions kOptions = {.reducer = {.caps = {Bytes{200}, Bytes{2500}}}};

// Only the sign of each gradient counts, and the ranks vote (Bernstein et al., "signSGD with
// majority vote", 2019).
class MajorityVote : public BucketReduction {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {
        {.kind = CollectiveKind::kAllReduce, .dtype = DType::kInt8, .count = bucket.data.count}};
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int,
                                          const ReductionStep&) override {
    votes_.resize(bucket.bucket_count);
    std::vector<int8_t>& votes = votes_[bucket.index];
    votes.clear();
    for (float gradient : bucket.data.as<float>()) votes.push_back((gradient > 0) - (gradient < 0));
    return RoundBuffers{.in = {absl::MakeSpan(votes)}, .out = {absl::MakeSpan(votes)}};
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep&) override {
    const std::vector<int8_t>& votes = votes_[bucket.index];
    for (size_t i = 0; i < votes.size(); ++i)
      bucket.data.as<float>()[i] = (votes[i] > 0) - (votes[i] < 0);
    return GradFate::kReduced;
  }
  bool HasThread() const override { return true; }

 private:
  std::vector<std::vector<int8_t>> votes_;  // By bucket; at most 127 ranks.
};

TEST(OwnReductionTest, AVoteTrainsTowardsTheMedianOfTheTargets) {
  for (const int world : {1, 3, 5}) {
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank());
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &problem.params(), {}, kOptions,
                                                         std::make_unique<MajorityVote>()));
      for (int batch = 0; batch < 120; ++batch)
        EK_RETURN_IF_ERROR(problem.Step(*ddp, batch, 0.01f));
      for (int j = 0; j < kSizes[2]; ++j) {
        std::vector<float> targets;
        for (int rank = 0; rank < world; ++rank) targets.push_back(Quadratic::Target(rank, 2, j));
        std::sort(targets.begin(), targets.end());
        EXPECT_NEAR(problem.values()[2][j], targets[world / 2], 0.011f);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// A reduction whose buffers for a round are wrong in one way.
class Wrong : public AllReduceBuckets {
 public:
  enum class How { kShort, kNull, kOtherType, kNothing, kCountsThatDiffer };
  Wrong(How how, int rank) : how_(how), rank_(rank) {}
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    std::vector<Collective> collectives = AllReduceBuckets::CollectivesFor(bucket);
    if (how_ == How::kCountsThatDiffer && bucket.index == 1) collectives[0].count += rank_;
    return collectives;
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int,
                                          const ReductionStep& step) override {
    TensorView sent = bucket.wire;
    if (bucket.index == 1 && rank_ == 1) {
      if (how_ == How::kShort) --sent.count;
      if (how_ == How::kNull) sent.data = nullptr;
      if (how_ == How::kOtherType) sent.dtype = DType::kInt32;
      if (how_ == How::kNothing) return RoundBuffers{.in = {}, .out = {}};
    }
    return RoundBuffers{.in = {sent}, .out = {sent}, .scale = step.scale};
  }

 private:
  const How how_;
  const int rank_;
};

TEST(OwnReductionTest, BuffersThatDoNotFitEndTheStepOnAllRanks) {
  const struct {
    Wrong::How how;
    std::string says;
  } cases[] = {
      {Wrong::How::kShort, "elements, expected"},
      {Wrong::How::kNull, "no memory"},
      {Wrong::How::kOtherType, "expected float32"},
      {Wrong::How::kNothing, "has 0 elements, expected"},
      {Wrong::How::kCountsThatDiffer, "rank"},
  };
  for (const auto& [how, says] : cases) {
    SCOPED_TRACE(says);
    std::vector<absl::Status> results(3);
    (void)RunTestRanks(3, [&, &how = how](Communicator& comm) -> absl::Status {
      Quadratic problem(kSizes, comm.rank());
      absl::StatusOr<std::unique_ptr<DataParallel>> ddp = DataParallel::Create(
          &comm, &problem.params(), {}, kOptions, std::make_unique<Wrong>(how, comm.rank()));
      absl::Status status = ddp.status();
      for (int batch = 0; batch < 3 && status.ok(); ++batch)
        status = problem.Step(**ddp, batch, 0.1f);
      return results[comm.rank()] = status;
    });
    for (const absl::Status& status : results) {
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(std::string(status.message()), HasSubstr(says));
    }
  }
}

}  // namespace
}  // namespace evenkeel
