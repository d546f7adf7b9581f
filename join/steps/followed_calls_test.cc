#include "evenkeel/join/steps/followed_calls.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// As FollowedCalls has them on the way: a call of the first loop.
std::string CallNotice(int64_t number, int64_t step, const std::string& call) {
  return internal::ByteWriter().U8(1).I64(1).I64(number).I64(step).Bytes(call).Take();
}

// Others may wait for the beginning of those steps on this rank.
TEST(FollowedCallsTest, ACallComesNotBeforeTheStepsThatCameBeforeIt) {
  const absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) return comm.Barrier();
    FollowedCalls calls(&comm.control());
    calls.BeginLoop();
    calls.BecomeExhausted();
    calls.OnNotice(1, CallNotice(0, 1, "before step 1"));
    calls.OnNotice(1, CallNotice(1, 2, "before step 2"));
    EXPECT_FALSE(calls.HasNext(0));
    EXPECT_TRUE(calls.HasNext(1));
    EXPECT_EQ(calls.TakeNext(), "before step 1");
    EXPECT_FALSE(calls.HasNext(1));
    EXPECT_TRUE(calls.HasNext(2)) << "and so it does for a rank that is late";
    EXPECT_EQ(calls.TakeNext(), "before step 2");
    EXPECT_FALSE(calls.HasNext(2));
    EXPECT_EQ(calls.position(), 2);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Told by a notice and as an action of the step, in any order: it is followed once.
TEST(FollowedCallsTest, ACallIsTakenOnceHoweverOftenItIsTold) {
  const absl::Status status = RunRanks(1, [](Communicator& comm) -> absl::Status {
    FollowedCalls calls(&comm.control());
    calls.BeginLoop();
    calls.BecomeExhausted();
    EXPECT_TRUE(calls.Take(0));
    calls.OnNotice(0, CallNotice(0, 0, "a"));
    EXPECT_FALSE(calls.HasNext(0));
    calls.OnNotice(0, CallNotice(1, 0, "b"));
    EXPECT_TRUE(calls.Take(1));
    EXPECT_FALSE(calls.HasNext(0));
    EXPECT_FALSE(calls.Take(1));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
