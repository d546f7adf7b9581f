// Code of the loop between the calls of the library counts as in one process, or is an error that
// names the cause.

#include "evenkeel/tests/programs/program.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Ne;

using Inputs = std::vector<int>;
const std::vector<Inputs> kInputs = {{3}, {2, 2}, {1, 3}, {3, 0, 2}};
const std::vector<Inputs> kUneven = {{1, 3}, {3, 0, 2}};
const Placement kWithSteps[] = {Replicated{}, WholeTensors{.bucket_cap = Bytes{256}}, Slices{},
                                Slices{.overlap_forward = true}};

// Over backends that are not tested in full the last one.
std::vector<Inputs> Tested(std::vector<Inputs> inputs) {
  if (!TheTestBackend().is_in_full) inputs = {inputs.back()};
  return inputs;
}

// By rank: how it ended, "" if well. Where it is well, the values are those of one process.
std::vector<std::string> EndsOf(const Program& program) {
  const std::string want = RunAlone(program);
  std::vector<std::string> ends(program.inputs.size());
  (void)RunTestRanks(static_cast<int>(ends.size()),
                     [&](Communicator& comm) -> absl::Status {
                       const absl::StatusOr<std::string> values = RunRank(program, comm);
                       ends[comm.rank()] = std::string(values.status().message());
                       if (!values.ok()) return values.status();
                       if (!IsNear(*values, want)) ends[comm.rank()] = "other values";
                       return absl::OkStatus();
                     },
                     {.timeout = absl::Seconds(60)});
  return ends;
}

TEST(ProgramTest, FunctionsBeforeAndAfterTheUpdateActAsInOneProcess) {
  for (const Inputs& inputs : Tested(kInputs)) {
    for (const Placement& placement : kWithSteps) {
      for (const bool is_other : {false, true}) {
        Program program{.inputs = inputs,
                        .placement = placement,
                        .has_views = is_other,
                        .lacks_gradients = is_other,
                        .has_function_before = true,
                        .has_function_after = is_other,
                        .acts = {{.step = 1, .act = is_other ? Act::kRepeatStep : Act::kSkipStep}}};
        if (is_other) program.options.clip = ClipOptions{.max_norm = 0.5};
        EXPECT_THAT(EndsOf(program), Each("")) << ToString(program);
      }
    }
    const Program local{.inputs = inputs,
                        .placement = WholeTensors{.bucket_cap = Bytes{256}},
                        .lacks_gradients = true,
                        .has_function_before = true,
                        .is_without_reducer = true};
    EXPECT_THAT(EndsOf(local), Each("")) << ToString(local);
  }
}

TEST(ProgramTest, ClearedFrozenAndRepeatedStepsCountWithEveryPlacement) {
  const std::vector<Action> acts[] = {
      {{.step = 1, .act = Act::kClear}},
      {{.step = 1, .act = Act::kClearAll}},
      {{.step = 0, .act = Act::kFreeze},
       {.step = 1, .at = At::kBeforeBegin, .act = Act::kUnfreeze}},
      {{.step = 0, .act = Act::kRepeatStep}},  // The second one adopts another plan.
      {{.step = 1, .act = Act::kRepeatStep}},
      {{.step = 1, .act = Act::kRepeatStep},
       {.step = 1, .at = At::kBetweenSteps, .act = Act::kFreeze}},
      {{.step = 1, .act = Act::kRepeatStep},
       {.step = 1, .at = At::kBetweenSteps, .act = Act::kClear}},
      {{.step = 1, .act = Act::kOmitStep}},
  };
  for (const Inputs& inputs : Tested(kInputs)) {
    for (const Placement& placement : kWithSteps) {
      for (const std::vector<Action>& some : acts) {
        const Program program{.inputs = inputs, .placement = placement, .acts = some};
        EXPECT_THAT(EndsOf(program), Each("")) << ToString(program);
      }
    }
  }
}

TEST(ProgramTest, WhatOnlyRanksWithInputChangeIsAnErrorThatNamesIt) {
  for (const Inputs& inputs : Tested(kUneven)) {
    for (const Placement& placement :
         {Placement(Replicated{}), Placement(Replicated{.update_in_backward = true}),
          Placement(WholeTensors{}), Placement(Slices{}),
          Placement(Slices{.update_in_backward = true}),
          Placement(Slices{.overlap_forward = true})}) {
      for (const int step : {1, 2}) {
        for (const At at : {At::kBeforeBegin, At::kBeforeStep, At::kAfterStep}) {
          const auto* const slices = std::get_if<Slices>(&placement);
          // In the middle of an update, which the loop must not disturb.
          if (slices != nullptr && slices->update_in_backward && at == At::kBeforeStep) continue;
          const Program program{.inputs = inputs,
                                .placement = placement,
                                .acts = {{.step = step, .at = at, .act = Act::kChangeValue}}};
          EXPECT_THAT(EndsOf(program), Each(AllOf(HasSubstr("\"p2\""), HasSubstr("AfterUpdate()"))))
              << ToString(program);
        }
        const Program program{.inputs = inputs,
                              .placement = placement,
                              .acts = {{.step = step, .act = Act::kChangeGradient}}};
        if (placement == Placement(Replicated{.update_in_backward = true})) continue;  // None.
        EXPECT_THAT(EndsOf(program),
                    Each(AllOf(HasSubstr("the gradient of \"p2\""), HasSubstr("BeforeUpdate()"))))
            << ToString(program);
      }
    }
  }
}

TEST(ProgramTest, WhatOneRankAloneDoesIsAnErrorThatNamesTheParameter) {
  for (const Inputs& inputs : Tested({{3, 3}, {3, 3, 1}})) {
    for (const Placement& placement : kWithSteps) {
      for (const Act act : {Act::kClear, Act::kClearAll, Act::kFreeze}) {
        for (const int step : {0, 2}) {
          const Program program{.inputs = inputs,
                                .placement = placement,
                                .acts = {{.step = step, .act = act, .param = 0, .ranks = {1}}}};
          EXPECT_THAT(EndsOf(program), Each(HasSubstr("\"p0\""))) << ToString(program);
        }
      }
    }
  }
  for (const Placement& placement : {Placement(Replicated{}), Placement(WholeTensors{})}) {
    const Program program{.inputs = {3, 3, 1},
                          .placement = placement,
                          .acts = {{.step = 2, .act = Act::kChangeGradient, .ranks = {1}}}};
    EXPECT_THAT(EndsOf(program), Each(HasSubstr("rank 1 has hash of values and gradients=")))
        << ToString(program);
  }
  for (const Act act : {Act::kOmitStep, Act::kSkipStep}) {
    const Program program{.inputs = {3, 3, 1}, .acts = {{.step = 1, .act = act, .ranks = {1}}}};
    EXPECT_THAT(EndsOf(program), Each(HasSubstr("rank 1 has "))) << ToString(program);
  }
}

TEST(ProgramTest, WithoutADataParallelTheOptimizerComparesTheValues) {
  for (const Inputs& inputs : Tested(kUneven)) {
    for (const At at : {At::kBeforeBegin, At::kBeforeStep, At::kAfterStep}) {
      const Program program{.inputs = inputs,
                            .placement = WholeTensors{},
                            .is_without_reducer = true,
                            .acts = {{.step = 2, .at = at, .act = Act::kChangeValue}}};
      EXPECT_THAT(EndsOf(program), Each(AllOf(HasSubstr("\"p2\""), HasSubstr("AfterUpdate()"))))
          << ToString(program);
    }
  }
}

// It is found in the first steps, in even ones, too.
TEST(ProgramTest, GradientsThatChangeOutsideOfTheSlicesAreAnError) {
  for (const Inputs& inputs : {Inputs{2}, Inputs{2, 2}}) {
    for (const bool has_views : {false, true}) {
      const Program program{.inputs = inputs,
                            .placement = Slices{},
                            .has_views = has_views,
                            .acts = {{.step = 1, .act = Act::kChangeGradient}}};
      EXPECT_THAT(EndsOf(program), Each(HasSubstr("changed the memory of the gradient of \"p2\"")));
    }
  }
}

TEST(ProgramTest, UpdatesInBackwardRefuseWhatComesTooLate) {
  const Placement placement = Slices{.update_in_backward = true};
  for (const Act act : {Act::kClear, Act::kFreeze, Act::kRepeatStep, Act::kOmitStep}) {
    const Program program{
        .inputs = {1, 3}, .placement = placement, .acts = {{.step = 1, .act = act}}};
    EXPECT_THAT(EndsOf(program), Each(AllOf(Ne(""), Ne("other values")))) << ToString(program);
  }
  const Program cleared_and_frozen{
      .inputs = {1, 3},
      .placement = placement,
      .acts = {{.step = 1, .act = Act::kClear}, {.step = 1, .act = Act::kFreeze, .param = 3}}};
  EXPECT_THAT(EndsOf(cleared_and_frozen), Each(AllOf(Ne(""), Ne("other values"))));
  // A gradient that no rank has was not used.
  std::vector<std::string> ends;
  for (int param = 0; param < kProgramParams; ++param) {
    for (const Act act : {Act::kClear, Act::kFreeze}) {
      ends.push_back(EndsOf({.inputs = {2},
                             .placement = placement,
                             .lacks_gradients = true,
                             .acts = {{.step = 1, .act = act, .param = param}}})[0]);
    }
  }
  EXPECT_THAT(ends, Each(AnyOf("", HasSubstr("was updated in backward already"))));
  EXPECT_THAT(ends, AllOf(Contains(""), Contains(Ne(""))));
  for (const Placement& in_backward :
       {placement, Placement(Replicated{.update_in_backward = true})}) {
    const Program program{.inputs = {1, 2}, .placement = in_backward, .has_function_before = true};
    EXPECT_THAT(EndsOf(program), Each(HasSubstr("has no BeforeUpdate() with update_in_backward")));
  }
}

}  // namespace
}  // namespace evenkeel
