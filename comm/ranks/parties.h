// The form of ranks in messages, and of disagreements between them.
//
//   Parties parties;
//   parties[1] = "#412 barrier (user)";
//   parties[0] = parties[2] = "#412 all_reduce (user) float32[10] sum";
//   // "rank 1 is at #412 barrier (user); ranks 0,2 are at #412 all_reduce ..."
//   Describe(parties, "is at", "are at")
//
// The smallest party comes first, since it is most likely the wrong one.
//
// Threads: pure functions.

#ifndef EVENKEEL_COMM_RANKS_PARTIES_H_
#define EVENKEEL_COMM_RANKS_PARTIES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace evenkeel::internal {

// Returns "rank 2", "ranks 0,3,4"; for more than 16 ranks "ranks 0-1022,1024 and 1024 more", if
// those more are not in the first 16 ranges.
std::string RankList(const std::vector<int>& ranks);

// Returns `status` as an error of `rank`: "rank 3: <message>", with a FailureInfo. A status that
// has one stays as it is, since its message names the ranks; so does OK.
absl::Status AsErrorOf(int rank, const absl::Status& status);

// Returns `status` with the ranks of its FailureInfo as those of another group, for both of which
// the ranks' numbers in the job are given; causes that are not in that group are left out.
absl::Status Renumber(const absl::Status& status, absl::Span<const int> from,
                      absl::Span<const int> to);

using Parties = std::map<int, std::string>;  // By rank: its value.

// Returns DeadlineExceeded with a FailureInfo: `missing` did not arrive in time.
absl::Status MissedDeadline(absl::string_view message, const std::vector<int>& missing,
                            absl::string_view operation = "", int64_t position = -1);

// `one` stands between one rank and its value, `several` between several ranks and theirs. Names at
// most 8 parties, the largest among them, and counts the others.
std::string Describe(const Parties& parties, absl::string_view one, absl::string_view several);
// Returns the lowest rank of the smallest party; -1 if there is none.
int Suspect(const Parties& parties);

// Returns FailedPrecondition "<before>rank 1 is at ...; ranks 0,2 are at ...: the ranks
// disagree<after>", with a FailureInfo that names the ranks of the smallest party; of all of them
// if several are the smallest, since any of them may be wrong.
struct Wording {
  absl::string_view one = "is at", several = "are at";
  absl::string_view before = "", after = "";
};
absl::Status Disagreement(const Parties& parties, const Wording& wording = {});

// The position of a rank on its channel: "#412 barrier (user)<detail>".
struct AtOperation {
  int64_t position = 0;
  std::string operation;
  std::string detail = "";
};
// The same for ranks at different operations. The FailureInfo has the operation of its lowest rank.
absl::Status Disagreement(const std::map<int, AtOperation>& ranks);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_RANKS_PARTIES_H_
