#include "evenkeel/comm/shm/transfer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/local/meeting.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

constexpr int64_t kLine = 64;

// Up to here each rank reduces everything by itself: that costs world_size times the reading, and
// saves a round of waiting.
constexpr int64_t kOneShotBytes = 64 << 10;  // Over the world size.
// From here on looking up registered memory, and reading another rank's, pays.
constexpr int64_t kRegisteredBytes = 16 << 10;
// The bytes that a thread that only issues an operation copies at once.
constexpr int64_t kEarlyBytes = 64 << 10;

// Whether all ranks' buffers hold the same elements, so that each rank can reduce a piece of them.
bool IsReducedByPieces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce;
}

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

ShmTransfer::ShmTransfer(ShmLane& lane, const Operation& operation)
    : lane_(lane),
      operation_(operation),
      kind_(operation.what.kind),
      element_bytes_(SizeOf(operation.what.dtype)),
      count_(operation.what.kind == CollectiveKind::kBarrier ? 0 : operation.what.count),
      in_(operation.in) {
  if (IsUneven(kind_)) {
    // Each rank begins with another one, so that all streams are read at the same time. Its own
    // part is last.
    if (kind_ == CollectiveKind::kAllToAllV)
      std::rotate(in_.begin(), in_.begin() + (me() + 1) % size(), in_.end());
    for (const TensorView& view : in_) sizes_.push_back(view.count);
  }
  const int64_t all = count_ * element_bytes_;
  is_one_shot_ = IsReducedByPieces(kind_) && all * size() <= kOneShotBytes;
  if (is_one_shot_) {
    chunk_elements_ = count_;
  } else {
    const int64_t bytes = SlicesInput(kind_) ? kShmSlotBytes / size() : kShmSlotBytes;
    chunk_elements_ = std::max<int64_t>(1, bytes / kLine * kLine / element_bytes_);
  }
  chunks_ = count_ == 0 ? 0 : (count_ + chunk_elements_ - 1) / chunk_elements_;
  if (IsUneven(kind_)) chunks_ = StreamChunks(sizes_);  // Until ReadSizes().
}

ShmTransfer::~ShmTransfer() = default;

// Arriving ----------------------------------------------------------------------------------------

bool ShmTransfer::CanArrive() const {
  return lane_.OthersHave(&ShmSeat::done, ShmLatestTwo<ShmHeader>::EndedBefore(lane_.operations));
}

uint64_t ShmTransfer::GistOf(bool is_registered, bool is_writable) const {
  return (HashOfCommonPart(operation_) & ~ShmGist::kBits) |
         (operation_.contributes ? ShmGist::kContributes : 0) |
         (is_registered ? ShmGist::kIsRegistered : 0) | (is_writable ? ShmGist::kIsWritable : 0);
}

absl::Status ShmTransfer::Arrive() {
  SetAsideEndangeredInput();
  ShmSeat& seat = mine();
  ShmHeader& header = seat.headers.Of(lane_.operations);
  header.what = operation_.what;
  header.scale = operation_.scale;
  header.step_of = operation_.step_of;
  const std::vector<int64_t> parts = PartsOf(operation_);
  header.parts = static_cast<int32_t>(parts.size());
  for (int i = 0; i < std::min(header.parts, ShmHeader::kParts); ++i)
    header.part_counts[i] = parts[i];
  Register(header);
  seat.gists.Of(lane_.operations)
      .store(GistOf(registered_ != nullptr, is_exposed_), std::memory_order_relaxed);

  // So that who comes last finds all that it needs.
  const int64_t all = (IsUneven(kind_) ? StreamElements(sizes_) : CountOf(in_)) * element_bytes_;
  if (registered_ == nullptr && all <= kEarlyBytes && CanPublish()) {
    way_ = is_one_shot_ ? Way::kOneShot : Way::kStaged;
    EK_RETURN_IF_ERROR(Publish().status());
    way_ = Way::kUnknown;
  }
  seat.arrived.store(lane_.operations + 1, std::memory_order_release);
  has_arrived_ = true;
  std::atomic_thread_fence(
      std::memory_order_seq_cst);  // Of two ranks that arrive together, one sees the other.
  return absl::OkStatus();
}

void ShmTransfer::Register(ShmHeader& header) {
  header.extents = 0;
  int64_t bytes = 0;
  for (const TensorView& view : in_) bytes += view.bytes();
  const size_t most = Reduces(kind_) ? 1 : ShmHeader::kExtents;
  if (size() == 1 || IsUneven(kind_) || !Publishes(me()) || is_one_shot_ ||
      bytes < kRegisteredBytes || in_.size() > most)
    return;
  absl::InlinedVector<RegisteredRange, 4> ranges;
  for (const TensorView& view : in_) {
    std::optional<RegisteredRange> range = FindRegistered(view.data, view.bytes());
    if (!range.has_value()) return;
    ranges.push_back(*std::move(range));
  }
  const RegisteredMemory* given = nullptr;
  for (const RegisteredRange& range : ranges) {
    if (range.in.get() != given && !lane_.Give(*range.in)) return;
    given = range.in.get();
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    header.extent[i] = {
        .memory = ranges[i].in->id, .offset = ranges[i].offset, .bytes = in_[i].bytes()};
  }
  header.extents = static_cast<int32_t>(ranges.size());
  // An in-place reduction writes where it reads, so the result must belong there.
  is_exposed_ =
      ranges.front().is_writable && IsReducedByPieces(kind_) && operation_.in == operation_.out;
  exposed_offset_ = ranges.front().offset;
  registered_ = std::move(ranges.front().in);
}

absl::Status ShmTransfer::Meet(bool& all_are_here) {
  const uint64_t gist = mine().gists.Of(lane_.operations).load(std::memory_order_relaxed);
  all_are_here = true;
  flags_.assign(size(), 0);
  flags_all_ = ShmGist::kBits;
  for (int seat = 0; seat < size(); ++seat) {
    const ShmSeat& other = lane_.seats[seat];
    if (other.arrived.load(std::memory_order_acquire) <= lane_.operations) {
      all_are_here = false;
      continue;
    }
    const uint64_t theirs = other.gists.Of(lane_.operations).load(std::memory_order_relaxed);
    if ((theirs ^ gist) & ~ShmGist::kBits) return DescribeDisagreement();
    flags_[seat] = theirs & ShmGist::kBits;
    flags_all_ &= theirs;
  }
  return absl::OkStatus();
}

absl::Status ShmTransfer::DescribeDisagreement() const {
  Seats seats;
  for (int i = 0; i < size(); ++i) {
    const ShmSeat& seat = lane_.seats[i];
    if (seat.arrived.load(std::memory_order_acquire) <= lane_.operations) continue;
    const ShmHeader& header = seat.headers.Of(lane_.operations);
    Seat& theirs = seats[i];
    theirs.rank = lane_.ranks[i];
    theirs.operation.what = header.what;
    theirs.operation.scale = header.scale;
    theirs.operation.step_of = header.step_of;
    theirs.operation.sequence = operation_.sequence;
    for (int part = 0; part < std::min(header.parts, ShmHeader::kParts); ++part) {
      theirs.operation.out.push_back(
          TensorView(nullptr, header.part_counts[part], header.what.dtype));
    }
  }
  return DisagreementOf(seats, lane_.names);
}

absl::Status ShmTransfer::ChooseWay() {
  if (chunks_ == 0) {
    way_ = Way::kNothing;
    return absl::OkStatus();
  }
  sources_.assign(size(), {});
  if (IsReducedByPieces(kind_)) {
    if (is_one_shot_) {
      way_ = Way::kOneShot;
      return absl::OkStatus();
    }
    if ((flags_all_ & ShmGist::kIsWritable) == 0) {
      way_ = Way::kStaged;
      // Unused memory from some ranks is looked up all the same, or their sockets fill up.
      for (int seat = 0; seat < size(); ++seat) {
        if (IsMine(seat) || (flags_[seat] & ShmGist::kIsRegistered) == 0) continue;
        lane_.Find(seat, lane_.seats[seat].headers.Of(lane_.operations).extent.front().memory)
            .IgnoreError();
      }
      return absl::OkStatus();
    }
    way_ = Way::kDirect;
  } else {
    way_ = Way::kStaged;
  }
  const absl::Status found = FindSources();
  // The others may have done it all by now, and freed their memory.
  return way_ == Way::kDirect && AreBlocksFinished() ? absl::OkStatus() : found;
}

absl::Status ShmTransfer::FindSources() {
  for (int seat = 0; seat < size(); ++seat) {
    if ((flags_[seat] & ShmGist::kIsRegistered) == 0) continue;
    if (IsMine(seat)) {
      sources_[seat] = in_;
      continue;
    }
    const ShmHeader& header = lane_.seats[seat].headers.Of(lane_.operations);
    int64_t left = count_ * (SlicesInput(kind_) ? size() : 1);
    std::shared_ptr<SharedMemory> memory;
    for (int i = 0; i < std::clamp(header.extents, 0, ShmHeader::kExtents); ++i) {
      const ShmHeader::Extent& extent = header.extent[i];
      if (i == 0 || extent.memory != header.extent[i - 1].memory) {
        EK_ASSIGN_OR_RETURN(memory, lane_.Find(seat, extent.memory));
        held_.push_back(memory);
      }
      if (extent.offset < 0 || extent.bytes < 0 || extent.offset > memory->bytes() - extent.bytes) {
        return absl::InternalError(absl::StrCat("rank ", lane_.names[lane_.ranks[seat]], " names ",
                                                extent.bytes, " bytes at ", extent.offset,
                                                " of memory that has ", memory->bytes()));
      }
      const int64_t elements = extent.bytes / element_bytes_;
      sources_[seat].push_back(
          TensorView(memory->data() + extent.offset, elements, operation_.what.dtype));
      left -= elements;
    }
    if (left != 0) {
      return absl::InternalError(absl::StrCat("rank ", lane_.names[lane_.ranks[seat]],
                                              "'s registered input lacks ", left, " elements"));
    }
  }
  return absl::OkStatus();
}

// Moving ------------------------------------------------------------------------------------------

absl::StatusOr<ShmTransfer::State> ShmTransfer::Advance(int64_t budget,
                                                        const std::atomic<bool>& stop) {
  has_moved_ = false;
  if (!has_arrived_) {
    if (!CanArrive()) return State::kBlocked;
    EK_RETURN_IF_ERROR(Arrive());
    if (lane_.has_tags) lane_.Notify();
    has_moved_ = true;
  }
  if (!all_are_here_) {
    EK_RETURN_IF_ERROR(Meet(all_are_here_));
    if (!all_are_here_) return State::kBlocked;
    if (const absl::Status chosen = ChooseWay(); !chosen.ok()) {
      // The memory of a rank that has given up may be freed: blocked until the group ends here as
      // well.
      all_are_here_ = !HasAnotherGivenUp();
      return all_are_here_ ? absl::StatusOr<State>(chosen) : State::kBlocked;
    }
    if (has_moved_) lane_.Notify();  // This rank came last, and the others may sleep.
    has_moved_ = true;
  }
  bool is_over = way_ == Way::kNothing;
  if (way_ == Way::kDirect) {
    const State state = AdvanceDirect(budget, stop);
    if (state != State::kEnded) return state;
    is_over = true;
  }
  while (!is_over) {
    if (stop.load(std::memory_order_relaxed)) return State::kBlocked;
    if (budget <= 0) return State::kMore;
    const int64_t before = budget;
    bool has_stepped = false;
    if (CanPublish()) {
      EK_ASSIGN_OR_RETURN(const int64_t bytes, Publish());
      budget -= bytes;
      has_stepped = true;
    }
    if (CanReduce()) {
      EK_ASSIGN_OR_RETURN(const int64_t bytes, Reduce());
      budget -= bytes;
      has_stepped = true;
    }
    if (CanTake()) {
      EK_ASSIGN_OR_RETURN(const int64_t bytes, Take());
      budget -= bytes;
      has_stepped = true;
    }
    is_over = IsStagedOver();
    if (!has_stepped && !is_over) return State::kBlocked;
    if (before != budget || has_stepped) has_moved_ = true;
  }
  if (MayHaveReadGarbage()) return State::kBlocked;  // Until the group ends here as well.
  if (way_ == Way::kDirect) {
    for (int seat = 0; seat < size(); ++seat) lane_.blocks[seat] += BlocksOf(seat);
  } else {
    lane_.chunks += chunks_;
  }
  ++lane_.operations;
  mine().done.store(lane_.operations, std::memory_order_release);
  has_moved_ = true;
  lane_.Notify();
  return State::kEnded;
}

void ShmTransfer::Fence() {
  if (!has_arrived_ || !std::exchange(is_exposed_, false)) return;
  registered_->is_retired = true;
  // Whole pages: what is behind the buffer on its last one is nobody's.
  registered_->memory->Fence(exposed_offset_, RoundUp(in_.front().bytes(), PageBytes()));
}

// Chunks ------------------------------------------------------------------------------------------

int64_t ShmTransfer::ChunkLength(int64_t chunk) const {
  return std::min(chunk_elements_, count_ - chunk * chunk_elements_);
}

ShmTransfer::Piece ShmTransfer::PieceOf(int seat, int64_t chunk) const {
  return Share(seat, ChunkLength(chunk));
}

bool ShmTransfer::Publishes(int seat) const {
  switch (kind_) {
    case CollectiveKind::kBroadcast:
      return lane_.ranks[seat] == operation_.what.root;
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
      return seat == 0;
    case CollectiveKind::kBarrier:
      return false;
    default:
      return true;
  }
}

bool ShmTransfer::CanPublish() const {
  if (published_ == chunks_ || !Publishes(me()) || way_ == Way::kDirect || way_ == Way::kNothing)
    return false;
  if (!IsStaged(me())) return true;
  // This rank's own part of the slot's last chunk comes first: in a shorter chunk other ranks'
  // inputs lie there.
  if (Reduces(kind_) && published_ - reduced_ >= kShmSlots) return false;
  const uint64_t chunk = lane_.chunks + published_;
  return chunk < kShmSlots || lane_.OthersHave(&ShmSeat::taken, chunk + 1 - kShmSlots);
}

absl::StatusOr<int64_t> ShmTransfer::Publish() {
  const int64_t chunk = published_++;
  const int64_t begin = chunk * chunk_elements_;
  const int64_t length = ChunkLength(chunk);
  int64_t bytes = 0;
  const bool is_read = size() > 1 && (operation_.contributes || !Reduces(kind_));
  if (size() > 1 && IsStaged(me())) {
    EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(me(), chunk));
    if (IsUneven(kind_)) {
      const int64_t sizes = SizesLength();
      if (chunk == 0) std::memcpy(slot, sizes_.data(), sizes_.size() * sizeof(int64_t));
      const int64_t from = std::max(begin - sizes, int64_t{0});
      const int64_t to = std::min(begin - sizes + chunk_elements_, StreamElements(sizes_));
      if (from < to) {
        std::byte* const at = slot + (sizes + from - begin) * element_bytes_;
        Copy(in_, from, InOnePiece(at, to - from), 0, to - from);
        bytes += (to - from) * element_bytes_;
      }
    } else if (!is_read) {
      // Others know, and take no notice of what is there.
    } else if (IsReducedByPieces(kind_) && way_ == Way::kStaged) {
      for (int seat = 0; seat < size(); ++seat) {
        if (IsMine(seat)) continue;
        const Piece piece = PieceOf(seat, chunk);
        Copy(in_, begin + piece.begin,
             InOnePiece(slot + piece.begin * element_bytes_, piece.length), 0, piece.length);
        bytes += piece.length * element_bytes_;
      }
    } else if (SlicesInput(kind_)) {
      for (int seat = 0; seat < size(); ++seat) {
        if (IsMine(seat)) continue;
        Copy(in_, seat * count_ + begin,
             InOnePiece(slot + seat * chunk_elements_ * element_bytes_, length), 0, length);
        bytes += length * element_bytes_;
      }
    } else {
      Copy(in_, begin, InOnePiece(slot, length), 0, length);
      bytes += length * element_bytes_;
    }
  }
  mine().published.store(lane_.chunks + published_, std::memory_order_release);
  if (has_arrived_) lane_.Notify();
  return bytes;
}

bool ShmTransfer::CanReduce() const {
  if (!Reduces(kind_) || reduced_ == chunks_ || published_ <= reduced_) return false;
  for (int seat = 0; seat < size(); ++seat) {
    if (IsMine(seat) || !IsStaged(seat)) continue;
    if (lane_.seats[seat].published.load(std::memory_order_acquire) <= lane_.chunks + reduced_)
      return false;
  }
  return true;
}

absl::StatusOr<int64_t> ShmTransfer::Reduce() {
  const int64_t chunk = reduced_++;
  const int64_t begin = chunk * chunk_elements_;
  const int64_t length = ChunkLength(chunk);
  Piece piece{0, length};
  int64_t offset =
      0;  // Start of the piece in a slot, or, in another rank's memory, relative to the chunk.
  int64_t in_begin = begin;
  if (way_ == Way::kStaged && IsReducedByPieces(kind_)) {
    piece = PieceOf(me(), chunk);
    offset = piece.begin;
    in_begin += piece.begin;
  }
  if (kind_ == CollectiveKind::kReduceScatter) {
    offset = me() * chunk_elements_;
    in_begin = me() * count_ + begin;
  }
  const bool is_for_me = way_ == Way::kStaged || kind_ != CollectiveKind::kReduce ||
                         lane_.ranks[me()] == operation_.what.root;
  if (is_for_me && piece.length > 0) {
    absl::InlinedVector<const std::byte*, 8> inputs(size(), nullptr);
    for (int seat = 0; seat < size(); ++seat) {
      if (IsMine(seat) || (flags_[seat] & ShmGist::kContributes) == 0) continue;
      if (!IsStaged(seat)) {
        inputs[seat] =
            static_cast<const std::byte*>(sources_[seat].front().data) + in_begin * element_bytes_;
        continue;
      }
      EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
      inputs[seat] = slot + offset * element_bytes_;
    }
    std::byte* also = nullptr;
    if (way_ == Way::kStaged && IsReducedByPieces(kind_) && size() > 1) {
      EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(me(), chunk));
      also = slot + offset * element_bytes_;
    }
    ReduceElements(inputs, in_begin, begin + piece.begin, piece.length, also);
  }
  mine().reduced.store(lane_.chunks + reduced_, std::memory_order_release);
  if (IsReducedByPieces(kind_)) lane_.Notify();
  return piece.length * element_bytes_;
}

bool ShmTransfer::CanTake() const {
  if (taken_ == chunks_) return false;
  if (Reduces(kind_) && reduced_ <= taken_) return false;
  if (Publishes(me()) && published_ <= taken_) return false;
  const uint64_t chunk = lane_.chunks + taken_;
  const bool fetches_results =
      way_ == Way::kStaged &&
      (kind_ == CollectiveKind::kAllReduce ||
       (kind_ == CollectiveKind::kReduce && lane_.ranks[me()] == operation_.what.root));
  for (int seat = 0; seat < size(); ++seat) {
    if (IsMine(seat)) continue;
    if (fetches_results) {
      if (lane_.seats[seat].reduced.load(std::memory_order_acquire) <= chunk) return false;
    } else if (!Reduces(kind_) && Publishes(seat) && IsStaged(seat)) {
      if (lane_.seats[seat].published.load(std::memory_order_acquire) <= chunk) return false;
    }
  }
  return true;
}

absl::StatusOr<int64_t> ShmTransfer::Take() {
  const int64_t chunk = taken_++;
  const int64_t begin = chunk * chunk_elements_;
  const int64_t length = ChunkLength(chunk);
  int64_t bytes = 0;
  const TensorList& out = operation_.out;
  if (IsUneven(kind_)) {
    if (chunk == 0) EK_RETURN_IF_ERROR(ReadSizes());
    EK_ASSIGN_OR_RETURN(bytes, TakeFromStreams(chunk));
  } else if (IsReducedByPieces(kind_)) {
    if (way_ == Way::kStaged &&
        (kind_ == CollectiveKind::kAllReduce || lane_.ranks[me()] == operation_.what.root)) {
      for (int seat = 0; seat < size(); ++seat) {
        const Piece piece = PieceOf(seat, chunk);
        if (IsMine(seat) || piece.length == 0) continue;
        EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
        Copy(InOnePiece(slot + piece.begin * element_bytes_, piece.length), 0, out,
             begin + piece.begin, piece.length);
        bytes += piece.length * element_bytes_;
      }
    }
  } else if (!Reduces(kind_)) {
    for (int seat = 0; seat < size(); ++seat) {
      if (!Publishes(seat)) continue;
      if (!SlicesOutput(kind_) && IsMine(seat)) continue;
      const int64_t to = SlicesOutput(kind_) ? seat * count_ + begin : begin;
      const int64_t from = kind_ == CollectiveKind::kAllToAll ? me() * count_ + begin : begin;
      bytes += length * element_bytes_;
      if (!IsStaged(seat) || IsMine(seat)) {
        Copy(IsMine(seat) ? in_ : sources_[seat], from, out, to, length);
      } else {
        EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
        const int64_t offset = kind_ == CollectiveKind::kAllToAll ? me() * chunk_elements_ : 0;
        Copy(InOnePiece(slot + offset * element_bytes_, length), 0, out, to, length);
      }
    }
  }
  mine().taken.store(lane_.chunks + taken_, std::memory_order_release);
  lane_.Notify();
  return bytes;
}

int64_t ShmTransfer::SizesLength() const {
  return RoundUp(sizes_.size() * sizeof(int64_t), kLine) / element_bytes_;
}

int64_t ShmTransfer::StreamElements(const std::vector<int64_t>& sizes) const {
  const int own = kind_ == CollectiveKind::kAllToAllV ? 1 : 0;
  return std::accumulate(sizes.begin(), sizes.end() - own, int64_t{0});
}

int64_t ShmTransfer::StreamChunks(const std::vector<int64_t>& sizes) const {
  // The own part is copied in as many shares, which must not be longer than chunks.
  const int64_t own = kind_ == CollectiveKind::kAllToAllV ? sizes.back() : 0;
  const int64_t elements = std::max(SizesLength() + StreamElements(sizes), own);
  return (elements + chunk_elements_ - 1) / chunk_elements_;
}

absl::Status ShmTransfer::ReadSizes() {
  for (int seat = 0; seat < size(); ++seat) {
    std::vector<int64_t> sizes = sizes_;
    if (!IsMine(seat)) {
      EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, 0));
      std::memcpy(sizes.data(), slot, sizes.size() * sizeof(int64_t));
    }
    const size_t part =
        kind_ == CollectiveKind::kAllGatherV ? 0 : (me() - seat - 1 + size()) % size();
    const int64_t before = std::accumulate(sizes.begin(), sizes.begin() + part, int64_t{0});
    parts_.push_back({.begin = SizesLength() + before, .length = sizes[part]});
    chunks_ = std::max(chunks_, StreamChunks(sizes));
    if (sizes[part] != operation_.out[seat].count) {
      return SizesDisagree(operation_.what, operation_.sequence, lane_.names[lane_.ranks[seat]],
                           sizes[part], lane_.names[lane_.ranks[me()]], operation_.out[seat].count);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ShmTransfer::TakeFromStreams(int64_t chunk) {
  const int64_t begin = chunk * chunk_elements_;
  int64_t elements = 0;
  for (int seat = 0; seat < size(); ++seat) {
    const Piece& part = parts_[seat];
    if (IsMine(seat)) {  // It needs no other rank: a share is copied beside each chunk.
      const int64_t share = (part.length + chunks_ - 1) / chunks_;
      const int64_t from = std::min(chunk * share, part.length);
      const int64_t length = std::min(share, part.length - from);
      Copy(in_, part.begin - SizesLength() + from, {operation_.out[seat]}, from, length);
      elements += length;
      continue;
    }
    const int64_t from = std::max(begin, part.begin);
    const int64_t length = std::min(begin + chunk_elements_, part.begin + part.length) - from;
    if (length <= 0) continue;
    EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
    Copy(InOnePiece(slot + (from - begin) * element_bytes_, length), 0, {operation_.out[seat]},
         from - part.begin, length);
    elements += length;
  }
  return elements * element_bytes_;
}

bool ShmTransfer::IsStagedOver() const {
  if (taken_ < chunks_) return false;
  // The input is the user's again when all others have read it.
  return IsStaged(me()) || lane_.OthersHave(&ShmSeat::taken, lane_.chunks + chunks_);
}

bool ShmTransfer::HasAnotherGivenUp() const {
  for (int seat = 0; seat < size(); ++seat) {
    if (!IsMine(seat) && lane_.HasEnded(seat)) return true;
  }
  return false;
}

bool ShmTransfer::MayHaveReadGarbage() const {
  for (int seat = 0; seat < static_cast<int>(sources_.size()); ++seat) {
    if (IsMine(seat) || IsStaged(seat) || !lane_.HasEnded(seat)) continue;
    // Who has ended the operation before has waited until all others had read.
    if (lane_.seats[seat].done.load(std::memory_order_acquire) <= lane_.operations) return true;
  }
  return false;
}

}  // namespace evenkeel::internal
