// One collective as a value, and a step's list of them: the schedule.
//
//   Schedule schedule{.generation = 3};
//   schedule.entries.push_back({.kind = CollectiveKind::kAllReduce, .dtype = DType::kFloat32, .count = 1 << 20,
//                               .op = ReduceOp::kSum, .role = Role::kBucket, .index = 2,
//                               .joined = Contribution::kIdentity});
//   schedule.Hash();   // equal on ranks that will issue the same
//
// What a training step communicates is the accident of which code ran in other systems, so nobody can compare it,
// and a rank that has run out of inputs has to guess it. Here it is a value that is made from the plan, hashed,
// compared, executed by active ranks with their data and by joined ranks with the stated contributions.
//
// Units:   `count` = elements: of the buffer for all_reduce, reduce, broadcast, send and recv; what each rank sends for
//          all_gather; what each rank receives for reduce_scatter; what each rank sends to each for all_to_all.
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
  kReduce,     // To `root`; elsewhere the buffer's content is unspecified afterwards.
  kBroadcast,  // From `root`.
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBarrier,  // A kind of its own, never a disguised all-reduce: it can pair with nothing else.
  kSend,     // `root` is the receiver.
  kRecv,     // `root` is the sender.
};
absl::string_view ToString(CollectiveKind kind);  // "all_reduce", ...
// A half of a message between two ranks; all others take every rank of the group.
constexpr bool IsPair(CollectiveKind kind) { return kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv; }

// What a collective is for. Part of what ranks must agree on, and of every message.
enum class Role : uint8_t { kUser, kBucket, kBuffers, kState, kShard, kJoin, kTest };
absl::string_view ToString(Role role);

// What a rank that has run out of inputs puts into a collective.
enum class Contribution : uint8_t {
  kIdentity,  // Nothing: zeros for a sum (gradients, counts).
  kOwned,     // Its real value: updated shards, norms, buffers when it is the root.
  kReceive,   // It only receives.
};

struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kFloat32;
  int64_t count = 0;
  ReduceOp op = ReduceOp::kSum;  // Ignored by kinds that do not reduce.
  int root = -1;                 // Root or peer; -1 where the kind has none.
  Role role = Role::kUser;
  int index = -1;       // Which bucket, shard, ...; -1: the role needs none.
  int index_count = 0;  // Out of how many; 0: not said.
  Contribution joined = Contribution::kIdentity;

  friend bool operator==(const Collective&, const Collective&) = default;
};

// "all_reduce bucket 2/5 float32[1048576] sum", "broadcast shard 0/3 float32[10] root 1", "barrier (user)".
std::string ToString(const Collective& collective);

// Mixes every field into `seed`. Equal on all builds and machines, so ranks may compare it.
uint64_t HashOf(const Collective& collective, uint64_t seed = 0);

struct Schedule {
  uint64_t generation = 0;  // Of the plan that made it.
  std::vector<Collective> entries;

  // Generation and entries in order.
  uint64_t Hash() const;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// A 64-bit mix of `value` into `seed` (splitmix64's finaliser); and of bytes. The same everywhere, unlike absl::Hash.
uint64_t StableHash(uint64_t seed, uint64_t value);
uint64_t StableHash(uint64_t seed, absl::string_view bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_COLLECTIVE_H_
