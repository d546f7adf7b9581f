#include "evenkeel/comm/arith/view_lists.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace evenkeel::internal {
namespace {

char* Begin(const TensorView& view) { return static_cast<char*>(view.data); }
char* End(const TensorView& view) { return Begin(view) + view.bytes(); }

bool Overlap(const TensorView& a, const TensorView& b) {
  const auto less = std::less<const char*>();
  return a.count > 0 && b.count > 0 && less(Begin(a), End(b)) && less(Begin(b), End(a));
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

bool Overlap(const TensorList& a, const TensorList& b) {
  return std::any_of(a.begin(), a.end(), [&](const TensorView& x) {
    return std::any_of(b.begin(), b.end(), [&](const TensorView& y) { return Overlap(x, y); });
  });
}

void Copy(const TensorList& from, const TensorList& to) {
  if (from == to) return;
  auto source = from.begin();
  auto target = to.begin();
  int64_t read = 0, written = 0;  // In `source` and `target`.
  while (source != from.end() && target != to.end()) {
    const int64_t n = std::min(source->count - read, target->count - written);
    if (n > 0)
      std::memcpy(target->Slice(written, n).data, source->Slice(read, n).data,
                  n * SizeOf(source->dtype));
    read += n;
    written += n;
    if (read == source->count) ++source, read = 0;
    if (written == target->count) ++target, written = 0;
  }
}

}  // namespace evenkeel::internal
