#include "evenkeel/join/steps/step_agreement.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/interval_samples.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

StepRecord Active(std::vector<ParticipantState> participants) {
  return {.samples = 3, .participants = std::move(participants)};
}

StepRecord Exhausted(std::vector<ParticipantState> participants = {}) {
  return {.joined = true, .participants = std::move(participants)};
}

absl::StatusOr<StepAnswer> AgreeOn(const std::vector<StepRecord>& records,
                                   SamplesRule samples = SamplesRule::kOptional) {
  auto names = std::make_shared<ParticipantNames>();
  while (names->size() < records[0].participants.size())
    names->push_back(absl::StrCat("part ", names->size()));
  std::vector<std::string> parts;
  for (const StepRecord& record : records) parts.push_back(record.Serialize());
  StepAnswer answer;
  EK_RETURN_IF_ERROR(Agree(7, parts, std::move(names), samples, answer));
  return answer;
}

struct Case {
  std::vector<StepRecord> records;
  std::string message;  // Empty: they agree.
  std::vector<int> ranks = {};
};

TEST(CompareTest, NamesTheFewestRanksThatDifferAndTheirValues) {
  const ParticipantState one;
  const ParticipantState waits{.sync = false};
  const ParticipantState frozen{.mask_hash = 7, .note = "frozen: a"};
  StepRecord elsewhere = Active({one});
  elsewhere.scope_hash = 10;
  const Case kCases[] = {
      {{Active({}), Active({})}, ""},
      {{Active({one, frozen}), Active({one, frozen}), Exhausted({waits, one})}, ""},
      {{Exhausted(), Exhausted()}, ""},
      {{Active({one}), Active({waits}), Active({one})},
       "step 7, part 0: the ranks disagree about synchronising: ranks 0,2: synchronises; rank 1: "
       "accumulates",
       {1}},
      {{Active({waits}), Active({one}), Active({one})},
       "step 7, part 0: the ranks disagree about synchronising: rank 0: accumulates; ranks 1,2: "
       "synchronises",
       {0}},
      {{Active({frozen}), Active({one})},
       "step 7, part 0: the ranks disagree about the set of trained parameters: rank 0: frozen: a "
       "(mask 7); rank 1: nothing frozen (mask 0)",
       {0}},
      {{Active({one, waits}), Active({one, one})},
       "step 7, part 1: the ranks disagree about synchronising: rank 0: accumulates; rank 1: "
       "synchronises",
       {0}},
      // The lowest active rank is the measure, not an exhausted one.
      {{Exhausted({waits}), Active({one}), Active({waits}), Active({one})},
       "step 7, part 0: the ranks disagree about synchronising: ranks 1,3: synchronises; rank 2: "
       "accumulates",
       {2}},
      {{Active({one}), elsewhere, Active({one})},
       "step 7: the ranks run different joins (objects or options): ranks 0,2: no join; "
       "rank 1: join a",
       {1}},
  };
  for (const Case& test : kCases) {
    SCOPED_TRACE(test.message);
    const absl::StatusOr<StepAnswer> answer = AgreeOn(test.records);
    EXPECT_EQ(std::string(answer.status().message()), test.message);
    if (test.message.empty()) continue;
    EXPECT_TRUE(absl::IsFailedPrecondition(answer.status()));
    EXPECT_EQ(FailureInfoOf(answer.status())->ranks, test.ranks);
  }
}

TEST(AgreeTest, AddsUpWhatAllRanksReport) {
  StepRecord stop = Active({{.samples = 5}});
  stop.requests = StepRequests::kStop;
  StepRecord save = Active({{.samples = 1}});
  save.requests = StepRequests::kSave;
  StepRecord left = Exhausted({{.samples = 2}});
  left.samples = 2;
  const absl::StatusOr<StepAnswer> answer = AgreeOn({left, stop, save, Exhausted({{}})});
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->step, 7);
  EXPECT_EQ(answer->world_size, 4);
  EXPECT_EQ(answer->active, 2);
  EXPECT_EQ(answer->lowest_active, 1);
  EXPECT_EQ(answer->highest_active, 2);
  EXPECT_EQ(answer->requests, StepRequests::kStop | StepRequests::kSave);
  EXPECT_EQ(answer->samples, 2 + 3 + 3);
  EXPECT_FALSE(answer->everyone_active());
  EXPECT_EQ(answer->SamplesOf("part 0"), 2 + 3 + 3 + 5 + 1 + 2);
  EXPECT_EQ(answer->SamplesOf("part 1"), 2 + 3 + 3);
  EXPECT_EQ(answer->LeaderState("part 0").samples, 5);
  EXPECT_EQ(answer->StateOf("part 1", 0), nullptr);
}

TEST(AgreeTest, NamesTheRankWhoseRecordIsUnreadable) {
  const std::string good = Active({}).Serialize();
  StepAnswer answer;
  const absl::Status status = Agree(7, {good, good + "x"}, std::make_shared<ParticipantNames>(),
                                    SamplesRule::kOptional, answer);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_EQ(std::string(status.message().substr(0, 16)), "step 7, rank 1: ");
  EXPECT_EQ(answer.records, nullptr);
}

TEST(AgreeTest, ComparesLedgersFirst) {
  StepRecord one = Active({{.sync = false}}), other = Active({{}});
  one.ledger = "optimizer#0\t3\t3\t=\t\n";
  other.ledger = "optimizer#0\t4\t4\t=\t\n";
  EXPECT_EQ(std::string(AgreeOn({one, other}).status().message()),
            "step 7: optimizer#0: rank 0 has finished 3 steps; rank 1 has finished 4 steps: the "
            "ranks disagree; every rank must take every step");
}

TEST(AgreeTest, RefusesOtherParticipants) {
  StepRecord other = Active({{}});
  other.names_hash = HashOfNames({"part 0"});
  EXPECT_TRUE(absl::IsNotFound(AgreeOn({Active({{}}), other}).status()));
  EXPECT_EQ(
      std::string(AgreeOn({Active({{}}), Active({{}, {}})}).status().message()),
      "step 7, rank 1: the record has the states of 2 participants instead of 1 (internal error)");
  EXPECT_NE(HashOfNames({"a", "b"}), HashOfNames({"b", "a"}));
  std::vector<std::string> details;
  for (const char* const names : {"a, b", "b, a", "a, b", ""})
    details.push_back(internal::ToBytes(StepDetails{.names = names}));
  const absl::Status status = CompareDetails({.step = 7, .world_size = 4}, details);
  EXPECT_EQ(std::string(status.message()),
            "step 7: the ranks have different models and optimizers, or made them in a different "
            "order: ranks 0,2: a, b; rank 1: b, a; rank 3: none");
  EXPECT_EQ(FailureInfoOf(status)->ranks, std::vector<int>{1});
}

// The records of ranks that divide a batch of 8 samples in parts of `counts`.
std::vector<StepRecord> RecordsOf(const std::vector<int64_t>& counts, int64_t first = 16) {
  std::vector<StepRecord> records;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    records.push_back({.joined = counts[rank] == 0, .samples = counts[rank]});
    records.back().SetShares({.first = first, .samples = 8, .counts = counts},
                             static_cast<int>(rank));
  }
  return records;
}

TEST(AgreeTest, EachRankTakesItsShare) {
  EXPECT_TRUE(AgreeOn(RecordsOf({3, 3, 2})).ok());
  EXPECT_TRUE(AgreeOn(RecordsOf({4, 4, 0})).ok());
  std::vector<StepRecord> later = RecordsOf({4, 4, 0});
  later[2] = Exhausted();  // It has not divided this batch.
  EXPECT_TRUE(AgreeOn(later).ok());
  EXPECT_TRUE(AgreeOn({Active({}), Active({}), Exhausted()}).ok()) << "without shares";
  std::vector<StepRecord> ended = {Exhausted(), RecordsOf({3, 3, 2})[1], Exhausted()};
  ended[1].joined = true;
  EXPECT_TRUE(AgreeOn(ended).ok()) << "no rank takes a step";
}

TEST(AgreeTest, DetailsAreNeededWhereARankDoesNotTakeItsShare) {
  std::vector<std::vector<StepRecord>> wrong(10, RecordsOf({3, 3, 2}));
  wrong[0][1] = RecordsOf({3, 3, 2}, 24)[1];
  wrong[1][2] = RecordsOf({3, 2, 3})[2];
  wrong[2][1] = Active({});
  wrong[3][1] = Exhausted();
  wrong[4][1].joined = true;
  wrong[5] = RecordsOf({4, 4, 0});
  wrong[5][2].joined = false;
  for (int rank = 0; rank < 3; ++rank) {  // All of them.
    wrong[6][rank].samples = 1;
    wrong[6][rank].SetShares({.first = 16, .samples = 8, .counts = {3, 3, 2}}, rank);
  }
  // As many ranks take the step as have a part, but rank 0 in place of rank 2.
  wrong[7] = RecordsOf({0, 4, 4});
  wrong[7][0].joined = false;
  wrong[7][0].SetShares({.first = 16, .samples = 8, .counts = {0, 4, 4}}, 0);
  wrong[7][2] = Exhausted();
  for (int i : {8, 9}) {  // Samples that no step had would be a part of the divisor.
    wrong[i] = RecordsOf({0, 4, 4});
    wrong[i][0].samples = 5;
  }
  wrong[8][0].SetShares({.first = 16, .samples = 8, .counts = {0, 4, 4}}, 0);
  wrong[9][0].sharing = 0;
  for (size_t i = 0; i < wrong.size(); ++i)
    EXPECT_TRUE(absl::IsNotFound(AgreeOn(wrong[i]).status())) << i;
}

TEST(AgreeTest, TextsOfManyRanksAreShortAndDiffer) {
  EXPECT_EQ(TextOfCounts({}), "");
  EXPECT_EQ(TextOfCounts(std::vector<int64_t>(16, 1)), "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1");
  EXPECT_EQ(TextOfCounts(std::vector<int64_t>(17, 1)), "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,...");
  std::vector<int64_t> even(1000, 2), other = even;
  ++other[998];
  --other[999];
  const StepAnswer answer{
      .step = 7,
      .world_size = 1000,
      .active = 1000,
      .records = std::make_shared<const std::vector<StepRecord>>(RecordsOf(even))};
  std::vector<std::string> details;
  for (int rank = 0; rank < 1000; ++rank) {
    details.push_back(internal::ToBytes(
        StepDetails{.shares = {.samples = 2000, .counts = rank == 3 ? other : even}}));
  }
  const absl::Status status = CompareDetails(answer, details);
  EXPECT_EQ(FailureInfoOf(status)->ranks, std::vector<int>{3});
  EXPECT_LT(status.message().size(), 500u) << status;
}

TEST(AgreeTest, SeveralStepsOfAnIntervalHaveItsSamples) {
  IntervalSamples intervals(2);
  const auto add = [&](int64_t of_rank_0, int64_t of_rank_1, bool sync) {
    const std::vector<StepRecord> records = {
        {.samples = of_rank_0, .participants = {{.sync = sync}, {}}},
        {.samples = of_rank_1, .participants = {{.sync = sync}, {}}}};
    const absl::StatusOr<StepAnswer> answer = AgreeOn(records);
    EXPECT_TRUE(answer.ok()) << answer.status();
    const absl::Span<const int64_t> samples = intervals.Add(*answer);
    return std::vector<int64_t>(samples.begin(), samples.end());
  };
  EXPECT_EQ(add(1, 2, false), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(add(10, 20, true), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(add(100, StepRecord::kNotSaid, true), (std::vector<int64_t>{11, 22}));
  EXPECT_EQ(add(3, 4, false), (std::vector<int64_t>{100, 0}));
  EXPECT_EQ(add(3, 4, true), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(add(5, 5, true), (std::vector<int64_t>{6, 8}));
}

TEST(AgreeTest, WantsSamplesOnlyWhereTheyAreRequired) {
  StepRecord silent = Active({});
  silent.samples = StepRecord::kNotSaid;
  EXPECT_TRUE(AgreeOn({Active({}), silent}).ok());
  EXPECT_TRUE(AgreeOn({Active({}), Exhausted()}, SamplesRule::kRequired).ok());
  const absl::Status status = AgreeOn({Active({}), silent}, SamplesRule::kRequired).status();
  EXPECT_EQ(std::string(status.message()),
            "step 7: gradients are divided by the samples of all ranks, and rank 1 passed no "
            "number: call JoinScope::AddSamples() before each step");
  EXPECT_EQ(FailureInfoOf(status)->ranks, std::vector<int>{1});
}

}  // namespace
}  // namespace evenkeel
