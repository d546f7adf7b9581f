#include "evenkeel/comm/nccl/launch_order.h"

#include <bit>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/ranks/parties.h"

namespace evenkeel::internal {
namespace {

absl::Status DisagreementOf(const std::map<int, LaunchRequest>& requests) {
  std::map<int, AtOperation> ranks;
  for (const auto& [rank, request] : requests) ranks[rank] = {request.key.sequence, request.text};
  return Disagreement(ranks);
}

}  // namespace

LaunchRequest RequestOf(const Operation& operation, int rank, uint64_t layout) {
  LaunchRequest request{.key = {operation.channel, operation.sequence}, .layout = layout};
  Collective what = operation.what;
  request.text = ToString(what);
  if (what.kind == CollectiveKind::kSend) {
    request.key.from = rank;
    request.key.to = what.root;
  } else if (what.kind == CollectiveKind::kRecv) {
    request.key.from = what.root;
    request.key.to = rank;
    what.kind = CollectiveKind::kSend;  // The two halves are one thing.
    what.root = rank;
  }
  if (operation.scale != 1.0) absl::StrAppend(&request.text, ", scale ", operation.scale);
  request.hash =
      StableHash(HashOf(what, operation.step_of), std::bit_cast<uint64_t>(operation.scale));
  return request;
}

absl::StatusOr<std::optional<LaunchTurn>> LaunchOrder::Arrive(int rank,
                                                              const LaunchRequest& request) {
  if (rank < 0 || rank >= world_size_ || !request.key.Concerns(rank)) {
    return absl::InternalError(absl::StrCat(
        "rank ", rank, " requests a launch in which it takes no part: ", request.text));
  }
  std::map<int, LaunchRequest>& parts = arrived_[request.key];
  parts[rank] = request;
  LaunchTurn turn{.key = request.key};
  for (const auto& [other, part] : parts) {
    if (part.hash != request.hash) return DisagreementOf(parts);
    turn.is_alike = turn.is_alike && part.layout == request.layout;
  }
  const size_t wanted = request.key.from < 0 ? static_cast<size_t>(world_size_) : 2;
  if (parts.size() < wanted) return std::nullopt;
  arrived_.erase(request.key);
  return turn;
}

}  // namespace evenkeel::internal
