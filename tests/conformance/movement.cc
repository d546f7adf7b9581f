// The operations that move elements without changing them.

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

class MovementTest : public WorldTest {};  // World size.

constexpr int64_t kSizes[] = {0, 1, 3, 17, 1000, 65537};

// The elements that `rank` starts with.
template <typename T>
std::vector<T> From(int rank, int64_t n) {
  return Inputs<T>(ReduceOp::kMax, rank, n);
}

template <typename T>
std::vector<T> Share(const std::vector<T>& whole, int index, int64_t n) {
  return {whole.begin() + index * n, whole.begin() + (index + 1) * n};
}

// Runs check(type, n) for each type and size on each rank.
template <typename Check>
absl::Status ForEachCase(Check check) {
  return ForEachType([&](auto type) -> absl::Status {
    for (int64_t n : kSizes) EK_RETURN_IF_ERROR(check(type, n));
    return absl::OkStatus();
  });
}

template <typename T>
absl::Status CheckBroadcast(Communicator& comm, int64_t n) {
  const int root = static_cast<int>((n + sizeof(T)) % comm.world_size());
  std::vector<T> data = From<T>(comm.rank(), n);
  EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, data));
  EK_RETURN_IF_ERROR(comm.Broadcast(placed.view(), root));
  EK_RETURN_IF_ERROR(placed.Fetch());
  return ExpectEqual(absl::StrCat("broadcast from ", root), data, From<T>(root, n));
}

template <typename T>
absl::Status CheckAllGather(Communicator& comm, int64_t n) {
  std::vector<T> input = From<T>(comm.rank(), n);
  std::vector<T> output(n * comm.world_size());
  EK_ASSIGN_OR_RETURN(Placed<T> in, Place(comm, input));
  EK_ASSIGN_OR_RETURN(Placed<T> out, Place(comm, output));
  EK_RETURN_IF_ERROR(comm.AllGather(in.view(), out.view()));
  EK_RETURN_IF_ERROR(out.Fetch());
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    EK_RETURN_IF_ERROR(ExpectEqual(absl::StrCat("all_gather, part ", rank), Share(output, rank, n),
                                   From<T>(rank, n)));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status CheckAllToAll(Communicator& comm, int64_t n) {
  const int world_size = comm.world_size();
  std::vector<T> input = From<T>(comm.rank(), n * world_size);
  std::vector<T> output(n * world_size);
  EK_ASSIGN_OR_RETURN(Placed<T> in, Place(comm, input));
  EK_ASSIGN_OR_RETURN(Placed<T> out, Place(comm, output));
  EK_RETURN_IF_ERROR(comm.user().AllToAll(in.view(), out.view()).Wait());
  EK_RETURN_IF_ERROR(out.Fetch());
  for (int rank = 0; rank < world_size; ++rank) {
    EK_RETURN_IF_ERROR(ExpectEqual(absl::StrCat("all_to_all, part ", rank), Share(output, rank, n),
                                   Share(From<T>(rank, n * world_size), comm.rank(), n)));
  }
  return absl::OkStatus();
}

// A ring: each rank sends to the next one.
template <typename T>
absl::Status CheckSendRecv(Communicator& comm, int64_t n, bool receive_first) {
  const int world_size = comm.world_size();
  if (world_size == 1) return absl::OkStatus();
  const int next = (comm.rank() + 1) % world_size;
  const int previous = (comm.rank() + world_size - 1) % world_size;
  std::vector<T> sent = From<T>(comm.rank(), n);
  std::vector<T> received(n);
  EK_ASSIGN_OR_RETURN(Placed<T> out, Place(comm, sent));
  EK_ASSIGN_OR_RETURN(Placed<T> in, Place(comm, received));
  Work receive, send;
  if (receive_first) receive = comm.user().Recv(in.view(), previous);
  send = comm.user().Send(out.view(), next);
  if (!receive_first) receive = comm.user().Recv(in.view(), previous);
  EK_RETURN_IF_ERROR(receive.Wait());
  EK_RETURN_IF_ERROR(send.Wait());
  EK_RETURN_IF_ERROR(in.Fetch());
  return ExpectEqual("recv", received, From<T>(previous, n));
}

TEST_P(MovementTest, BroadcastGivesTheRootsElements) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachCase([&](auto type, int64_t n) {
      return CheckBroadcast<typename decltype(type)::type>(comm, n);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MovementTest, AllGatherGivesEveryRanksElementsInOrder) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachCase([&](auto type, int64_t n) {
      return CheckAllGather<typename decltype(type)::type>(comm, n);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MovementTest, AllToAllExchangesParts) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachCase([&](auto type, int64_t n) {
      return CheckAllToAll<typename decltype(type)::type>(comm, n / comm.world_size());
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MovementTest, SendAndRecvMeetInEitherOrder) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachCase([&](auto type, int64_t n) -> absl::Status {
      using T = typename decltype(type)::type;
      EK_RETURN_IF_ERROR(CheckSendRecv<T>(comm, n, /*receive_first=*/true));
      EK_RETURN_IF_ERROR(CheckSendRecv<T>(comm, n, /*receive_first=*/false));
      return CheckSendRecv<T>(comm, n, /*receive_first=*/comm.rank() % 2 == 0);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MovementTest, MessagesOfAPairKeepTheirOrder) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr int kMessages = 50;
    std::vector<int32_t> numbers(kMessages);
    for (int i = 0; comm.rank() == 0 && i < kMessages; ++i) numbers[i] = i;
    EK_ASSIGN_OR_RETURN(Placed<int32_t> placed, Place(comm, numbers));
    std::vector<Work> works;
    for (int i = 0; i < kMessages; ++i) {
      const TensorView number = placed.view().Slice(i, 1);
      if (comm.rank() == 0 && comm.world_size() > 1) {
        works.push_back(comm.user().Send(number, 1));
      } else if (comm.rank() == 1) {
        works.push_back(comm.user().Recv(number, 0));
      }
    }
    for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    EK_RETURN_IF_ERROR(placed.Fetch());
    for (int i = 0; comm.rank() == 1 && i < kMessages; ++i) EXPECT_EQ(numbers[i], i);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MovementTest, ABarrierEndsOnlyWhenAllHaveCome) {
  if (Tested().run != nullptr) GTEST_SKIP() << "the ranks are processes: nobody counts them";
  std::atomic<int> arrived = 0;
  absl::Status status = RunTested(GetParam(), [&](Communicator& comm) -> absl::Status {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      EK_RETURN_IF_ERROR(comm.Barrier());
      EXPECT_GE(arrived, round * comm.world_size());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(MovementTest, AllocatedMemoryIsAlignedZeroedAndUsable) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(1000 * sizeof(float)));
    EXPECT_EQ(memory.bytes, 1000 * sizeof(float));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data.get()) % 64, 0);
    const TensorView view(memory.data.get(), 1000, DType::kFloat32, comm.device());
    std::vector<float> elements(1000, 5.0f);
    EK_RETURN_IF_ERROR(Read(comm, view, elements));
    for (float element : elements) EXPECT_EQ(element, 0.0f);
    elements[999] = 1.0f;
    EK_RETURN_IF_ERROR(Write(comm, elements, view));
    EK_RETURN_IF_ERROR(comm.AllReduce(view, ReduceOp::kSum));
    EK_RETURN_IF_ERROR(Read(comm, view, elements));
    EXPECT_EQ(elements[999], comm.world_size());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, MovementTest, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
