// Where the ranks' operations meet.
//
//   Meeting& meeting = lane.At(operation.sequence);
//   const bool agree =
//       meeting.seats.empty() || Agree(meeting.seats.begin()->second.operation, operation);
//   meeting.seats[rank] = {rank, operation, work};
//   if (!agree) return DisagreementOf(meeting.seats, names);
//
// Threads: plain data. A group's mutex guards all of it, but what the seats' operations and
// `exchange` hold belongs to the slices while the meeting runs.

#ifndef EVENKEEL_COMM_LOCAL_MEETING_H_
#define EVENKEEL_COMM_LOCAL_MEETING_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/local/exchange.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

// One rank's part.
struct Seat {
  int rank = -1;
  Operation operation;
  std::shared_ptr<WorkState> work;  // Null once somebody is finishing it.
};
using Seats = std::map<int, Seat>;  // By rank; of a pair: 0 the sender, 1 the receiver.

struct Meeting {
  enum class State { kGathering, kRunning, kOver };  // In this order.
  State state = State::kGathering;
  Seats seats;
  std::unique_ptr<LocalExchange> exchange;
  int slices_left = 0;
  std::atomic<bool> is_broken =
      false;  // One of its ranks was aborted: it will not run, or stops running.
};

// Channel; of messages: sender, receiver, tag; else -1.
using LaneKey = std::tuple<uint64_t, int, int, int64_t>;

// Operations that run one after the other: the collectives of a channel, or its messages with one
// tag from one rank to another.
struct Lane {
  LaneKey key;
  bool is_pair = false;
  size_t seats = 0;   // Per meeting.
  int64_t first = 0;  // Sequence of the front.
  std::deque<std::shared_ptr<Meeting>> meetings;

  Meeting& At(int64_t sequence);
};

// "rank 1 is at #412 barrier (user); ranks 0,2,3 are at #412 all_reduce (user) float32[10] sum: the
// ranks disagree", the smallest party first.
absl::Status DisagreementOf(const Seats& seats, const RankNames& names);

// Returns the error of the first seat whose sizes in an uneven collective do not fit `rank`'s.
absl::Status CheckUnevenSizes(const Seats& seats, int rank, const RankNames& names);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_MEETING_H_
