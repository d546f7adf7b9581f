#include "evenkeel/comm/tcp/backend.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/work.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

// Two ranks that are connected, with nobody above them that watches.
struct Pair {
  std::unique_ptr<TcpBackend> ranks[2];

  Pair() {
    std::vector<std::string> addresses;
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank] = std::make_unique<TcpBackend>(rank, 2, "world");
      auto address = ranks[rank]->Listen("127.0.0.1", "key", [](const absl::Status&) {});
      EXPECT_TRUE(address.ok()) << address.status();
      addresses.push_back(address.value_or(""));
    }
    std::thread other([&] { EXPECT_TRUE(ranks[1]->Connect(addresses, absl::Seconds(30)).ok()); });
    EXPECT_TRUE(ranks[0]->Connect(addresses, absl::Seconds(30)).ok());
    other.join();
  }
};

std::shared_ptr<WorkState> StartBarrier(TcpBackend& backend, absl::Duration timeout) {
  Operation operation;
  operation.what.kind = CollectiveKind::kBarrier;
  operation.deadline = absl::Now() + timeout;
  auto work = std::make_shared<WorkState>(absl::InfiniteFuture(), nullptr);
  backend.Start(std::move(operation), work);
  return work;
}

TEST(TcpBackendTest, ABrokenConnectionAfterTheDeadlineIsExplainedByWhoKnows) {
  // A machine on which that takes longer than a rank's patience shows nothing.
  bool was_in_time = false;
  for (int attempt = 0; attempt < 10 && !was_in_time; ++attempt) {
    Pair pair;
    const absl::Time start = absl::Now();
    const auto work = StartBarrier(*pair.ranks[0], absl::Milliseconds(50));
    absl::SleepFor(absl::Milliseconds(100));
    pair.ranks[1]->Abort(absl::CancelledError("rank 1 has gone"));
    absl::SleepFor(absl::Milliseconds(100));  // As long as the control plane may take.
    pair.ranks[0]->Abort(absl::DeadlineExceededError("rank 0 waited for rank 1"));
    was_in_time = absl::Now() - start < absl::Seconds(1);
    const absl::Status status = work->Wait();
    if (was_in_time) {
      EXPECT_EQ(status, absl::DeadlineExceededError("rank 0 waited for rank 1"));
    }
  }
  EXPECT_TRUE(was_in_time);
}

TEST(TcpBackendTest, ADeadlineNobodyExplainsEndsTheOperation) {
  Pair pair;
  const absl::Status status = StartBarrier(*pair.ranks[0], absl::Milliseconds(50))->Wait();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(status.message(), "rank 0 at #0 barrier (user): the operation missed its deadline");
}

}  // namespace
}  // namespace evenkeel::internal
