#include "evenkeel/comm/shm/task.h"

#include <algorithm>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

ShmTask::ShmTask(ShmLane& lane, const Operation& operation)
    : lane(lane),
      operation(operation),
      what(operation.what),
      element_bytes(SizeOf(what.dtype)),
      count(what.kind == CollectiveKind::kBarrier ? 0 : what.count),
      in(operation.in) {
  if (what.kind == CollectiveKind::kAllToAllV)
    std::rotate(in.begin(), in.begin() + (me() + 1) % size(), in.end());
}

bool ShmTask::IsOneShot() const {
  // It costs world_size times the reading, and saves a round of waiting.
  constexpr int64_t kOneShotBytes = 64 << 10;  // Over the world size.
  return IsReducedByPieces() && count * element_bytes * size() <= kOneShotBytes;
}

bool ShmTask::Publishes(int seat) const {
  switch (what.kind) {
    case CollectiveKind::kBroadcast:
      return IsRoot(seat);
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      return seat == 0;
    case CollectiveKind::kBarrier:
      return false;
    default:
      return true;
  }
}

ShmRange ShmTask::ShareOf(int seat, int64_t length) const {
  const int64_t unit = RoundUp((length + size() - 1) / size(), kCacheLine / element_bytes);
  const int64_t begin = std::min(seat * unit, length);
  return {begin, std::min(unit, length - begin)};
}

void ShmTask::SetAsideEndangeredInput() {
  if (!operation.contributes || !OutputEndangersInput(operation, me())) return;
  const int64_t all = CountOf(in);
  set_aside_.resize(all * element_bytes);
  CopyIn(0, set_aside_.data(), all);
  in = {TensorView(set_aside_.data(), all, what.dtype)};
}

int64_t ShmTask::Copy(const TensorList& from, int64_t from_begin, const TensorList& to,
                      int64_t to_begin, int64_t length) const {
  CopyRange(from, from_begin, to, to_begin, length);
  return length * element_bytes;
}

int64_t ShmTask::CopyIn(int64_t begin, std::byte* to, int64_t length) const {
  return Copy(in, begin, {TensorView(to, length, what.dtype)}, 0, length);
}

int64_t ShmTask::CopyOut(std::byte* from, const TensorList& to, int64_t to_begin,
                         int64_t length) const {
  return Copy({TensorView(from, length, what.dtype)}, 0, to, to_begin, length);
}

void ShmTask::Reduce(std::span<const std::byte* const> inputs, int64_t in_begin, int64_t out_begin,
                     int64_t length, std::byte* also) const {
  ViewCursor mine(in, in_begin);
  ViewCursor out(operation.out, out_begin);
  absl::InlinedVector<const void*, 8> at_block;
  for (int64_t done = 0; done < length;) {
    int64_t n = std::min({length - done, kCacheBytes / element_bytes, out.contiguous()});
    if (operation.contributes) n = std::min(n, mine.contiguous());
    if (n == 0) return;
    at_block.clear();
    for (int seat = 0; seat < size(); ++seat) {
      if (IsMine(seat)) {
        if (operation.contributes) at_block.push_back(mine.data());
      } else if (inputs[seat] != nullptr) {
        at_block.push_back(inputs[seat] + done * element_bytes);
      }
    }
    std::byte* const copy = also == nullptr ? nullptr : also + done * element_bytes;
    // A rank that reduces a piece for the root leaves its own memory alone.
    void* const result = WantsResult() ? out.data() : copy;
    ReducePlain(at_block, result, n);
    if (copy != nullptr && copy != result) std::memcpy(copy, result, n * element_bytes);
    if (operation.contributes) mine.Advance(n);
    out.Advance(n);
    done += n;
  }
}

void ShmTask::ReducePlain(std::span<const void* const> inputs, void* result, int64_t length) const {
  if (inputs.empty()) {
    FillIdentity(what.op, what.dtype, result, length);
  } else {
    ReduceInto(what.op, what.dtype, result, inputs, length, operation.scale);
  }
}

}  // namespace evenkeel::internal
