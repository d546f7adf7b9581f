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

void AppendParts(std::vector<EqualParts>& parts, EqualParts more) {
  if (!parts.empty() && parts.back().part == more.part) {
    parts.back().count += more.count;
  } else {
    parts.push_back(std::move(more));
  }
}

absl::Status CheckSize(const ControlMessage& exchange) {
  constexpr size_t kOfEach = 16, kOfAll = 4096;  // More than the fields around the bytes take.
  size_t bytes = kOfAll + exchange.topic.size();
  int64_t ranks = 0;
  for (const EqualParts& run : exchange.parts) {
    bytes += kOfEach + run.part.size();
    ranks += run.count;
  }
  if (bytes <= kMaxFrame) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the parts of ", ranks, " ranks for \"", exchange.topic, "\" #", exchange.sequence, " have ",
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

absl::StatusOr<std::optional<ControlMessage>> ExchangeRelay::OnExchange(int from,
                                                                        ControlMessage message) {
  std::vector<EqualParts> parts = std::move(message.parts);
  if (from == rank_) parts = {{1, std::move(message.payload)}};
  int64_t count = 0;
  for (const EqualParts& run : parts) {
    if (run.count < 1 || run.count > shape_.world_size) count = -1;
    if (count >= 0) count += run.count;
  }
  const auto size = sizes_.find(from);
  if (size == sizes_.end() || count != size->second) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank_, ": the message of rank ", from, " for \"", message.topic,
                     "\" #", message.sequence, " does not fit a tree of fanout ", shape_.fanout,
                     " over ", shape_.world_size, " ranks"));
  }
  const Key key(message.topic, message.sequence);
  Gathering& gathering = gathering_[key];
  gathering.parts.emplace(from, std::move(parts));
  if (gathering.parts.size() < sources_.size()) {
    EK_RETURN_IF_ERROR(CheckLeft(key, gathering));
    return std::optional<ControlMessage>();
  }
  ControlMessage up{.type = ControlMessage::Type::kExchange,
                    .sequence = key.second,
                    .request = shape_.fanout,
                    .topic = key.first};
  for (const int source : sources_) {
    for (EqualParts& run : gathering.parts[source]) AppendParts(up.parts, std::move(run));
  }
  gathering_.erase(key);
  EK_RETURN_IF_ERROR(CheckSize(up));
  return std::optional<ControlMessage>(std::move(up));
}

absl::Status ExchangeRelay::OnLeave(int child) {
  left_.insert(child);
  for (const auto& [key, gathering] : gathering_) EK_RETURN_IF_ERROR(CheckLeft(key, gathering));
  return absl::OkStatus();
}

absl::Status ExchangeRelay::CheckLeft(const Key& key, const Gathering& gathering) const {
  for (const int gone : left_) {
    if (gathering.parts.contains(gone)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", gone, " has left the group while rank ", gathering.parts.begin()->first,
        " is at \"", key.first, "\" #", key.second, ": the ranks disagree"));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
