#include "evenkeel/comm/collective.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

bool HasElements(CollectiveKind kind) { return kind != CollectiveKind::kBarrier; }

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}

// What `root` is called: the other side of a message is no root.
absl::string_view RootWord(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kSend:
      return "to rank";
    case CollectiveKind::kRecv:
      return "from rank";
    default:
      return "root";
  }
}

// The bytes of a word in one order, whatever the machine's.
uint64_t LittleEndianWord(absl::string_view bytes) {
  uint64_t word = 0;
  for (size_t i = 0; i < bytes.size(); ++i) word |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  return word;
}

}  // namespace

absl::string_view ToString(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kReduce:
      return "reduce";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kAllToAll:
      return "all_to_all";
    case CollectiveKind::kBarrier:
      return "barrier";
    case CollectiveKind::kSend:
      return "send";
    case CollectiveKind::kRecv:
      return "recv";
  }
  return "unknown collective";
}

absl::string_view ToString(Role role) {
  switch (role) {
    case Role::kUser:
      return "user";
    case Role::kBucket:
      return "bucket";
    case Role::kBuffers:
      return "buffers";
    case Role::kState:
      return "state";
    case Role::kShard:
      return "shard";
    case Role::kJoin:
      return "join";
    case Role::kTest:
      return "test";
  }
  return "unknown role";
}

std::string ToString(const Collective& collective) {
  std::string text(ToString(collective.kind));
  if (collective.index >= 0) {
    absl::StrAppend(&text, " ", ToString(collective.role), " ", collective.index);
    if (collective.index_count > 0) absl::StrAppend(&text, "/", collective.index_count);
  } else {
    absl::StrAppend(&text, " (", ToString(collective.role), ")");
  }
  if (HasElements(collective.kind)) {
    absl::StrAppend(&text, " ", ToString(collective.dtype), "[", collective.count, "]");
  }
  if (Reduces(collective.kind)) absl::StrAppend(&text, " ", ToString(collective.op));
  if (collective.root >= 0) absl::StrAppend(&text, " ", RootWord(collective.kind), " ", collective.root);
  return text;
}

uint64_t HashOf(const Collective& collective, uint64_t seed) {
  const uint64_t fields[] = {static_cast<uint64_t>(collective.kind),  static_cast<uint64_t>(collective.dtype),
                             static_cast<uint64_t>(collective.count), static_cast<uint64_t>(collective.op),
                             static_cast<uint64_t>(collective.root),  static_cast<uint64_t>(collective.role),
                             static_cast<uint64_t>(collective.index), static_cast<uint64_t>(collective.index_count),
                             static_cast<uint64_t>(collective.joined)};
  for (uint64_t field : fields) seed = StableHash(seed, field);
  return seed;
}

uint64_t Schedule::Hash() const {
  uint64_t hash = StableHash(generation, entries.size());
  for (const Collective& collective : entries) hash = HashOf(collective, hash);
  return hash;
}

uint64_t StableHash(uint64_t seed, uint64_t value) {
  // The seed is spread before the value comes in: a plain sum would make (1, 2) and (2, 1) the same.
  uint64_t mixed = seed * 0x9e3779b97f4a7c15u + value + 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

uint64_t StableHash(uint64_t seed, absl::string_view bytes) {
  seed = StableHash(seed, bytes.size());
  for (size_t at = 0; at < bytes.size(); at += 8) seed = StableHash(seed, LittleEndianWord(bytes.substr(at, 8)));
  return seed;
}

}  // namespace evenkeel
