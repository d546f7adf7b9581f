// A collective as a value, and the list of a step's collectives: the schedule.
//
//   Schedule schedule{.generation = 3};
//   schedule.entries.push_back({.kind = CollectiveKind::kAllReduce,
//                               .dtype = DType::kFloat32,
//                               .count = 1 << 20,
//                               .op = ReduceOp::kSum,
//                               .role = Role::kBucket,
//                               .index = 2,
//                               .joined = Contribution::kIdentity});
//   schedule.Hash();   // equal on ranks that will issue the same
//
// In other systems the communication of a training step results from the code that happened to run:
// it cannot be compared, and a rank that has run out of inputs has to guess it. Here it is a value.
// It is made from the plan, hashed, compared, and executed by active ranks with their data and by
// exhausted ranks with the stated contributions.
//
// Units:   `count` is in elements: of the buffer for all_reduce, reduce, broadcast, send and recv;
//          of each rank's input for all_gather; of each rank's output for reduce_scatter; of each
//          block from one rank to another for all_to_all; 0 for all_gather_v and all_to_all_v,
//          whose sizes are those of each rank's tensors.
// Threads: immutable values.

#ifndef EVENKEEL_COMM_COLLECTIVE_H_
#define EVENKEEL_COMM_COLLECTIVE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kReduce,     // To `root`. On other ranks the content of the buffer is unspecified afterwards.
  kBroadcast,  // From `root`.
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBarrier,     // A kind of its own, not a disguised all-reduce: it can pair with nothing else.
  kSend,        // `root` is the receiver.
  kRecv,        // `root` is the sender; -1 in records of a receive from any rank.
  kAllGatherV,  // Inputs have a size for each rank,
  kAllToAllV,   // and here for each pair of ranks.
};
absl::string_view ToString(CollectiveKind kind);  // "all_reduce", ...
// Returns whether it is one half of a message between two ranks. All other kinds involve every rank
// of the group.
constexpr bool IsPair(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
}
// Returns whether sizes differ between the ranks. The output has one tensor per rank, and so has
// the input of all_to_all_v; that of all_gather_v is one tensor.
constexpr bool IsUneven(CollectiveKind kind) {
  return kind == CollectiveKind::kAllGatherV || kind == CollectiveKind::kAllToAllV;
}
// Returns whether a ReduceOp combines the elements of the ranks.
constexpr bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kReduceScatter;
}
// Returns whether `root` is a rank: a root, or the other side of a message.
constexpr bool HasRoot(CollectiveKind kind) {
  return kind == CollectiveKind::kReduce || kind == CollectiveKind::kBroadcast || IsPair(kind);
}
// Returns whether input and output are one buffer.
constexpr bool IsInPlace(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kBroadcast;
}
// Returns whether the input has one block of equal size per rank; and the output.
constexpr bool SlicesInput(CollectiveKind kind) {
  return kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllToAll;
}
constexpr bool SlicesOutput(CollectiveKind kind) {
  return kind == CollectiveKind::kAllGather || kind == CollectiveKind::kAllToAll;
}

// The purpose of a collective. Ranks must agree on it, and every message names it.
enum class Role : uint8_t { kUser, kBucket, kBuffers, kState, kShard, kJoin, kTest };
absl::string_view ToString(Role role);

// The contribution of a rank that has run out of inputs.
enum class Contribution : uint8_t {
  kIdentity,  // Nothing: zeros for a sum (gradients, counts).
  kOwned,     // Its real values: updated shards, norms, buffers if it is the root.
  kReceive,   // Nothing; it only receives.
};

struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kFloat32;
  int64_t count = 0;
  ReduceOp op = ReduceOp::kSum;  // Ignored by kinds that do not reduce.
  int root = -1;                 // Root or peer; -1 if the kind has none.
  Role role = Role::kUser;
  int index = -1;       // The number of the bucket, shard, ...; -1 if the role needs none.
  int index_count = 0;  // The number of buckets, shards, ...; 0: unspecified.
  Contribution joined = Contribution::kIdentity;
  int64_t tag = 0;  // A message's, see CallOptions::tag; else 0.

  friend bool operator==(const Collective&, const Collective&) = default;
};

// Returns "all_reduce bucket 2/5 float32[1048576] sum", "broadcast shard 0/3 float32[10] root 1",
// "barrier (user)".
std::string ToString(const Collective& collective);

// Mixes every field into `seed`. Equal on all builds and machines, so that ranks may compare it.
uint64_t HashOf(const Collective& collective, uint64_t seed = 0);

struct Schedule {
  uint64_t generation = 0;  // The generation of the plan that made it.
  std::vector<Collective> entries;

  // Returns the hash of the generation and of the entries in order.
  uint64_t Hash() const;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// Mixes 64 bits (with the finaliser of splitmix64), or bytes, into `seed`. Equal on all builds and
// machines, unlike absl::Hash.
uint64_t StableHash(uint64_t seed, uint64_t value);
uint64_t StableHash(uint64_t seed, absl::string_view bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_COLLECTIVE_H_
