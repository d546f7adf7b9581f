#include "evenkeel/trainer/report/gather_records.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

TEST(GatherRecordsTest, RankZeroHasThemAllInOrder) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
      for (int time = 0; time < 3; ++time) {
        const RankRecord mine{
            .rank = comm.rank(), .host = HostName(), .memory = {.data = 10 * time + comm.rank()}};
        EK_ASSIGN_OR_RETURN(const std::vector<RankRecord> all, GatherRecords(comm, mine));
        EXPECT_EQ(all.size(), comm.rank() == 0 ? ranks : 0);
        for (size_t rank = 0; rank < all.size(); ++rank) {
          EXPECT_EQ(all[rank].rank, rank);
          EXPECT_EQ(all[rank].host, HostName());
          EXPECT_EQ(all[rank].memory.data, 10 * time + static_cast<int>(rank));
        }
        EK_RETURN_IF_ERROR(
            comm.Barrier());  // Rank 0 must not take a record of the next time for one of this.
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ranks << ": " << status;
  }
}

TEST(GatherRecordsTest, ARankThatFailsIsNoReasonToWait) {
  const absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) return absl::DataLossError("gone");
    return GatherRecords(comm, {.rank = comm.rank()}).status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

TEST(ProcessTest, KnowsItself) {
  EXPECT_NE(HostName(), "");
  EXPECT_GT(PeakResidentBytes(), 1 << 20);
}

// A launcher is a Python program of half a gigabyte, perhaps. The child is this program once more,
// by exec.
TEST(ProcessDeathTest, ThePeakIsNotThatOfTheProgramThatStartedIt) {
  constexpr int64_t kMuch = int64_t{200} << 20;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<char> much;
  if (!testing::internal::InDeathTestChild()) {
    much.assign(kMuch, 1);
    EXPECT_GE(PeakResidentBytes(), kMuch);
  }
  EXPECT_EXIT(std::exit(PeakResidentBytes() < kMuch ? 0 : 1), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace evenkeel
