#include "evenkeel/comm/internal/gloo_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/internal/common_part.h"
#include "evenkeel/comm/internal/gloo_mesh.h"
#include "evenkeel/comm/internal/gloo_transport.h"
#include "evenkeel/comm/internal/parties.h"
#include "evenkeel/comm/internal/reduce_kernels.h"
#include "gloo/allgather.h"
#include "gloo/allreduce.h"
#include "gloo/alltoall.h"
#include "gloo/barrier.h"
#include "gloo/broadcast.h"
#include "gloo/context.h"
#include "gloo/reduce.h"
#include "gloo/transport/unbound_buffer.h"

namespace evenkeel::internal {
namespace {

using gloo::transport::UnboundBuffer;

// What one message of the reduce-scatter ring carries: small enough that a piece is added while the next one travels,
// and stays in the cache meanwhile; large enough that its header costs nothing.
constexpr int64_t kPieceBytes = 256 << 10;

constexpr uint64_t kReduceScatterSlots = 0x41;
constexpr uint64_t kMessageSlots = 0x42;
constexpr uint64_t kNoteSlots = 0x43;

// 40 bits of the tag between the top byte and 16 bits for the number of the message.
uint64_t Slot(uint64_t top_byte, uint64_t tag, int64_t message = 0) {
  return top_byte << 56 | (tag & 0xff'ffff'ffff) << 16 | (message & 0xffff);
}

bool Overlap(const TensorView& a, const TensorView& b) {
  const auto begin = [](const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data); };
  return begin(a) < begin(b) + b.bytes() && begin(b) < begin(a) + a.bytes();
}

int64_t CountOf(const TensorList& views) {
  int64_t count = 0;
  for (const TensorView& view : views) count += view.count;
  return count;
}

// A scale on the contributions keeps sums of float16 in range. Where the result is no sum it belongs to the result.
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
void Conclude(const Operation& operation, const TensorView& data, int world_size) {
  const Collective& what = operation.what;
  if (!ScalesContributions(what.op) && operation.scale != 1.0) {
    Scale(what.dtype, data.data, data.count, operation.scale);
  }
  if (what.op == ReduceOp::kAverage) DivideIntegers(what.dtype, data.data, data.count, world_size);
}

// Gloo's form of a reduction: out = a op b.
auto ReductionOf(const Collective& what) {
  return [op = what.op, dtype = what.dtype](void* out, const void* a, const void* b, size_t n) {
    const void* const in[] = {a, b};
    if (out == a) {
      Accumulate(op, dtype, out, b, static_cast<int64_t>(n));
    } else if (out == b) {
      Accumulate(op, dtype, out, a, static_cast<int64_t>(n));
    } else {
      ReduceInto(op == ReduceOp::kAverage ? ReduceOp::kSum : op, dtype, out, in, static_cast<int64_t>(n));
    }
  };
}

// Gloo knows an element by its size alone.
template <typename Options>
void SetOutput(Options& options, const TensorView& data) {
  switch (SizeOf(data.dtype)) {
    case 1:
      return options.setOutput(static_cast<uint8_t*>(data.data), data.count);
    case 2:
      return options.setOutput(static_cast<uint16_t*>(data.data), data.count);
    case 4:
      return options.setOutput(static_cast<uint32_t*>(data.data), data.count);
    default:
      return options.setOutput(static_cast<uint64_t*>(data.data), data.count);
  }
}

template <typename Options>
void SetInput(Options& options, const TensorView& data) {
  options.setInput(static_cast<uint8_t*>(data.data), data.bytes());
}

// Goes ahead of a message's data: one half of the message, which the other half must match.
constexpr size_t kNoteBytes = 128;

struct PairNote {
  uint64_t hash = 0;
  int64_t sequence = 0;
  std::string text;  // For people.

  static PairNote Of(const Operation& operation, const RankNames& names) {
    PairNote note{HashOfCommonPart(operation), operation.sequence, names.TextOf(operation.what)};
    const std::vector<int64_t> parts = PartsOf(operation);
    if (parts.size() > 1) absl::StrAppend(&note.text, " in parts ", absl::StrJoin(parts, "+"));
    if (operation.scale != 1.0) absl::StrAppend(&note.text, ", scale ", operation.scale);
    return note;
  }
  std::string Serialize() const {
    constexpr size_t kMostText = kNoteBytes - sizeof(hash) - sizeof(sequence) - sizeof(uint32_t);
    std::string bytes = ByteWriter().U64(hash).I64(sequence).Bytes(text.substr(0, kMostText)).Take();
    bytes.resize(kNoteBytes);
    return bytes;
  }
  static PairNote Parse(absl::string_view bytes) {
    ByteReader reader(bytes);
    PairNote note{.hash = reader.U64(), .sequence = reader.I64(), .text = ""};
    note.text = std::string(reader.Bytes());
    return note;
  }
};

void CheckNotes(int sender, const PairNote& sent, int receiver, const PairNote& expected) {
  if (sent.hash == expected.hash && sent.sequence == expected.sequence) return;
  Parties parties;
  parties[sender] = absl::StrCat("#", sent.sequence, " ", sent.text);
  parties[receiver] = absl::StrCat("#", expected.sequence, " ", expected.text);
  throw StatusError(
      absl::FailedPreconditionError(absl::StrCat(Describe(parties, "is at", "are at"), ": the ranks disagree")));
}

}  // namespace

uint64_t TagOf(const Operation& operation, uint64_t generation) {
  const uint64_t lane = StableHash(generation, operation.channel);
  return StableHash(StableHash(lane, static_cast<uint64_t>(operation.sequence)), HashOfCommonPart(operation));
}

char* GlooCollectives::Scratch::Get(int64_t bytes) {
  if (bytes > size_) {
    data_ = nullptr;
    size_ = 0;
    data_ = std::make_unique_for_overwrite<char[]>(bytes);
    size_ = bytes;
  }
  return data_.get();
}

GlooCollectives::GlooCollectives(std::shared_ptr<gloo::Context> context, int rank, int world_size, uint64_t generation,
                                 const RankNames& names)
    : context_(std::move(context)), rank_(rank), world_size_(world_size), generation_(generation), names_(names) {}

GlooCollectives::~GlooCollectives() = default;

void GlooCollectives::Run(const Operation& operation) {
  const CollectiveKind kind = operation.what.kind;
  if (kind == CollectiveKind::kBarrier) return Barrier(operation);
  if (operation.what.count == 0 && !IsPair(operation.what.kind)) return;  // Nothing to say to anybody.
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
    case CollectiveKind::kSend:
      return Send(operation);
    case CollectiveKind::kRecv:
      return Recv(operation);
    case CollectiveKind::kBarrier:
      return;
  }
}

TensorView GlooCollectives::Gather(const Operation& operation, const TensorList& views, const TensorList& avoid) {
  const bool touches = views.size() == 1 && std::any_of(avoid.begin(), avoid.end(), [&](const TensorView& view) {
                         return Overlap(views[0], view);
                       });
  if (views.size() == 1 && !touches) return views[0];
  const int64_t count = CountOf(views);
  TensorView whole(in_.Get(count * SizeOf(operation.what.dtype)), count, operation.what.dtype);
  char* to = static_cast<char*>(whole.data);
  for (const TensorView& view : views) {
    if (view.count > 0) std::memcpy(to, view.data, view.bytes());
    to += view.bytes();
  }
  return whole;
}

TensorView GlooCollectives::Room(const Operation& operation, const TensorList& views) {
  if (views.size() == 1) return views[0];
  const int64_t count = CountOf(views);
  return TensorView(out_.Get(count * SizeOf(operation.what.dtype)), count, operation.what.dtype);
}

void GlooCollectives::Spread(const TensorView& whole, const TensorList& views) {
  const char* from = static_cast<const char*>(whole.data);
  for (const TensorView& view : views) {
    if (view.data != from && view.count > 0) std::memcpy(view.data, from, view.bytes());
    from += view.bytes();
  }
}

void GlooCollectives::AllReduce(const Operation& operation) {
  const TensorView data = Gather(operation, operation.out, {});
  Contribute(operation, data);
  if (world_size_ > 1) {
    gloo::AllreduceOptions options(context_);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    SetOutput(options, data);
    options.setReduceFunction(ReductionOf(operation.what));
    options.setTag(static_cast<uint32_t>(TagOf(operation, generation_)));
    options.setTimeout(GlooTimeout(operation.deadline));
    gloo::allreduce(options);
  }
  Conclude(operation, data, world_size_);
  Spread(data, operation.out);
}

void GlooCollectives::Reduce(const Operation& operation) {
  const TensorView data = Gather(operation, operation.out, {});
  Contribute(operation, data);
  if (world_size_ > 1) {
    gloo::ReduceOptions options(context_);
    SetOutput(options, data);
    options.setRoot(operation.what.root);
    options.setReduceFunction(ReductionOf(operation.what));
    options.setTag(static_cast<uint32_t>(TagOf(operation, generation_)));
    options.setTimeout(GlooTimeout(operation.deadline));
    gloo::reduce(options);
  }
  if (rank_ != operation.what.root) return;
  Conclude(operation, data, world_size_);
  Spread(data, operation.out);
}

void GlooCollectives::Broadcast(const Operation& operation) {
  if (world_size_ == 1) return;
  const bool is_root = rank_ == operation.what.root;
  const TensorView data = is_root ? Gather(operation, operation.in, {}) : Room(operation, operation.out);
  gloo::BroadcastOptions options(context_);
  SetOutput(options, data);
  options.setRoot(operation.what.root);
  options.setTag(static_cast<uint32_t>(TagOf(operation, generation_)));
  options.setTimeout(GlooTimeout(operation.deadline));
  gloo::broadcast(options);
  if (!is_root) Spread(data, operation.out);
}

void GlooCollectives::AllGather(const Operation& operation) {
  const TensorView input = Gather(operation, operation.in, operation.out);
  const TensorView output = Room(operation, operation.out);
  if (world_size_ == 1) {
    std::memcpy(output.data, input.data, input.bytes());
  } else {
    gloo::AllgatherOptions options(context_);
    SetInput(options, input);
    options.setOutput(static_cast<uint8_t*>(output.data), output.bytes());
    options.setTag(static_cast<uint32_t>(TagOf(operation, generation_)));
    options.setTimeout(GlooTimeout(operation.deadline));
    gloo::allgather(options);
  }
  Spread(output, operation.out);
}

void GlooCollectives::AllToAll(const Operation& operation) {
  const TensorView input = Gather(operation, operation.in, operation.out);
  const TensorView output = Room(operation, operation.out);
  if (world_size_ == 1) {
    std::memcpy(output.data, input.data, input.bytes());
  } else {
    gloo::AlltoallOptions options(context_);
    SetInput(options, input);
    options.setOutput(static_cast<uint8_t*>(output.data), output.bytes());
    options.setTag(static_cast<uint32_t>(TagOf(operation, generation_)));
    options.setTimeout(GlooTimeout(operation.deadline));
    gloo::alltoall(options);
  }
  Spread(output, operation.out);
}

void GlooCollectives::Barrier(const Operation& operation) {
  if (world_size_ == 1) return;
  gloo::BarrierOptions options(context_);
  options.setTag(static_cast<uint32_t>(TagOf(operation, generation_)));
  options.setTimeout(GlooTimeout(operation.deadline));
  gloo::barrier(options);
}

uint64_t GlooCollectives::NoteSlot(const Operation& operation) const {
  return Slot(kNoteSlots, StableHash(generation_, operation.channel));
}

void GlooCollectives::Send(const Operation& operation) {
  const int to = operation.what.root;
  std::string note = PairNote::Of(operation, names_).Serialize();
  const TensorView data = Gather(operation, operation.in, {});
  const auto ahead = context_->createUnboundBuffer(note.data(), note.size());
  const auto buffer = context_->createUnboundBuffer(data.data, data.bytes());
  ahead->send(to, NoteSlot(operation));
  if (data.bytes() > 0) {
    buffer->send(to, Slot(kMessageSlots, TagOf(operation, generation_)));
    buffer->waitSend(GlooTimeout(operation.deadline));
  }
  ahead->waitSend(GlooTimeout(operation.deadline));
}

void GlooCollectives::Recv(const Operation& operation) {
  const int from = operation.what.root;
  std::string note(kNoteBytes, '\0');
  const TensorView data = Room(operation, operation.out);
  const auto ahead = context_->createUnboundBuffer(note.data(), note.size());
  const auto buffer = context_->createUnboundBuffer(data.data, data.bytes());
  ahead->recv(from, NoteSlot(operation));
  // Asked for at once, so that large data need not wait for the note.
  if (data.bytes() > 0) buffer->recv(from, Slot(kMessageSlots, TagOf(operation, generation_)));
  ahead->waitRecv(GlooTimeout(operation.deadline));
  CheckNotes(names_[from], PairNote::Parse(note), names_[rank_], PairNote::Of(operation, names_));
  if (data.bytes() > 0) buffer->waitRecv(GlooTimeout(operation.deadline));
  Spread(data, operation.out);
}

void GlooCollectives::ReduceScatter(const Operation& operation) {
  const TensorView input = Gather(operation, operation.in, {});
  const TensorView output = Room(operation, operation.out);
  if (world_size_ == 1) {
    std::memmove(output.data, input.data, input.bytes());
    Contribute(operation, output);
  } else {
    ReduceScatterRing(operation, static_cast<const char*>(input.data), static_cast<char*>(output.data));
  }
  Conclude(operation, output, world_size_);
  Spread(output, operation.out);
}

// The ring: chunk c, which rank c ends up with, starts at rank c + 1 and goes round once; each rank adds its own part
// and sends it on. So in step s this rank sends chunk rank - 1 - s, which it has completed in the step before, and
// receives chunk rank - 2 - s. Chunks travel in pieces, each in a message of its own, so that adding one piece overlaps
// with the transport of others. Two sums are in work, the one that leaves and the one that arrives; a piece's place is
// used again in the step after the next one, when it has left.
void GlooCollectives::ReduceScatterRing(const Operation& operation, const char* input, char* output) {
  const Collective& what = operation.what;
  const int64_t element = SizeOf(what.dtype);
  const int64_t per_piece = kPieceBytes / element;
  const int64_t pieces = (what.count + per_piece - 1) / per_piece;
  const int next = (rank_ + 1) % world_size_, previous = (rank_ + world_size_ - 1) % world_size_;
  const uint64_t tag = TagOf(operation, generation_);
  const int64_t chunk_bytes = what.count * element;
  char* const sums[2] = {ring_.Get(2 * chunk_bytes + kPieceBytes), ring_.Get(0) + chunk_bytes};
  char* const own = ring_.Get(0) + 2 * chunk_bytes;  // This rank's part of one piece.

  const auto length = [&](int64_t piece) { return std::min(per_piece, what.count - piece * per_piece); };
  const auto part_of = [&](int step, int64_t piece) {
    const int chunk = (rank_ + 2 * world_size_ - 1 - step) % world_size_;
    return input + chunk * chunk_bytes + piece * kPieceBytes;
  };
  const auto slot = [&](int step, int64_t piece) { return Slot(kReduceScatterSlots, tag, step * pieces + piece); };

  std::array<std::vector<std::unique_ptr<UnboundBuffer>>, 2> buffers;
  for (int side = 0; side < 2; ++side) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      buffers[side].push_back(context_->createUnboundBuffer(sums[side] + piece * kPieceBytes, length(piece) * element));
    }
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const TensorView start(sums[0] + piece * kPieceBytes, length(piece), what.dtype);
    buffers[1][piece]->recv(previous, slot(0, piece));
    if (operation.contributes) std::memcpy(start.data, part_of(0, piece), start.bytes());
    Contribute(operation, start);
    buffers[0][piece]->send(next, slot(0, piece));
  }
  for (int step = 0; step < world_size_ - 1; ++step) {
    const int leaving = step % 2, arriving = 1 - leaving;
    const bool is_last = step == world_size_ - 2;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      buffers[arriving][piece]->waitRecv(GlooTimeout(operation.deadline));
      char* const sum = sums[arriving] + piece * kPieceBytes;
      if (operation.contributes) {
        const TensorView mine(own, length(piece), what.dtype);
        const char* addend = part_of(step + 1, piece);
        if (ScalesContributions(what.op) && operation.scale != 1.0) {
          std::memcpy(own, addend, mine.bytes());
          Contribute(operation, mine);
          addend = own;
        }
        Accumulate(what.op, what.dtype, sum, addend, mine.count);
      }
      buffers[leaving][piece]->waitSend(GlooTimeout(operation.deadline));
      if (is_last) continue;
      buffers[leaving][piece]->recv(previous, slot(step + 1, piece));
      buffers[arriving][piece]->send(next, slot(step + 1, piece));
    }
  }
  // The output may overlap the input, which is no longer read.
  std::memcpy(output, sums[(world_size_ - 1) % 2], chunk_bytes);
}

}  // namespace evenkeel::internal
