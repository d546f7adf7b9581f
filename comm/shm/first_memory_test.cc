// The first registered memory of a process: a program of its own, because it is the first only
// once.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Its number is none that the ranks use for memory of the group's own.
TEST(ShmFirstMemoryTest, IsNotTakenForTheGroupsOwn) {
  constexpr int64_t kCount = 1 << 20;
  auto group = CreateShmGroupInProcess(3, {.timeout = absl::Seconds(60)});
  ASSERT_TRUE(group.ok()) << group.status();
  const absl::StatusOr<Memory> first = (*group)[0]->Allocate(kCount * sizeof(int32_t));
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status status = internal::RunGroup(*group, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(kCount * sizeof(int32_t)));
    if (comm.rank() == 0) memory = *first;
    const TensorView data(memory.data.get(), kCount, DType::kInt32);
    for (int64_t i = 0; i < kCount; ++i)
      data.as<int32_t>()[i] = static_cast<int32_t>(i) * (comm.rank() + 1);
    EK_RETURN_IF_ERROR(comm.AllReduce(data, ReduceOp::kSum));
    EK_RETURN_IF_ERROR(comm.Broadcast(data, 0));
    for (int64_t i = 0; i < kCount; ++i) {
      if (data.as<int32_t>()[i] != static_cast<int32_t>(i) * 6)
        return absl::DataLossError(absl::StrCat("at ", i));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
