#include "evenkeel/comm/collective.h"

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

Collective BucketAllReduce() {
  return {.kind = CollectiveKind::kAllReduce,
          .dtype = DType::kFloat32,
          .count = 1 << 20,
          .op = ReduceOp::kSum,
          .role = Role::kBucket,
          .index = 2,
          .index_count = 5};
}

// BucketAllReduce() and everything that differs from it in one field.
std::vector<Collective> OneOfEach() {
  std::vector<Collective> all(10, BucketAllReduce());
  all[1].kind = CollectiveKind::kReduceScatter;
  all[2].dtype = DType::kInt32;
  all[3].count += 1;
  all[4].op = ReduceOp::kMax;
  all[5].root = 0;
  all[6].role = Role::kShard;
  all[7].index = 3;
  all[8].index_count = 6;
  all[9].joined = Contribution::kReceive;
  return all;
}

TEST(CollectiveTest, SaysWhatItIs) {
  struct Case {
    Collective collective;
    std::string text;
  };
  const Case cases[] = {
      {BucketAllReduce(), "all_reduce bucket 2/5 float32[1048576] sum"},
      {{.kind = CollectiveKind::kBroadcast,
        .count = 10,
        .root = 1,
        .role = Role::kShard,
        .index = 0,
        .index_count = 3},
       "broadcast shard 0/3 float32[10] root 1"},
      {{.kind = CollectiveKind::kBarrier}, "barrier (user)"},
      {{.kind = CollectiveKind::kBarrier, .role = Role::kJoin}, "barrier (join)"},
      {{.kind = CollectiveKind::kReduce,
        .dtype = DType::kInt64,
        .count = 0,
        .op = ReduceOp::kBitOr,
        .root = 0},
       "reduce (user) int64[0] bit_or root 0"},
      {{.kind = CollectiveKind::kReduceScatter,
        .count = 4,
        .op = ReduceOp::kAverage,
        .role = Role::kBucket,
        .index = 7},
       "reduce_scatter bucket 7 float32[4] average"},
      {{.kind = CollectiveKind::kAllGather,
        .dtype = DType::kUint8,
        .count = 3,
        .role = Role::kState},
       "all_gather (state) uint8[3]"},
      {{.kind = CollectiveKind::kAllToAll, .count = 3}, "all_to_all (user) float32[3]"},
      {{.kind = CollectiveKind::kSend, .count = 3, .root = 4}, "send (user) float32[3] to rank 4"},
      {{.kind = CollectiveKind::kRecv, .count = 3, .root = 4, .role = Role::kBuffers},
       "recv (buffers) float32[3] from rank 4"},
      {{.kind = CollectiveKind::kAllGatherV}, "all_gather_v (user) float32"},
      {{.kind = CollectiveKind::kAllToAllV, .dtype = DType::kInt8}, "all_to_all_v (user) int8"},
  };
  for (const Case& c : cases) EXPECT_EQ(ToString(c.collective), c.text);
}

TEST(CollectiveTest, EveryFieldCountsForEqualityAndHash) {
  std::set<uint64_t> hashes;
  const std::vector<Collective> all = OneOfEach();
  for (size_t i = 0; i < all.size(); ++i) {
    hashes.insert(HashOf(all[i]));
    for (size_t j = 0; j < all.size(); ++j) EXPECT_EQ(all[i] == all[j], i == j) << i << " " << j;
  }
  EXPECT_EQ(hashes.size(), all.size());
  EXPECT_NE(HashOf(all[0], 1), HashOf(all[0], 2));
}

TEST(ScheduleTest, HashSeesGenerationOrderAndLength) {
  Schedule schedule{.generation = 3, .entries = OneOfEach()};
  std::set<uint64_t> hashes = {schedule.Hash()};

  Schedule other = schedule;
  EXPECT_EQ(other.Hash(), schedule.Hash());
  other.generation = 4;
  hashes.insert(other.Hash());

  other = schedule;
  std::swap(other.entries[0], other.entries[1]);
  hashes.insert(other.Hash());

  other = schedule;
  other.entries.pop_back();
  hashes.insert(other.Hash());

  hashes.insert(Schedule{}.Hash());
  EXPECT_EQ(hashes.size(), 5u);
}

// Ranks compare these numbers across builds and versions: a change here is a change of the
// protocol.
TEST(StableHashTest, StaysAsItIs) {
  EXPECT_EQ(StableHash(0, 0),
            0xe220a8397b1dcdafu);  // The first output of splitmix64 seeded with 0.
  EXPECT_EQ(StableHash(1, 2), 0xbfc846100bfc1e42u);
  EXPECT_EQ(StableHash(7, "evenkeel"), 0x15fe7544b528b36bu);
  EXPECT_EQ(HashOf(BucketAllReduce()), 0x97b4105c1b0a09fau);
}

TEST(StableHashTest, OrderAndLengthCount) {
  EXPECT_NE(StableHash(1, 2), StableHash(2, 1));
  EXPECT_NE(StableHash(0, absl::string_view("a")), StableHash(0, absl::string_view("a\0", 2)));
  EXPECT_NE(StableHash(0, absl::string_view("")),
            StableHash(0, absl::string_view("\0\0\0\0\0\0\0\0", 8)));
  EXPECT_NE(StableHash(0, absl::string_view("12345678abcdefgh")),
            StableHash(0, absl::string_view("abcdefgh12345678")));
}

}  // namespace
}  // namespace evenkeel
