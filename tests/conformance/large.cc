// 10^7 elements.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/conformance/reference.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int64_t kCount = 10'000'000;

float InputAt(int rank, int64_t i) { return static_cast<float>((i * 2654435761 + rank * 40503) % 1001); }

TEST(LargeTest, TenMillionElementsArriveWhole) {
  absl::Status status = RunTested(2, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(kCount), expected(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      data[i] = InputAt(comm.rank(), i);
      expected[i] = InputAt(0, i) + InputAt(1, i);
    }
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
    EK_RETURN_IF_ERROR(ExpectEqual("all_reduce", data, expected));

    const TensorView whole{absl::MakeSpan(data)};
    const TensorView mine = whole.Slice(comm.rank() * kCount / 2, kCount / 2);
    EK_RETURN_IF_ERROR(comm.ReduceScatter(whole, mine, ReduceOp::kMax));
    EK_RETURN_IF_ERROR(comm.AllGather(mine, whole));
    EK_RETURN_IF_ERROR(comm.Broadcast(whole, 1));
    return ExpectEqual("reduce_scatter, all_gather, broadcast", data, expected);
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
