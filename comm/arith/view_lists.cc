#include "evenkeel/comm/arith/view_lists.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {
namespace {

char* Begin(const TensorView& view) { return static_cast<char*>(view.data); }
char* End(const TensorView& view) { return Begin(view) + view.bytes(); }

// Returns whether `part` is the `rank`-th share of `count` elements of `whole`, element by element.
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

int64_t CountOf(const TensorList& views) {
  int64_t count = 0;
  for (const TensorView& view : views) count += view.count;
  return count;
}

void AppendRange(const TensorList& views, int64_t begin, int64_t count, TensorList& to) {
  for (const TensorView& view : views) {
    if (count == 0) return;
    if (begin >= view.count) {
      begin -= view.count;
      continue;
    }
    const TensorView piece = view.Slice(begin, std::min(count, view.count - begin));
    const bool continues = begin > 0 && !to.empty() && End(to.back()) == Begin(piece);
    if (continues) {
      to.back().count += piece.count;
    } else {
      to.push_back(piece);
    }
    count -= piece.count;
    begin = 0;
  }
}

TensorList Range(const TensorList& views, int64_t begin, int64_t count) {
  TensorList range;
  AppendRange(views, begin, count, range);
  return range;
}

TensorList LaidOutLike(const TensorList& views, void* data) {
  TensorList list;
  char* at = static_cast<char*>(data);
  for (const TensorView& view : views) {
    list.push_back({at, view.count, view.dtype, view.device});
    at += view.bytes();
  }
  return list;
}

TensorList As(DType dtype, TensorList views) {
  for (TensorView& view : views) view.dtype = dtype;
  return views;
}

bool Overlap(const TensorView& a, const TensorView& b) {
  const auto less = std::less<const char*>();
  return a.count > 0 && b.count > 0 && less(Begin(a), End(b)) && less(Begin(b), End(a));
}

bool Overlap(const TensorList& a, const TensorList& b) {
  return std::any_of(a.begin(), a.end(), [&](const TensorView& x) {
    return std::any_of(b.begin(), b.end(), [&](const TensorView& y) { return Overlap(x, y); });
  });
}

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
  return Overlap(in, out);
}

void Copy(const TensorList& from, const TensorList& to) {
  if (from != to) CopyRange(from, 0, to, 0, CountOf(from));
}

void CopyRange(const TensorList& from, int64_t from_begin, const TensorList& to, int64_t to_begin,
               int64_t count) {
  ViewCursor source(from, from_begin), target(to, to_begin);
  while (count > 0) {
    const int64_t n = std::min({count, source.contiguous(), target.contiguous()});
    if (n == 0) return;  // A list has fewer elements than `count`.
    if (target.data() != source.data()) std::memcpy(target.data(), source.data(), source.bytes(n));
    source.Advance(n);
    target.Advance(n);
    count -= n;
  }
}

}  // namespace evenkeel::internal
