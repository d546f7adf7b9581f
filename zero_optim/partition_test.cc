#include "evenkeel/zero_optim/partition.h"

#include <cstdint>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::Each;
using testing::ElementsAre;

std::vector<int> Range(int begin, int end) {
  std::vector<int> indices(end - begin);
  std::iota(indices.begin(), indices.end(), begin);
  return indices;
}

std::vector<int64_t> Numbers(const std::string& line) {
  std::istringstream words(line.substr(line.find(' ') + 1));
  std::vector<int64_t> numbers;
  for (int64_t number; words >> number;) numbers.push_back(number);
  return numbers;
}

// The file has a line "world w" per case, then per parameter group "sizes ..." and "ranks ...".
TEST(OwnerTableTest, ReproducesPyTorchsRecordedPartitions) {
  std::ifstream file("tests/testdata/optim/zero_partition.txt");
  ASSERT_TRUE(file.is_open());
  int cases = 0, world_size = 0;
  std::vector<int64_t> sizes;
  std::vector<int> group_ends, expected;
  const auto check = [&] {
    if (expected.empty()) return;
    SCOPED_TRACE(absl::StrCat("case ", cases++, ", ", world_size, " ranks"));
    OwnerTable owners(sizes, world_size);
    int begin = 0;
    for (int end : group_ends) {
      ASSERT_TRUE(owners.Assign(Range(begin, end)).ok());
      begin = end;
    }
    EXPECT_EQ(owners.owners(), expected);
    sizes.clear(), group_ends.clear(), expected.clear();
  };
  for (std::string line; std::getline(file, line);) {
    const std::vector<int64_t> numbers = Numbers(line);
    if (absl::StartsWith(line, "world ")) {
      check();
      world_size = static_cast<int>(numbers.at(0));
    } else if (absl::StartsWith(line, "sizes ")) {
      sizes.insert(sizes.end(), numbers.begin(), numbers.end());
      group_ends.push_back(static_cast<int>(sizes.size()));
    } else if (absl::StartsWith(line, "ranks ")) {
      expected.insert(expected.end(), numbers.begin(), numbers.end());
    }
  }
  check();
  EXPECT_EQ(cases, 40);
}

TEST(OwnerTableTest, GivesTheLargestFirstToTheRankWithTheLeast) {
  OwnerTable owners({1000, 10, 600, 500}, 2);
  ASSERT_TRUE(owners.Assign(std::vector<int>{0, 2, 3}).ok());
  EXPECT_THAT(owners.owners(), ElementsAre(0, kNoOwner, 1, 1));
  EXPECT_THAT(owners.loads(), ElementsAre(1000, 1100));
}

TEST(OwnerTableTest, AFrozenGiantDoesNotCount) {
  OwnerTable with({1 << 30, 8, 8, 8, 8}, 2), without({8, 8, 8, 8}, 2);
  ASSERT_TRUE(with.Assign(Range(1, 5)).ok());
  ASSERT_TRUE(without.Assign(Range(0, 4)).ok());
  EXPECT_EQ(std::vector<int>(with.owners().begin() + 1, with.owners().end()), without.owners());
}

TEST(OwnerTableTest, LeavesOwnersAloneWhenMoreIsTrained) {
  OwnerTable owners({40, 30, 20, 100, 5}, 3);
  ASSERT_TRUE(owners.Assign(Range(0, 3)).ok());
  const std::vector<int> first = owners.owners();
  ASSERT_TRUE(owners.Assign(Range(3, 5)).ok());
  for (int param : Range(0, 3)) EXPECT_EQ(owners.owner(param), first[param]);
  EXPECT_EQ(owners.owner(3), 2);
  EXPECT_EQ(owners.owner(4), 1);
}

TEST(OwnerTableTest, SomeRanksOwnNothingIfThereAreMoreRanksThanParameters) {
  OwnerTable owners({7, 7}, 5);
  ASSERT_TRUE(owners.Assign(Range(0, 2)).ok());
  EXPECT_THAT(owners.owners(), ElementsAre(0, 1));
  EXPECT_THAT(owners.loads(), ElementsAre(7, 7, 0, 0, 0));
}

TEST(OwnerTableTest, KeepsLoadsWithinTheLargestParameter) {
  std::mt19937 random(7);
  for (int world_size : {1, 2, 3, 5, 8}) {
    std::vector<int64_t> sizes(200);
    for (int64_t& size : sizes) size = random() % 1000;
    OwnerTable owners(sizes, world_size);
    ASSERT_TRUE(owners.Assign(Range(0, 200)).ok());
    const auto [least, most] = std::minmax_element(owners.loads().begin(), owners.loads().end());
    EXPECT_LE(*most - *least, 1000);
    EXPECT_EQ(std::accumulate(owners.loads().begin(), owners.loads().end(), int64_t{0}),
              std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  }
}

TEST(OwnerTableTest, RefusesAParameterThatIsUnknownOrOwned) {
  OwnerTable owners({1, 2, 3}, 2);
  ASSERT_TRUE(owners.Assign(std::vector<int>{1}).ok());
  for (const std::vector<int>& wrong : {std::vector<int>{0, 3}, {0, -1}, {0, 1}, {2, 2}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(owners.Assign(wrong))) << testing::PrintToString(wrong);
  }
  EXPECT_THAT(owners.owners(), ElementsAre(kNoOwner, 0, kNoOwner));
  EXPECT_THAT(owners.loads(), ElementsAre(2, 0));
}

TEST(OwnerTableTest, TravelsAsBytes) {
  OwnerTable owners({10, 20, 30}, 2), copy({10, 20, 30}, 2);
  ASSERT_TRUE(owners.Assign(std::vector<int>{0, 2}).ok());
  ASSERT_TRUE(copy.Restore(owners.Serialize()).ok());
  EXPECT_EQ(copy, owners);
  EXPECT_THAT(copy.loads(), ElementsAre(30, 10));
}

TEST(OwnerTableTest, RefusesBytesOfAnotherTable) {
  OwnerTable two({1, 1, 1}, 2), three({1, 1, 1}, 3), other({1, 1}, 2);
  ASSERT_TRUE(three.Assign(Range(0, 3)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(two.Restore(three.Serialize())));  // Has a rank 2.
  EXPECT_TRUE(absl::IsInvalidArgument(two.Restore(other.Serialize())));
  EXPECT_TRUE(absl::IsInvalidArgument(two.Restore("x")));
  EXPECT_THAT(two.owners(), Each(kNoOwner));
}

}  // namespace
}  // namespace evenkeel
