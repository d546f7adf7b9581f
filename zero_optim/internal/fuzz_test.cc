// No bytes that another rank sends as an optimizer's step, owners or facts do harm.

#include "evenkeel/comm/testing/fuzz.h"

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/zero_optim/internal/placement/shard_move.h"
#include "evenkeel/zero_optim/internal/placement/slice_recovery.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/partition.h"
#include "evenkeel/zero_optim/update_rule.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

const FuzzOptions kShort = {.rounds = 5000};

void ExpectValid(const StepMessage& step, int params) {
  for (const UpdateRule& rule : step.rules) EXPECT_TRUE(Validate(rule).ok());
  EXPECT_TRUE(CheckOptions(step.options).ok());
  EXPECT_EQ(step.sources.size(), static_cast<size_t>(params));
}

// Returns the step of an action, if it has one.
const StepMessage* StepOf(const OptimizerAction& action) {
  const auto* const check = std::get_if<CheckAction>(&action);
  return check != nullptr ? &check->step : std::get_if<StepMessage>(&action);
}

TEST(ZeroOptimFuzzTest, StepMessage) {
  for (const int params : {0, 1, 4, 7, 1000}) {
    SCOPED_TRACE(absl::StrCat(params, " parameters"));
    std::vector<GradientSource> sources;
    for (int i = 0; i < params; ++i) sources.push_back(static_cast<GradientSource>(i % 3));
    std::vector<std::string> good;
    for (const UpdateRule& rule :
         {UpdateRule(Sgd{.momentum = 0.9}), UpdateRule(Adam{}), UpdateRule(AdamW{})}) {
      good.push_back(
          StepMessage{.rules = {rule, Sgd{}}, .options = {.skip = true}, .sources = sources}
              .Serialize());
      good.push_back(
          StepMessage{.rules = {rule}, .options = {.clip = ClipOptions{}}, .sources = sources}
              .Serialize());
    }
    Fuzz(
        good,
        [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
          const absl::StatusOr<StepMessage> step = StepMessage::Parse(bytes, params);
          if (!step.ok()) return step.status();
          ExpectValid(*step, params);
          return step->Serialize();
        },
        kShort);
  }
}

TEST(ZeroOptimFuzzTest, OptimizerAction) {
  const StepMessage step{.rules = {AdamW{}}, .sources = {GradientSource::kToReduce}};
  const OptimizerAction actions[] = {step, CheckAction{step}, RebalanceAction(),
                                     SaveAction{.is_async = true, .folder = "checkpoints"},
                                     VisitAction{.to = 3, .chunk_bytes = 1 << 20}};
  std::vector<std::string> good;
  for (const OptimizerAction& action : actions) good.push_back(ToBytes(action));
  Fuzz(
      good,
      [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
        const absl::StatusOr<OptimizerAction> action =
            FromBytes<OptimizerAction>(bytes, "an action");
        if (!action.ok()) return action.status();
        // As an exhausted rank does before it repeats the action.
        const StepMessage* const sent = StepOf(*action);
        if (sent != nullptr && sent->CheckFor(/*param_count=*/1).ok()) ExpectValid(*sent, 1);
        return ToBytes(*action);
      },
      kShort);
}

TEST(ZeroOptimFuzzTest, OwnerTable) {
  OwnerTable table({4, 2, 2, 1, 7}, 3);
  const std::string nobody = table.Serialize();
  ASSERT_TRUE(table.Assign(std::vector<int>{0, 1, 3, 4}).ok());
  Fuzz({nobody, table.Serialize()}, [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
    OwnerTable restored({4, 2, 2, 1, 7}, 3);
    if (const absl::Status status = restored.Restore(bytes); !status.ok()) return status;
    return restored.Serialize();
  });
}

TEST(ZeroOptimFuzzTest, ShardFacts) {
  constexpr int kParams = 5;
  const ShardFacts facts{
      .standing = {.steps_finished = 17, .may_lose = true, .checkpoint_hint = "checkpoints/last"},
      .generation = 4,
      .old_rank = 2,
      .mask = TrainableMask(kParams, true),
      .owners = {0, 1, -1, 2, 0},
      .was_updated = {1, 1, 0, 0, 1},
      .held_steps = {17, 0, 0, 0, 3}};
  Fuzz({facts.Serialize()}, [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::StatusOr<ShardFacts> parsed = ShardFacts::Parse(bytes, kParams);
    if (!parsed.ok()) return parsed.status();
    return parsed->Serialize();
  });
}

TEST(ZeroOptimFuzzTest, SliceFacts) {
  const std::vector<int64_t> sizes = {10, 0, 300};
  SliceFacts facts{.standing = {.steps_finished = 17,
                                .may_lose = true,
                                .holds_state = true,
                                .checkpoint_hint = "last"},
                   .old_rank = 2,
                   .old_world_size = 4};
  facts.held = {{.step = 17, .begin = 3, .count = 7}, {.step = 17}, {.begin = 100, .count = 200}};
  Fuzz({facts.Serialize()}, [&](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::StatusOr<SliceFacts> parsed = SliceFacts::Parse(bytes, sizes);
    if (!parsed.ok()) return parsed.status();
    return parsed->Serialize();
  });
}

}  // namespace
}  // namespace evenkeel::internal
