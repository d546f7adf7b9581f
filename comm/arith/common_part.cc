#include "evenkeel/comm/arith/common_part.h"

#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/ranks/parties.h"

namespace evenkeel::internal {

Collective CommonPart(Collective what) {
  if (IsPair(what.kind)) {
    what.kind = CollectiveKind::kSend;
    what.root = -1;
  }
  return what;
}

std::vector<int64_t> PartsOf(const Operation& operation) {
  std::vector<int64_t> parts;
  if (IsUneven(operation.what.kind)) return parts;
  for (const TensorView& view : operation.out.empty() ? operation.in : operation.out)
    parts.push_back(view.count);
  return parts;
}

bool Agree(const Operation& a, const Operation& b) {
  return CommonPart(a.what) == CommonPart(b.what) && PartsOf(a) == PartsOf(b) &&
         a.scale == b.scale && a.step_of == b.step_of;
}

uint64_t HashOfCommonPart(const Operation& operation) {
  uint64_t hash =
      StableHash(HashOf(CommonPart(operation.what)), std::bit_cast<uint64_t>(operation.scale));
  hash = StableHash(hash, operation.step_of);
  if (IsUneven(operation.what.kind)) return hash;
  for (const TensorView& view : operation.out.empty() ? operation.in : operation.out) {
    hash = StableHash(hash, static_cast<uint64_t>(view.count));
  }
  return hash;
}

int64_t UnevenCount(const Collective& what, const TensorList& in, int to) {
  return in[what.kind == CollectiveKind::kAllGatherV ? 0 : to].count;
}

absl::Status SizesDisagree(const Collective& what, int64_t sequence, int sender, int64_t sent,
                           int receiver, int64_t expected) {
  const std::string text = ToString(what);
  return Disagreement(
      {{sender,
        AtOperation{sequence, text, absl::StrCat(" with ", sent, " elements for rank ", receiver)}},
       {receiver, AtOperation{sequence, text,
                              absl::StrCat(" with ", expected, " elements from rank ", sender)}}});
}

}  // namespace evenkeel::internal
