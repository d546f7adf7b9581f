#include "evenkeel/comm/arith/view_lists.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

std::vector<int32_t> ElementsOf(const TensorList& views) {
  std::vector<int32_t> elements;
  for (const TensorView& view : views) {
    for (int32_t element : view.as<int32_t>()) elements.push_back(element);
  }
  return elements;
}

std::vector<int64_t> PartsOf(const TensorList& views) {
  std::vector<int64_t> parts;
  for (const TensorView& view : views) parts.push_back(view.count);
  return parts;
}

class ViewListsTest : public testing::Test {
 protected:
  ViewListsTest() { std::iota(data_.begin(), data_.end(), 0); }

  // The elements from 0 to 20, whose views lie the other way round in memory, with an empty one in
  // between.
  TensorList Scattered() {
    std::iota(data_.begin(), data_.begin() + 8, 12);
    std::iota(data_.begin() + 8, data_.end(), 0);
    const TensorView whole{absl::MakeSpan(data_)};
    return {whole.Slice(8, 12), whole.Slice(3, 0), whole.Slice(0, 8)};
  }

  std::vector<int32_t> data_ = std::vector<int32_t>(20);
};

TEST_F(ViewListsTest, EveryRangeHasItsElements) {
  const TensorList views = Scattered();
  ASSERT_EQ(CountOf(views), 20);
  for (int begin = 0; begin <= 20; ++begin) {
    for (int count = 0; begin + count <= 20; ++count) {
      std::vector<int32_t> expected(count);
      std::iota(expected.begin(), expected.end(), begin);
      EXPECT_EQ(ElementsOf(Range(views, begin, count)), expected) << begin << " + " << count;
    }
  }
}

TEST_F(ViewListsTest, RangesOfOneViewThatFollowEachOtherAreJoined) {
  const TensorList whole = {TensorView(absl::MakeSpan(data_))};
  TensorList list;
  AppendRange(whole, 5, 5, list);
  AppendRange(whole, 10, 5, list);
  AppendRange(whole, 0, 5, list);
  EXPECT_EQ(PartsOf(list), (std::vector<int64_t>{10, 5}));
}

// Whether views lie side by side may differ from rank to rank, and parts may not.
TEST_F(ViewListsTest, PartsDoNotDependOnWhereTheViewsLie) {
  const TensorView whole{absl::MakeSpan(data_)};
  const TensorList side_by_side = {whole.Slice(0, 12), whole.Slice(12, 8)};
  for (int middle = 0; middle <= 20; ++middle) {
    TensorList here = Range(side_by_side, 0, middle), there = Range(Scattered(), 0, middle);
    AppendRange(side_by_side, middle, 20 - middle, here);
    AppendRange(Scattered(), middle, 20 - middle, there);
    EXPECT_EQ(PartsOf(here), PartsOf(there)) << middle;
  }
}

TEST_F(ViewListsTest, CopiesBetweenListsWithOtherParts) {
  std::vector<int32_t> copy(20, -1);
  const TensorView whole{absl::MakeSpan(copy)};
  Copy(Scattered(), {whole.Slice(0, 3), whole.Slice(3, 0), whole.Slice(3, 14), whole.Slice(17, 3)});
  EXPECT_EQ(copy, ElementsOf(Scattered()));
}

TEST_F(ViewListsTest, CopiesARangeAndNothingBeyondTheEndOfAList) {
  std::vector<int32_t> copy(20, -1);
  CopyRange(Scattered(), 10, {TensorView(absl::MakeSpan(copy))}, 15, 8);
  std::vector<int32_t> expected(20, -1);
  std::iota(expected.begin() + 15, expected.end(), 10);
  EXPECT_EQ(copy, expected);
}

TEST_F(ViewListsTest, LaysMemoryOutLikeAList) {
  std::vector<int32_t> copy(20);
  const TensorList like = LaidOutLike(Scattered(), copy.data());
  EXPECT_EQ(PartsOf(like), PartsOf(Scattered()));
  Copy(Scattered(), like);
  EXPECT_EQ(copy, ElementsOf(Scattered()));
}

TEST_F(ViewListsTest, SeesWhatOverlaps) {
  const TensorView whole{absl::MakeSpan(data_)};
  EXPECT_TRUE(Overlap({whole.Slice(0, 2), whole.Slice(8, 2)}, {whole.Slice(9, 4)}));
  EXPECT_FALSE(
      Overlap({whole.Slice(0, 2), whole.Slice(8, 2)}, {whole.Slice(2, 6), whole.Slice(10, 10)}));
  EXPECT_FALSE(Overlap({whole.Slice(4, 0)}, {whole}));
}

}  // namespace
}  // namespace evenkeel::internal
