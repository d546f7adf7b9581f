#include "evenkeel/comm/local/exchange.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

// Stays in the first-level cache with the inputs that are combined into it.
constexpr int64_t kBlockBytes = 8 << 10;

using Cursor = ViewCursor;
using Cursors = absl::InlinedVector<Cursor, 8>;

// Calls `step(n)` for pieces of `length` elements that lie contiguous at every cursor, and advances
// them all.
template <typename Step>
void ForEachBlock(Cursors& sources, Cursors& targets, int64_t length, int64_t most,
                  const std::atomic<bool>& stop, Step step) {
  while (length > 0 && !stop.load(std::memory_order_relaxed)) {
    int64_t n = std::min(length, most);
    for (const Cursor& cursor : sources) n = std::min(n, cursor.contiguous());
    for (const Cursor& cursor : targets) n = std::min(n, cursor.contiguous());
    if (n == 0) return;  // A list is shorter than it says: nothing beyond its end is touched.
    step(n);
    for (Cursor& cursor : sources) cursor.Advance(n);
    for (Cursor& cursor : targets) cursor.Advance(n);
    length -= n;
  }
}

void Copy(Cursor source, Cursors targets, int64_t length, const Operation& like,
          const std::atomic<bool>& stop) {
  const int64_t size = SizeOf(like.what.dtype);
  Cursors sources = {source};
  ForEachBlock(sources, targets, length, kBlockBytes / size, stop, [&](int64_t n) {
    const void* from = sources.front().data();
    for (const Cursor& target : targets) {
      if (target.data() != from) std::memcpy(target.data(), from, n * size);
    }
  });
}

// The block in between is what allows any of the targets to be one of the sources.
void Reduce(Cursors sources, Cursors targets, int64_t length, const Operation& like,
            const std::atomic<bool>& stop) {
  const ReduceOp op = like.what.op;
  const DType dtype = like.what.dtype;
  const int64_t size = SizeOf(dtype);
  absl::InlinedVector<const void*, 8> inputs;
  alignas(64) std::byte block[kBlockBytes];
  ForEachBlock(sources, targets, length, kBlockBytes / size, stop, [&](int64_t n) {
    inputs.clear();
    for (const Cursor& source : sources) inputs.push_back(source.data());
    if (inputs.empty()) {
      FillIdentity(op, dtype, block, n);
    } else {
      ReduceInto(op, dtype, block, std::span(inputs.data(), inputs.size()), n, like.scale);
    }
    for (const Cursor& target : targets) std::memcpy(target.data(), block, n * size);
  });
}

}  // namespace

LocalExchange::LocalExchange(std::vector<Operation*> seats) : seats_(std::move(seats)) {}

void LocalExchange::Prepare() {
  for (int rank = 0; rank < size(); ++rank) {
    Operation& operation = *seats_[rank];
    if (!operation.contributes || !OutputEndangersInput(operation, rank)) continue;
    const int64_t bytes = CountOf(operation.in) * SizeOf(operation.what.dtype);
    set_aside_.push_back(std::make_unique<std::byte[]>(bytes));
    const TensorList aside = LaidOutLike(operation.in, set_aside_.back().get());
    internal::Copy(operation.in, aside);
    operation.in = aside;
  }
}

int64_t LocalExchange::elements() const {
  const CollectiveKind kind = seats_.front()->what.kind;
  if (kind == CollectiveKind::kBarrier) return 0;
  if (!IsUneven(kind)) return count();
  int64_t longest = 0;
  for (const Operation* seat : seats_) {
    for (const TensorView& view : seat->out) longest = std::max(longest, view.count);
  }
  return longest;
}

int64_t LocalExchange::bytes() const {
  int64_t bytes = 0;
  for (const Operation* seat : seats_) {
    for (const TensorView& view : seat->out) bytes += view.bytes();
  }
  return bytes;
}

void LocalExchange::Run(int64_t begin, int64_t end, const std::atomic<bool>& stop) const {
  const Operation& like = *seats_.front();
  const Collective& what = like.what;
  const int64_t length = end - begin;
  const auto inputs_at = [&](int64_t offset) {  // Inputs of contributing ranks, in rank order.
    Cursors cursors;
    for (const Operation* seat : seats_) {
      if (seat->contributes) cursors.emplace_back(seat->in, offset + begin);
    }
    return cursors;
  };
  const auto outputs_at = [&](int64_t offset) {
    Cursors cursors;
    for (const Operation* seat : seats_) cursors.emplace_back(seat->out, offset + begin);
    return cursors;
  };
  const auto input = [&](int rank, int64_t offset) {
    return Cursor(seats_[rank]->in, offset + begin);
  };
  const auto output = [&](int rank, int64_t offset) {
    return Cursors{Cursor(seats_[rank]->out, offset + begin)};
  };

  switch (what.kind) {
    case CollectiveKind::kAllReduce:
      return Reduce(inputs_at(0), outputs_at(0), length, like, stop);
    case CollectiveKind::kReduce:
      return Reduce(inputs_at(0), output(what.root, 0), length, like, stop);
    case CollectiveKind::kBroadcast:
      return Copy(input(what.root, 0), outputs_at(0), length, like, stop);
    case CollectiveKind::kAllGather:
      for (int from = 0; from < size(); ++from) {
        Copy(input(from, 0), outputs_at(from * count()), length, like, stop);
      }
      return;
    case CollectiveKind::kReduceScatter:
      for (int to = 0; to < size(); ++to) {
        Reduce(inputs_at(to * count()), output(to, 0), length, like, stop);
      }
      return;
    case CollectiveKind::kAllToAll:
      for (int from = 0; from < size(); ++from) {
        for (int to = 0; to < size(); ++to) {
          Copy(input(from, to * count()), output(to, from * count()), length, like, stop);
        }
      }
      return;
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      return Copy(input(0, 0), output(1, 0), length, like, stop);
    case CollectiveKind::kAllGatherV:
    case CollectiveKind::kAllToAllV:
      return RunUneven(begin, end, stop);
    case CollectiveKind::kBarrier:
      return;
  }
}

void LocalExchange::RunUneven(int64_t begin, int64_t end, const std::atomic<bool>& stop) const {
  for (int from = 0; from < size(); ++from) {
    const Operation& sender = *seats_[from];
    for (int to = 0; to < size(); ++to) {
      const TensorView source = sender.in[sender.what.kind == CollectiveKind::kAllGatherV ? 0 : to];
      const int64_t length = std::min(end, source.count) - begin;
      if (length <= 0) continue;
      const TensorList in = {source}, out = {seats_[to]->out[from]};
      Copy(Cursor(in, begin), {Cursor(out, begin)}, length, sender, stop);
    }
  }
}

}  // namespace evenkeel::internal
