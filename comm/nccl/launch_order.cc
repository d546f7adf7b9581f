#include "evenkeel/comm/nccl/launch_order.h"

#include <bit>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

void WriteKey(const LaunchKey& key, ByteWriter& writer) {
  writer.U64(key.channel).I64(key.sequence).I32(key.from).I32(key.to);
}
LaunchKey ReadKey(ByteReader& reader) {
  LaunchKey key;
  key.channel = reader.U64();
  key.sequence = reader.I64();
  key.from = reader.I32();
  key.to = reader.I32();
  return key;
}

absl::Status DisagreementOf(const std::map<int, LaunchRequest>& requests) {
  std::map<int, AtOperation> ranks;
  for (const auto& [rank, request] : requests) ranks[rank] = {request.key.sequence, request.text};
  return Disagreement(ranks);
}

}  // namespace

std::string LaunchRequest::Serialize() const {
  ByteWriter writer;
  WriteKey(key, writer);
  return writer.U64(hash).U64(layout).Bytes(text).Take();
}

absl::StatusOr<LaunchRequest> LaunchRequest::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  LaunchRequest request;
  request.key = ReadKey(reader);
  request.hash = reader.U64();
  request.layout = reader.U64();
  request.text = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("a rank's launch request"));
  return request;
}

std::string LaunchTurn::Serialize() const {
  ByteWriter writer;
  WriteKey(key, writer);
  return writer.Bool(is_alike).Take();
}

absl::StatusOr<LaunchTurn> LaunchTurn::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  LaunchTurn turn;
  turn.key = ReadKey(reader);
  turn.is_alike = reader.Bool();
  EK_RETURN_IF_ERROR(reader.Finish("the launch order of rank 0"));
  return turn;
}

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
