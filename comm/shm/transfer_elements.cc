// The parts of ShmTransfer that touch users' elements: blocks that are reduced where they lie, and
// copies and sums of lists of views.

#include <algorithm>
#include <cstring>

#include "evenkeel/comm/arith/operation_views.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/shm/transfer.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

constexpr int64_t kLine = 64;
// The bytes that a rank claims at once, and those processed in the first-level cache at once.
constexpr int64_t kClaimBytes = 64 << 10;
constexpr int64_t kCacheBytes = 8 << 10;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

// Blocks ------------------------------------------------------------------------------------------

ShmTransfer::Piece ShmTransfer::Share(int seat, int64_t length) const {
  const int64_t unit = RoundUp((length + size() - 1) / size(), kLine / element_bytes_);
  const int64_t begin = std::min(seat * unit, length);
  return {begin, std::min(unit, length - begin)};
}

ShmTransfer::Piece ShmTransfer::ShareOf(int seat) const { return Share(seat, count_); }

int64_t ShmTransfer::BlocksOf(int seat) const {
  const int64_t per_block = kClaimBytes / element_bytes_;
  return (ShareOf(seat).length + per_block - 1) / per_block;
}

bool ShmTransfer::ClaimBlock(int share, int64_t& block) {
  std::atomic<uint64_t>& claimed = lane_.seats[share].claimed;
  const uint64_t base = lane_.blocks[share];
  const uint64_t end = base + BlocksOf(share);
  uint64_t next = claimed.load(std::memory_order_relaxed);
  while (next < end) {
    if (claimed.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) {
      block = static_cast<int64_t>(next - base);
      return true;
    }
  }
  return false;
}

ShmTransfer::State ShmTransfer::AdvanceDirect(int64_t budget, const std::atomic<bool>& stop) {
  for (int i = 0; i < size(); ++i) {
    const int share =
        (me() + i) % size();  // Its own first: what it has read before is in its cache.
    const uint64_t end = lane_.blocks[share] + BlocksOf(share);
    int64_t block = 0;
    while (true) {
      if (stop.load(std::memory_order_relaxed)) return State::kBlocked;
      if (budget <= 0) return State::kMore;
      if (!ClaimBlock(share, block)) break;
      budget -= ReduceBlock(share, block);
      has_moved_ = true;
      if (lane_.seats[share].finished.fetch_add(1, std::memory_order_acq_rel) + 1 == end)
        lane_.Notify();
    }
  }
  return AreBlocksFinished() ? State::kEnded : State::kBlocked;
}

bool ShmTransfer::AreBlocksFinished() const {
  for (int seat = 0; seat < size(); ++seat) {
    const uint64_t finished = lane_.seats[seat].finished.load(std::memory_order_acquire);
    if (finished < lane_.blocks[seat] + BlocksOf(seat)) return false;
  }
  return true;
}

int64_t ShmTransfer::ReduceBlock(int share, int64_t block) {
  const Collective& what = operation_.what;
  const Piece all = ShareOf(share);
  const int64_t per_block = kClaimBytes / element_bytes_;
  const int64_t begin = all.begin + block * per_block;
  const int64_t length = std::min(per_block, all.length - block * per_block);
  absl::InlinedVector<const void*, 8> inputs;
  absl::InlinedVector<std::byte*, 8> outputs;
  for (int64_t at = begin; at < begin + length;) {
    const int64_t n = std::min(kCacheBytes / element_bytes_, begin + length - at);
    inputs.clear();
    outputs.clear();
    for (int seat = 0; seat < size(); ++seat) {
      std::byte* const place =
          static_cast<std::byte*>(sources_[seat].front().data) + at * element_bytes_;
      if (flags_[seat] & ShmGist::kContributes) inputs.push_back(place);
      if (kind_ == CollectiveKind::kAllReduce || lane_.ranks[seat] == what.root)
        outputs.push_back(place);
    }
    if (inputs.empty()) {
      FillIdentity(what.op, what.dtype, outputs.front(), n);
    } else {
      ReduceInto(what.op, what.dtype, outputs.front(),
                 std::span<const void* const>(inputs.data(), inputs.size()), n, operation_.scale);
    }
    for (size_t i = 1; i < outputs.size(); ++i)
      std::memcpy(outputs[i], outputs.front(), n * element_bytes_);
    at += n;
  }
  return length * element_bytes_ * size();
}

// Elements ----------------------------------------------------------------------------------------

TensorList ShmTransfer::InOnePiece(std::byte* data, int64_t length) const {
  return {TensorView(data, length, operation_.what.dtype)};
}

void ShmTransfer::Copy(const TensorList& from, int64_t from_begin, const TensorList& to,
                       int64_t to_begin, int64_t length) const {
  ViewCursor source(from, from_begin);
  for (ViewCursor target(to, to_begin); length > 0;) {
    const int64_t n = std::min({length, source.contiguous(), target.contiguous()});
    if (n == 0) return;  // A list is shorter than it says: nothing beyond its end is touched.
    if (target.data() != source.data())
      std::memcpy(target.data(), source.data(), n * element_bytes_);
    source.Advance(n);
    target.Advance(n);
    length -= n;
  }
}

void ShmTransfer::ReduceElements(std::span<const std::byte* const> inputs, int64_t in_begin,
                                 int64_t out_begin, int64_t length, std::byte* also) const {
  const Collective& what = operation_.what;
  ViewCursor mine(in_, in_begin);
  ViewCursor out(operation_.out, out_begin);
  // Who reduces a piece for the root leaves its own memory alone.
  const bool is_mine_too = kind_ != CollectiveKind::kReduce || lane_.ranks[me()] == what.root;
  absl::InlinedVector<const void*, 8> at_block;
  for (int64_t done = 0; done < length;) {
    int64_t n = std::min({length - done, kCacheBytes / element_bytes_, out.contiguous()});
    if (operation_.contributes) n = std::min(n, mine.contiguous());
    if (n == 0) return;
    at_block.clear();
    for (int seat = 0; seat < size(); ++seat) {
      if (IsMine(seat)) {
        if (operation_.contributes) at_block.push_back(mine.data());
      } else if (inputs[seat] != nullptr) {
        at_block.push_back(inputs[seat] + done * element_bytes_);
      }
    }
    std::byte* const copy = also == nullptr ? nullptr : also + done * element_bytes_;
    void* const result = is_mine_too ? out.data() : copy;
    if (at_block.empty()) {
      FillIdentity(what.op, what.dtype, result, n);
    } else {
      ReduceInto(what.op, what.dtype, result,
                 std::span<const void* const>(at_block.data(), at_block.size()), n,
                 operation_.scale);
    }
    if (copy != nullptr && copy != result) std::memcpy(copy, result, n * element_bytes_);
    if (operation_.contributes) mine.Advance(n);
    out.Advance(n);
    done += n;
  }
}

void ShmTransfer::SetAsideEndangeredInput() {
  if (!operation_.contributes || !OutputEndangersInput(operation_, me())) return;
  int64_t count = 0;
  for (const TensorView& view : in_) count += view.count;
  set_aside_.resize(count * element_bytes_);
  Copy(in_, 0, InOnePiece(set_aside_.data(), count), 0, count);
  in_ = {TensorView(set_aside_.data(), count, operation_.what.dtype)};
}

}  // namespace evenkeel::internal
