// What the ranks of a transport are called in messages: their numbers in the group that uses it, where that has more
// ranks.
//
//   const RankNames names(map.leaders());     // The transport between hosts {0, 1} and {2, 3}: its rank 1 is rank 2.
//   absl::StrCat("rank ", names[1]);          // "rank 2"
//   names.TextOf(operation.what);             // "send (user) float32[12] to rank 2"
//
// Threads: immutable.

#ifndef EVENKEEL_COMM_INTERNAL_RANK_NAMES_H_
#define EVENKEEL_COMM_INTERNAL_RANK_NAMES_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {

class RankNames {
 public:
  RankNames() = default;                                                          // Its own numbers.
  explicit RankNames(std::vector<int> numbers) : numbers_(std::move(numbers)) {}  // By the transport's rank.

  int operator[](int rank) const { return static_cast<size_t>(rank) < numbers_.size() ? numbers_[rank] : rank; }
  std::vector<int> Of(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = (*this)[rank];
    return ranks;
  }
  std::string TextOf(Collective what) const {
    what.root = (*this)[what.root];  // -1 stays.
    return ToString(what);
  }

 private:
  std::vector<int> numbers_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_RANK_NAMES_H_
