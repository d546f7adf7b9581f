#include "evenkeel/comm/tcp/collectives.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/thresholds.h"

namespace evenkeel::internal {
namespace {

// The number of pieces by which a step of the ring is behind the step before it: so many may be in
// flight.
constexpr int kLag = 2;

// A scale on the contributions keeps sums of float16 in range. Where the result is no sum it
// belongs to the result.
bool ScalesContributions(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAverage; }

// Makes `data` what this rank puts into the reduction.
void Contribute(const Operation& operation, const TensorView& data) {
  const Collective& what = operation.what;
  if (!operation.contributes) {
    FillIdentity(what.op, what.dtype, data.data, data.count);
  } else if (ScalesContributions(what.op) && operation.scale != 1.0) {
    Scale(what.dtype, data.data, data.count, operation.scale);
  }
}

// Makes the combined `data` the result.
void Conclude(const Operation& operation, const TensorView& data) {
  const Collective& what = operation.what;
  if (!ScalesContributions(what.op) && operation.scale != 1.0) {
    Scale(what.dtype, data.data, data.count, operation.scale);
  }
}

// `count` elements in chunks, one for each rank, that differ by one element at most; chunks in
// pieces, of which each chunk has the same number, the last of them possibly empty.
struct Chunks {
  int64_t count = 0;
  int ranks = 1;
  int64_t per_piece = 1;

  Chunks(int64_t count, int ranks, DType dtype)
      : count(count), ranks(ranks), per_piece(kTcpPieceBytes / SizeOf(dtype)) {}
  int64_t begin(int chunk) const { return count * chunk / ranks; }
  int64_t longest() const { return (count + ranks - 1) / ranks; }
  int64_t pieces() const { return (longest() + per_piece - 1) / per_piece; }
  // Where the piece is in the whole.
  TensorView Piece(const void* whole, DType dtype, int chunk, int64_t piece) const {
    const int64_t at = std::min(begin(chunk) + piece * per_piece, begin(chunk + 1));
    return TensorView(static_cast<char*>(const_cast<void*>(whole)) + at * SizeOf(dtype),
                      std::min(per_piece, begin(chunk + 1) - at), dtype);
  }
};

// a = a op b. In this order on each rank: the bits of a maximum of zeros depend on it.
void CombineInto(const Collective& what, const TensorView& a, const void* b) {
  if (a.count > 0) Accumulate(what.op, what.dtype, a.data, b, a.count);
}

void Copy(const TensorView& to, const TensorView& from) {
  if (from.count > 0 && to.data != from.data) std::memmove(to.data, from.data, from.bytes());
}

}  // namespace

uint64_t TcpSlot(TcpSlots slots, uint64_t tag, int64_t number) {
  return static_cast<uint64_t>(slots) << 56 | (tag & 0xff'ffff'ffff) << 16 | (number & 0xffff);
}

uint64_t TagOf(const Operation& operation, uint64_t generation) {
  const uint64_t lane = StableHash(generation, operation.channel);
  return StableHash(StableHash(lane, static_cast<uint64_t>(operation.sequence)),
                    HashOfCommonPart(operation));
}

char* TcpCollectives::Scratch::Get(int64_t bytes) {
  if (bytes > size_) {
    data_ = nullptr;
    size_ = 0;
    data_ = std::make_unique_for_overwrite<char[]>(bytes);
    size_ = bytes;
  }
  return data_.get();
}

TcpCollectives::TcpCollectives(std::shared_ptr<TcpTransport> transport, int rank, int world_size,
                               uint64_t generation, const RankNames& names)
    : transport_(std::move(transport)),
      rank_(rank),
      world_size_(world_size),
      generation_(generation),
      names_(names) {}

absl::Status TcpCollectives::Run(const Operation& operation) {
  deadline_ = operation.deadline + kTcpSlack;
  try {
    return RunNow(operation);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

absl::Status TcpCollectives::RunNow(const Operation& operation) {
  const CollectiveKind kind = operation.what.kind;
  if (kind == CollectiveKind::kBarrier) return Barrier(operation);
  if (operation.what.count == 0 && !IsUneven(kind)) return absl::OkStatus();
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return AllReduce(operation);
    case CollectiveKind::kReduce:
      return Reduce(operation);
    case CollectiveKind::kBroadcast:
      return Broadcast(operation);
    case CollectiveKind::kAllGather:
      return AllGather(operation);
    case CollectiveKind::kReduceScatter:
      return ReduceScatter(operation);
    case CollectiveKind::kAllToAll:
      return AllToAll(operation);
    case CollectiveKind::kAllGatherV:
      return AllGatherV(operation);
    case CollectiveKind::kAllToAllV:
      return AllToAllV(operation);
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
      break;
  }
  return absl::InternalError(absl::StrCat(ToString(kind), " is no collective of TCP"));
}

// Transport ---------------------------------------------------------------------------------------

uint64_t TcpCollectives::SlotOf(const Operation& operation, int64_t number) const {
  // No two messages share a slot: they are not always received in the order in which they are sent.
  const uint64_t tag = TagOf(operation, generation_);
  return TcpSlot(TcpSlots::kCollectives,
                 number < 0x10000 ? tag : StableHash(tag, static_cast<uint64_t>(number >> 16)),
                 number);
}

TcpCollectives::Pending TcpCollectives::Send(int to, const Operation& operation, int64_t number,
                                             const TensorView& data) {
  if (data.count == 0 && !IsUneven(operation.what.kind)) return Pending();
  return transport_->Send(to, SlotOf(operation, number), data.data, data.bytes());
}

TcpCollectives::Pending TcpCollectives::Receive(int from, const Operation& operation,
                                                int64_t number, const TensorView& place) {
  if (place.count == 0 && !IsUneven(operation.what.kind)) return Pending();
  return transport_->Receive(from, SlotOf(operation, number), place.data, place.bytes());
}

absl::Status TcpCollectives::WaitForAll(std::vector<Pending>& pending) {
  for (Pending& one : pending) EK_RETURN_IF_ERROR(one.Wait(deadline_));
  return absl::OkStatus();
}

absl::Status TcpCollectives::ExchangeDirectly(const Operation& operation,
                                              absl::FunctionRef<TensorView(int)> part,
                                              absl::FunctionRef<TensorView(int)> place) {
  std::vector<Pending> pending;
  for (int i = 1; i < world_size_; ++i) {
    const int from = (rank_ + world_size_ - i) % world_size_;
    pending.push_back(Receive(from, operation, 0, place(from)));
  }
  for (int i = 1; i < world_size_; ++i) {
    const int to = (rank_ + i) % world_size_;
    pending.push_back(Send(to, operation, 0, part(to)));
  }
  const absl::Status status = WaitForAll(pending);
  // Two ranks with different sizes: the transport has not the operation's name.
  return IsUneven(operation.what.kind) && absl::IsFailedPrecondition(status)
             ? Annotate(status, names_.Place(rank_, operation.sequence, operation.what))
             : status;
}

// Memory ------------------------------------------------------------------------------------------

TensorView TcpCollectives::Gather(const Operation& operation, const TensorList& views,
                                  const TensorList& avoid) {
  if (views.size() == 1 && !Overlap(views, avoid)) return views[0];
  const int64_t count = CountOf(views);
  const TensorView whole(in_.Get(count * SizeOf(operation.what.dtype)), count,
                         operation.what.dtype);
  internal::Copy(views, {whole});
  return whole;
}

TensorView TcpCollectives::Room(const Operation& operation, const TensorList& views) {
  if (views.size() == 1) return views[0];
  const int64_t count = CountOf(views);
  return TensorView(out_.Get(count * SizeOf(operation.what.dtype)), count, operation.what.dtype);
}

// Reductions --------------------------------------------------------------------------------------

absl::Status TcpCollectives::AllReduce(const Operation& operation) {
  const TensorView data = Gather(operation, operation.out, {});
  Contribute(operation, data);
  if (world_size_ > 1) EK_RETURN_IF_ERROR(Combine(operation, data));
  Conclude(operation, data);
  internal::Copy({data}, operation.out);
  return absl::OkStatus();
}

absl::Status TcpCollectives::Combine(const Operation& operation, const TensorView& data) {
  if (world_size_ <= kTcpFewRanks && data.bytes() * (world_size_ - 1) <= kTcpMostDirect)
    return CombineDirectly(operation, data);
  if (data.bytes() <= kTcpMostInRounds) return CombineByDoubling(operation, data);
  return CombineInRing(operation, data);
}

absl::Status TcpCollectives::CombineDirectly(const Operation& operation, const TensorView& data) {
  char* const theirs = work_.Get(data.bytes() * world_size_);
  const auto place = [&](int rank) {
    return rank == rank_ ? data : TensorView(theirs + rank * data.bytes(), data.count, data.dtype);
  };
  EK_RETURN_IF_ERROR(ExchangeDirectly(
      operation, [&](int) { return data; }, place));
  std::vector<const void*> in;
  for (int rank = 0; rank < world_size_; ++rank) in.push_back(place(rank).data);
  ReduceInto(operation.what.op, data.dtype, data.data, in, data.count);
  return absl::OkStatus();
}

// Among the first ranks, as many as the largest power of two; each of the others gives its data to
// one of them before, and gets the result after.
absl::Status TcpCollectives::CombineByDoubling(const Operation& operation, const TensorView& data) {
  const int doubling = static_cast<int>(std::bit_floor(static_cast<unsigned>(world_size_)));
  const TensorView theirs(work_.Get(data.bytes()), data.count, data.dtype);
  enum : int64_t { kBefore = 0, kAfter = 1, kRounds = 2 };
  if (rank_ >= doubling) {
    EK_RETURN_IF_ERROR(Send(rank_ - doubling, operation, kBefore, data).Wait(deadline_));
    return Receive(rank_ - doubling, operation, kAfter, data).Wait(deadline_);
  }
  const bool has_other = rank_ + doubling < world_size_;
  if (has_other) {
    EK_RETURN_IF_ERROR(Receive(rank_ + doubling, operation, kBefore, theirs).Wait(deadline_));
    CombineInto(operation.what, data, theirs.data);
  }
  for (int distance = 1; distance < doubling; distance *= 2) {
    const int peer = rank_ ^ distance;
    Pending receive = Receive(peer, operation, kRounds, theirs);
    Pending send = Send(peer, operation, kRounds, data);
    EK_RETURN_IF_ERROR(receive.Wait(deadline_));
    EK_RETURN_IF_ERROR(send.Wait(deadline_));
    if (rank_ < peer) {
      CombineInto(operation.what, data, theirs.data);
    } else {
      CombineInto(operation.what, theirs, data.data);
      Copy(data, theirs);
    }
  }
  return has_other ? Send(rank_ + doubling, operation, kAfter, data).Wait(deadline_)
                   : absl::OkStatus();
}

// The second half of a ring: each rank's chunk of `data` goes to all others, piece by piece. In
// step s a rank sends chunk rank - s, which it received in the step before, and receives chunk
// rank - 1 - s.
class TcpCollectives::Gathering {
 public:
  // `first`: the number of its first message.
  Gathering(TcpCollectives* owner, const Operation& operation, const TensorView& data,
            int64_t first)
      : owner_(*owner),
        operation_(operation),
        data_(data),
        chunks_(data.count, owner->world_size_, data.dtype),
        first_(first),
        receives_(owner->world_size_ - 1) {
    for (auto& of_step : receives_) of_step.resize(chunks_.pieces());
  }

  // This rank's piece is complete in `data`, and the places of the other ranks' same pieces may be
  // written.
  void Begin(int64_t piece) {
    const int previous = (owner_.rank_ + owner_.world_size_ - 1) % owner_.world_size_;
    for (int step = 0; step < owner_.world_size_ - 1; ++step) {
      receives_[step][piece] =
          owner_.Receive(previous, operation_, Number(step, piece), Sent(step + 1, piece));
    }
    Send(0, piece);
  }
  absl::Status Finish() {
    for (int step = 0; step < owner_.world_size_ - 1; ++step) {
      for (int64_t piece = 0; piece < chunks_.pieces(); ++piece) {
        EK_RETURN_IF_ERROR(receives_[step][piece].Wait(owner_.deadline_));
        if (step + 1 < owner_.world_size_ - 1) Send(step + 1, piece);
      }
    }
    return owner_.WaitForAll(sends_);
  }

 private:
  int64_t Number(int step, int64_t piece) const { return first_ + step * chunks_.pieces() + piece; }
  TensorView Sent(int step, int64_t piece) const {
    const int chunk = (owner_.rank_ + owner_.world_size_ - step) % owner_.world_size_;
    return chunks_.Piece(data_.data, data_.dtype, chunk, piece);
  }
  void Send(int step, int64_t piece) {
    const int next = (owner_.rank_ + 1) % owner_.world_size_;
    sends_.push_back(owner_.Send(next, operation_, Number(step, piece), Sent(step, piece)));
  }

  TcpCollectives& owner_;
  const Operation& operation_;
  const TensorView data_;
  const Chunks chunks_;
  const int64_t first_;
  std::vector<std::vector<Pending>> receives_;  // By step and piece.
  std::vector<Pending> sends_;
};

absl::Status TcpCollectives::CombineInRing(const Operation& operation, const TensorView& data) {
  const Chunks chunks(data.count, world_size_, data.dtype);
  Gathering gathering(this, operation, data, (world_size_ - 1) * chunks.pieces());
  EK_RETURN_IF_ERROR(
      ReduceInRing(operation, static_cast<const char*>(data.data), data.count, Parts::kInPlace,
                   [&](int64_t piece, const TensorView&) { gathering.Begin(piece); }));
  return gathering.Finish();
}

absl::Status TcpCollectives::Reduce(const Operation& operation) {
  const TensorView data = Gather(operation, operation.out, {});
  const int root = operation.what.root;
  Contribute(operation, data);
  std::vector<Pending> pending;
  if (world_size_ == 1 || data.bytes() <= kTcpMostInRounds) {
    if (rank_ != root) return Send(root, operation, 0, data).Wait(deadline_);
    std::vector<const void*> in;
    for (int rank = 0; rank < world_size_; ++rank) {
      char* const theirs = work_.Get(data.bytes() * world_size_) + rank * data.bytes();
      in.push_back(rank == rank_ ? data.data : theirs);
      if (rank == rank_) continue;
      pending.push_back(Receive(rank, operation, 0, TensorView(theirs, data.count, data.dtype)));
    }
    EK_RETURN_IF_ERROR(WaitForAll(pending));
    ReduceInto(operation.what.op, data.dtype, data.data, in, data.count);
  } else {
    const Chunks chunks(data.count, world_size_, data.dtype);
    const int64_t first = (world_size_ - 1) * chunks.pieces();
    const auto take = [&](int64_t piece, const TensorView& sum) {
      if (rank_ != root) return pending.push_back(Send(root, operation, first + piece, sum));
      for (int rank = 0; rank < world_size_; ++rank) {
        if (rank == root) continue;
        pending.push_back(Receive(rank, operation, first + piece,
                                  chunks.Piece(data.data, data.dtype, rank, piece)));
      }
    };
    EK_RETURN_IF_ERROR(ReduceInRing(operation, static_cast<const char*>(data.data), data.count,
                                    Parts::kInPlace, take));
    EK_RETURN_IF_ERROR(WaitForAll(pending));
  }
  if (rank_ != root) return absl::OkStatus();
  Conclude(operation, data);
  internal::Copy({data}, operation.out);
  return absl::OkStatus();
}

absl::Status TcpCollectives::ReduceScatter(const Operation& operation) {
  const TensorView input = Gather(operation, operation.in, {});
  const TensorView output = Room(operation, operation.out);
  if (world_size_ == 1) {
    Copy(output, input);
    Contribute(operation, output);
  } else {
    const Chunks chunks(input.count, world_size_, input.dtype);
    // The ring still reads the input while it completes the output's first pieces.
    const TensorView result = Overlap(output, input)
                                  ? TensorView(out_.Get(output.bytes()), output.count, output.dtype)
                                  : output;
    EK_RETURN_IF_ERROR(ReduceInRing(operation, static_cast<const char*>(input.data), input.count,
                                    Parts::kToContribute,
                                    [&](int64_t piece, const TensorView& sum) {
                                      Copy(result.Slice(piece * chunks.per_piece, sum.count), sum);
                                    }));
    Copy(output, result);
  }
  Conclude(operation, output);
  internal::Copy({output}, operation.out);
  return absl::OkStatus();
}

// Chunk c, which rank c ends up with, starts at rank c + 1 and goes round once; each rank adds its
// own part and sends the sum on. So in step s this rank completes chunk rank - 1 - s, which the
// rank before it has sent after its own step s - 1.
//
// All steps are in work at a time, each kLag pieces behind the one before it: then only a few sums
// are in memory, and stay in the cache. What a rank waits for in a tick the others have done at
// least kLag ticks before, so no rank waits for itself.
absl::Status TcpCollectives::ReduceInRing(
    const Operation& operation, const char* input, int64_t count, Parts parts,
    absl::FunctionRef<void(int64_t, const TensorView&)> take) {
  const Collective& what = operation.what;
  const Chunks chunks(count, world_size_, what.dtype);
  const int64_t pieces = chunks.pieces();
  const int next = (rank_ + 1) % world_size_, previous = (rank_ + world_size_ - 1) % world_size_;
  constexpr int kPlaces = 2 * kLag;  // Per step: a piece stays until it is added and sent.
  char* const places = work_.Get((world_size_ * kPlaces + 1) * kTcpPieceBytes);
  const auto place = [&](int step, int64_t piece) { return step * kPlaces + piece % kPlaces; };
  std::vector<Pending> receives(world_size_ * kPlaces), sends(world_size_ * kPlaces);
  std::vector<Pending> first_sends(pieces);  // Those of step 0.

  const bool is_scaled = ScalesContributions(what.op) && operation.scale != 1.0;
  const bool is_ready = parts == Parts::kInPlace || (operation.contributes && !is_scaled);
  const auto part_of = [&](int step, int64_t piece) {
    const int chunk = (rank_ + 2 * world_size_ - 1 - step) % world_size_;
    return chunks.Piece(input, what.dtype, chunk, piece);
  };
  // The same as this rank contributes it: in its place, or else in `memory`.
  const auto contribution = [&](int step, int64_t piece, void* memory) {
    const TensorView part = part_of(step, piece);
    if (is_ready) return part;
    const TensorView copy(memory, part.count, part.dtype);
    if (operation.contributes) Copy(copy, part);
    Contribute(operation, copy);
    return copy;
  };

  const auto sum_of = [&](int step, int64_t piece) {
    return TensorView(places + place(step, piece) * kTcpPieceBytes, part_of(step, piece).count,
                      what.dtype);
  };
  const auto has = [&](int64_t piece) { return piece >= 0 && piece < pieces; };
  for (int64_t tick = 0; tick < pieces + (world_size_ - 1) * kLag; ++tick) {
    for (int step = 1; step < world_size_; ++step) {
      const int64_t piece = tick - (step - 1) * kLag;
      if (!has(piece)) continue;
      EK_RETURN_IF_ERROR(sends[place(step, piece)].Wait(deadline_));
      receives[place(step, piece)] =
          Receive(previous, operation, (step - 1) * pieces + piece, sum_of(step, piece));
    }
    if (has(tick)) {
      if (has(tick - kPlaces)) EK_RETURN_IF_ERROR(first_sends[tick - kPlaces].Wait(deadline_));
      first_sends[tick] = Send(next, operation, tick, contribution(0, tick, sum_of(0, tick).data));
    }
    for (int step = 1; step < world_size_; ++step) {
      const int64_t piece = tick - step * kLag;
      if (!has(piece)) continue;
      const TensorView sum = sum_of(step, piece), mine = part_of(step, piece);
      EK_RETURN_IF_ERROR(receives[place(step, piece)].Wait(deadline_));
      const bool is_last = step == world_size_ - 1;
      const bool stays = is_last && parts == Parts::kInPlace;
      if (stays) {
        operation.contributes ? CombineInto(what, mine, sum.data) : Copy(mine, sum);
      } else if (operation.contributes) {
        char* const memory = places + world_size_ * kPlaces * kTcpPieceBytes;
        CombineInto(what, sum, contribution(step, piece, memory).data);
      }
      if (is_last) {
        EK_RETURN_IF_ERROR(first_sends[piece].Wait(deadline_));  // take() may overwrite it.
        take(piece, stays ? mine : sum);
      } else {
        sends[place(step, piece)] = Send(next, operation, step * pieces + piece, sum);
      }
    }
  }
  return WaitForAll(sends);
}

// Copies ------------------------------------------------------------------------------------------

absl::Status TcpCollectives::Broadcast(const Operation& operation) {
  if (world_size_ == 1) return absl::OkStatus();
  const int root = operation.what.root;
  const TensorView data =
      rank_ == root ? Gather(operation, operation.in, {}) : Room(operation, operation.out);
  const int place = (rank_ + world_size_ - root) % world_size_;  // Counted from the root.
  const auto rank_at = [&](int at) { return (at + root) % world_size_; };
  std::vector<Pending> sends;
  if (data.bytes() <= kTcpMostInRounds) {
    // A binomial tree: each place gets the data from the one without its highest bit.
    int first = 1;
    if (place > 0) {
      const int highest = static_cast<int>(std::bit_floor(static_cast<unsigned>(place)));
      EK_RETURN_IF_ERROR(Receive(rank_at(place - highest), operation, 0, data).Wait(deadline_));
      first = 2 * highest;
    }
    for (int bit = first; place + bit < world_size_; bit *= 2)
      sends.push_back(Send(rank_at(place + bit), operation, 0, data));
  } else {
    // A chain.
    const int64_t per_piece = world_size_ == 2 ? data.count : kTcpPieceBytes / SizeOf(data.dtype);
    std::vector<TensorView> pieces;
    for (int64_t at = 0; at < data.count; at += per_piece)
      pieces.push_back(data.Slice(at, std::min(per_piece, data.count - at)));
    std::vector<Pending> receives(pieces.size());
    for (size_t i = 0; place > 0 && i < pieces.size(); ++i)
      receives[i] = Receive(rank_at(place - 1), operation, i, pieces[i]);
    for (size_t i = 0; i < pieces.size(); ++i) {
      EK_RETURN_IF_ERROR(receives[i].Wait(deadline_));
      if (place + 1 < world_size_)
        sends.push_back(Send(rank_at(place + 1), operation, i, pieces[i]));
    }
  }
  EK_RETURN_IF_ERROR(WaitForAll(sends));
  if (rank_ != root) internal::Copy({data}, operation.out);
  return absl::OkStatus();
}

absl::Status TcpCollectives::AllGather(const Operation& operation) {
  const TensorView input = Gather(operation, operation.in, operation.out);
  const TensorView output = Room(operation, operation.out);
  const auto part = [&](int rank) { return output.Slice(rank * input.count, input.count); };
  Copy(part(rank_), input);
  if (world_size_ == 1 ||
      input.bytes() <= (world_size_ <= kTcpFewRanks ? kTcpMostDirect : kTcpMostInRounds)) {
    EK_RETURN_IF_ERROR(ExchangeDirectly(
        operation, [&](int) { return input; }, part));
  } else {
    Gathering gathering(this, operation, output, 0);
    const int64_t pieces = Chunks(output.count, world_size_, output.dtype).pieces();
    for (int64_t piece = 0; piece < pieces; ++piece) gathering.Begin(piece);
    EK_RETURN_IF_ERROR(gathering.Finish());
  }
  internal::Copy({output}, operation.out);
  return absl::OkStatus();
}

absl::Status TcpCollectives::AllToAll(const Operation& operation) {
  const TensorView input = Gather(operation, operation.in, operation.out);
  const TensorView output = Room(operation, operation.out);
  const int64_t count = operation.what.count;
  const auto part = [&](int rank) { return input.Slice(rank * count, count); };
  const auto place = [&](int rank) { return output.Slice(rank * count, count); };
  Copy(place(rank_), part(rank_));
  EK_RETURN_IF_ERROR(ExchangeDirectly(operation, part, place));
  internal::Copy({output}, operation.out);
  return absl::OkStatus();
}

// Each rank sends its elements to all others itself: no rank waits for another one's large part.
absl::Status TcpCollectives::AllGatherV(const Operation& operation) {
  const TensorList& out = operation.out;
  Copy(out[rank_], operation.in[0]);
  return ExchangeDirectly(
      operation, [&](int) { return out[rank_]; }, [&](int rank) { return out[rank]; });
}

absl::Status TcpCollectives::AllToAllV(const Operation& operation) {
  const TensorList& out = operation.out;
  TensorList in = operation.in;
  if (Overlap(in, out)) {
    in = LaidOutLike(in, in_.Get(CountOf(in) * SizeOf(operation.what.dtype)));
    internal::Copy(operation.in, in);
  }
  Copy(out[rank_], in[rank_]);
  return ExchangeDirectly(
      operation, [&](int rank) { return in[rank]; }, [&](int rank) { return out[rank]; });
}

// After the round of distance d a rank knows that the 2 d ranks up to it are here.
absl::Status TcpCollectives::Barrier(const Operation& operation) {
  const uint64_t tag = TagOf(operation, generation_);
  int64_t round = 0;
  for (int distance = 1; distance < world_size_; distance *= 2, ++round) {
    const uint64_t slot = TcpSlot(TcpSlots::kCollectives, tag, round);
    Pending receive =
        transport_->Receive((rank_ + world_size_ - distance) % world_size_, slot, nullptr, 0);
    Pending send = transport_->Send((rank_ + distance) % world_size_, slot, nullptr, 0);
    EK_RETURN_IF_ERROR(receive.Wait(deadline_));
    EK_RETURN_IF_ERROR(send.Wait(deadline_));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
