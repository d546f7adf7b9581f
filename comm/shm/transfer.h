// One rank's part in one collective over shared memory: moves on as far as the other ranks let it,
// and never waits.
//
//   ShmTransfer transfer(lane, operation);
//   // again and again, while others fill in their seats
//   switch (transfer.Advance(budget, stop)) { ... }
//
// Data paths:
//   one shot  small reductions: each rank publishes its input, and reduces the inputs of all ranks;
//   staged    chunk by chunk: each rank puts what others need of its input into its ring of slots
//             (publish), reduces its piece of the chunk (reduce), and fetches the others' results
//             (take). Of an input in registered memory, a rank publishes the location only. In
//             all_gather_v and all_to_all_v the chunks are those of a stream: the sizes of the
//             rank's parts, then the parts for others. The ranks get the number of chunks from the
//             beginnings of all streams;
//   direct    all-reduce and reduce where all buffers are registered: blocks of each rank's share
//             are reduced from all buffers into all buffers, by any rank that is running.
//
// Each element is combined in rank order by one rank, so results depend neither on which way it
// goes, nor on sizes.
//
// Threads: one at a time; `stop` from any.

#ifndef EVENKEEL_COMM_SHM_TRANSFER_H_
#define EVENKEEL_COMM_SHM_TRANSFER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/shm/board.h"
#include "evenkeel/comm/shm/lane.h"
#include "evenkeel/comm/shm/registered_memory.h"

namespace evenkeel::internal {

class ShmTransfer {
 public:
  enum class State {
    kBlocked,  // Until another rank's seat changes.
    kMore,     // The budget is spent.
    kEnded,
  };

  // Both must outlive it.
  ShmTransfer(ShmLane& lane, const Operation& operation);
  ~ShmTransfer();

  // Moves about `budget` bytes at most. Not OK: the ranks disagree, or there is no memory; then no
  // further call.
  absl::StatusOr<State> Advance(int64_t budget, const std::atomic<bool>& stop);
  // Returns whether the last Advance() has moved data, or changed a state for which others may
  // wait.
  bool has_moved() const { return has_moved_; }
  // Returns whether all ranks have joined the operation, so that each wait ends by itself.
  bool all_are_here() const { return all_are_here_; }

  // After its own or the group's end, when Advance() runs no more: keeps peers that may still run
  // from writing to this rank's memory. Not for the second time.
  void Fence();

 private:
  enum class Way { kUnknown, kNothing, kOneShot, kStaged, kDirect };

  ShmSeat& mine() const { return lane_.mine(); }
  int size() const { return lane_.size(); }
  int me() const { return lane_.me; }
  bool IsMine(int seat) const { return seat == lane_.me; }

  // Arriving.
  bool CanArrive() const;
  absl::Status Arrive();
  uint64_t GistOf(bool is_registered, bool is_writable) const;
  absl::Status Meet(bool& all_are_here);
  absl::Status DescribeDisagreement() const;
  absl::Status ChooseWay();
  absl::Status FindSources();
  // Finds the input in registered memory, and says so in the header.
  void Register(ShmHeader& header);
  bool IsStaged(int seat) const { return sources_.empty() || sources_[seat].empty(); }

  // Chunks.
  int64_t ChunkLength(int64_t chunk) const;
  struct Piece {
    int64_t begin = 0;
    int64_t length = 0;
  };
  Piece PieceOf(int seat, int64_t chunk) const;  // In a chunk to reduce, relative to it.
  bool Publishes(int seat) const;
  bool CanPublish() const;
  absl::StatusOr<int64_t> Publish();  // The bytes that it moved; so the next two.
  bool CanReduce() const;
  absl::StatusOr<int64_t> Reduce();
  bool CanTake() const;
  absl::StatusOr<int64_t> Take();
  bool IsStagedOver() const;

  // Streams of uneven collectives. Positions are in elements of a rank's stream.
  int64_t SizesLength() const;  // The sizes at the beginning.
  // Returns the number of elements behind the sizes. The stream of all_to_all_v lacks the rank's
  // own part, which the rank copies directly.
  int64_t StreamElements(const std::vector<int64_t>& sizes) const;
  int64_t StreamChunks(const std::vector<int64_t>& sizes) const;
  absl::Status ReadSizes();
  absl::StatusOr<int64_t> TakeFromStreams(int64_t chunk);
  // Whether somebody has given up in the middle of this operation whose memory this rank may have
  // read later.
  bool HasAnotherGivenUp() const;
  bool MayHaveReadGarbage() const;

  // Blocks.
  int64_t BlocksOf(int seat) const;
  bool AreBlocksFinished() const;
  Piece ShareOf(int seat) const;
  Piece Share(int seat, int64_t length) const;  // Of `length` elements, in whole cache lines.
  int64_t ReduceBlock(int share, int64_t block);
  bool ClaimBlock(int share, int64_t& block);
  State AdvanceDirect(int64_t budget, const std::atomic<bool>& stop);

  // `length` elements from one list of views to another one, from where they begin.
  void Copy(const TensorList& from, int64_t from_begin, const TensorList& to, int64_t to_begin,
            int64_t length) const;
  TensorList InOnePiece(std::byte* data, int64_t length) const;
  // Reduces `length` elements: inputs by seat (null: takes no part), this rank's own from its
  // views. Into its output unless that is for the root alone, and a copy to `also` if that is not
  // null.
  void ReduceElements(std::span<const std::byte* const> inputs, int64_t in_begin, int64_t out_begin,
                      int64_t length, std::byte* also) const;
  void SetAsideEndangeredInput();

  ShmLane& lane_;
  const Operation& operation_;
  const CollectiveKind kind_;
  const int64_t element_bytes_;
  const int64_t count_;
  TensorList in_;
  std::vector<std::byte> set_aside_;

  bool is_one_shot_ = false;
  bool has_arrived_ = false;
  bool all_are_here_ = false;
  bool has_moved_ = false;
  Way way_ = Way::kUnknown;
  std::shared_ptr<RegisteredMemory> registered_;  // Where others may find the input.
  int64_t exposed_offset_ = 0;
  bool is_exposed_ = false;                 // Others may write to it.
  uint64_t flags_all_ = 0;                  // The flags common to all seats' gists.
  absl::InlinedVector<uint64_t, 8> flags_;  // By seat.

  int64_t chunks_ = 0;
  int64_t chunk_elements_ = 0;
  int64_t published_ = 0;
  int64_t reduced_ = 0;
  int64_t taken_ = 0;
  // By seat: input in registered memory, null if it is staged.
  std::vector<std::shared_ptr<SharedMemory>> held_;
  std::vector<TensorList> sources_;
  // The sizes of this rank's parts, for uneven collectives. In all_to_all_v the order is the next
  // seat, ..., this rank.
  std::vector<int64_t> sizes_;
  std::vector<Piece> parts_;  // By seat: the part of its stream that is for this rank.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_TRANSFER_H_
