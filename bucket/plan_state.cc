#include "evenkeel/bucket/plan_state.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

std::string PlanState::Serialize() const {
  const std::string mask_bytes = mask.Serialize();
  const uint64_t header[4] = {generation, mask_bytes.size(), order.size(), order_final};
  std::string bytes(reinterpret_cast<const char*>(header), sizeof(header));
  bytes += mask_bytes;
  bytes.append(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int));
  return bytes;
}

absl::StatusOr<PlanState> PlanState::Parse(absl::string_view bytes, int param_count) {
  const absl::Status malformed =
      absl::InvalidArgumentError(absl::StrCat("a plan state of ", bytes.size(), " bytes is malformed"));
  uint64_t header[4];
  if (bytes.size() < sizeof(header)) return malformed;
  std::memcpy(header, bytes.data(), sizeof(header));
  bytes.remove_prefix(sizeof(header));
  const auto [generation, mask_size, order_size, order_final] = header;
  if (order_size != 0 && order_size != static_cast<uint64_t>(param_count)) return malformed;
  if (order_final > 1) return malformed;
  if (mask_size > bytes.size() || bytes.size() - mask_size != order_size * sizeof(int)) return malformed;
  PlanState state;
  state.generation = generation;
  state.order_final = order_final != 0;
  EK_ASSIGN_OR_RETURN(state.mask, TrainableMask::Parse(bytes.substr(0, mask_size)));
  if (state.mask.size() != param_count) return malformed;
  state.order.resize(order_size);
  if (order_size > 0) std::memcpy(state.order.data(), bytes.data() + mask_size, order_size * sizeof(int));
  std::vector<bool> seen(param_count, false);
  for (int index : state.order) {
    if (index < 0 || index >= param_count || seen[index]) return malformed;
    seen[index] = true;
  }
  return state;
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
