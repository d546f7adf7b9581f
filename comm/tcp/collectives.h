// Runs one collective at a time over a TcpTransport, on the calling thread.
//
//   TcpCollectives collectives(mesh.transport(), rank, world_size, generation, names);
//   EK_RETURN_IF_ERROR(collectives.Run(operation));
//
// Algorithms, by the size of the data: small data goes directly to each rank that needs it, or in
// as many rounds as the world size has bits; large data goes round a ring, or along a chain, in
// pieces, so that the work on one piece overlaps with the transport of others. The ring moves the
// fewest bytes per rank that are possible.
//
// Result: a reduction has equal bits on all ranks. In which order contributions are combined
//       depends on the size of the data and the world size alone.
// Tags: all that the ranks must agree on is hashed: group, channel, sequence, and what
//       HashOfCommonPart() covers. 40 bits of the hash are in the slot of each message, so the data
//       of operations that differ never meets.
//
// Threads: thread-compatible; several objects may share a transport.
// Errors:  those of the transport; ResourceExhausted without memory.

#ifndef EVENKEEL_COMM_TCP_COLLECTIVES_H_
#define EVENKEEL_COMM_TCP_COLLECTIVES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/tcp/transport.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

// The transport's slots: 40 bits of a tag between what uses it and 16 bits for a message's number.
enum class TcpSlots : uint8_t { kCollectives = 0x41, kMessages, kNotes };
uint64_t TcpSlot(TcpSlots slots, uint64_t tag, int64_t number = 0);

// Equal for operations that may meet, and only for them; of messages, between the same two ranks.
uint64_t TagOf(const Operation& operation, uint64_t generation);

// A waiter that gives up at the deadline knows better what it waited for, so it comes first.
inline constexpr absl::Duration kTcpSlack = absl::Milliseconds(250);

class TcpCollectives {
 public:
  // `transport` may be null in a group of one rank.
  TcpCollectives(std::shared_ptr<TcpTransport> transport, int rank, int world_size,
                 uint64_t generation, const RankNames& names);

  absl::Status Run(const Operation& operation);

 private:
  // Memory that is kept from one operation to the next; contents are lost when it grows.
  class Scratch {
   public:
    char* Get(int64_t bytes);

   private:
    std::unique_ptr<char[]> data_;
    int64_t size_ = 0;
  };

  using Pending = TcpTransport::Pending;
  class Gathering;

  absl::Status RunNow(const Operation& operation);
  absl::Status AllReduce(const Operation& operation);
  absl::Status Reduce(const Operation& operation);
  absl::Status Broadcast(const Operation& operation);
  absl::Status AllGather(const Operation& operation);
  absl::Status ReduceScatter(const Operation& operation);
  absl::Status AllToAll(const Operation& operation);
  absl::Status AllGatherV(const Operation& operation);
  absl::Status AllToAllV(const Operation& operation);
  absl::Status Barrier(const Operation& operation);

  // Makes `data`, the contribution of each rank, the combination of all, on all ranks.
  absl::Status Combine(const Operation& operation, const TensorView& data);
  absl::Status CombineDirectly(const Operation& operation, const TensorView& data);
  absl::Status CombineByDoubling(const Operation& operation, const TensorView& data);
  absl::Status CombineInRing(const Operation& operation, const TensorView& data);
  // Gives each rank its chunk of the combined inputs, of `count` elements together, piece by piece:
  // take(piece, sum), after which the same piece of the other chunks is not read any more.
  enum class Parts {
    kInPlace,       // The input is contributed as it is, and may be changed: the sum is in it.
    kToContribute,  // As Contribute() has it. The sum is gone when take() returns.
  };
  absl::Status ReduceInRing(const Operation& operation, const char* input, int64_t count,
                            Parts parts,
                            absl::FunctionRef<void(int64_t piece, const TensorView& sum)> take);
  // Receives, from all other ranks, what each has for this one: `place(rank)`, while `part(rank)`
  // is sent to that rank.
  absl::Status ExchangeDirectly(const Operation& operation,
                                absl::FunctionRef<TensorView(int rank)> part,
                                absl::FunctionRef<TensorView(int rank)> place);

  // Messages of this operation; `number` counts those of a pair of ranks. Empty views are not sent,
  // except where only the receiver of a message finds that its size is another one.
  Pending Send(int to, const Operation& operation, int64_t number, const TensorView& data);
  Pending Receive(int from, const Operation& operation, int64_t number, const TensorView& place);
  uint64_t SlotOf(const Operation& operation, int64_t number) const;
  absl::Status WaitForAll(std::vector<Pending>& pending);

  // One piece of memory with the elements of all views: the view itself if it is alone and does not
  // touch `avoid`.
  TensorView Gather(const Operation& operation, const TensorList& views, const TensorList& avoid);
  // One piece of memory for the elements of all views.
  TensorView Room(const Operation& operation, const TensorList& views);

  const std::shared_ptr<TcpTransport> transport_;
  const int rank_;
  const int world_size_;
  const uint64_t generation_;
  const RankNames names_;
  absl::Time deadline_;  // The current operation's.
  Scratch in_, out_, work_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_COLLECTIVES_H_
