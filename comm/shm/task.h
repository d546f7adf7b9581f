// One rank's part in one operation over shared memory: its elements, and the loops that copy and
// reduce them.
//
//   ShmTask task(lane, operation);
//   bytes += task.CopyIn(begin, slot, length);              // this rank's input, for other ranks
//   const std::byte* const inputs[] = {nullptr, slot1, slot2};  // by seat
//   task.Reduce(inputs, begin, begin, length, nullptr);
//
// Units:     elements.
// Order:     each element is reduced in the order of seats.
// Ownership: the lane and the operation must outlive it.
// Threads:   thread-compatible.

#ifndef EVENKEEL_COMM_SHM_TASK_H_
#define EVENKEEL_COMM_SHM_TASK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/shm/lane.h"

namespace evenkeel::internal {

inline constexpr int64_t kCacheLine = 64;
// The number of bytes processed at once, in the first-level cache.
inline constexpr int64_t kCacheBytes = 8 << 10;

constexpr int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct ShmRange {
  int64_t begin = 0;
  int64_t length = 0;
};

struct ShmTask {
  ShmTask(ShmLane& lane, const Operation& operation);
  ShmTask(const ShmTask&) = delete;
  ShmTask& operator=(const ShmTask&) = delete;

  ShmLane& lane;
  const Operation& operation;
  const Collective& what;  // The operation's.
  const int64_t element_bytes;
  const int64_t count;  // 0 for a barrier.
  // The input. In all_to_all_v it begins with the part for the next seat and ends with this rank's,
  // so that the ranks read all streams at the same time.
  TensorList in;

  int size() const { return lane.size(); }
  int me() const { return lane.me; }
  bool IsMine(int seat) const { return seat == lane.me; }
  bool IsRoot(int seat) const { return lane.ranks[seat] == what.root; }
  // Returns whether the buffers of all ranks have the same layout, so that each rank can reduce one
  // piece of them.
  bool IsReducedByPieces() const {
    return what.kind == CollectiveKind::kAllReduce || what.kind == CollectiveKind::kReduce;
  }
  // Returns whether this rank receives the result of a reduction; in reduce only the root does.
  bool WantsResult() const { return what.kind != CollectiveKind::kReduce || IsRoot(me()); }
  // Returns whether each rank reduces all elements by itself, because they are few.
  bool IsOneShot() const;
  // Returns whether other ranks read this seat's input.
  bool Publishes(int seat) const;
  // Returns a seat's share of `length` elements, in whole cache lines.
  ShmRange ShareOf(int seat, int64_t length) const;

  // Replaces the input by a copy if writing the output could destroy it before it is read.
  void SetAsideEndangeredInput();
  // Copy `length` elements between lists of views, from the input, and into a list, from the given
  // beginnings. Return the number of bytes.
  int64_t Copy(const TensorList& from, int64_t from_begin, const TensorList& to, int64_t to_begin,
               int64_t length) const;
  int64_t CopyIn(int64_t begin, std::byte* to, int64_t length) const;
  int64_t CopyOut(std::byte* from, const TensorList& to, int64_t to_begin, int64_t length) const;
  // Reduces `length` elements of `inputs`, which are by seat (null: takes no part), and of `in` for
  // this rank. Writes the result to the output, unless only the root receives it, and to `also`
  // unless that is null.
  void Reduce(std::span<const std::byte* const> inputs, int64_t in_begin, int64_t out_begin,
              int64_t length, std::byte* also) const;
  // Reduces `length` elements of these inputs into `result`; without inputs, writes the identity.
  void ReducePlain(std::span<const void* const> inputs, void* result, int64_t length) const;

 private:
  std::vector<std::byte> set_aside_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_TASK_H_
