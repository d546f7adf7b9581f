// Calls that are wrong in themselves, which do no harm; and ranks that issue different collectives,
// which end the group.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

struct WrongCall {
  const char* what;
  std::function<Work(Communicator& comm, TensorView a, TensorView b)>
      call;  // Two tensors of 12 elements.
};

const std::vector<WrongCall>& WrongCalls() {
  static const auto& calls = *new std::vector<WrongCall>{
      {"root below 0", [](auto& comm, auto a, auto) { return comm.user().Broadcast(a, -1); }},
      {"root above the group",
       [](auto& comm, auto a, auto) { return comm.user().Broadcast(a, comm.world_size()); }},
      {"reduce to nobody",
       [](auto& comm, auto a, auto) {
         return comm.user().Reduce(a, ReduceOp::kSum, comm.world_size());
       }},
      {"send to nobody",
       [](auto& comm, auto a, auto) { return comm.user().Send(a, comm.world_size()); }},
      {"send to oneself",
       [](auto& comm, auto a, auto) { return comm.user().Send(a, comm.rank()); }},
      {"receive from nobody", [](auto& comm, auto a, auto) { return comm.user().Recv(a, -1); }},
      {"bits of floats",
       [](auto& comm, auto a, auto) { return comm.user().AllReduce(a, ReduceOp::kBitOr); }},
      {"all_gather into too much",
       [](auto& comm, auto a, auto b) {
         return comm.user().AllGather(a.Slice(0, 1), b.Slice(0, comm.world_size() + 1));
       }},
      {"reduce_scatter of too little",
       [](auto& comm, auto a, auto b) {
         return comm.user().ReduceScatter(a.Slice(0, comm.world_size() - 1), b.Slice(0, 1),
                                          ReduceOp::kSum);
       }},
      {"all_to_all into something else",
       [](auto& comm, auto a, auto b) {
         return comm.user().AllToAll(a.Slice(0, comm.world_size()), b.Slice(0, 0));
       }},
      {"two types in one operation",
       [](auto& comm, auto a, auto b) {
         b.dtype = DType::kInt32;
         return comm.user().AllReduce({a, b}, ReduceOp::kSum);
       }},
      {"another type out than in",
       [](auto& comm, auto a, auto b) {
         b.dtype = DType::kInt32;
         return comm.user().AllGather(a.Slice(0, 1), b.Slice(0, comm.world_size()));
       }},
      {"no memory",
       [](auto& comm, auto a, auto) {
         a.data = nullptr;
         return comm.user().AllReduce(a, ReduceOp::kSum);
       }},
      {"a negative count",
       [](auto& comm, auto a, auto) {
         a.count = -1;
         return comm.user().AllReduce(a, ReduceOp::kSum);
       }},
      {"another device",
       [](auto& comm, auto a, auto) {
         a.device = comm.device().is_cpu() ? Device::Cuda(0) : Device::Cpu();
         return comm.user().AllReduce(a, ReduceOp::kSum);
       }},
      {"a count that is not that of the tensors",
       [](auto& comm, auto a, auto) {
         return comm.user().Issue({.kind = CollectiveKind::kAllReduce, .count = 11}, {a}, {a});
       }},
  };
  return calls;
}

class MisuseTest : public WorldTest {};  // World size.

TEST_P(MisuseTest, AWrongCallIsRefusedAndTheChannelGoesOn) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    for (const WrongCall& wrong : WrongCalls()) {
      std::vector<float> a(12), b(12);
      EK_ASSIGN_OR_RETURN(Placed<float> placed_a, Place(comm, a));
      EK_ASSIGN_OR_RETURN(Placed<float> placed_b, Place(comm, b));
      const int64_t before = comm.user().position();
      const absl::Status refused = wrong.call(comm, placed_a.view(), placed_b.view()).Wait();
      EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument)
          << wrong.what << ": " << refused;
      EXPECT_EQ(comm.user().position(), before) << wrong.what;
      std::vector<float> ones(3, 1.0f);
      EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, ones));
      EK_RETURN_IF_ERROR(Annotate(comm.AllReduce(placed.view(), ReduceOp::kSum), wrong.what));
      EK_RETURN_IF_ERROR(placed.Fetch());
      EXPECT_EQ(ones[2], comm.world_size());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// One rank alone may be wrong: the others' operation still waits for it, and it can still come.
TEST_P(MisuseTest, AWrongCallOfOneRankLeavesTheOthersWaiting) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<float> ones(4, 1.0f);
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, ones));
    if (comm.rank() == 0) {
      EXPECT_FALSE(comm.user().Broadcast(placed.view(), -1).Wait().ok());
      EXPECT_FALSE(comm.AllReduce(placed.view(), ReduceOp::kBitOr).ok());
    }
    EK_RETURN_IF_ERROR(comm.AllReduce(placed.view(), ReduceOp::kSum));
    EK_RETURN_IF_ERROR(placed.Fetch());
    EXPECT_EQ(ones[0], comm.world_size());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MisuseTest, BitsOfFloatsAreNotSupported) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      for (const DType dtype :
           {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
        EXPECT_EQ(comm.Supports({.kind = CollectiveKind::kAllReduce, .dtype = dtype, .op = op}),
                  absl::InvalidArgumentError(
                      absl::StrCat(ToString(op), " needs an integer type, not ", ToString(dtype))));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MisuseTest, ChannelsNeedAName) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EXPECT_EQ(comm.OpenChannel("").status().code(), absl::StatusCode::kInvalidArgument);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, MisuseTest, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

// One rank's operation while the others issue all_reduce float32[12] sum, or broadcast it from rank
// 0.
struct Disagreement {
  const char* what;
  std::function<Work(Channel& channel, TensorView data)> others;
  std::function<Work(Channel& channel, TensorView data)> one;
  bool is_for_devices = true;
};

Work Sum(Channel& channel, TensorView data) { return channel.AllReduce(data, ReduceOp::kSum); }

Work Average(Channel& channel, TensorView data, DType dtype) {
  data.dtype = dtype;
  return channel.AllReduce(data, ReduceOp::kAverage);
}

const std::vector<Disagreement>& Disagreements() {
  static const auto& disagreements = *new std::vector<Disagreement>{
      {"kind", Sum, [](auto& channel, auto) { return channel.Barrier(); }},
      {"type", Sum,
       [](auto& channel, auto data) {
         data.dtype = DType::kInt32;
         return channel.AllReduce(data, ReduceOp::kSum);
       }},
      {"count", Sum,
       [](auto& channel, auto data) {
         return channel.AllReduce(data.Slice(0, 11), ReduceOp::kSum);
       }},
      {"reduction", Sum,
       [](auto& channel, auto data) { return channel.AllReduce(data, ReduceOp::kMax); }},
      {"role", Sum,
       [](auto& channel, auto data) {
         return channel.AllReduce(data, ReduceOp::kSum,
                                  {.role = Role::kBucket, .index = 0, .index_count = 2});
       }},
      // Both travel as int32.
      {"type of an average",
       [](auto& channel, auto data) { return Average(channel, data, DType::kInt8); },
       [](auto& channel, auto data) { return Average(channel, data, DType::kUint8); },
       /*is_for_devices=*/false},
      {"root", [](auto& channel, auto data) { return channel.Broadcast(data, 0); },
       [](auto& channel, auto data) { return channel.Broadcast(data, 1); }},
  };
  return disagreements;
}

class DisagreementTest : public WorldTest {};  // World size.

TEST_P(DisagreementTest, EndsTheGroupOnEveryRank) {
  // Over several hosts the position may be that of one of the steps into which the operation is
  // divided.
  const char* const where =
      absl::StartsWith(Tested().name, "hierarchical") ? "rank 1 is at #" : "rank 1 is at #1 ";
  for (const Disagreement& disagreement : Disagreements()) {
    SCOPED_TRACE(disagreement.what);
    absl::Status status = RunTested(
        GetParam(),
        [&](Communicator& comm) -> absl::Status {
          if (!disagreement.is_for_devices && !comm.device().is_cpu())
            return absl::UnimplementedError("no average of integers");
          std::vector<float> data(12, 1.0f);
          EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
          EK_RETURN_IF_ERROR(comm.Barrier());
          const absl::Time start = absl::Now();
          Work work = comm.rank() == 1 ? disagreement.one(comm.user(), placed.view())
                                       : disagreement.others(comm.user(), placed.view());
          absl::Status ended = work.Wait();
          // A root may have sent its data without an error; then the next operation
          // fails.
          if (ended.ok()) ended = comm.Barrier();
          EXPECT_LT(absl::Now() - start, kAtOnce) << "not at a deadline, which is later";
          EXPECT_FALSE(ended.ok()) << "rank " << comm.rank();
          EXPECT_FALSE(comm.Barrier().ok()) << "rank " << comm.rank();
          EXPECT_TRUE(absl::StrContains(ended.message(), where)) << ended;
          EXPECT_TRUE(absl::StrContains(ended.message(), "disagree")) << ended;
          EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
          const auto info = FailureInfoOf(ended);
          EXPECT_TRUE(info.has_value() && info->kind == FailureKind::kDisagreement) << ended;
          return ended;
        },
        {.timeout = kPatience, .watch = {.beat = absl::Milliseconds(200)}});
    EXPECT_FALSE(status.ok());
  }
}

// A send and a receive that are no pair.
struct Halves {
  const char* what;
  std::function<Work(Channel& channel, TensorView data, int to)> send;
  std::function<Work(Channel& channel, TensorView data, int from)> receive;
  const char* send_says;
  const char* receive_says;
};

const std::vector<Halves>& DifferentHalves() {
  const auto send = [](auto& channel, auto data, int to) { return channel.Send(data, to); };
  const auto receive = [](auto& channel, auto data, int from) { return channel.Recv(data, from); };
  static const auto& halves = *new std::vector<Halves>{
      {"less than is sent", send,
       [](auto& channel, auto data, int from) { return channel.Recv(data.Slice(0, 11), from); },
       "send (user) float32[12] to rank ", "recv (user) float32[11] from rank "},
      {"something where nothing is sent",
       [](auto& channel, auto data, int to) { return channel.Send(data.Slice(0, 0), to); }, receive,
       "send (user) float32[0] to rank ", "recv (user) float32[12] from rank "},
      {"as many bytes of another type", send,
       [](auto& channel, auto data, int from) {
         data.dtype = DType::kInt32;
         return channel.Recv(data, from);
       },
       "send (user) float32[12] to rank ", "recv (user) int32[12] from rank "},
      {"for another purpose",
       [](auto& channel, auto data, int to) {
         return channel.Send(data, to, {.role = Role::kBucket, .index = 0, .index_count = 2});
       },
       receive, "send bucket 0/2 float32[12] to rank ", "recv (user) float32[12] from rank "},
  };
  return halves;
}

// In a group over several hosts two ranks are of different hosts, and two of one host, which are
// not its first ones.
std::vector<std::pair<int, int>> SendersAndReceivers(int world_size) {
  if (world_size == 2) return {{1, 0}};
  return {{0, 1}, world_size == 5 ? std::pair(3, 2) : std::pair(world_size - 1, 0)};
}

TEST_P(DisagreementTest, HalvesOfAMessageThatDifferEndTheGroupOnEveryRank) {
  for (const Halves& halves : DifferentHalves()) {
    for (const auto& [from, to] : SendersAndReceivers(GetParam())) {
      SCOPED_TRACE(absl::StrCat(halves.what, ", from rank ", from, " to rank ", to));
      const absl::Time start = absl::Now();
      const std::string sent = absl::StrCat("rank ", from, " is at #1 ", halves.send_says, to);
      const std::string received =
          absl::StrCat("rank ", to, " is at #1 ", halves.receive_says, from);
      const auto body = [&](Communicator& comm) -> absl::Status {
        std::vector<float> data(12, 1.0f);
        EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
        if (comm.rank() == from) {
          EK_RETURN_IF_ERROR(comm.user().Send(placed.view(), to).Wait());
          halves.send(comm.user(), placed.view(), to).Wait().IgnoreError();
        } else if (comm.rank() == to) {
          EK_RETURN_IF_ERROR(comm.user().Recv(placed.view(), from).Wait());
          halves.receive(comm.user(), placed.view(), from).Wait().IgnoreError();
        }
        const absl::Status ended = comm.Barrier();
        EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition)
            << "rank " << comm.rank() << ": " << ended;
        EXPECT_TRUE(absl::StrContains(ended.message(), sent))
            << "rank " << comm.rank() << ": " << ended;
        EXPECT_TRUE(absl::StrContains(ended.message(), received))
            << "rank " << comm.rank() << ": " << ended;
        return ended;
      };
      EXPECT_FALSE(RunTested(GetParam(), body).ok());
      ASSERT_LT(absl::Now() - start, kAtOnce);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSize, DisagreementTest, testing::ValuesIn(WorldSizes(2, 5)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
