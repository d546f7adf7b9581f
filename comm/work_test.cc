#include "evenkeel/comm/work.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"

namespace evenkeel {
namespace {

// A waiter that learns of a failure may abort its group at once: whoever is to know of the failure
// first does by then.
TEST(WorkStateTest, OnEndRunsBeforeAnybodyCanSeeTheEnd) {
  const auto state = std::make_shared<WorkState>(absl::Now() + absl::Seconds(30), nullptr);
  std::vector<std::string> order;
  state->on_end = [&](absl::Status status) {
    EXPECT_FALSE(state->IsDone());
    order.push_back("on_end " + std::string(status.message()));
    state->Finish(
        absl::InternalError("second"));  // As a group that ends does to all its operations.
    return absl::InternalError(absl::StrCat(status.message(), " and more"));
  };
  const Work work(state);
  work.OnDone([&](const absl::Status& status) {
    EXPECT_TRUE(state->IsDone());
    order.push_back("callback " + std::string(status.message()));
  });
  state->Finish(absl::InternalError("first"));
  EXPECT_EQ(work.Wait().message(), "first and more");
  EXPECT_EQ(order, (std::vector<std::string>{"on_end first", "callback first and more"}));
}

TEST(WorkTest, AwaitDoneEndsAtTheEndOfTheOperationOrAtTheDeadline) {
  const auto state = std::make_shared<WorkState>(absl::Now() + absl::Seconds(30), nullptr);
  const Work work(state);
  EXPECT_FALSE(work.AwaitDone(SteadyNow() + absl::Milliseconds(20)));
  EXPECT_FALSE(work.IsDone());
  std::thread other([&] { state->Finish(absl::InternalError("an error")); });
  EXPECT_TRUE(work.AwaitDone(SteadyNow() + absl::Seconds(30)));
  other.join();
  EXPECT_TRUE(work.AwaitDone(absl::InfinitePast()));
}

}  // namespace
}  // namespace evenkeel
