// The names of a transport's ranks in messages: their numbers in the group that uses the transport,
// which may have more ranks.
//
//   // The transport between hosts {0, 1} and {2, 3}: its rank 1 is rank 2.
//   const RankNames names(map.leaders());
//   absl::StrCat("rank ", names[1]);          // "rank 2"
//   names.TextOf(operation.what);             // "send (user) float32[12] to rank 2"
//
// Threads: immutable.

#ifndef EVENKEEL_COMM_RANKS_RANK_NAMES_H_
#define EVENKEEL_COMM_RANKS_RANK_NAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {

class RankNames {
 public:
  RankNames() = default;  // The transport's own numbers.
  explicit RankNames(std::vector<int> numbers)
      : numbers_(std::move(numbers)) {}  // By the transport's rank.

  int operator[](int rank) const {
    return static_cast<size_t>(rank) < numbers_.size() ? numbers_[rank] : rank;
  }
  std::vector<int> Of(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = (*this)[rank];
    return ranks;
  }
  std::string TextOf(Collective what) const {
    what.root = (*this)[what.root];  // -1 stays.
    return ToString(what);
  }
  // Returns "rank 3 at #412 all_reduce (user) float32[10] sum".
  std::string Place(int rank, int64_t position, const Collective& what) const;
  // Returns `status` as an error of `rank` in a collective: "<Place()>: <message>", with a
  // FailureInfo. A disagreement stays as it is, since its message names all ranks; so does OK.
  absl::Status AtOperation(const absl::Status& status, int rank, int64_t position,
                           const Collective& what) const;

 private:
  std::vector<int> numbers_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_RANKS_RANK_NAMES_H_
