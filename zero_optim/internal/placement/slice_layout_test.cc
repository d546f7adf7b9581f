#include "evenkeel/zero_optim/internal/placement/slice_layout.h"

#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

SlicedBucket BucketOf(const std::vector<int64_t>& counts, int world_size) {
  SlicedBucket bucket;
  for (size_t i = 0; i < counts.size(); ++i) {
    bucket.params.push_back(static_cast<int>(10 + i));
    bucket.offsets.push_back(bucket.count);
    bucket.count += counts[i];
  }
  const int64_t unit = kSliceUnit * world_size;
  bucket.slice = (bucket.count + unit - 1) / unit * kSliceUnit;
  return bucket;
}

TEST(SliceLayoutTest, CutsParametersWhereASliceEnds) {
  const SlicedBucket bucket = BucketOf({60, 7}, 3);
  EXPECT_EQ(bucket.slice, 32);
  EXPECT_THAT(SegmentsOf(bucket, 0), ElementsAre(Segment{10, 0, 32, 0}));
  EXPECT_THAT(SegmentsOf(bucket, 1), ElementsAre(Segment{10, 32, 28, 0}, Segment{11, 0, 4, 28}));
  EXPECT_THAT(SegmentsOf(bucket, 2), ElementsAre(Segment{11, 4, 3, 0}));
  EXPECT_EQ(PaddingOf(bucket, 0), 0);
  EXPECT_EQ(PaddingOf(bucket, 2), 29);
  EXPECT_THAT(HoldersIn(bucket, 1, 3), ElementsAre(HeldRange{0, 4, 1}, HeldRange{4, 7, 2}));
}

// Every element once, whatever the sizes: also none, fewer elements than ranks, and a whole number
// of units.
TEST(SliceLayoutTest, CoversEachElementOnceInEqualSlices) {
  std::mt19937 random(7);
  for (int world_size : {1, 2, 3, 5, 8}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<int64_t> counts(random() % 6);
      for (int64_t& count : counts) count = random() % 3 == 0 ? random() % 3 : random() % 100;
      const SlicedBucket bucket = BucketOf(counts, world_size);
      SCOPED_TRACE(absl::StrCat("world ", world_size, " round ", round));
      std::vector<std::vector<int>> seen(counts.size());
      for (size_t i = 0; i < counts.size(); ++i) seen[i].assign(counts[i], -1);
      for (int rank = 0; rank < world_size; ++rank) {
        int64_t held = 0;
        for (const Segment& segment : SegmentsOf(bucket, rank)) {
          EXPECT_EQ(segment.offset, held);
          held += segment.count;
          for (int64_t k = 0; k < segment.count; ++k) {
            int& owner = seen[segment.param - 10][segment.begin + k];
            EXPECT_EQ(owner, -1);
            owner = rank;
          }
        }
        EXPECT_EQ(held + PaddingOf(bucket, rank), bucket.slice);
        EXPECT_LE(held * world_size, bucket.count + kSliceUnit * world_size);
      }
      for (size_t i = 0; i < counts.size(); ++i) {
        const Holders holders = HoldersIn(bucket, i, world_size);
        int64_t next = 0;
        for (const HeldRange& range : holders) {
          EXPECT_EQ(range.begin, next);
          for (next = range.begin; next < range.end; ++next) EXPECT_EQ(seen[i][next], range.rank);
          EXPECT_EQ(RangeOf(holders, range.rank), range);
        }
        EXPECT_EQ(next, counts[i]);
      }
    }
  }
}

TEST(SliceLayoutTest, DividesWhatIsInNoBucketEqually) {
  EXPECT_THAT(HoldersOfAlone(7, 3),
              ElementsAre(HeldRange{0, 3, 0}, HeldRange{3, 6, 1}, HeldRange{6, 7, 2}));
  EXPECT_THAT(HoldersOfAlone(2, 3), ElementsAre(HeldRange{0, 1, 0}, HeldRange{1, 2, 1}));
  EXPECT_THAT(HoldersOfAlone(0, 3), IsEmpty());
  EXPECT_EQ(RangeOf(HoldersOfAlone(2, 3), 2), (HeldRange{0, 0, 2}));
}

TEST(SliceLayoutTest, TransfersAreWhatTwoDivisionsHaveInCommon) {
  const Holders before = {{0, 32, 0}, {32, 60, 1}}, after = {{0, 10, 2}, {10, 40, 0}, {40, 60, 1}};
  EXPECT_THAT(TransfersBetween(before, after),
              ElementsAre(Transfer{0, 10, 0, 2}, Transfer{10, 22, 0, 0}, Transfer{32, 8, 1, 0},
                          Transfer{40, 20, 1, 1}));
  EXPECT_THAT(TransfersBetween(before, before),
              ElementsAre(Transfer{0, 32, 0, 0}, Transfer{32, 28, 1, 1}));
  EXPECT_THAT(TransfersBetween({}, after), IsEmpty());
  EXPECT_THAT(TransfersBetween(before, {}), IsEmpty());
}

}  // namespace
}  // namespace evenkeel::internal
