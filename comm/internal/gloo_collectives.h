// Runs one operation at a time over a gloo::Context, on the calling thread.
//
//   GlooCollectives collectives(mesh.context(), rank, world_size, generation, names);
//   collectives.Run(operation);          // throws StatusError, and what Gloo throws
//
// Gloo's own algorithms where it has them; reduce-scatter and messages are written here, on unbound buffers.
//
// Tags: all that the ranks must agree on is hashed: group, channel, sequence, and what HashOfCommonPart() covers. Gloo
//       takes 32 bits of it and puts a byte of 0x01 to 0x08 on top; what is written here uses other top bytes and 40
//       bits. So the data of operations that differ never meets.
// Messages: a note goes ahead of the data, on the channel's slot for notes. Two ranks' notes meet in the order of their
//       issue, whatever they say, so the receiver finds halves that differ: FailedPrecondition with both. A receive
//       from any of several ranks would take the first note that comes; a tag would be part of the slot.
//
// Threads: thread-compatible; several objects may share a context.

#ifndef EVENKEEL_COMM_INTERNAL_GLOO_COLLECTIVES_H_
#define EVENKEEL_COMM_INTERNAL_GLOO_COLLECTIVES_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/internal/rank_names.h"
#include "evenkeel/comm/types.h"

namespace gloo {
class Context;
}  // namespace gloo

namespace evenkeel::internal {

// Equal for operations that may meet, and only for them; of messages, between the same two ranks.
uint64_t TagOf(const Operation& operation, uint64_t generation);

class GlooCollectives {
 public:
  // `context` may be null in a group of one rank.
  GlooCollectives(std::shared_ptr<gloo::Context> context, int rank, int world_size, uint64_t generation,
                  const RankNames& names);
  ~GlooCollectives();

  void Run(const Operation& operation);

 private:
  // Memory that is kept from one operation to the next; contents are lost when it grows.
  class Scratch {
   public:
    char* Get(int64_t bytes);

   private:
    std::unique_ptr<char[]> data_;
    int64_t size_ = 0;
  };

  void AllReduce(const Operation& operation);
  void Reduce(const Operation& operation);
  void Broadcast(const Operation& operation);
  void AllGather(const Operation& operation);
  void ReduceScatter(const Operation& operation);
  void AllToAll(const Operation& operation);
  void Barrier(const Operation& operation);
  void Send(const Operation& operation);
  void Recv(const Operation& operation);
  uint64_t NoteSlot(const Operation& operation) const;
  void ReduceScatterRing(const Operation& operation, const char* input, char* output);

  // One piece of memory with the elements of all views: the view itself if it is alone and does not touch `avoid`.
  TensorView Gather(const Operation& operation, const TensorList& views, const TensorList& avoid);
  // One piece of memory for the elements of all views.
  TensorView Room(const Operation& operation, const TensorList& views);
  // From there to the views, if it is not theirs.
  static void Spread(const TensorView& whole, const TensorList& views);

  const std::shared_ptr<gloo::Context> context_;
  const int rank_;
  const int world_size_;
  const uint64_t generation_;
  const RankNames names_;
  Scratch in_, out_, ring_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_GLOO_COLLECTIVES_H_
