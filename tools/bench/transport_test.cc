#include "evenkeel/tools/bench/transport.h"

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;

// Every rank knows what all have, so no rank needs to send anything.
class Oracle : public Transport {
 public:
  Oracle(int rank, int world) : rank_(rank), world_(world) {}

  absl::Status Supports(const Case& what) const override {
    return what.op == Op::kReduce ? absl::UnimplementedError("oracles do not reduce")
                                  : absl::OkStatus();
  }
  absl::Status Run(const Case& what, float*, float* out) override {
    ++runs;
    if (what.op == Op::kSend) return absl::UnavailableError("the line is dead");
    if (what.op == Op::kBarrier) return absl::OkStatus();  // Lets all ranks through.
    for (int64_t i = 0; i < what.out_count(); ++i)
      out[i] = static_cast<float>(Expected(what, rank_, i));
    if (lies && rank_ == world_ - 1) out[3] = 100;
    return absl::OkStatus();
  }

  bool lies = false;
  int runs = 0;

 private:
  const int rank_, world_;
};

constexpr int kWorld = 3;

// Returns each rank's status of `run`, on ranks that are threads.
std::vector<absl::Status> OnRanks(const std::function<absl::Status(RankContender&, Oracle&)>& run,
                                  bool registered = false) {
  const std::string folder = std::string(std::getenv("TEST_TMPDIR")) + "/" +
                             testing::UnitTest::GetInstance()->current_test_info()->name();
  std::filesystem::create_directories(folder);
  std::vector<absl::Status> statuses(kWorld);
  const absl::Status status = RunRanks(kWorld, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const Meeting meeting, Meeting::Create(&comm, folder));
    Oracle oracle(comm.rank(), kWorld);
    RankContender contender("oracle", &oracle, registered, meeting);
    statuses[comm.rank()] = run(contender, oracle);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return statuses;
}

TEST(RankContenderTest, TimesEachRepetitionButNoWarmUp) {
  const Case what{.op = Op::kAllReduce, .bytes = 4096, .world = kWorld};
  const auto statuses = OnRanks([&](RankContender& contender, Oracle& oracle) -> absl::Status {
    for (int i = 1; i <= 2; ++i) {
      EK_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                          contender.Time(what, {.warmups = 2, .repetitions = 5}));
      EXPECT_THAT(seconds, SizeIs(5));
      EXPECT_THAT(seconds, Each(testing::Gt(0)));
      EXPECT_EQ(oracle.runs, 7 * i);
      contender.Forget();
    }
    return absl::OkStatus();
  });
  EXPECT_THAT(statuses, Each(absl::OkStatus()));
}

TEST(RankContenderTest, ALoopIsOneNumber) {
  const Case what{.op = Op::kAllReduce, .bytes = 4096, .world = kWorld};
  const auto statuses = OnRanks([&](RankContender& contender, Oracle& oracle) -> absl::Status {
    EK_ASSIGN_OR_RETURN(
        const std::vector<double> seconds,
        contender.Time(what, {.timing = Timing::kLoop, .warmups = 2, .repetitions = 5}));
    EXPECT_THAT(seconds, SizeIs(1));
    EXPECT_EQ(oracle.runs, 7);
    return absl::OkStatus();
  });
  EXPECT_THAT(statuses, Each(absl::OkStatus()));
}

TEST(RankContenderTest, AWrongNumberIsNamed) {
  const Case what{.op = Op::kAllGather, .bytes = 1200, .world = kWorld};
  for (const bool lies : {false, true}) {
    const auto statuses = OnRanks([&](RankContender& contender, Oracle& oracle) {
      oracle.lies = lies;
      return contender.Check(what);
    });
    EXPECT_EQ(statuses[0], absl::OkStatus());
    if (!lies) {
      EXPECT_EQ(statuses[2], absl::OkStatus());
      continue;
    }
    EXPECT_TRUE(absl::IsDataLoss(statuses[2]));
    EXPECT_THAT(statuses[2].message(),
                HasSubstr("oracle computed a wrong result: all_gather of 1200 bytes, rank 2: "
                          "element 3 of 300 is 100 instead of "));
  }
}

TEST(RankContenderTest, ABarrierThatLetsThroughIsWrong) {
  const auto statuses = OnRanks([&](RankContender& contender, Oracle&) {
    return contender.Check({.op = Op::kBarrier, .world = kWorld});
  });
  int wrong = 0;
  for (const absl::Status& status : statuses) wrong += absl::IsDataLoss(status) ? 1 : 0;
  EXPECT_GT(wrong, 0);
}

TEST(RankContenderTest, FailuresAndRefusalsAreToldApart) {
  const auto dead = OnRanks([&](RankContender& contender, Oracle&) {
    return contender.Time({.op = Op::kSend, .bytes = 8, .world = kWorld}, {}).status();
  });
  EXPECT_THAT(dead[1].message(),
              HasSubstr("oracle failed: send_recv of 8 bytes, rank 1: the line is dead"));
  const Case reduce{.op = Op::kReduce, .bytes = 8, .world = kWorld};
  const auto refused = OnRanks(
      [&](RankContender& contender, Oracle&) { return contender.Time(reduce, {}).status(); });
  EXPECT_THAT(refused, Each(absl::UnimplementedError("oracle: oracles do not reduce")));
  const auto no_memory = OnRanks(
      [&](RankContender& contender, Oracle&) {
        const Case what{.op = Op::kAllReduce, .bytes = 8, .world = kWorld};
        EXPECT_TRUE(absl::IsUnimplemented(contender.Time(what, {}).status()));
        return contender.Time(what, {}).status();
      },
      /*registered=*/true);
  EXPECT_THAT(no_memory, Each(absl::UnimplementedError("oracle: it has no memory of its own")));
}

}  // namespace
}  // namespace evenkeel::bench
