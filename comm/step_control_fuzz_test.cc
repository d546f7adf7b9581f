// No bytes that another rank sends as the record of a step do harm.

#include <string>

#include "evenkeel/comm/step_control.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(StepControlFuzzTest, StepRecord) {
  const ParticipantState reducer{.name_hash = 1, .generation = 2, .schedule_hash = 3, .mask_hash = 4};
  const ParticipantState optimizer{.name_hash = 5, .sync = false, .note = std::string(256, 'n')};
  const StepRecord alone{}, full{.joined = true,
                                 .requests = 7,
                                 .samples = -1,
                                 .scope_hash = ~uint64_t{0},
                                 .participants = {reducer, optimizer}};
  Fuzz({alone.Serialize(), full.Serialize()}, Again<StepRecord>);
}

}  // namespace
}  // namespace evenkeel
