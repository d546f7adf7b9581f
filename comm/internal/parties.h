// How messages name ranks, and who of them has what.
//
//   Parties parties;
//   parties[1] = "#412 barrier (user)";  parties[0] = parties[2] = "#412 all_reduce (user) float32[10] sum";
//   Describe(parties, "is at", "are at")   // "rank 1 is at #412 barrier (user); ranks 0,2 are at #412 all_reduce ..."
//
// The smallest party comes first: it is most likely the one that is wrong.
//
// Threads: pure functions.

#ifndef EVENKEEL_COMM_INTERNAL_PARTIES_H_
#define EVENKEEL_COMM_INTERNAL_PARTIES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// "rank 2", "ranks 0,3,4".
std::string RankList(const std::vector<int>& ranks);

using Parties = std::map<int, std::string>;  // By rank: what it has.

// `one` goes between a rank and what it has, `several` between ranks and what they have.
std::string Describe(const Parties& parties, absl::string_view one, absl::string_view several);
// The lowest rank of the smallest party; -1 if there is none.
int Suspect(const Parties& parties);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_PARTIES_H_
