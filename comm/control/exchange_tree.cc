#include "evenkeel/comm/control/exchange_tree.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

std::vector<int> TreeShape::ChildrenOf(int rank) const {
  std::vector<int> children;
  const int64_t first = (int64_t{rank} + 1) * fanout;
  for (int64_t child = first; child < std::min<int64_t>(first + fanout, world_size); ++child) {
    children.push_back(static_cast<int>(child));
  }
  return children;
}

std::vector<int> TreeShape::SubtreeOf(int rank) const {
  std::vector<int> subtree = {rank};
  for (const int child : ChildrenOf(rank)) {
    const std::vector<int> below = SubtreeOf(child);
    subtree.insert(subtree.end(), below.begin(), below.end());
  }
  return subtree;
}

void AppendParts(ExchangeParts& parts, EqualParts more) {
  if (!parts.empty() && parts.back().part == more.part) {
    parts.back().count += more.count;
  } else {
    parts.push_back(std::move(more));
  }
}

int64_t CountRanks(const ExchangeParts& parts, int world_size) {
  int64_t ranks = 0;
  for (const EqualParts& run : parts) {
    if (run.count < 1 || run.count > world_size) return -1;
    ranks += run.count;
  }
  return ranks;
}

absl::Status CheckSize(const ExchangeId& id, const ExchangeParts& parts) {
  constexpr size_t kOfEach = 16, kOfAll = 4096;  // More than the fields around the bytes take.
  size_t bytes = kOfAll + id.topic.size();
  int64_t ranks = 0;
  for (const EqualParts& run : parts) {
    bytes += kOfEach + run.part.size();
    ranks += run.count;
  }
  if (bytes <= kMaxFrame) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the parts of ", ranks, " ranks for \"", id.topic, "\" #", id.sequence, " have ",
                   bytes, " bytes together, but a message has at most ", kMaxFrame,
                   ": exchange less over the control plane"));
}

ExchangeRelay::ExchangeRelay(TreeShape shape, int rank)
    : shape_(shape), rank_(rank), sources_(shape.ChildrenOf(rank)) {
  sources_.insert(sources_.begin(), rank);
  for (const int source : sources_)
    sizes_[source] = static_cast<int64_t>(shape.SubtreeOf(source).size());
  sizes_[rank] = 1;
}

absl::StatusOr<std::optional<to_hub::Exchange>> ExchangeRelay::OnExchange(int from,
                                                                          to_hub::Exchange part) {
  const auto size = sizes_.find(from);
  if (size == sizes_.end() || CountRanks(part.parts, shape_.world_size) != size->second) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank_, ": the message of rank ", from, " for \"", part.id.topic,
                     "\" #", part.id.sequence, " does not fit a tree of fanout ", shape_.fanout,
                     " over ", shape_.world_size, " ranks"));
  }
  Gathering& gathering = gathering_[part.id];
  gathering.emplace(from, std::move(part.parts));
  if (gathering.size() < sources_.size()) {
    EK_RETURN_IF_ERROR(CheckLeft(part.id, gathering));
    return std::nullopt;
  }
  to_hub::Exchange up{.id = std::move(part.id), .fanout = shape_.fanout};
  for (const int source : sources_) {
    for (EqualParts& run : gathering[source]) AppendParts(up.parts, std::move(run));
  }
  gathering_.erase(up.id);
  EK_RETURN_IF_ERROR(CheckSize(up.id, up.parts));
  return up;
}

absl::Status ExchangeRelay::OnLeave(int child) {
  left_.insert(child);
  for (const auto& [id, gathering] : gathering_) EK_RETURN_IF_ERROR(CheckLeft(id, gathering));
  return absl::OkStatus();
}

absl::Status ExchangeRelay::CheckLeft(const ExchangeId& id, const Gathering& gathering) const {
  for (const int gone : left_) {
    if (gathering.contains(gone)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", gone, " has left the group while rank ", gathering.begin()->first,
                     " is at \"", id.topic, "\" #", id.sequence, ": the ranks disagree"));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
