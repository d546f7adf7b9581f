// One rank's view of a lane, kept from one operation to the next.
//
//   ShmLane lane = {.board = board, .mesh = mesh, .place = place, .seats = seats, .ranks = {0, 1}};
//
// Ownership: the board and the mesh must outlive it.
// Threads:   thread-compatible: one thread at a time drives a lane.

#ifndef EVENKEEL_COMM_SHM_LANE_H_
#define EVENKEEL_COMM_SHM_LANE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/shm/board.h"
#include "evenkeel/comm/shm/mesh.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

struct ShmLane {
  ShmBoard* board = nullptr;
  ShmMesh* mesh = nullptr;
  ShmPlace place = {};
  ShmSeat* seats = nullptr;
  std::vector<int> ranks;  // By seat; in a lane of messages: the sender, the receiver.
  int me = 0;              // This rank's seat.
  bool has_tags = false;   // For messages with tags: the receiver begins after the sender.
  RankNames names = {};    // For messages.
  // Totals of the operations that have ended.
  uint64_t operations = 0;
  uint64_t chunks = 0;
  std::vector<uint64_t> blocks = std::vector<uint64_t>(ranks.size());  // By seat: of its share.
  // By seat; null until it is needed.
  std::vector<std::byte*> rings = std::vector<std::byte*>(ranks.size());

  int size() const { return static_cast<int>(ranks.size()); }
  ShmSeat& mine() const { return seats[me]; }

  // Returns whether this counter of each other seat is at least `n`.
  bool OthersHave(std::atomic<uint64_t> ShmSeat::*counter, uint64_t n) const {
    for (int seat = 0; seat < size(); ++seat) {
      if (seat != me && (seats[seat].*counter).load(std::memory_order_acquire) < n) return false;
    }
    return true;
  }

  // Returns the slot of a chunk of the current operation in a seat's ring. Errors: those of
  // ShmBoard::Ring().
  absl::StatusOr<std::byte*> Slot(int seat, int64_t chunk) {
    if (rings[seat] == nullptr) {
      EK_ASSIGN_OR_RETURN(rings[seat], board->Ring(place, seat));
    }
    return rings[seat] + (chunks + chunk) % kShmSlots * kShmSlotBytes;
  }

  // Returns whether the seat's rank has given up, so that its memory may change.
  bool HasEnded(int seat) const { return board->has_ended(ranks[seat]); }
  // Wakes the ranks that wait for this seat. Call it after this rank's seat has changed.
  void Notify() const { board->Notify(seats, ranks, me); }
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_LANE_H_
