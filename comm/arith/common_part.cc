#include "evenkeel/comm/arith/common_part.h"

#include <bit>

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
  for (const TensorView& view : operation.out.empty() ? operation.in : operation.out) {
    hash = StableHash(hash, static_cast<uint64_t>(view.count));
  }
  return hash;
}

}  // namespace evenkeel::internal
