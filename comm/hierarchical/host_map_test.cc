#include "evenkeel/comm/hierarchical/host_map.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

TEST(HostMapTest, NumbersHostsByTheirLowestRanks) {
  const HostMap map({"b", "a", "b", "c", "a", "b"});
  EXPECT_EQ(map.ranks(), 6);
  ASSERT_EQ(map.hosts(), 3);
  EXPECT_EQ(map.ranks_of(0), (std::vector<int>{0, 2, 5}));
  EXPECT_EQ(map.ranks_of(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(map.ranks_of(2), (std::vector<int>{3}));
  EXPECT_EQ(map.leaders(), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(map.largest(), 3);
  EXPECT_EQ(map.Describe(), "host 0 has ranks 0,2,5; host 1 has ranks 1,4; host 2 has rank 3");
}

TEST(HostMapTest, PlacesCountTheRanksOfAHost) {
  const HostMap map({"b", "a", "b", "c", "a", "b"});
  for (int rank = 0; rank < map.ranks(); ++rank) {
    EXPECT_EQ(map.ranks_of(map.host_of(rank))[map.place_of(rank)], rank);
  }
  EXPECT_EQ(map.leader_of(1), 1);
}

TEST(HostMapTest, OneRankIsAHost) {
  const HostMap map({"only"});
  EXPECT_EQ(map.hosts(), 1);
  EXPECT_EQ(map.largest(), 1);
  EXPECT_EQ(map.place_of(0), 0);
}

}  // namespace
}  // namespace evenkeel::internal
