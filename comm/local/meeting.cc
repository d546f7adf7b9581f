#include "evenkeel/comm/local/meeting.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/arith/common_part.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

Meeting& Lane::At(int64_t sequence) {
  while (first + static_cast<int64_t>(meetings.size()) <= sequence)
    meetings.push_back(std::make_shared<Meeting>());
  return *meetings[sequence - first];
}

absl::Status DisagreementOf(const Seats& seats, const RankNames& names) {
  const Collective first = CommonPart(seats.begin()->second.operation.what);
  const bool only_details_differ = std::all_of(seats.begin(), seats.end(), [&](const auto& seat) {
    return CommonPart(seat.second.operation.what) == first;
  });
  std::map<int, AtOperation> ranks;
  for (const auto& [index, seat] : seats) {
    const Operation& operation = seat.operation;
    AtOperation& at = ranks[names[seat.rank]];
    at = {operation.sequence, names.TextOf(operation.what)};
    if (!only_details_differ) continue;
    absl::StrAppend(&at.detail, " in parts ", absl::StrJoin(PartsOf(operation), "+"), ", scale ",
                    operation.scale);
    if (operation.step_of != 0)
      absl::StrAppend(&at.detail, ", a step of ", absl::Hex(operation.step_of));
  }
  return Disagreement(ranks);
}

absl::Status CheckUnevenSizes(const Seats& seats, int rank, const RankNames& names) {
  const Seat& mine = seats.at(rank);
  const auto check = [&](const Seat& sender, const Seat& receiver) -> absl::Status {
    const Operation& operation = sender.operation;
    const int64_t sent = UnevenCount(operation.what, operation.in, receiver.rank);
    const int64_t expected = receiver.operation.out[sender.rank].count;
    if (sent == expected) return absl::OkStatus();
    return SizesDisagree(operation.what, operation.sequence, names[sender.rank], sent,
                         names[receiver.rank], expected);
  };
  for (const auto& [other, seat] : seats) {
    EK_RETURN_IF_ERROR(check(seat, mine));
    EK_RETURN_IF_ERROR(check(mine, seat));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
