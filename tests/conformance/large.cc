// 10^7 elements.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/reference.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int64_t kCount = 10'000'000;

float InputAt(int rank, int64_t i) {
  return static_cast<float>((i * 2654435761 + rank * 40503) % 1001);
}

class LargeTest : public WorldTest {};

TEST_P(LargeTest, TenMillionElementsArriveWhole) {
  absl::Status status = RunTested(2, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(kCount), expected(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      data[i] = InputAt(comm.rank(), i);
      expected[i] = InputAt(0, i) + InputAt(1, i);
    }
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
    const TensorView whole = placed.view();
    EK_RETURN_IF_ERROR(comm.AllReduce(whole, ReduceOp::kSum));
    EK_RETURN_IF_ERROR(placed.Fetch());
    EK_RETURN_IF_ERROR(ExpectEqual("all_reduce", data, expected));

    const TensorView mine = whole.Slice(comm.rank() * kCount / 2, kCount / 2);
    EK_RETURN_IF_ERROR(comm.ReduceScatter(whole, mine, ReduceOp::kMax));
    EK_RETURN_IF_ERROR(comm.AllGather(mine, whole));
    EK_RETURN_IF_ERROR(comm.Broadcast(whole, 1));
    EK_RETURN_IF_ERROR(placed.Fetch());
    return ExpectEqual("reduce_scatter, all_gather, broadcast", data, expected);
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, LargeTest, testing::Values(2),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
