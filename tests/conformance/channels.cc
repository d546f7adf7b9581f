// Many operations in flight, on channels that ranks interleave differently.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/reference.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class ChannelsTest : public WorldTest {};  // World size.

// The n-th operation of a channel: another kind, size and content for each. Check() is for after
// Wait().
class Exchange {
 public:
  Exchange(Communicator& comm, Channel& channel, int n)
      : comm_(comm), seed_(StableHash(channel.id(), n)) {
    const int64_t count = 1 + static_cast<int64_t>(seed_ % 3000);
    const int64_t w = comm.world_size();
    kind_ = static_cast<int>(seed_ / 3000 % 5);
    input_ = Values(comm.rank(), kind_ == 0 || kind_ == 1 || kind_ == 2 ? count : count * w);
    output_.resize(kind_ == 2 || kind_ == 3 ? count * w : count);
    root_ = static_cast<int>(seed_ / 15000 % w);
    status_ = PlaceBoth();
    if (!status_.ok()) return;
    const TensorView in = placed_input_.view(), out = placed_output_.view();
    if (kind_ == 0) work_ = channel.AllReduce(in, ReduceOp::kSum);
    if (kind_ == 1) work_ = channel.Broadcast(in, root_);
    if (kind_ == 2) work_ = channel.AllGather(in, out);
    if (kind_ == 3) work_ = channel.AllToAll(in, out);
    if (kind_ == 4) work_ = channel.ReduceScatter(in, out, ReduceOp::kMax);
  }

  absl::Status WaitAndCheck() {
    EK_RETURN_IF_ERROR(status_);
    EK_RETURN_IF_ERROR(work_.Wait());
    EK_RETURN_IF_ERROR(placed_input_.Fetch());
    EK_RETURN_IF_ERROR(placed_output_.Fetch());
    const int w = comm_.world_size();
    const int64_t count =
        kind_ == 2 ? static_cast<int64_t>(input_.size()) : static_cast<int64_t>(output_.size());
    std::vector<int32_t> expected(kind_ < 2 ? input_.size() : output_.size());
    for (int64_t i = 0; i < static_cast<int64_t>(expected.size()); ++i) {
      const int64_t share = kind_ == 3 ? count / w : count;
      if (kind_ == 0) expected[i] = Combined(i, [](int32_t a, int32_t b) { return a + b; });
      if (kind_ == 1) expected[i] = Value(root_, i);
      if (kind_ == 2) expected[i] = Value(static_cast<int>(i / share), i % share);
      if (kind_ == 3)
        expected[i] = Value(static_cast<int>(i / share), comm_.rank() * share + i % share);
      if (kind_ == 4)
        expected[i] =
            Combined(comm_.rank() * share + i, [](int32_t a, int32_t b) { return std::max(a, b); });
    }
    return ExpectEqual(absl::StrCat("kind ", kind_), kind_ < 2 ? input_ : output_, expected);
  }

 private:
  absl::Status PlaceBoth() {
    EK_ASSIGN_OR_RETURN(placed_input_, Place(comm_, input_));
    EK_ASSIGN_OR_RETURN(placed_output_, Place(comm_, output_));
    return absl::OkStatus();
  }
  int32_t Value(int rank, int64_t i) const {
    return static_cast<int32_t>(StableHash(seed_ + rank, i) % 1000);
  }
  std::vector<int32_t> Values(int rank, int64_t n) const {
    std::vector<int32_t> values(n);
    for (int64_t i = 0; i < n; ++i) values[i] = Value(rank, i);
    return values;
  }
  template <typename Op>
  int32_t Combined(int64_t i, Op op) const {
    int32_t value = Value(0, i);
    for (int rank = 1; rank < comm_.world_size(); ++rank) value = op(value, Value(rank, i));
    return value;
  }

  Communicator& comm_;
  const uint64_t seed_;
  int kind_ = 0;
  int root_ = 0;
  std::vector<int32_t> input_;
  std::vector<int32_t> output_;
  Placed<int32_t> placed_input_, placed_output_;
  absl::Status status_;
  Work work_;
};

TEST_P(ChannelsTest, ManyOperationsAreInFlightOnOneChannel) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (int i = 0; i < 100; ++i)
      exchanges.push_back(std::make_unique<Exchange>(comm, comm.user(), i));
    for (int i = 99; i >= 0; --i) EK_RETURN_IF_ERROR(exchanges[i]->WaitAndCheck());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

constexpr int kChannels = 4, kOperations = 25;

TEST_P(ChannelsTest, RanksInterleaveChannelsAsTheyLike) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    // Which channel issues next, another order on each rank; operations of one channel stay in
    // order.
    std::vector<int> order;
    for (int channel = 0; channel < kChannels; ++channel)
      order.insert(order.end(), kOperations, channel);
    std::mt19937 random(comm.rank());
    std::shuffle(order.begin(), order.end(), random);

    std::vector<Channel*> channels;
    for (int i = 0; i < kChannels; ++i) {
      EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel(absl::StrCat("channel ", i)));
      channels.push_back(channel);
    }
    std::vector<int> issued(kChannels);
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (int channel : order) {
      exchanges.push_back(std::make_unique<Exchange>(comm, *channels[channel], issued[channel]++));
    }
    for (auto& exchange : exchanges) EK_RETURN_IF_ERROR(exchange->WaitAndCheck());
    for (Channel* channel : channels) EXPECT_EQ(channel->position(), kOperations);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Nothing but the channel tells the two apart, and ranks come to them in another order.
TEST_P(ChannelsTest, EqualCollectivesOfTwoChannelsNeverPair) {
  constexpr int kRounds = 25;
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Channel * small, comm.OpenChannel("small"));
    EK_ASSIGN_OR_RETURN(Channel * large, comm.OpenChannel("large"));
    const int w = comm.world_size();
    for (int round = 0; round < kRounds; ++round) {
      std::vector<int32_t> ones(8, 1 + round), thousands(8, 1000);
      EK_ASSIGN_OR_RETURN(Placed<int32_t> one, Place(comm, ones));
      EK_ASSIGN_OR_RETURN(Placed<int32_t> other, Place(comm, thousands));
      Work first, second;
      if (comm.rank() == 0) first = small->AllReduce(one.view(), ReduceOp::kSum);
      second = large->AllReduce(other.view(), ReduceOp::kSum);
      if (comm.rank() != 0) first = small->AllReduce(one.view(), ReduceOp::kSum);
      EK_RETURN_IF_ERROR(first.Wait());
      EK_RETURN_IF_ERROR(second.Wait());
      EK_RETURN_IF_ERROR(one.Fetch());
      EK_RETURN_IF_ERROR(other.Fetch());
      EK_RETURN_IF_ERROR(ExpectEqual("small", ones, std::vector<int32_t>(8, w * (1 + round))));
      EK_RETURN_IF_ERROR(ExpectEqual("large", thousands, std::vector<int32_t>(8, w * 1000)));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ChannelsTest, AChannelThatWaitsDoesNotHoldUpAnother) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Channel * slow, comm.OpenChannel("slow"));
    EK_ASSIGN_OR_RETURN(Channel * quick, comm.OpenChannel("quick"));
    // Rank 0 comes to the slow channel only after the quick one has done all its work.
    Work waiting;
    if (comm.rank() != 0) waiting = slow->Barrier();
    for (int i = 0; i < 20; ++i) {
      Exchange exchange(comm, *quick, i);
      EK_RETURN_IF_ERROR(exchange.WaitAndCheck());
    }
    if (comm.rank() == 0) waiting = slow->Barrier();
    return waiting.Wait();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ChannelsTest, AThreadPerChannelIsFine) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr int kThreads = 3;
    std::vector<absl::Status> statuses(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        statuses[t] = [&]() -> absl::Status {
          EK_ASSIGN_OR_RETURN(Channel * channel, comm.OpenChannel(absl::StrCat("thread ", t)));
          for (int i = 0; i < 30; ++i) {
            Exchange exchange(comm, *channel, i);
            EK_RETURN_IF_ERROR(exchange.WaitAndCheck());
          }
          return absl::OkStatus();
        }();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) EK_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ChannelsTest, MessagesPassCollectivesThatWait) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (comm.world_size() == 1) return absl::OkStatus();
    std::vector<int32_t> number = {comm.rank() == 0 ? 42 : 0};
    EK_ASSIGN_OR_RETURN(Placed<int32_t> placed, Place(comm, number));
    const int last = comm.world_size() - 1;
    Work barrier;
    if (comm.rank() != last) barrier = comm.user().Barrier();
    if (comm.rank() == 0) EK_RETURN_IF_ERROR(comm.user().Send(placed.view(), last).Wait());
    if (comm.rank() == last) {
      EK_RETURN_IF_ERROR(comm.user().Recv(placed.view(), 0).Wait());
      EK_RETURN_IF_ERROR(placed.Fetch());
      EXPECT_EQ(number[0], 42);
      barrier = comm.user().Barrier();
    }
    return barrier.Wait();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, ChannelsTest, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
