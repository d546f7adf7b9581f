#include "evenkeel/comm/local_meeting.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/internal/parties.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

// Sizes, in elements.
std::vector<int64_t> PartsOf(const Operation& operation) {
  std::vector<int64_t> parts;
  for (const TensorView& view : operation.out.empty() ? operation.in : operation.out) parts.push_back(view.count);
  return parts;
}

}  // namespace

Meeting& Lane::At(int64_t sequence) {
  while (first + static_cast<int64_t>(meetings.size()) <= sequence) meetings.push_back(std::make_shared<Meeting>());
  return *meetings[sequence - first];
}

bool IsPair(const Collective& what) { return what.kind == CollectiveKind::kSend || what.kind == CollectiveKind::kRecv; }

Collective CommonPart(Collective what) {
  if (IsPair(what)) {
    what.kind = CollectiveKind::kSend;
    what.root = -1;
  }
  return what;
}

bool Agree(const Operation& a, const Operation& b) {
  return CommonPart(a.what) == CommonPart(b.what) && PartsOf(a) == PartsOf(b) && a.scale == b.scale &&
         a.step_of == b.step_of;
}

std::string DescribeDisagreement(const Seats& seats) {
  const Collective first = CommonPart(seats.begin()->second.operation.what);
  const bool only_details_differ = std::all_of(
      seats.begin(), seats.end(), [&](const auto& seat) { return CommonPart(seat.second.operation.what) == first; });
  Parties parties;
  for (const auto& [index, seat] : seats) {
    const Operation& operation = seat.operation;
    std::string place = absl::StrCat("#", operation.sequence, " ", ToString(operation.what));
    if (only_details_differ) {
      absl::StrAppend(&place, " in parts ", absl::StrJoin(PartsOf(operation), "+"), ", scale ", operation.scale);
      if (operation.step_of != 0) absl::StrAppend(&place, ", a step of ", absl::Hex(operation.step_of));
    }
    parties[seat.rank] = std::move(place);
  }
  return absl::StrCat(Describe(parties, "is at", "are at"), ": the ranks disagree");
}

}  // namespace evenkeel::internal
