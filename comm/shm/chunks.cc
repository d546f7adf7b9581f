// The ways that move an operation chunk by chunk through the ranks' rings of slots.
//
// A rank publishes a chunk of its input, reduces its piece of the chunk when the others have
// published theirs, and takes what it needs of them. The slot of a chunk is used again when all
// others have taken that chunk.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/shm/transfer.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The loop of all of them. `Way` has Publish(), Reduce() and Take() of the next chunk, which return
// the bytes that they have moved; and CanReduce() and CanTake(). It may replace CanPublish(),
// IsOver(), AreResultsFetched(): whether ranks wait for pieces that others reduce, and
// EarlyElements(): what the first Publish() copies at most. None of these calls is virtual.
template <typename Way>
class Chunks : public ShmWay {
 public:
  absl::Status PublishEarly() final {
    // The bytes that a thread that only issues an operation copies at once.
    constexpr int64_t kEarlyBytes = 64 << 10;
    Way& way = static_cast<Way&>(*this);
    if (way.EarlyElements() * task_.element_bytes > kEarlyBytes || !way.CanPublish())
      return absl::OkStatus();
    EK_RETURN_IF_ERROR(way.Publish(published_).status());
    lane_.mine().published.store(lane_.chunks + ++published_, std::memory_order_release);
    return absl::OkStatus();
  }

  absl::StatusOr<ShmProgress> Advance(int64_t budget, const std::atomic<bool>& stop) final {
    Way& way = static_cast<Way&>(*this);
    for (auto blocked = ShmProgress::kBlocked;; blocked = ShmProgress::kMoved) {
      if (stop.load(std::memory_order_relaxed)) return blocked;
      if (budget <= 0 && (way.CanPublish() || way.CanReduce() || way.CanTake()))
        return ShmProgress::kMore;
      bool has_stepped = false;
      if (way.CanPublish()) {
        EK_ASSIGN_OR_RETURN(const int64_t bytes, way.Publish(published_));
        lane_.mine().published.store(lane_.chunks + ++published_, std::memory_order_release);
        lane_.Notify();
        budget -= bytes;
        has_stepped = true;
      }
      if (way.CanReduce()) {
        EK_ASSIGN_OR_RETURN(const int64_t bytes, way.Reduce(reduced_));
        lane_.mine().reduced.store(lane_.chunks + ++reduced_, std::memory_order_release);
        if (way.AreResultsFetched()) lane_.Notify();
        budget -= bytes;
        has_stepped = true;
      }
      if (way.CanTake()) {
        EK_ASSIGN_OR_RETURN(const int64_t bytes, way.Take(taken_));
        lane_.mine().taken.store(lane_.chunks + ++taken_, std::memory_order_release);
        if (!way.IsOver()) lane_.Notify();  // Else the end of the operation notifies.
        budget -= bytes;
        has_stepped = true;
      }
      if (way.IsOver()) return ShmProgress::kEnded;
      if (!has_stepped) return blocked;
    }
  }

  void CountIn() final { lane_.chunks += chunks_; }

 protected:
  Chunks(const ShmTask& task, int64_t chunks) : task_(task), lane_(task.lane), chunks_(chunks) {}

  bool CanPublish() const {
    if (published_ == chunks_) return false;
    const uint64_t chunk = lane_.chunks + published_;
    return chunk < kShmSlots || lane_.OthersHave(&ShmSeat::taken, chunk + 1 - kShmSlots);
  }
  bool IsOver() const { return taken_ == chunks_; }
  bool AreResultsFetched() const { return false; }
  int64_t EarlyElements() const { return CountOf(task_.in); }

  const ShmTask& task_;
  ShmLane& lane_;
  int64_t chunks_;  // In all.
  // The chunks of which this rank has done each step; counted here alone.
  int64_t published_ = 0;
  int64_t reduced_ = 0;
  int64_t taken_ = 0;
};

// One shot and staged -----------------------------------------------------------------------------

int64_t ChunkElements(const ShmTask& task) {
  const int64_t bytes = SlicesInput(task.what.kind) ? kShmSlotBytes / task.size() : kShmSlotBytes;
  return std::max<int64_t>(1, bytes / kCacheLine * kCacheLine / task.element_bytes);
}

// In all-reduce and reduce, a chunk is cut into a piece for each rank to reduce, which then fetches
// the others' results. One shot is the same uncut: each rank reduces all of the only chunk.
class Staged : public Chunks<Staged> {
 public:
  Staged(const ShmTask& task, ShmArrival& arrival)
      : Chunks(task, (task.count + ChunkElements(task) - 1) / ChunkElements(task)),
        kind_(task.what.kind),
        is_cut_(task.IsReducedByPieces() && !task.IsOneShot()),
        chunk_elements_(ChunkElements(task)),
        arrival_(arrival) {}

  absl::Status Begin() override { return arrival_.FindSources(); }

  bool CanPublish() const;
  absl::StatusOr<int64_t> Publish(int64_t chunk);
  bool CanReduce() const {
    return Reduces(kind_) && reduced_ < published_ && HaveOthersPublished(reduced_);
  }
  absl::StatusOr<int64_t> Reduce(int64_t chunk);
  bool CanTake() const;
  absl::StatusOr<int64_t> Take(int64_t chunk);
  bool IsOver() const;
  bool AreResultsFetched() const { return is_cut_; }

 private:
  // The elements of a chunk that are for one seat: where they begin in the input of the rank that
  // publishes them, and in its slot.
  struct Piece {
    int64_t in = 0;
    int64_t in_slot = 0;
    int64_t length = 0;
  };
  Piece PieceFor(int seat, int64_t chunk) const;
  int64_t Begins(int64_t chunk) const { return chunk * chunk_elements_; }
  bool HaveOthersPublished(int64_t chunk) const;
  // Returns whether this rank needs the pieces that others reduce.
  bool FetchesResults() const { return AreResultsFetched() && task_.WantsResult(); }

  const CollectiveKind kind_;
  const bool is_cut_;
  const int64_t chunk_elements_;
  ShmArrival& arrival_;
};

Staged::Piece Staged::PieceFor(int seat, int64_t chunk) const {
  const int64_t begin = Begins(chunk);
  const int64_t length = std::min(chunk_elements_, task_.count - begin);
  if (SlicesInput(kind_)) return {seat * task_.count + begin, seat * chunk_elements_, length};
  if (!is_cut_) return {begin, 0, length};
  const ShmRange share = task_.ShareOf(seat, length);
  return {begin + share.begin, share.begin, share.length};
}

bool Staged::HaveOthersPublished(int64_t chunk) const {
  for (int seat = 0; seat < task_.size(); ++seat) {
    if (task_.IsMine(seat) || !task_.Publishes(seat) || !arrival_.IsStaged(seat)) continue;
    if (lane_.seats[seat].published.load(std::memory_order_acquire) <= lane_.chunks + chunk)
      return false;
  }
  return true;
}

bool Staged::CanPublish() const {
  if (published_ == chunks_ || !task_.Publishes(task_.me())) return false;
  if (!arrival_.IsStaged(task_.me())) return true;
  // This rank's own part of the slot's last chunk comes first: in a shorter chunk other ranks'
  // inputs lie there.
  if (Reduces(kind_) && published_ - reduced_ >= kShmSlots) return false;
  return Chunks::CanPublish();
}

absl::StatusOr<int64_t> Staged::Publish(int64_t chunk) {
  if (task_.size() == 1 || !arrival_.IsStaged(task_.me())) return 0;
  EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(task_.me(), chunk));
  // Others know, and take no notice of the slot.
  if (Reduces(kind_) && !task_.operation.contributes) return 0;
  const bool is_one_for_all = !is_cut_ && !SlicesInput(kind_);
  int64_t bytes = 0;
  for (int seat = 0; seat < task_.size(); ++seat) {
    if (task_.IsMine(seat)) continue;
    const Piece piece = PieceFor(seat, chunk);
    bytes += task_.CopyIn(piece.in, slot + piece.in_slot * task_.element_bytes, piece.length);
    if (is_one_for_all) break;
  }
  return bytes;
}

absl::StatusOr<int64_t> Staged::Reduce(int64_t chunk) {
  const Piece piece = PieceFor(task_.me(), chunk);
  const int64_t bytes = piece.length * task_.element_bytes;
  if (bytes == 0 || (!is_cut_ && !task_.WantsResult())) return bytes;
  absl::InlinedVector<const std::byte*, 8> inputs(task_.size(), nullptr);
  for (int seat = 0; seat < task_.size(); ++seat) {
    if (task_.IsMine(seat) || !arrival_.Contributes(seat)) continue;
    if (arrival_.IsStaged(seat)) {
      EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
      inputs[seat] = slot + piece.in_slot * task_.element_bytes;
    } else {
      inputs[seat] = static_cast<const std::byte*>(arrival_.source(seat).front().data) +
                     piece.in * task_.element_bytes;
    }
  }
  std::byte* also = nullptr;
  if (is_cut_ && task_.size() > 1) {
    EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(task_.me(), chunk));
    also = slot + piece.in_slot * task_.element_bytes;
  }
  const int64_t out_begin = is_cut_ ? piece.in : Begins(chunk);
  task_.Reduce(inputs, piece.in, out_begin, piece.length, also);
  return bytes;
}

bool Staged::CanTake() const {
  if (taken_ == chunks_) return false;
  if (Reduces(kind_) && reduced_ <= taken_) return false;
  if (task_.Publishes(task_.me()) && published_ <= taken_) return false;
  if (FetchesResults()) return lane_.OthersHave(&ShmSeat::reduced, lane_.chunks + taken_ + 1);
  return Reduces(kind_) || HaveOthersPublished(taken_);
}

absl::StatusOr<int64_t> Staged::Take(int64_t chunk) {
  if (Reduces(kind_) && !FetchesResults()) return 0;
  const TensorList& out = task_.operation.out;
  int64_t bytes = 0;
  for (int seat = 0; seat < task_.size(); ++seat) {
    // All kinds but those that have a block per rank in the output leave the own part in place.
    if (!task_.Publishes(seat) || (task_.IsMine(seat) && !SlicesOutput(kind_))) continue;
    const Piece piece = PieceFor(FetchesResults() ? seat : task_.me(), chunk);
    const int64_t to = SlicesOutput(kind_) ? seat * task_.count + Begins(chunk) : piece.in;
    if (piece.length == 0) continue;
    if (task_.IsMine(seat)) {
      bytes += task_.Copy(task_.in, piece.in, out, to, piece.length);
    } else if (!arrival_.IsStaged(seat)) {
      bytes += task_.Copy(arrival_.source(seat), piece.in, out, to, piece.length);
    } else {
      EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
      bytes += task_.CopyOut(slot + piece.in_slot * task_.element_bytes, out, to, piece.length);
    }
  }
  return bytes;
}

bool Staged::IsOver() const {
  // The input is the user's again when all others have read it.
  return taken_ == chunks_ && (arrival_.IsStaged(task_.me()) ||
                               lane_.OthersHave(&ShmSeat::taken, lane_.chunks + chunks_));
}

// Stream ------------------------------------------------------------------------------------------

// Positions are in elements of a rank's stream, which begins with the sizes. The stream of
// all_to_all_v lacks the rank's own part, which the rank copies directly.
class Stream : public Chunks<Stream> {
 public:
  explicit Stream(const ShmTask& task)
      : Chunks(task, 0), chunk_elements_(kShmSlotBytes / task.element_bytes) {
    for (const TensorView& view : task.in) sizes_.push_back(view.count);
    chunks_ = ChunksOf(sizes_);  // Until ReadSizes().
  }

  int64_t EarlyElements() const { return ElementsOf(sizes_); }
  absl::StatusOr<int64_t> Publish(int64_t chunk);
  bool CanReduce() const { return false; }
  absl::StatusOr<int64_t> Reduce(int64_t /*chunk*/) { return 0; }
  bool CanTake() const {
    return taken_ < published_ && lane_.OthersHave(&ShmSeat::published, lane_.chunks + taken_ + 1);
  }
  absl::StatusOr<int64_t> Take(int64_t chunk);

 private:
  bool HasOwnPart() const { return task_.what.kind == CollectiveKind::kAllToAllV; }
  int64_t SizesLength() const {
    return RoundUp(sizes_.size() * sizeof(int64_t), kCacheLine) / task_.element_bytes;
  }
  // Return the number of elements behind the sizes, and of chunks, of a stream with these sizes.
  int64_t ElementsOf(const std::vector<int64_t>& sizes) const {
    return std::accumulate(sizes.begin(), sizes.end() - (HasOwnPart() ? 1 : 0), int64_t{0});
  }
  int64_t ChunksOf(const std::vector<int64_t>& sizes) const;
  absl::Status ReadSizes();

  const int64_t chunk_elements_;
  // The sizes of this rank's parts. In all_to_all_v the order is the next seat, ..., this rank.
  std::vector<int64_t> sizes_;
  std::vector<ShmRange> parts_;  // By seat: the part of its stream that is for this rank.
};

int64_t Stream::ChunksOf(const std::vector<int64_t>& sizes) const {
  // The own part is copied in as many shares, which must not be longer than chunks.
  const int64_t own = HasOwnPart() ? sizes.back() : 0;
  const int64_t elements = std::max(SizesLength() + ElementsOf(sizes), own);
  return (elements + chunk_elements_ - 1) / chunk_elements_;
}

absl::StatusOr<int64_t> Stream::Publish(int64_t chunk) {
  if (task_.size() == 1) return 0;
  EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(task_.me(), chunk));
  if (chunk == 0) std::memcpy(slot, sizes_.data(), sizes_.size() * sizeof(int64_t));
  const int64_t begin = chunk * chunk_elements_ - SizesLength();  // Behind the sizes.
  const int64_t from = std::max(begin, int64_t{0});
  const int64_t to = std::min(begin + chunk_elements_, ElementsOf(sizes_));
  if (from >= to) return 0;
  return task_.CopyIn(from, slot + (from - begin) * task_.element_bytes, to - from);
}

absl::Status Stream::ReadSizes() {
  const int me = task_.me();
  for (int seat = 0; seat < task_.size(); ++seat) {
    std::vector<int64_t> sizes = sizes_;
    if (!task_.IsMine(seat)) {
      EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, 0));
      std::memcpy(sizes.data(), slot, sizes.size() * sizeof(int64_t));
    }
    const size_t part = HasOwnPart() ? (me - seat - 1 + task_.size()) % task_.size() : 0;
    const int64_t before = std::accumulate(sizes.begin(), sizes.begin() + part, int64_t{0});
    parts_.push_back({.begin = SizesLength() + before, .length = sizes[part]});
    chunks_ = std::max(chunks_, ChunksOf(sizes));
    const int64_t expected = task_.operation.out[seat].count;
    if (sizes[part] != expected) {
      return SizesDisagree(task_.what, task_.operation.sequence, lane_.names[lane_.ranks[seat]],
                           sizes[part], lane_.names[lane_.ranks[me]], expected);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Stream::Take(int64_t chunk) {
  if (chunk == 0) EK_RETURN_IF_ERROR(ReadSizes());
  const int64_t begin = chunk * chunk_elements_;
  int64_t bytes = 0;
  for (int seat = 0; seat < task_.size(); ++seat) {
    const ShmRange& part = parts_[seat];
    const TensorList out = {task_.operation.out[seat]};
    if (task_.IsMine(seat)) {  // It needs no other rank: a share is copied beside each chunk.
      const int64_t share = (part.length + chunks_ - 1) / chunks_;
      const int64_t from = std::min(chunk * share, part.length);
      const int64_t length = std::min(share, part.length - from);
      bytes += task_.Copy(task_.in, part.begin - SizesLength() + from, out, from, length);
      continue;
    }
    const int64_t from = std::max(begin, part.begin);
    const int64_t length = std::min(begin + chunk_elements_, part.begin + part.length) - from;
    if (length <= 0) continue;
    EK_ASSIGN_OR_RETURN(std::byte* const slot, lane_.Slot(seat, chunk));
    bytes +=
        task_.CopyOut(slot + (from - begin) * task_.element_bytes, out, from - part.begin, length);
  }
  return bytes;
}

}  // namespace

std::unique_ptr<ShmWay> MakeShmWay(const ShmTask& task, ShmArrival& arrival) {
  if (IsUneven(task.what.kind)) return std::make_unique<Stream>(task);
  if (task.count == 0) return nullptr;
  return std::make_unique<Staged>(task, arrival);
}

}  // namespace evenkeel::internal
