// A good trace breaks no rule, and each rule finds the traces that break it.

#include "evenkeel/tests/simulation/replacement_rules.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::simulation {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::StartsWith;
using Kind = TraceEvent::Kind;
using Events = std::vector<TraceEvent>;

constexpr Process kRank{0, 0}, kLost{1, 0}, kNewcomer{1, 1}, kThird{2, 0};
constexpr uint64_t kStates[] = {100, 101, 102, 103};  // By finished steps.

TraceEvent Step(Kind kind, Process process, int group, int64_t step) {
  return {.kind = kind, .process = process, .group = group, .step = step, .state = kStates[step]};
}
TraceEvent GoesOn(Process process, int group, int64_t step, std::vector<Process> members) {
  TraceEvent event = Step(Kind::kGoesOn, process, group, step);
  event.members = std::move(members);
  return event;
}

// Three ranks train. One is lost after the first of three steps; the others finish none or one more
// before they ask, and a newcomer enters.
ReplacementTrace Good() {
  ReplacementTrace trace{.steps = 3, .wait = 5 * kSecond};
  Events& events = trace.events;
  const std::vector<Process> old = {kRank, kLost, kThird}, next = {kRank, kNewcomer, kThird};
  events.push_back({.kind = Kind::kDecided, .group = 0, .members = old});
  for (const Process process : old) {
    events.push_back({.kind = Kind::kStarts, .process = process});
    events.push_back(GoesOn(process, 0, 0, old));
  }
  for (const Process process : old) events.push_back(Step(Kind::kFinishes, process, 0, 1));
  events.push_back({.kind = Kind::kStrikes, .process = kLost});
  events.push_back(Step(Kind::kFinishes, kRank, 0, 2));
  events.push_back({.kind = Kind::kLost, .process = kLost});
  events.push_back(Step(Kind::kAsks, kRank, 0, 2));
  events.push_back(Step(Kind::kAsks, kThird, 0, 1));
  events.push_back({.kind = Kind::kGathered, .when = kSecond, .group = 0});
  events.push_back({.kind = Kind::kStarts, .process = kNewcomer});
  events.push_back({.kind = Kind::kAnnounced, .process = kNewcomer});
  events.push_back({.kind = Kind::kDecided, .when = 2 * kSecond, .group = 1, .members = next});
  events.push_back({.kind = Kind::kRecovered, .group = 1});
  for (const Process process : next) {
    events.push_back(GoesOn(process, 1, 1, next));
    events.back().source = 2;
  }
  for (int64_t step = 2; step <= 3; ++step) {
    for (const Process process : next) events.push_back(Step(Kind::kFinishes, process, 1, step));
  }
  events.push_back({.kind = Kind::kLastStep, .group = 1});
  for (const Process process : next)
    events.push_back({.kind = Kind::kEnds, .process = process, .step = 3});
  return trace;
}

// Finds the only event, or the first or last one, of a kind.
TraceEvent& First(ReplacementTrace& trace, Kind kind, Process process = kRank, int group = 1) {
  return *std::ranges::find_if(trace.events, [&](const TraceEvent& event) {
    const bool is_of_store = kind == Kind::kDecided || kind == Kind::kRecovered ||
                             kind == Kind::kGathered || kind == Kind::kLastStep;
    const bool has_group = is_of_store ? kind != Kind::kGathered : kind == Kind::kGoesOn;
    return event.kind == kind && (is_of_store || event.process == process) &&
           (!has_group || event.group == group);
  });
}

void Remove(ReplacementTrace& trace, Kind kind, Process process = kRank) {
  std::erase_if(trace.events, [&](const TraceEvent& event) {
    return event.kind == kind && event.process == process;
  });
}

// The rules that break when `change` has been made to the good trace.
std::vector<std::string> BrokenBy(const std::function<void(ReplacementTrace&)>& change) {
  ReplacementTrace trace = Good();
  change(trace);
  return BrokenRules(trace);
}

TEST(ReplacementRulesTest, AGoodTraceBreaksNone) { EXPECT_THAT(BrokenRules(Good()), IsEmpty()); }

TEST(ReplacementRulesTest, R1NoStepIsMadeInAnOlderGroupAndNoGroupIsDecidedTwice) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) {
                trace.events.insert(trace.events.end() - 4, Step(Kind::kBegins, kThird, 0, 1));
              }),
              ElementsAre("R1: 2/0 makes a step in group 0 after the decision on group 1"));
  EXPECT_THAT(BreakOfR1([] {
                ReplacementTrace trace = Good();
                trace.events.push_back(First(trace, Kind::kDecided));
                return trace;
              }()),
              "group 1 is decided after group 1");
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) {
                trace.events.push_back(Step(Kind::kBegins, kLost, 0, 1));
              }),
              IsEmpty())
      << "a lost process may run on";
}

TEST(ReplacementRulesTest, R2APlaceChangesItsHolderAfterALossToAHigherIncarnation) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) { Remove(trace, Kind::kLost, kLost); }),
              ElementsAre(StartsWith("R2: 1/1 gets the place of 1/0, which is not lost")));
  EXPECT_THAT(BreakOfR2({.events = {{.kind = Kind::kDecided, .members = {{0, 0}, {1, 3}}},
                                    {.kind = Kind::kLost, .process = {1, 3}},
                                    {.kind = Kind::kDecided, .group = 1, .members = {{1, 2}}}}}),
              "1/2 comes after 1/3");
  EXPECT_THAT(
      BrokenBy([](ReplacementTrace& trace) {
        trace.events.insert(trace.events.begin(), {.kind = Kind::kAnnounced, .process = {1, 2}});
      }),
      ElementsAre("R2: 1/1 is chosen, although 1/2 waits"));
  EXPECT_THAT(BreakOfR2({.events = {{.kind = Kind::kDecided, .members = {{0, 0}, {0, 1}}}}}),
              "group 0 has place 0 twice");
  EXPECT_THAT(BreakOfR2({.events = {{.kind = Kind::kDecided, .members = {{0, 0}}},
                                    {.kind = Kind::kDecided, .group = 1, .members = {{1, 1}}}}}),
              "place 1 was given up, and 1/1 gets it");
}

TEST(ReplacementRulesTest, R3ALostProcessIsNoMemberAndDoesNotRecover) {
  const TraceEvent lost = {.kind = Kind::kLost, .process = kThird};
  EXPECT_EQ(BreakOfR3({.events = {lost, {.kind = Kind::kDecided, .members = {kThird}}}}),
            "2/0 is lost, and group 0 has it");
  EXPECT_EQ(BreakOfR3({.events = {{.kind = Kind::kDecided, .members = {kThird}},
                                  lost,
                                  {.kind = Kind::kRecovered}}}),
            "2/0 is lost, and group 0 recovers with it");
}

TEST(ReplacementRulesTest, R4TheWaitsOfAPauseAreBounded) {
  EXPECT_THAT(
      BrokenBy([](ReplacementTrace& trace) { First(trace, Kind::kDecided).when = 14 * kSecond; }),
      ElementsAre("R4: the store has waited 12.4s before group 1"));
}

TEST(ReplacementRulesTest, R5AllContinueFromTheStateOfTheSource) {
  const auto broken = [](const std::function<void(TraceEvent&)>& change) {
    return BrokenBy(
        [&](ReplacementTrace& trace) { change(First(trace, Kind::kGoesOn, kNewcomer)); });
  };
  EXPECT_THAT(broken([](TraceEvent& event) { event.state = 7; }),
              ElementsAre(StartsWith("R5: 1/1 goes on in group 1 from step 1 of rank 2, 0/0 from "
                                     "step 1 of rank 2, with another state")));
  EXPECT_THAT(broken([](TraceEvent& event) { event.source = 0; }),
              ElementsAre(StartsWith("R5: 1/1 goes on in group 1 from step 1 of rank 0")));
  EXPECT_THAT(broken([](TraceEvent& event) { event.members.pop_back(); }),
              ElementsAre(StartsWith("R5: 1/1 goes on in group 1 from step 1 with 0/0 1/1, but")));
  const auto all = [](const std::function<void(TraceEvent&)>& change) {
    return BrokenBy([&](ReplacementTrace& trace) {
      for (TraceEvent& event : trace.events) {
        if (event.kind == Kind::kGoesOn && event.group == 1) change(event);
      }
    });
  };
  EXPECT_THAT(all([](TraceEvent& event) { event.state = 7; }),
              ElementsAre("R5: 0/0 goes on in group 1 from step 1, which is not the state of 2/0"));
  EXPECT_THAT(all([](TraceEvent& event) {
                event.source = 0;
                event.step = 2;
                event.state = kStates[2];
              }),
              ElementsAre("R5: 0/0 goes on in group 1 from step 2, but 2/0 has finished 1"));
}

TEST(ReplacementRulesTest, R6NoneGoesOnBeforeAllHaveRecovered) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) { Remove(trace, Kind::kRecovered, Process()); }),
              ElementsAre("R6: 0/0 goes on in group 1 before all members have recovered"));
}

TEST(ReplacementRulesTest, R7FinishedStepsDifferByOne) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) {
                std::erase_if(trace.events, [](const TraceEvent& event) {
                  return event.kind == Kind::kFinishes && event.process == kThird &&
                         event.group == 1;
                });
              }),
              ElementsAre("R7: 0/0 has finished 3 steps, 2/0 1"));
}

TEST(ReplacementRulesTest, R8WhoIsNotLostFinishes) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) {
                First(trace, Kind::kEnds, kNewcomer).is_error = true;
              }),
              ElementsAre("R8: 1/1 does not finish the last step"));
}

TEST(ReplacementRulesTest, R9NoStepFollowsTheLastOne) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) {
                trace.events.push_back(Step(Kind::kBegins, kThird, 1, 2));
              }),
              ElementsAre("R9: 2/0 begins step 2 in group 1 after the agreement on the last step"));
}

TEST(ReplacementRulesTest, R10EachProcessEnds) {
  EXPECT_THAT(BrokenBy([](ReplacementTrace& trace) {
                trace.events.push_back({.kind = Kind::kStarts, .process = {1, 2}});
              }),
              ElementsAre("R10: 1/2 has no end"));
}

TEST(ReplacementRulesTest, Phase4ANewcomerThatWaitsEntersAndAPlaceIsNotGivenUpEarly) {
  const auto without_the_newcomer = [](ReplacementTrace& trace) {
    trace.events.resize(&First(trace, Kind::kDecided) - trace.events.data() + 1);
    trace.events.back().members = {kRank, kThird};
  };
  ReplacementTrace trace = Good();
  without_the_newcomer(trace);
  EXPECT_EQ(BreakOfPhase4(trace), "group 1 gives up place 1, for which 1/1 waits");
  Remove(trace, Kind::kAnnounced, kNewcomer);
  EXPECT_EQ(BreakOfPhase4(trace), "group 1 gives up place 1 after 1s");
  trace.events.back().when = 6 * kSecond;
  EXPECT_EQ(BreakOfPhase4(trace), "");
}

}  // namespace
}  // namespace evenkeel::simulation
