#include "evenkeel/bucket/plan_state.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

std::string PlanState::Serialize() const {
  internal::ByteWriter writer;
  writer.U64(generation).Bytes(mask.Serialize()).Bool(order_final).U32(static_cast<uint32_t>(order.size()));
  for (const int index : order) writer.I32(index);
  return writer.Take();
}

absl::StatusOr<PlanState> PlanState::Parse(absl::string_view bytes, int param_count) {
  internal::ByteReader reader(bytes);
  PlanState state;
  state.generation = reader.U64();
  const absl::string_view mask_bytes = reader.Bytes();
  state.order_final = reader.Bool();
  const uint32_t order_size = reader.U32();
  if (order_size != 0 && order_size != static_cast<uint32_t>(param_count)) reader.Refuse();
  std::vector<bool> seen(param_count, false);
  for (uint32_t i = 0; i < order_size && reader.ok(); ++i) {
    const int index = reader.I32();
    if (index < 0 || index >= param_count || seen[index]) {
      reader.Refuse();
      break;
    }
    seen[index] = true;
    state.order.push_back(index);
  }
  EK_RETURN_IF_ERROR(reader.Finish("a plan's state"));
  EK_ASSIGN_OR_RETURN(state.mask, TrainableMask::Parse(mask_bytes));
  if (state.mask.size() == param_count) return state;
  return absl::InvalidArgumentError(
      absl::StrCat("a plan's state for ", param_count, " parameters has a mask of ", state.mask.size()));
}

absl::StatusOr<BucketPlan> PlanFor(const PlanState& state, std::span<const ParamSpec> specs,
                                   const std::vector<Bytes>& caps) {
  std::vector<int> trained;
  trained.reserve(specs.size());
  if (state.order.empty()) {
    for (int i = 0; i < state.mask.size(); ++i) {
      if (state.mask[i]) trained.push_back(i);
    }
    return PlanFirstStep(specs, trained);
  }
  for (int i : state.order) {
    if (state.mask[i]) trained.push_back(i);
  }
  if (trained.empty()) return BucketPlan{};
  return PlanBuckets(specs, {.caps = caps, .order = std::move(trained)});
}

void AdoptOrder(PlanState& state, std::span<const int> recorded) {
  const int count = state.mask.size();
  std::vector<int> before = std::move(state.order);
  if (before.empty()) {
    for (int i = count - 1; i >= 0; --i) before.push_back(i);  // Last registered is usually first ready.
  }
  std::vector<bool> placed(count, false);
  state.order.assign(recorded.begin(), recorded.end());
  for (int i : recorded) placed[i] = true;
  for (int i : before) {
    if (!placed[i]) state.order.push_back(i);
  }
  state.order_final = true;
  ++state.generation;
}

void AdoptMask(PlanState& state, const TrainableMask& mask) {
  state.mask = mask;
  state.order_final = false;
  ++state.generation;
}

}  // namespace evenkeel
