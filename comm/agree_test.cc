#include "evenkeel/comm/agree.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(AgreeOnTest, AllRanksGetAllValues) {
  const absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::vector<std::string> values,
                        AgreeOn(comm, "values", absl::OkStatus(), absl::StrCat(comm.rank())));
    EXPECT_THAT(values, ElementsAre("0", "1", "2"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AgreeOnTest, AllRanksHearOfTheLowestThatFailed) {
  const absl::Status status = RunRanks(4, [](Communicator& comm) -> absl::Status {
    EK_RETURN_IF_ERROR(AgreeOn(comm, "setup", absl::OkStatus()).status());
    const absl::Status some =
        AgreeOn(comm, "setup",
                comm.rank() < 2 ? absl::OkStatus()
                                : absl::NotFoundError(absl::StrCat("file ", comm.rank())))
            .status();
    EXPECT_EQ(some, absl::NotFoundError("rank 2: file 2"));
    const absl::Status all =
        AgreeOn(comm, "setup", absl::InvalidArgumentError("a flag: is wrong")).status();
    EXPECT_EQ(all, absl::InvalidArgumentError("a flag: is wrong"));
    return comm.Barrier();  // The group goes on.
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AgreeOnTest, ARankOfAPartOfTheGroupIsNamedByItsNumberInTheJob) {
  const absl::Status status = RunRanks(4, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> part, comm.Split(comm.rank() / 2, 0));
    const absl::Status own = part->rank() == 1 ? absl::NotFoundError("file") : absl::OkStatus();
    EXPECT_EQ(AgreeOn(*part, "setup", own).status(),
              absl::NotFoundError(comm.rank() < 2 ? "rank 1: file" : "rank 3: file"));
    return part->Finalize();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AgreeOnTest, ARanksOwnErrorComesBeforeThatOfAnEndedGroup) {
  const absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    comm.Abort(absl::CancelledError("no longer"));
    const absl::Status own = absl::NotFoundError("file");
    EXPECT_EQ(AgreeOn(comm, "setup", own).status(), own);
    EXPECT_FALSE(AgreeOn(comm, "setup", absl::OkStatus()).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST(AgreeOnEqualTest, ListsTheValuesOnlyIfTheyDiffer) {
  const absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    const auto agree = [&](const std::string& value) {
      return AgreeOnEqual(comm, "plan", absl::OkStatus(), value);
    };
    EXPECT_THAT(*agree("the same"), IsEmpty());
    EXPECT_THAT(*agree(comm.rank() == 1 ? "b" : "a"), ElementsAre("a", "b", "a"));
    const absl::Status own = comm.rank() == 1 ? absl::NotFoundError("plan") : absl::OkStatus();
    EXPECT_EQ(AgreeOnEqual(comm, "plan", own, "a").status(), absl::NotFoundError("rank 1: plan"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(VerifySameTest, NamesTheFirstFactThatDiffersAndTheRanks) {
  const absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    const auto verify = [&](const std::vector<Fact>& usual, const std::vector<Fact>& of_rank_1) {
      return VerifySame(comm, "model", absl::OkStatus(), comm.rank() == 1 ? of_rank_1 : usual);
    };
    EXPECT_TRUE(verify({{"size", "3"}}, {{"size", "3"}}).ok());
    EXPECT_EQ(
        verify({{"size", "3"}, {"rate", "1"}}, {{"size", "3"}, {"rate", "2"}}),
        absl::InvalidArgumentError("rate: rank 1 has 2; ranks 0,2 have 1: the ranks disagree"));
    EXPECT_EQ(verify({{"a", "1"}}, {{"b", "1"}}).message(),
              "a: rank 1 has b: 1; ranks 0,2 have 1: the ranks disagree");
    EXPECT_EQ(verify({{"a", "1"}, {"b", "2"}}, {{"a", "1"}}).message(),
              "b: rank 1 has nothing; ranks 0,2 have 2: the ranks disagree");
    EXPECT_EQ(verify({{"a", "1"}}, {{"a", "1"}, {"b", "2"}}).message(),
              "b: rank 1 has 2; ranks 0,2 have nothing: the ranks disagree");
    return comm.Barrier();  // The group goes on.
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
