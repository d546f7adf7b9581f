#include "evenkeel/comm/shm/arrival.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/local/meeting.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

bool ShmArrival::MayDescribe() const {
  return lane_.OthersHave(&ShmSeat::done, ShmLatestTwo<ShmHeader>::EndedBefore(lane_.operations));
}

void ShmArrival::Describe() {
  const Operation& operation = task_.operation;
  ShmHeader& header = lane_.mine().headers.Of(lane_.operations);
  header.what = operation.what;
  header.scale = operation.scale;
  header.step_of = operation.step_of;
  const std::vector<int64_t> parts = PartsOf(operation);
  header.parts = static_cast<int32_t>(parts.size());
  for (int i = 0; i < std::min(header.parts, ShmHeader::kParts); ++i)
    header.part_counts[i] = parts[i];
  Register(header);
  const uint64_t gist = (HashOfCommonPart(operation) & ~ShmGist::kBits) |
                        (operation.contributes ? ShmGist::kContributes : 0) |
                        (is_registered() ? ShmGist::kIsRegistered : 0) |
                        (is_exposed_ ? ShmGist::kIsWritable : 0);
  lane_.mine().gists.Of(lane_.operations).store(gist, std::memory_order_relaxed);
}

void ShmArrival::Register(ShmHeader& header) {
  // From here on looking up registered memory, and reading another rank's, pays.
  constexpr int64_t kRegisteredBytes = 16 << 10;
  header.extents = 0;
  int64_t bytes = 0;
  for (const TensorView& view : task_.in) bytes += view.bytes();
  const CollectiveKind kind = task_.what.kind;
  const size_t most = Reduces(kind) ? 1 : ShmHeader::kExtents;
  if (task_.size() == 1 || IsUneven(kind) || !task_.Publishes(task_.me()) || task_.IsOneShot() ||
      bytes < kRegisteredBytes || task_.in.size() > most)
    return;
  absl::InlinedVector<RegisteredRange, 4> ranges;
  for (const TensorView& view : task_.in) {
    std::optional<RegisteredRange> range = FindRegistered(view.data, view.bytes());
    if (!range.has_value()) return;
    ranges.push_back(*std::move(range));
  }
  const RegisteredMemory* given = nullptr;
  for (const RegisteredRange& range : ranges) {
    const RegisteredMemory* const memory = range.in.get();
    if (memory == given) continue;
    if (!lane_.mesh->Give(memory->id, *memory->memory, lane_.ranks).ok()) return;
    given = memory;
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    header.extent[i] = {
        .memory = ranges[i].in->id, .offset = ranges[i].offset, .bytes = task_.in[i].bytes()};
  }
  header.extents = static_cast<int32_t>(ranges.size());
  // An in-place reduction writes where it reads, so the result must belong there.
  is_exposed_ = ranges.front().is_writable && task_.IsReducedByPieces() &&
                task_.operation.in == task_.operation.out;
  exposed_offset_ = ranges.front().offset;
  registered_ = std::move(ranges.front().in);
}

void ShmArrival::Announce() {
  lane_.mine().arrived.store(lane_.operations + 1, std::memory_order_release);
  // If two ranks arrive together, one sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

absl::StatusOr<bool> ShmArrival::Meet() {
  const uint64_t gist = lane_.mine().gists.Of(lane_.operations).load(std::memory_order_relaxed);
  bool all_are_here = true;
  flags_.assign(task_.size(), 0);
  for (int seat = 0; seat < task_.size(); ++seat) {
    const ShmSeat& other = lane_.seats[seat];
    if (other.arrived.load(std::memory_order_acquire) <= lane_.operations) {
      all_are_here = false;
      continue;
    }
    const uint64_t theirs = other.gists.Of(lane_.operations).load(std::memory_order_relaxed);
    if ((theirs ^ gist) & ~ShmGist::kBits) return DescribeDisagreement();
    flags_[seat] = theirs & ShmGist::kBits;
  }
  return all_are_here;
}

absl::Status ShmArrival::DescribeDisagreement() const {
  Seats seats;
  for (int i = 0; i < task_.size(); ++i) {
    if (lane_.seats[i].arrived.load(std::memory_order_acquire) <= lane_.operations) continue;
    const ShmHeader& header = HeaderOf(i);
    Seat& theirs = seats[i];
    theirs.rank = lane_.ranks[i];
    theirs.operation.what = header.what;
    theirs.operation.scale = header.scale;
    theirs.operation.step_of = header.step_of;
    theirs.operation.sequence = task_.operation.sequence;
    for (int part = 0; part < std::min(header.parts, ShmHeader::kParts); ++part) {
      theirs.operation.out.push_back(
          TensorView(nullptr, header.part_counts[part], header.what.dtype));
    }
  }
  return DisagreementOf(seats, lane_.names);
}

bool ShmArrival::AreAllWritable() const {
  return std::all_of(flags_.begin(), flags_.end(),
                     [](uint64_t flags) { return (flags & ShmGist::kIsWritable) != 0; });
}

absl::Status ShmArrival::FindSources() {
  if (task_.IsReducedByPieces() && !AreAllWritable()) {
    // Nothing is used, but all is looked up, or the sockets of the ranks that gave it fill up.
    for (int seat = 0; seat < task_.size(); ++seat) {
      if (task_.IsMine(seat) || (flags_[seat] & ShmGist::kIsRegistered) == 0) continue;
      const uint64_t memory = HeaderOf(seat).extent.front().memory;
      lane_.mesh->Find(lane_.ranks[seat], memory).IgnoreError();
    }
    return absl::OkStatus();
  }
  sources_.assign(task_.size(), {});
  for (int seat = 0; seat < task_.size(); ++seat) {
    if ((flags_[seat] & ShmGist::kIsRegistered) == 0) continue;
    if (task_.IsMine(seat)) {
      sources_[seat] = task_.in;
      continue;
    }
    const ShmHeader& header = HeaderOf(seat);
    int64_t left = task_.count * (SlicesInput(task_.what.kind) ? task_.size() : 1);
    std::shared_ptr<SharedMemory> memory;
    for (int i = 0; i < std::clamp(header.extents, 0, ShmHeader::kExtents); ++i) {
      const ShmHeader::Extent& extent = header.extent[i];
      if (i == 0 || extent.memory != header.extent[i - 1].memory) {
        EK_ASSIGN_OR_RETURN(memory, lane_.mesh->Find(lane_.ranks[seat], extent.memory));
        held_.push_back(memory);
      }
      if (extent.offset < 0 || extent.bytes < 0 || extent.offset > memory->bytes() - extent.bytes) {
        return absl::InternalError(absl::StrCat("rank ", lane_.names[lane_.ranks[seat]], " names ",
                                                extent.bytes, " bytes at ", extent.offset,
                                                " of memory that has ", memory->bytes()));
      }
      const int64_t elements = extent.bytes / task_.element_bytes;
      sources_[seat].push_back(
          TensorView(memory->data() + extent.offset, elements, task_.what.dtype));
      left -= elements;
    }
    if (left != 0) {
      return absl::InternalError(absl::StrCat("rank ", lane_.names[lane_.ranks[seat]],
                                              "'s registered input lacks ", left, " elements"));
    }
  }
  return absl::OkStatus();
}

bool ShmArrival::MayBeGarbage() const {
  for (int seat = 0; seat < static_cast<int>(sources_.size()); ++seat) {
    if (task_.IsMine(seat) || IsStaged(seat) || !lane_.HasEnded(seat)) continue;
    // A rank that has ended the operation before has waited until all others had read.
    if (lane_.seats[seat].done.load(std::memory_order_acquire) <= lane_.operations) return true;
  }
  return false;
}

void ShmArrival::Fence() {
  if (!std::exchange(is_exposed_, false)) return;
  registered_->is_retired = true;
  // Whole pages: the rest of the last page belongs to no buffer.
  registered_->memory->Fence(exposed_offset_, RoundUp(task_.in.front().bytes(), PageBytes()));
}

}  // namespace evenkeel::internal
