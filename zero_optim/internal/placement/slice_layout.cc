#include "evenkeel/zero_optim/internal/placement/slice_layout.h"

#include <algorithm>

namespace evenkeel::internal {

std::vector<Segment> SegmentsOf(const SlicedBucket& bucket, int rank) {
  const int64_t begin = rank * bucket.slice, end = begin + bucket.slice;
  std::vector<Segment> segments;
  for (size_t i = 0; i < bucket.params.size(); ++i) {
    const int64_t first = std::max(begin, bucket.offsets[i]);
    const int64_t last = std::min(end, bucket.offsets[i] + bucket.CountAt(i));
    if (first >= last) continue;
    segments.push_back({.param = bucket.params[i],
                        .begin = first - bucket.offsets[i],
                        .count = last - first,
                        .offset = first - begin});
  }
  return segments;
}

int64_t PaddingOf(const SlicedBucket& bucket, int rank) {
  return std::clamp<int64_t>((rank + 1) * bucket.slice - bucket.count, 0, bucket.slice);
}

Holders HoldersIn(const SlicedBucket& bucket, size_t position, int world_size) {
  const int64_t offset = bucket.offsets[position], count = bucket.CountAt(position);
  Holders holders;
  for (int rank = 0; rank < world_size; ++rank) {
    const int64_t begin = std::max<int64_t>(0, rank * bucket.slice - offset);
    const int64_t end = std::min(count, (rank + 1) * bucket.slice - offset);
    if (begin < end) holders.push_back({begin, end, rank});
  }
  return holders;
}

Holders HoldersOfAlone(int64_t count, int world_size) {
  const int64_t each = (count + world_size - 1) / world_size;
  Holders holders;
  for (int rank = 0; rank < world_size; ++rank) {
    const int64_t begin = std::min(count, rank * each), end = std::min(count, begin + each);
    if (begin < end) holders.push_back({begin, end, rank});
  }
  return holders;
}

HeldRange RangeOf(const Holders& holders, int rank) {
  for (const HeldRange& range : holders) {
    if (range.rank == rank) return range;
  }
  return {.rank = rank};
}

std::vector<Transfer> TransfersBetween(const Holders& from, const Holders& to) {
  std::vector<Transfer> transfers;
  size_t f = 0, t = 0;
  while (f < from.size() && t < to.size()) {
    const int64_t begin = std::max(from[f].begin, to[t].begin),
                  end = std::min(from[f].end, to[t].end);
    if (begin < end) transfers.push_back({begin, end - begin, from[f].rank, to[t].rank});
    from[f].end < to[t].end ? ++f : ++t;
  }
  return transfers;
}

}  // namespace evenkeel::internal
