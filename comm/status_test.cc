#include "evenkeel/comm/status.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(ReturnIfErrorTest, ReturnsTheErrorAndGoesOnWhenOk) {
  int reached = 0;
  auto run = [&](absl::Status status) -> absl::Status {
    EK_RETURN_IF_ERROR(status);
    ++reached;
    return absl::OkStatus();
  };
  EXPECT_TRUE(run(absl::OkStatus()).ok());
  EXPECT_EQ(reached, 1);
  EXPECT_EQ(run(absl::UnavailableError("rank 1 is gone")),
            absl::UnavailableError("rank 1 is gone"));
  EXPECT_EQ(reached, 1);
}

TEST(ReturnIfErrorTest, ReturnsFromAFunctionThatAnswersAValue) {
  auto run = []() -> absl::StatusOr<int> {
    EK_RETURN_IF_ERROR(absl::InternalError("no"));
    return 1;
  };
  EXPECT_EQ(run().status(), absl::InternalError("no"));
}

TEST(AssignOrReturnTest, MovesTheValueOutOrReturnsTheStatus) {
  auto run = [](absl::StatusOr<std::unique_ptr<int>> from) -> absl::StatusOr<int> {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<int> value, std::move(from));
    EK_ASSIGN_OR_RETURN(const int one, absl::StatusOr<int>(1));
    return *value + one;
  };
  EXPECT_EQ(*run(std::make_unique<int>(6)), 7);
  EXPECT_EQ(run(absl::NotFoundError("gone")).status(), absl::NotFoundError("gone"));
}

#define TWO_ON_ONE_LINE_                           \
  EK_ASSIGN_OR_RETURN(const int one, Number(1));   \
  EK_ASSIGN_OR_RETURN(const int three, Number(3)); \
  return one + three

TEST(AssignOrReturnTest, MayStandTwiceOnALine) {
  const auto Number = [](int number) { return absl::StatusOr<int>(number); };
  const auto run = [&]() -> absl::StatusOr<int> { TWO_ON_ONE_LINE_; };
  EXPECT_EQ(*run(), 4);
}

TEST(AnnotateTest, PutsThePlaceBeforeTheMessage) {
  EXPECT_EQ(Annotate(absl::DataLossError("short file"), "reading w"),
            absl::DataLossError("reading w: short file"));
  EXPECT_TRUE(Annotate(absl::OkStatus(), "reading w").ok());
}

}  // namespace
}  // namespace evenkeel
