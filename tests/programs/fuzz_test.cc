// Random programs: each ends with the values of one process, or with an error on all ranks; it
// never ends with other values, and never hangs.
//
// EVENKEEL_TEST_PROGRAMS sets their number, EVENKEEL_TEST_FIRST the seed of the first.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/programs/program.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

int64_t Number(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  int64_t number = 0;
  return text != nullptr && absl::SimpleAtoi(text, &number) ? number : otherwise;
}

class Draws {
 public:
  explicit Draws(uint64_t seed) : engine_(seed) {}
  int Below(int bound) { return static_cast<int>(engine_() % static_cast<uint64_t>(bound)); }
  bool OneIn(int n) { return Below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

bool UpdatesInBackward(const Placement& placement) {
  const auto* const replicated = std::get_if<Replicated>(&placement);
  const auto* const slices = std::get_if<Slices>(&placement);
  return (replicated != nullptr && replicated->update_in_backward) ||
         (slices != nullptr && slices->update_in_backward);
}

Action DrawAction(Draws& draw, const Program& program) {
  Action action{.step = draw.Below(program.steps()), .param = draw.Below(kProgramParams)};
  if (UpdatesInBackward(program.placement)) {
    constexpr Act kActs[] = {Act::kChangeValue, Act::kFreeze, Act::kUnfreeze};
    action.act = kActs[draw.Below(3)];
    action.at = draw.OneIn(2) ? At::kBeforeBegin : At::kAfterStep;
    return action;
  }
  action.act = static_cast<Act>(draw.Below(9));
  action.at = static_cast<At>(draw.Below(4));
  // Each Step() uses up the ranks' own gradients; those that it leaves enter the next one.
  const bool needs_reduced = action.act == Act::kChangeGradient || action.act == Act::kRepeatStep ||
                             action.act == Act::kOmitStep;
  if (program.is_without_reducer && needs_reduced) action.act = Act::kChangeValue;
  // In even steps this is found in the first ones.
  const bool has_slices = std::holds_alternative<Slices>(program.placement);
  if (action.act == Act::kChangeGradient && has_slices) action.step = std::min(action.step, 1);
  if (action.act == Act::kChangeGradient) action.at = At::kBeforeStep;
  // Changes of memory by a rank alone are found in uneven steps only. Its own gradients, which
  // Step() will reduce, it may clear.
  const bool is_change = action.act == Act::kChangeValue || action.act == Act::kChangeGradient;
  const bool clears_own =
      program.is_without_reducer && (action.act == Act::kClear || action.act == Act::kClearAll);
  const bool is_before_step = action.at == At::kBeforeStep && !clears_own;
  const bool is_compared =
      is_change ? !program.IsEven(action.step) : action.act >= Act::kOmitStep || is_before_step;
  const bool is_first_partial =
      std::ranges::all_of(program.acts, [](const Action& other) { return other.ranks.empty(); });
  std::vector<int> active;
  for (int rank = 0; rank < static_cast<int>(program.inputs.size()); ++rank)
    if (action.step < program.inputs[rank]) active.push_back(rank);
  if (is_compared && is_first_partial && active.size() > 1 && draw.OneIn(8))
    action.ranks = {active[draw.Below(static_cast<int>(active.size()))]};
  return action;
}

Program DrawProgram(uint64_t seed) {
  Draws draw(seed);
  Program program;
  const int world = 1 + draw.Below(3);
  const bool is_even = draw.OneIn(3);
  const int steps = 1 + draw.Below(4);
  for (int rank = 0; rank < world; ++rank)
    program.inputs.push_back(is_even ? steps : draw.Below(5));
  if (program.steps() == 0) program.inputs[0] = steps;
  const Placement placements[] = {Replicated{},
                                  Replicated{.update_in_backward = true},
                                  WholeTensors{.bucket_cap = Bytes{256}},
                                  WholeTensors{},
                                  Slices{},
                                  Slices{},
                                  Slices{.overlap_forward = true},
                                  Slices{.update_in_backward = true}};
  program.placement = placements[draw.Below(8)];
  program.is_without_reducer =
      std::holds_alternative<WholeTensors>(program.placement) && draw.OneIn(2);
  if (draw.OneIn(2)) program.rule = Sgd{.learning_rate = 0.1, .momentum = 0.9};
  program.has_views = draw.OneIn(2);
  program.lacks_gradients = draw.OneIn(3);
  if (!UpdatesInBackward(program.placement)) {
    if (draw.OneIn(3)) program.options.clip = ClipOptions{.max_norm = 0.5};
    program.has_function_before = draw.OneIn(3);
    program.has_function_after = draw.OneIn(3);
  }
  for (int acts = draw.Below(4); acts > 0; --acts)
    program.acts.push_back(DrawAction(draw, program));
  return program;
}

// Returns whether an error would be wrong: each rank with input does the same, and what exhausted
// ranks, or slices, cannot know of is not done there.
bool MustSucceed(const Program& program) {
  const bool has_slices = std::holds_alternative<Slices>(program.placement);
  const auto has = [&](Act act) {
    return std::ranges::any_of(program.acts,
                               [&](const Action& action) { return action.act == act; });
  };
  if (has_slices && has(Act::kChangeGradient)) return false;
  int omitted = 0;  // An optimizer must step.
  for (int step = 0; step < program.steps(); ++step) {
    omitted += std::ranges::any_of(program.acts, [&](const Action& action) {
      return action.act == Act::kOmitStep && action.step == step;
    });
  }
  if (omitted == program.steps()) return false;
  return std::ranges::all_of(program.acts, [&](const Action& action) {
    const bool is_change = action.act == Act::kChangeValue || action.act == Act::kChangeGradient;
    return action.ranks.empty() && (!is_change || program.IsEven(action.step));
  });
}

struct Ends {
  std::vector<std::string> errors;  // By rank; empty: it ended well.
  std::vector<std::string> values;
};

Ends EndsOf(const Program& program) {
  const int world = static_cast<int>(program.inputs.size());
  Ends ends{.errors = std::vector<std::string>(world), .values = std::vector<std::string>(world)};
  (void)RunTestRanks(world,
                     [&](Communicator& comm) -> absl::Status {
                       const absl::StatusOr<std::string> values = RunRank(program, comm);
                       if (values.ok()) ends.values[comm.rank()] = *values;
                       ends.errors[comm.rank()] = std::string(values.status().message());
                       return values.status();
                     },
                     {.timeout = absl::Seconds(20),
                      .watch = {.beat = absl::Milliseconds(50),
                                .silence = absl::Seconds(10),
                                .warn = [](const std::string&) {}}});
  return ends;
}

// Returns "" or what is wrong.
std::string Problem(const Program& program, const Ends& ends) {
  const auto is_well = [](const std::string& error) { return error.empty(); };
  if (!std::ranges::any_of(ends.errors, is_well)) {
    const bool is_late = std::ranges::any_of(ends.errors, [](const std::string& error) {
      return absl::StrContains(error, "timeout") || absl::StrContains(error, "deadline");
    });
    if (is_late) return absl::StrCat("a rank waited until the deadline: ", ends.errors[0]);
    return MustSucceed(program) ? absl::StrCat("an error: ", ends.errors[0]) : "";
  }
  if (!std::ranges::all_of(ends.errors, is_well))
    return absl::StrCat("an error on some ranks only: \"", absl::StrJoin(ends.errors, "\", \""),
                        "\"");
  Program other = program;
  std::erase_if(other.acts, [](const Action& action) { return !action.ranks.empty(); });
  const std::string want = RunAlone(program), without = RunAlone(other);
  // If one rank alone did something, it counts on all, or on none.
  for (const std::string& one : {want, without}) {
    if (std::ranges::all_of(ends.values,
                            [&](const std::string& values) { return IsNear(values, one); }))
      return "";
  }
  return "other values";
}

TEST(ProgramFuzzTest, EndsAsInOneProcessOrWithAnError) {
  const int64_t first = Number("EVENKEEL_TEST_FIRST", 0);
  const int64_t count = Number("EVENKEEL_TEST_PROGRAMS", 500);
  int failures = 0, refused = 0;
  absl::Duration longest;
  for (int64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const Program program = DrawProgram(static_cast<uint64_t>(seed));
    const absl::Time begin = absl::Now();
    const Ends ends = EndsOf(program);
    longest = std::max(longest, absl::Now() - begin);
    refused += ends.errors[0].empty() ? 0 : 1;
    const std::string problem = Problem(program, ends);
    if (problem.empty()) continue;
    ++failures;
    ADD_FAILURE() << "seed " << seed << ": " << problem << "\n  " << ToString(program);
  }
  std::cout << count << " programs from seed " << first << ": " << refused
            << " refused, the longest took " << longest << std::endl;
}

}  // namespace
}  // namespace evenkeel
