#include "evenkeel/comm/abi/group.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "evenkeel/comm/testing/shared_store.h"

namespace evenkeel::abi {
namespace {

using std::chrono::milliseconds;

Buffer Of(std::vector<float>& data) {
  return {data.data(), static_cast<int64_t>(data.size()), DType::kFloat32};
}

Failure Do(Group& group, const Call& call) {
  const std::shared_ptr<Work> work = group.Issue(call);
  EXPECT_EQ(work->Wait(), work->failure().code == Code::kOk);
  EXPECT_TRUE(work->IsDone());
  return work->failure();
}

#define EXPECT_DONE(expression)                    \
  if (const Failure why = (expression); true) {    \
    EXPECT_EQ(why.code, Code::kOk) << why.message; \
  }

struct Case {
  const char* backend;
  int world_size;
};

class GroupTest : public testing::TestWithParam<Case> {
 protected:
  // Runs a rank per thread; each has its group, if it could be made.
  void RunRanks(const std::function<void(std::unique_ptr<Group>)>& body, Options options = {}) {
    SharedStore store;
    options.backend = GetParam().backend;
    options.world_size = GetParam().world_size;
    options.connect_timeout = milliseconds(20'000);
    std::vector<std::thread> ranks;
    for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
      ranks.emplace_back([&store, &body, options] {
        Failure failure;
        std::unique_ptr<Group> group = CreateGroup(store, options, &failure);
        ASSERT_NE(group, nullptr) << failure.message;
        body(std::move(group));
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
};

TEST_P(GroupTest, EachKindOfCallMovesItsData) {
  RunRanks([&](std::unique_ptr<Group> group) {
    const int rank = group->rank(), world = group->world_size();
    const float sum = world * (world + 1) / 2;
    std::vector<float> data(10, rank + 1);
    EXPECT_DONE(Do(*group, {.kind = Kind::kAllReduce, .out = {Of(data)}}));
    EXPECT_EQ(data, std::vector<float>(10, sum));

    data.assign(10, rank + 1);
    EXPECT_DONE(Do(*group, {.kind = Kind::kReduce, .out = {Of(data)}, .root = world - 1}));
    if (rank == world - 1) {
      EXPECT_EQ(data, std::vector<float>(10, sum));
    }

    data.assign(10, rank + 1);
    EXPECT_DONE(Do(*group, {.kind = Kind::kBroadcast, .out = {Of(data)}, .root = 0}));
    EXPECT_EQ(data, std::vector<float>(10, 1));

    // Rank r has r elements for all, and r + s for rank s.
    std::vector<float> mine(rank, rank);
    std::vector<std::vector<float>> gathered(world), sent(world), received(world);
    Call gather{.kind = Kind::kAllGather, .in = {Of(mine)}};
    Call exchange{.kind = Kind::kAllToAll};
    for (int peer = 0; peer < world; ++peer) {
      gathered[peer].resize(peer);
      sent[peer].assign(rank + peer, rank);
      received[peer].resize(rank + peer);
      gather.out.push_back(Of(gathered[peer]));
      exchange.in.push_back(Of(sent[peer]));
      exchange.out.push_back(Of(received[peer]));
    }
    EXPECT_DONE(Do(*group, gather));
    EXPECT_DONE(Do(*group, exchange));
    for (int peer = 0; peer < world; ++peer) {
      EXPECT_EQ(gathered[peer], std::vector<float>(peer, peer));
      EXPECT_EQ(received[peer], std::vector<float>(rank + peer, peer));
    }

    std::vector<float> shares(world * 3, rank + 1), share(3);
    EXPECT_DONE(Do(*group, {.kind = Kind::kReduceScatter, .in = {Of(shares)}, .out = {Of(share)}}));
    EXPECT_EQ(share, std::vector<float>(3, sum));

    std::vector<float> token(4, rank);
    if (world > 1 && rank == 0) {
      EXPECT_DONE(Do(*group, {.kind = Kind::kSend, .in = {Of(token)}, .root = 1, .tag = 7}));
    } else if (rank == 1) {
      EXPECT_DONE(Do(*group, {.kind = Kind::kRecv, .out = {Of(token)}, .root = 0, .tag = 7}));
      EXPECT_EQ(token, std::vector<float>(4, 0));
    }
    if (rank > 0) {
      EXPECT_DONE(Do(*group, {.kind = Kind::kSend, .in = {Of(token)}, .root = 0, .tag = 8}));
    }
    for (int i = 1, from = -1; rank == 0 && i < world; ++i) {
      EXPECT_DONE(Do(*group, {.kind = Kind::kRecv, .out = {Of(token)}, .from = &from, .tag = 8}));
      EXPECT_GT(from, 0);
      EXPECT_EQ(token, std::vector<float>(4, from == 1 ? 0 : from));
    }
    EXPECT_DONE(Do(*group, {.kind = Kind::kBarrier}));
    EXPECT_DONE(group->MonitoredBarrier(milliseconds(10'000)));
    EXPECT_DONE(group->Leave(milliseconds(10'000)));
    const Failure left = Do(*group, {.kind = Kind::kBarrier});
    EXPECT_EQ(left.code, Code::kFailedPrecondition);
    EXPECT_NE(left.message.find("has left the group"), std::string::npos) << left.message;
  });
}

TEST_P(GroupTest, ACallThatIsWrongByItselfFailsAlone) {
  RunRanks([&](std::unique_ptr<Group> group) {
    std::vector<float> data(10, 1);
    const Failure refused =
        Do(*group, {.kind = Kind::kAllReduce, .out = {Of(data)}, .op = ReduceOp::kBitAnd});
    EXPECT_EQ(refused.code, Code::kInvalidArgument);
    EXPECT_NE(refused.message.find("bit_and"), std::string::npos) << refused.message;
    EXPECT_EQ(Do(*group, {.kind = Kind::kBarrier, .in = {Of(data)}}).code, Code::kInvalidArgument);
    EXPECT_DONE(Do(*group, {.kind = Kind::kAllReduce, .out = {Of(data)}}));
    EXPECT_DONE(group->Leave(milliseconds(10'000)));
  });
}

TEST_P(GroupTest, AnAbortReachesAllRanksWithItsReasonAndItsRank) {
  if (GetParam().world_size == 1) GTEST_SKIP() << "there is no other rank";
  RunRanks([&](std::unique_ptr<Group> group) {
    std::vector<float> data(10, 1);
    Failure why = Do(*group, {.kind = Kind::kBarrier});
    if (group->rank() == 1) return group->Abort("no more data");
    // The abort may overtake the end of the barrier.
    if (why.code == Code::kOk) why = Do(*group, {.kind = Kind::kAllReduce, .out = {Of(data)}});
    EXPECT_EQ(why.code, Code::kUnavailable);
    EXPECT_EQ(why.kind, "failed");
    EXPECT_EQ(why.ranks, std::vector<int>{1});
    EXPECT_NE(why.message.find("no more data"), std::string::npos) << why.message;
  });
}

TEST_P(GroupTest, LeavingWithWorkInFlightIsAnAbort) {
  if (GetParam().world_size == 1) GTEST_SKIP() << "there is no other rank";
  RunRanks([&](std::unique_ptr<Group> group) {
    EXPECT_DONE(Do(*group, {.kind = Kind::kBarrier}));
    std::vector<float> data(10, 1);
    if (group->rank() == 0) {
      const std::shared_ptr<Work> work =
          group->Issue({.kind = Kind::kAllReduce, .out = {Of(data)}});
      const Failure why = group->Leave(milliseconds(50));
      EXPECT_EQ(why.code, Code::kDeadlineExceeded);
      EXPECT_NE(why.message.find("1 operations in flight"), std::string::npos) << why.message;
      EXPECT_FALSE(work->Wait());
    } else {
      Failure why;
      while (why.code == Code::kOk) {
        std::this_thread::sleep_for(milliseconds(1));
        why = group->failure();
      }
      EXPECT_EQ(why.ranks, std::vector<int>{0}) << why.message;
    }
  });
}

// A receive without a send does not delay the end.
TEST_P(GroupTest, LeavingEndsReceives) {
  if (GetParam().world_size == 1) GTEST_SKIP() << "there is no other rank";
  RunRanks([&](std::unique_ptr<Group> group) {
    std::vector<float> data(10, 1), other(10, 1);
    int from = -1;
    std::vector<std::shared_ptr<Work>> works;
    if (group->rank() == 0) {
      works.push_back(group->Issue({.kind = Kind::kRecv, .out = {Of(data)}, .root = 1}));
      works.push_back(group->Issue({.kind = Kind::kRecv, .out = {Of(other)}, .from = &from}));
    }
    EXPECT_DONE(Do(*group, {.kind = Kind::kBarrier}));
    EXPECT_DONE(group->Leave(milliseconds(20'000)));
    for (const auto& work : works) EXPECT_FALSE(work->Wait());
  });
}

INSTANTIATE_TEST_SUITE_P(Over, GroupTest,
                         testing::Values(Case{"auto", 1}, Case{"auto", 2}, Case{"shm", 3},
                                         Case{"tcp", 2}, Case{"tcp", 5}, Case{"shm", 8}),
                         [](const testing::TestParamInfo<Case>& info) {
                           return info.param.backend + std::to_string(info.param.world_size);
                         });

TEST(CreateGroupTest, ARankOutOfRangeIsASentence) {
  SharedStore store;
  Failure failure;
  EXPECT_EQ(CreateGroup(store, {.rank = 3, .world_size = 2}, &failure), nullptr);
  EXPECT_EQ(failure.code, Code::kInvalidArgument);
  EXPECT_EQ(failure.message, "rank 3 is out of range for 2 ranks");
}

// Runs two ranks with these options; returns their failures.
std::vector<Failure> FailuresOf(std::vector<Options> options) {
  SharedStore store;
  std::vector<Failure> failures(options.size());
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < options.size(); ++rank) {
    options[rank].rank = static_cast<int>(rank);
    options[rank].world_size = static_cast<int>(options.size());
    ranks.emplace_back(
        [&, rank] { EXPECT_EQ(CreateGroup(store, options[rank], &failures[rank]), nullptr); });
  }
  for (std::thread& rank : ranks) rank.join();
  return failures;
}

// The others, which would wait for two minutes, get the reason of the rank that cannot come.
TEST(CreateGroupTest, ARankOfAnotherGroupIsRefusedAndTheOthersAreTold) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Failure> failures = FailuresOf({{.members = {0, 3}}, {.members = {0, 2}}});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  for (const Failure& failure : failures) {
    EXPECT_NE(failure.message.find("gives the members of the group world as 0,"), std::string::npos)
        << failure.message;
  }
}

TEST(CreateGroupTest, ARankZeroThatCannotHostTellsTheOthers) {
  const std::vector<Failure> failures = FailuresOf({{.address = "192.0.2.1"}, {}});
  for (const Failure& failure : failures) {
    EXPECT_NE(failure.message.find("cannot listen on 192.0.2.1"), std::string::npos)
        << failure.message;
  }
}

TEST(CreateGroupTest, ARankThatIsAloneSaysWhatIsMissing) {
  SharedStore store;
  Failure failure;
  EXPECT_EQ(CreateGroup(store, {.rank = 1, .world_size = 2, .connect_timeout = milliseconds(200)},
                        &failure),
            nullptr);
  EXPECT_EQ(failure.code, Code::kDeadlineExceeded);
  EXPECT_NE(failure.message.find("rank 0 has not published"), std::string::npos) << failure.message;
}

}  // namespace
}  // namespace evenkeel::abi
