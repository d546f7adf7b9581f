#include "evenkeel/bucket/plan/plan_state.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

std::string PlanState::Serialize() const {
  internal::ByteWriter writer;
  writer.U64(generation).Bytes(mask.Serialize()).Bool(order_final);
  writer.Bool(cap_order == CapOrder::kFromLastReady).U32(static_cast<uint32_t>(caps.size()));
  for (const evenkeel::Bytes cap : caps) writer.I64(cap.value);
  writer.U8(0);  // Until 0.3: the way of fusing gradients that was measured to be faster.
  writer.U32(static_cast<uint32_t>(order.size()));
  for (const int index : order) writer.I32(index);
  return writer.Take();
}

absl::StatusOr<PlanState> PlanState::Parse(absl::string_view bytes, int param_count) {
  internal::ByteReader reader(bytes);
  PlanState state;
  state.generation = reader.U64();
  const absl::string_view mask_bytes = reader.Bytes();
  state.order_final = reader.Bool();
  state.cap_order = reader.Bool() ? CapOrder::kFromLastReady : CapOrder::kFromFirstReady;
  const uint32_t cap_count = reader.U32();
  for (uint32_t i = 0; i < cap_count && reader.ok(); ++i) {
    state.caps.push_back({reader.I64()});
    if (state.caps.back().value < 0) reader.Refuse();
  }
  if (reader.U8() != 0) reader.Refuse();
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
  return absl::InvalidArgumentError(absl::StrCat("a plan's state for ", param_count,
                                                 " parameters has a mask of ", state.mask.size()));
}

absl::StatusOr<BucketPlan> PlanFor(const PlanState& state, std::span<const ParamSpec> specs,
                                   const std::vector<Bytes>& caps, CapOrder cap_order) {
  if (state.order.empty()) {
    std::vector<int> trained;
    for (int i = 0; i < state.mask.size(); ++i) {
      if (state.mask[i]) trained.push_back(i);
    }
    return PlanFirstStep(specs, trained);
  }
  std::vector<int> trained = PlannedOrder(state);
  if (trained.empty()) return BucketPlan{};
  const bool is_tuned = !state.caps.empty();
  return PlanBuckets(specs, {.caps = is_tuned ? state.caps : caps,
                             .order = std::move(trained),
                             .cap_order = is_tuned ? state.cap_order : cap_order});
}

std::vector<int> PlannedOrder(const PlanState& state) {
  std::vector<int> trained;
  trained.reserve(state.order.size());
  for (int i : state.order) {
    if (state.mask[i]) trained.push_back(i);
  }
  return trained;
}

void AdoptOrder(PlanState& state, std::span<const int> recorded) {
  const int count = state.mask.size();
  std::vector<int> before = std::move(state.order);
  if (before.empty()) {
    for (int i = count - 1; i >= 0; --i)
      before.push_back(i);  // Last registered is usually first ready.
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

void AdoptCaps(PlanState& state, std::vector<Bytes> caps, CapOrder cap_order) {
  state.caps = std::move(caps);
  state.cap_order = cap_order;
  ++state.generation;
}

void AdoptMask(PlanState& state, const TrainableMask& mask) {
  state.mask = mask;
  state.order_final = false;
  ++state.generation;
}

}  // namespace evenkeel
