#include "evenkeel/comm/collective.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/names.h"

namespace evenkeel {
namespace {

bool HasElements(CollectiveKind kind) { return kind != CollectiveKind::kBarrier; }

// Returns the word for `root` in messages: the other side of a send or recv is not a root.
absl::string_view RootWord(CollectiveKind kind) {
  if (!IsPair(kind)) return "root";
  return kind == CollectiveKind::kSend ? "to rank" : "from rank";
}

}  // namespace

absl::string_view ToString(CollectiveKind kind) {
  static constexpr absl::string_view kNames[] = {
      "all_reduce", "reduce", "broadcast", "all_gather",   "reduce_scatter", "all_to_all",
      "barrier",    "send",   "recv",      "all_gather_v", "all_to_all_v"};
  static_assert(std::size(kNames) == static_cast<size_t>(CollectiveKind::kAllToAllV) + 1);
  return internal::NameIn(kNames, kind, "unknown collective");
}

absl::string_view ToString(Role role) {
  static constexpr absl::string_view kNames[] = {"user",  "bucket", "buffers", "state",
                                                 "shard", "join",   "test"};
  static_assert(std::size(kNames) == static_cast<size_t>(Role::kTest) + 1);
  return internal::NameIn(kNames, role, "unknown role");
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
    absl::StrAppend(&text, " ", ToString(collective.dtype));
    if (!IsUneven(collective.kind)) absl::StrAppend(&text, "[", collective.count, "]");
  }
  if (Reduces(collective.kind)) absl::StrAppend(&text, " ", ToString(collective.op));
  if (collective.root >= 0)
    absl::StrAppend(&text, " ", RootWord(collective.kind), " ", collective.root);
  if (collective.kind == CollectiveKind::kRecv && collective.root < 0)
    absl::StrAppend(&text, " from any rank");
  if (collective.tag != 0) absl::StrAppend(&text, " tag ", collective.tag);
  return text;
}

uint64_t HashOf(const Collective& collective, uint64_t seed) {
  const uint64_t fields[] = {
      static_cast<uint64_t>(collective.kind),   static_cast<uint64_t>(collective.dtype),
      static_cast<uint64_t>(collective.count),  static_cast<uint64_t>(collective.op),
      static_cast<uint64_t>(collective.root),   static_cast<uint64_t>(collective.role),
      static_cast<uint64_t>(collective.index),  static_cast<uint64_t>(collective.index_count),
      static_cast<uint64_t>(collective.joined), static_cast<uint64_t>(collective.tag)};
  for (uint64_t field : fields) seed = StableHash(seed, field);
  return seed;
}

uint64_t Schedule::Hash() const {
  uint64_t hash = StableHash(generation, entries.size());
  for (const Collective& collective : entries) hash = HashOf(collective, hash);
  return hash;
}

uint64_t StableHash(uint64_t seed, uint64_t value) {
  // The seed is multiplied before the value is added: a plain sum would be equal for (1, 2) and
  // (2, 1).
  uint64_t mixed = seed * 0x9e3779b97f4a7c15u + value + 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

uint64_t StableHash(uint64_t seed, absl::string_view bytes) {
  seed = StableHash(seed, bytes.size());
  for (size_t at = 0; at < bytes.size(); at += 8) {
    const absl::string_view word = bytes.substr(at, 8);
    seed = StableHash(seed, internal::GetInteger(word.data(), word.size()));
  }
  return seed;
}

}  // namespace evenkeel
