// Records of steps and entries of the log: no bytes that another rank sends do harm. The ranks'
// ledgers of steps are compared.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/steps/step_ledger.h"
#include "evenkeel/join/steps/step_log.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(StepControlFuzzTest, StepRecord) {
  const ParticipantState reducer{.generation = 2, .schedule_hash = 3, .mask_hash = 4};
  const ParticipantState optimizer{.sync = false, .note = std::string(256, 'n')};
  const StepRecord alone{}, full{.joined = true,
                                 .requests = 7,
                                 .samples = -1,
                                 .scope_hash = ~uint64_t{0},
                                 .times = PhaseTimes{.busy_us = {0, 127, 128, 4100, 700, 70'000},
                                                     .waited_us = int64_t{1} << 50,
                                                     .ready = {.first_us = 300, .last_us = 4000}},
                                 .ledger = "optimizer#0\t3\t3\t=\tlearning_rate=0.1\n",
                                 .participants = {reducer, optimizer},
                                 .shares_hash = ~uint32_t{0},
                                 .sharing = StepRecord::kOtherSamples};
  Fuzz({alone.Serialize(), full.Serialize()}, Again<StepRecord>);
}

TEST(StepControlFuzzTest, StepDetails) {
  const StepDetails alone{},
      full{.names = "model, optimizer",
           .shares = {.first = int64_t{1} << 40, .samples = 256, .counts = {176, 80, 0}}};
  Fuzz({internal::ToBytes(alone), internal::ToBytes(full)},
       [](absl::string_view bytes) -> absl::StatusOr<std::string> {
         EK_ASSIGN_OR_RETURN(const StepDetails details,
                             internal::FromBytes<StepDetails>(bytes, "details"));
         return internal::ToBytes(details);
       });
}

// The details of a rank are an error of the program for the others, whatever the bytes.
TEST(StepControlFuzzTest, DetailsOfAnotherRank) {
  const StepDetails mine{.names = "model", .shares = {.samples = 8, .counts = {4, 4}}};
  std::vector<StepRecord> records(2, StepRecord{.samples = 4});
  for (int rank = 0; rank < 2; ++rank) records[rank].SetShares(mine.shares, rank);
  const StepAnswer answer{.step = 7,
                          .world_size = 2,
                          .active = 2,
                          .records = std::make_shared<const std::vector<StepRecord>>(records)};
  const std::string good = internal::ToBytes(mine);
  Fuzz({good}, [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::Status status = CompareDetails(answer, {good, std::string(bytes)});
    EXPECT_FALSE(status.ok());
    if (absl::IsInvalidArgument(status)) return status;
    return std::string(bytes);
  });
}

TEST(StepControlFuzzTest, EntryOfTheLog) {
  const StepEntry alone{}, full{.kind = StepEntry::Kind::kAction,
                                .rank = 3,
                                .step = int64_t{1} << 40,
                                .number = 7,
                                .participant = "optimizer#0",
                                .payload = std::string(300, 'p')};
  Fuzz({internal::ToBytes(alone), internal::ToBytes(full)},
       [](absl::string_view bytes) -> absl::StatusOr<std::string> {
         EK_ASSIGN_OR_RETURN(const StepEntry entry,
                             internal::FromBytes<StepEntry>(bytes, "an entry"));
         return internal::ToBytes(entry);
       });
}

TEST(StepControlFuzzTest, AnotherVersionIsRefused) {
  std::string bytes = StepRecord().Serialize();
  EXPECT_EQ(bytes.size(), 55u) << "as step_agreement.h says";
  bytes[0] = StepRecord::kVersion + 1;
  EXPECT_EQ(StepRecord::Parse(bytes).status(),
            absl::InvalidArgumentError("the record of a step has version 7, this build reads 6: "
                                       "run the same build on all ranks"));
}

TEST(StepControlFuzzTest, LedgersOfSteps) {
  StepLedger ledger;
  ledger.Finish("data_parallel#0", 4, "");
  ledger.Finish("optimizer#0", 4, "learning_rate=0.1, max_norm=1");
  ledger.Plan("optimizer#1", "learning_rate=0.1");
  const std::string good = ledger.Serialize(StepLedger::Plans::kWith);
  Fuzz({good}, [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::Status status = StepLedger::Compare({std::string(bytes), good});
    if (bytes != good && !absl::IsFailedPrecondition(status) && !status.ok()) return status;
    return std::string(bytes);  // Whatever it says, it has been read.
  });
}

struct Ledgers {
  std::string name;
  std::vector<std::string> texts;  // By rank.
  std::string message;             // Empty: they agree.
};

const Ledgers kLedgers[] = {
    {"Nothing", {"", "", ""}, ""},
    {"Same", {"a#0\t2\t2\t=\tx=1\n", "a#0\t2\t2\t=\tx=1\n", "a#0\t2\t2\t=\tx=1\n"}, ""},
    // Ranks may come into a group with different pasts.
    {"OtherNumbers", {"a#0\t2\t12\t=\tx=1\n", "a#0\t2\t11\t=\tx=1\n", "a#0\t2\t12\t=\tx=1\n"}, ""},
    {"Counts",
     {"a#0\t2\t12\t=\tx=1\n", "a#0\t1\t11\t=\tx=1\n", "a#0\t2\t12\t=\tx=1\n"},
     "a#0: rank 1 has finished 11 steps (1 in this group); ranks 0,2 have finished 12 steps (2 in "
     "this group): the "
     "ranks disagree; every rank must take every step"},
    {"NoneOnOne",
     {"a#0\t1\t1\t=\tx=1\n", "a#0\t1\t1\t=\tx=1\n", ""},
     "a#0: rank 2 has finished 0 steps; ranks 0,1 have finished 1 step: the ranks disagree; every "
     "rank must take every "
     "step"},
    {"Settings",
     {"a#0\t2\t2\t=\tx=1, y=2\n", "a#0\t2\t2\t=\tx=1, y=3\n", "a#0\t2\t2\t=\tx=1, y=2\n"},
     "a#0: step 2 was taken with different settings: rank 1 has y=3; ranks 0,2 have y=2: the ranks "
     "disagree; every rank "
     "must pass the same settings to a step"},
    {"OneMoreSetting",
     {"a#0\t2\t2\t=\tx=1, y=2\n", "a#0\t2\t2\t=\tx=1\n", "a#0\t2\t2\t=\tx=1\n"},
     "a#0: step 2 was taken with different settings: rank 0 has y=2; ranks 1,2 have none of these: "
     "the ranks "
     "disagree; every rank must pass the same settings to a step"},
    {"Plans",
     {"a#0\t2\t2\t>\tx=1\n", "a#0\t2\t2\t>\tx=1\n", "a#0\t2\t2\t>\tx=2\n"},
     "a#0: step 3 begins with different settings: rank 2 has x=2; ranks 0,1 have x=1: the ranks "
     "disagree; every rank must "
     "pass the same settings to a step"},
    // A rank without inputs still has those of its last step.
    {"PlansAndSteps", {"a#0\t2\t2\t=\tx=1\n", "a#0\t2\t2\t>\tx=2\n", "a#0\t2\t2\t>\tx=2\n"}, ""},
    {"Malformed", {"", "a#0\t2\t2\t<\tx=1\n", ""}, "rank 1 sent a malformed ledger of steps"},
};

TEST(StepLedgerTest, ComparesTheRanksWithEachOther) {
  for (const Ledgers& ledgers : kLedgers) {
    SCOPED_TRACE(ledgers.name);
    EXPECT_EQ(StepLedger::Compare(ledgers.texts).message(), ledgers.message);
  }
}

// A rank that has no step to begin may have planned one that only accumulated.
TEST(StepLedgerTest, LeavesPlansOut) {
  StepLedger ledger, other;
  ledger.Finish("optimizer#0", 4, "learning_rate=0.1");
  other.Finish("optimizer#0", 4, "learning_rate=0.1");
  ledger.Plan("optimizer#0", "learning_rate=0.2");
  other.Plan("optimizer#0", "learning_rate=0.3");
  using Plans = StepLedger::Plans;
  EXPECT_FALSE(
      StepLedger::Compare({ledger.Serialize(Plans::kWith), other.Serialize(Plans::kWith)}).ok());
  EXPECT_TRUE(
      StepLedger::Compare({ledger.Serialize(Plans::kWithout), other.Serialize(Plans::kWithout)})
          .ok());
  other.Finish("optimizer#0", 5, "learning_rate=0.3");
  EXPECT_FALSE(
      StepLedger::Compare({ledger.Serialize(Plans::kWithout), other.Serialize(Plans::kWithout)})
          .ok());
}

TEST(StepLedgerTest, HasNoLineForAPlanAlone) {
  StepLedger ledger;
  ledger.Plan("optimizer#0", "learning_rate=0.1");
  const std::string text = ledger.Serialize(StepLedger::Plans::kWithout);
  EXPECT_EQ(text, "");
  EXPECT_TRUE(StepLedger::Compare({text, ""}).ok());
  ledger.Finish("optimizer#0", 1, "learning_rate=0.1");
  EXPECT_FALSE(StepLedger::Compare({ledger.Serialize(StepLedger::Plans::kWithout), text}).ok());
}

// A group of parameters may have any name.
TEST(StepLedgerTest, KeepsToItsLines) {
  StepLedger ledger;
  ledger.Finish("optimizer#0", 1, "learning_rate of a\tb\nc=1");
  EXPECT_EQ(ledger.Serialize(StepLedger::Plans::kWith),
            "optimizer#0\t1\t1\t=\tlearning_rate of a b c=1\n");
}

}  // namespace
}  // namespace evenkeel
