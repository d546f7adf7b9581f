#include "evenkeel/comm/arith/operation_views.h"

#include <algorithm>
#include <functional>

#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {
namespace {

bool Overlap(const TensorView& a, const TensorView& b) {
  const auto less = std::less<const char*>();
  const char* const a_begin = static_cast<const char*>(a.data);
  const char* const b_begin = static_cast<const char*>(b.data);
  return a.bytes() > 0 && b.bytes() > 0 && less(a_begin, b_begin + b.bytes()) &&
         less(b_begin, a_begin + a.bytes());
}

// Whether `part` is the `rank`-th share of `count` elements of `whole`, element by element.
bool IsShareOf(const TensorList& whole, const TensorList& part, int rank, int64_t count) {
  ViewCursor share(part, 0);
  for (ViewCursor at(whole, rank * count); count > 0;) {
    const int64_t n = std::min({count, at.contiguous(), share.contiguous()});
    if (n == 0 || at.data() != share.data()) return false;
    at.Advance(n);
    share.Advance(n);
    count -= n;
  }
  return true;
}

}  // namespace

bool OutputEndangersInput(const Operation& operation, int rank) {
  const Collective& what = operation.what;
  const TensorList& in = operation.in;
  const TensorList& out = operation.out;
  switch (what.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kBroadcast:
      if (in == out) return false;  // Each element is read before it is written.
      break;
    case CollectiveKind::kAllGather:
      if (IsShareOf(out, in, rank, what.count)) return false;
      break;
    case CollectiveKind::kAllGatherV:
      if (out[rank].data == in[0].data) return false;
      break;
    case CollectiveKind::kReduceScatter:
      if (IsShareOf(in, out, rank, what.count)) return false;
      break;
    default:
      break;
  }
  for (const TensorView& source : in) {
    for (const TensorView& target : out) {
      if (Overlap(source, target)) return true;
    }
  }
  return false;
}

}  // namespace evenkeel::internal
