// Which rank keeps which elements of each parameter, when the flat gradients of a bucket are cut
// into equal slices.
//
//   const SlicedBucket bucket = ...;  // params 4 and 2, 60 and 7 elements, padded to 96
//   SegmentsOf(bucket, /*rank=*/1);  // slice 32: {{4, 32, 28, 0}, {2, 0, 4, 28}}
//   const Holders now = HoldersIn(bucket, 0, 3);  // param 4: [0, 32) on rank 0, [32, 60) on rank 1
//   TransfersBetween(before, now);  // what changes hands when the plan changes
//
// A parameter lies in one bucket, in one piece, and a slice is one piece of the bucket: so a rank
// holds at most one range of a parameter.
//
// Units:   elements. Offsets count from the beginning of the slice, `begin` from that of the
//          parameter.
// Threads: pure functions of values.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_LAYOUT_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace evenkeel::internal {

// Slices are multiples of this. 16 float32 fill a cache line, at whose beginning buckets begin: so
// no line is written by two ranks that are threads, vector loads of gradients are aligned, and so
// is what a transport may want aligned (NCCL: 16 bytes, of whatever type). It costs up to 16 * N -
// 1 elements of padding per bucket.
inline constexpr int64_t kSliceUnit = 16;

// A bucket whose `slice` is equal on all ranks: rank r has elements [r * slice, (r + 1) * slice).
struct SlicedBucket {
  std::vector<int> params;       // In their order in the bucket.
  std::vector<int64_t> offsets;  // Where each begins in the bucket.
  int64_t count = 0;             // Elements that are gradients; behind them is padding.
  int64_t slice = 0;

  int64_t CountAt(size_t position) const {
    return (position + 1 < offsets.size() ? offsets[position + 1] : count) - offsets[position];
  }
};

// Elements [begin, begin + count) of a parameter, at `offset` in a slice.
struct Segment {
  int param = 0;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t offset = 0;
  friend bool operator==(const Segment&, const Segment&) = default;
};

// The parts of a rank's slice, in order; only parts with elements.
std::vector<Segment> SegmentsOf(const SlicedBucket& bucket, int rank);
// Elements of padding at the end of a rank's slice.
int64_t PaddingOf(const SlicedBucket& bucket, int rank);

// The holder of a parameter's elements [begin, end).
struct HeldRange {
  int64_t begin = 0;
  int64_t end = 0;
  int rank = 0;
  friend bool operator==(const HeldRange&, const HeldRange&) = default;
};
// All of a parameter's elements, ascending; none if nobody holds it.
using Holders = std::vector<HeldRange>;

// Returns the holders of the parameter at `position` in the bucket.
Holders HoldersIn(const SlicedBucket& bucket, size_t position, int world_size);
// Returns the holders of a parameter in no bucket: equal ranges, in rank order.
Holders HoldersOfAlone(int64_t count, int world_size);
// Returns the range of `rank`; empty if it has none.
HeldRange RangeOf(const Holders& holders, int rank);

// Elements [begin, begin + count) are at `from` and are to be at `to`; the two may be equal.
struct Transfer {
  int64_t begin = 0;
  int64_t count = 0;
  int from = 0;
  int to = 0;
  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// From one division of a parameter to another one of the same parameter, ascending. None if nobody
// holds it in one.
std::vector<Transfer> TransfersBetween(const Holders& from, const Holders& to);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_LAYOUT_H_
