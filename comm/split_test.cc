// Groups beside a group, over the backends that need no second process.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Group = std::vector<std::unique_ptr<Communicator>>;
using Body = std::function<absl::Status(Communicator&)>;

absl::StatusOr<Group> Create(const std::string& backend, int world_size) {
  return backend == "tcp" ? CreateTcpGroupInProcess(world_size) : CreateLocalGroup(world_size);
}

absl::StatusOr<float> SumOver(Communicator& comm, float mine) {
  std::vector<float> sum = {mine};
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(sum), ReduceOp::kSum));
  return sum[0];
}

class SplitTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  int world() const { return std::get<1>(GetParam()); }
  absl::Status Run(const Body& body) {
    EK_ASSIGN_OR_RETURN(Group group, Create(std::get<0>(GetParam()), world()));
    return internal::RunGroup(group, body);
  }
};

TEST_P(SplitTest, EachColorIsAGroupOfItsOwnAndTheOldOneGoesOn) {
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    const int color = comm.rank() % 2;
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> part, comm.Split(color, 0));
    float mates = 0;
    std::vector<int> members;
    for (int rank = color; rank < world(); rank += 2) {
      mates += static_cast<float>(rank + 1);
      members.push_back(rank);
    }
    EXPECT_EQ(part->members(), members);
    EXPECT_EQ(part->rank(), comm.rank() / 2);
    for (int round = 0; round < 3; ++round) {
      EK_ASSIGN_OR_RETURN(const float in_part, SumOver(*part, static_cast<float>(comm.rank() + 1)));
      EXPECT_EQ(in_part, mates);
      EK_ASSIGN_OR_RETURN(const float in_all, SumOver(comm, 1));
      EXPECT_EQ(in_all, static_cast<float>(world()));
    }
    return part->Finalize();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SplitTest, ASenderIsARankOfItsGroup) {
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> reversed, comm.Split(0, -comm.rank()));
    std::vector<float> number = {static_cast<float>(reversed->rank())};
    const TensorView view(absl::MakeSpan(number));
    for (int i = 1; i < world() && reversed->rank() == 0; ++i) {
      int from = -1;
      EK_RETURN_IF_ERROR(reversed->user().RecvAny(view, &from).Wait());
      EXPECT_EQ(number[0], static_cast<float>(from));
    }
    if (reversed->rank() > 0) EK_RETURN_IF_ERROR(reversed->user().Send(view, 0).Wait());
    return reversed->Finalize();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SplitTest, KeysSayTheOrderAndRanksBreakTies) {
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> reversed, comm.Split(7, -comm.rank()));
    EXPECT_EQ(reversed->rank(), world() - 1 - comm.rank());
    EXPECT_EQ(reversed->members()[reversed->rank()], comm.rank());
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> same, reversed->Split(0, 3));
    EXPECT_EQ(same->rank(), reversed->rank());
    EXPECT_EQ(same->members(), reversed->members()) << "ranks of the job's first group";
    EK_ASSIGN_OR_RETURN(const float sum, SumOver(*same, 1));
    EXPECT_EQ(sum, static_cast<float>(world()));
    return comm.Barrier();  // Whoever destroys a group ends it for those who are still in it.
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SplitTest, WithoutAColorThereIsNoGroup) {
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> some,
                        comm.Split(comm.rank() == 0 ? kNoColor : 1, 0));
    EXPECT_EQ(some == nullptr, comm.rank() == 0);
    if (some != nullptr) {
      EK_ASSIGN_OR_RETURN(const float sum, SumOver(*some, 1));
      EXPECT_EQ(sum, static_cast<float>(world() - 1));
    }
    EK_ASSIGN_OR_RETURN(const float all, SumOver(comm, 1));
    EXPECT_EQ(all, static_cast<float>(world()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SplitTest, NamesAreNeverUsedTwice) {
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> first, comm.Split(0, 0));
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> second, comm.Split(0, 0));
    EXPECT_EQ(first->group(), "world-0.0");
    EXPECT_EQ(second->group(), "world-1.0");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SplitTest, AWrongColorIsRefusedOnAllRanksAndTheGroupGoesOn) {
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    const absl::Status refused = comm.Split(comm.rank() == world() - 1 ? -5 : 0, 0).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("rank ", world() - 1, " gives the color -5")));
    return SumOver(comm, 1).status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(SplitTest, ARankThatNeverComesIsNamedAtTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "nobody to wait for";
  absl::StatusOr<Group> group = Create(std::get<0>(GetParam()), world());
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank + 1 < world(); ++rank) {
    threads.emplace_back([&, rank] {
      const absl::Status late = (*group)[rank]->Split(0, 0, absl::Milliseconds(300)).status();
      EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
      EXPECT_THAT(std::string(late.message()), HasSubstr(absl::StrCat("rank ", world() - 1)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Between the agreement and the new group: whoever waits for it learns that it will not come.
TEST_P(SplitTest, ALostRankEndsTheOldGroupAndTheNewOnes) {
  if (world() == 1) GTEST_SKIP() << "nobody to lose";
  absl::StatusOr<Group> group = Create(std::get<0>(GetParam()), world());
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world(); ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<std::unique_ptr<Communicator>> part = (*group)[rank]->Split(0, 0);
      ASSERT_TRUE(part.ok()) << part.status();
      if (rank == world() - 1) {
        part->reset();
        (*group)[rank].reset();
        return;
      }
      EXPECT_FALSE(SumOver(**part, 1).ok());
      EXPECT_FALSE(SumOver(*(*group)[rank], 1).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(SplitTest, AFailureOfOneGroupIsNotTheOthers) {
  if (world() < 4) GTEST_SKIP() << "needs two groups of two";
  const absl::Status status = Run([&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> part, comm.Split(comm.rank() % 2, 0));
    if (comm.rank() == 1) part->Abort(absl::ResourceExhaustedError("out of memory"));
    const absl::StatusOr<float> sum = SumOver(*part, 1);
    EXPECT_EQ(sum.ok(), comm.rank() % 2 == 0) << sum.status();
    return SumOver(comm, 1).status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(BackendsAndWorlds, SplitTest,
                         testing::Combine(testing::Values("local", "tcp"),
                                          testing::Values(1, 2, 4, 5)),
                         [](const testing::TestParamInfo<std::tuple<std::string, int>>& info) {
                           return absl::StrCat(std::get<0>(info.param), "_",
                                               std::get<1>(info.param));
                         });

// It has come to the split, and is lost before it joins the new group, whose hub never sees it.
TEST(SplitLossTest, ARankThatIsLostMeanwhileEndsTheWaitForIt) {
  const auto wait = [](absl::string_view name, int rank, int world_size,
                       std::unique_ptr<ControlLink> link,
                       absl::Duration timeout) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    ControlChannel control(rank, world_size, std::move(link));
    return internal::AwaitArrival(control, "arrival", "", {std::string(name), timeout}).status();
  };
  Communicator* second = nullptr;
  const auto leave = [&](absl::string_view, int, int, std::unique_ptr<ControlLink>,
                         absl::Duration) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    second->Abort(absl::DataLossError("the disk is gone"));
    return absl::DataLossError("the disk is gone");
  };
  std::vector<std::unique_ptr<Backend>> backends = internal::CreateLocalBackends(2);
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(2);
  Group group;
  for (int rank = 0; rank < 2; ++rank) {
    const auto make = rank == 0 ? GroupMaker(wait) : GroupMaker(leave);
    group.push_back(std::make_unique<Communicator>(
        std::move(backends[rank]),
        std::make_unique<ControlChannel>(rank, 2, std::move(links[rank])), CommunicatorOptions(),
        "world", make));
  }
  second = group[1].get();
  std::thread lost([&] { (void)group[1]->Split(0, 0, absl::Minutes(1)); });
  const absl::Time start = absl::Now();
  const absl::Status status = group[0]->Split(0, 0, absl::Minutes(1)).status();
  lost.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_THAT(status.message(), HasSubstr("rank 1 aborted the group: the disk is gone"));
  EXPECT_THAT(FailureInfoOf(status)->ranks, ElementsAre(1));
}

}  // namespace
}  // namespace evenkeel
