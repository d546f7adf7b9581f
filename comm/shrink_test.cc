// The group of those that are left after a failure, over each backend.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Group = TestGroup;

constexpr absl::Duration kAtOnce = absl::Seconds(3);

class ShrinkTest : public testing::TestWithParam<const char*> {
 protected:
  Group Create(int world_size) {
    absl::StatusOr<Group> group = FindTestBackend(GetParam())->create(world_size, {});
    EXPECT_TRUE(group.ok()) << group.status();
    return *std::move(group);
  }
};

// One thread per rank of the group; ranks whose communicator is null take no part.
void OnEachRank(Group& group, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    if (group[rank] != nullptr) threads.emplace_back(body, static_cast<int>(rank));
  }
  for (std::thread& thread : threads) thread.join();
}

// The failure's news is on its way; an operation would wait for it likewise.
void AwaitFailure(const Communicator& comm) {
  while (comm.status().ok()) std::this_thread::yield();
}

Group ShrinkAll(Group& group) {
  Group next(group.size());
  OnEachRank(group, [&](int rank) {
    AwaitFailure(*group[rank]);
    absl::StatusOr<std::unique_ptr<Communicator>> made = group[rank]->Shrink(absl::Seconds(20));
    EXPECT_TRUE(made.ok()) << made.status();
    if (made.ok()) next[rank] = *std::move(made);
  });
  return next;
}

float SumOfOnes(Communicator& comm) {
  std::vector<float> one = {1};
  const absl::Status status = comm.AllReduce(absl::MakeSpan(one), ReduceOp::kSum);
  EXPECT_TRUE(status.ok()) << status;
  return one[0];
}

TEST_P(ShrinkTest, TheSurvivorsWorkOnTogetherAndKnowWhoTheyWere) {
  for (int lost : {0, 1, 3}) {
    SCOPED_TRACE(lost);
    Group group = Create(4);
    group[lost] = nullptr;
    Group next = ShrinkAll(group);
    group.clear();  // The new one needs nothing of it.
    OnEachRank(next, [&](int rank) {
      Communicator& comm = *next[rank];
      EXPECT_EQ(comm.world_size(), 3);
      EXPECT_EQ(comm.members()[comm.rank()], rank);
      EXPECT_EQ(SumOfOnes(comm), 3);
      const absl::Status status = comm.Finalize();
      EXPECT_TRUE(status.ok()) << status;
    });
  }
}

TEST_P(ShrinkTest, GroupsShrinkAgainAndAgainDownToOneRank) {
  Group group = Create(4);
  for (int left = 3; left >= 1; --left) {
    group[left] = nullptr;
    group = ShrinkAll(group);
    OnEachRank(group,
               [&](int rank) { EXPECT_EQ(SumOfOnes(*group[rank]), left) << "rank " << rank; });
  }
  EXPECT_EQ(group[0]->group(), "world+3");
  EXPECT_THAT(group[0]->members(), ElementsAre(0));
}

TEST_P(ShrinkTest, AnErrorThatLosesNobodyKeepsEverybody) {
  Group group = Create(3);
  group[1]->Abort(absl::ResourceExhaustedError("out of memory"));
  const Group next = ShrinkAll(group);
  EXPECT_THAT(next[2]->members(), ElementsAre(0, 1, 2));
}

TEST_P(ShrinkTest, WhoIsAwaitedIsNamed) {
  Group group = Create(3);
  group[1] = nullptr;
  AwaitFailure(*group[0]);
  const absl::Status late = group[0]->Shrink(absl::Milliseconds(200)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("rank 2"));
}

// It has been told who is left, itself included, and is gone before it comes to the new group.
TEST_P(ShrinkTest, ARankThatIsLostOnItsWayToTheNewGroupIsLeftOutToo) {
  Group group = Create(4);
  group[3] = nullptr;
  OnEachRank(group, [&](int rank) {
    AwaitFailure(*group[rank]);
    if (rank == 2) {
      const auto survivors = group[rank]->control().Regroup(absl::Seconds(20));
      EXPECT_TRUE(survivors.ok()) << survivors.status();
      group[rank] = nullptr;
      return;
    }
    const absl::Time start = SteadyNow();
    const auto next = group[rank]->Shrink(absl::Minutes(2));
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_LT(SteadyNow() - start, kAtOnce);
    EXPECT_THAT((*next)->members(), ElementsAre(0, 1));
    EXPECT_EQ(SumOfOnes(**next), 2);
    const absl::Status status = (*next)->Finalize();
    EXPECT_TRUE(status.ok()) << status;
  });
}

// Nobody is lost, and yet one never comes: that is over when the caller said so, whatever the
// group's own deadlines.
TEST_P(ShrinkTest, ARankThatNeverComesToTheNewGroupEndsTheWaitInTime) {
  Group group = Create(3);
  group[2] = nullptr;
  std::atomic<bool> is_over = false;
  OnEachRank(group, [&](int rank) {
    AwaitFailure(*group[rank]);
    if (rank == 1) {
      const auto survivors = group[rank]->control().Regroup(absl::Seconds(20));
      EXPECT_TRUE(survivors.ok()) << survivors.status();
      is_over.wait(false);
      return;
    }
    const absl::Status late = group[rank]->Shrink(absl::Seconds(2)).status();
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
    EXPECT_THAT(std::string(late.message()), HasSubstr("rank 1"));
    is_over = true;
    is_over.notify_all();
  });
}

TEST_P(ShrinkTest, AGroupThatWorksIsLeftAlone) {
  Group group = Create(1);
  EXPECT_EQ(group[0]->Shrink().status().code(), absl::StatusCode::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Backends, ShrinkTest,
                         testing::Values("local", "shm", "tcp", "hierarchical"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace evenkeel
