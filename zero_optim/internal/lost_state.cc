#include "evenkeel/zero_optim/internal/lost_state.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel::internal {
namespace {

std::string WayOut(const std::vector<Standing>& by_rank) {
  std::string hint;
  for (const Standing& standing : by_rank) {
    if (hint.empty()) hint = standing.checkpoint_hint;
  }
  return absl::StrCat("resume from a checkpoint (", hint.empty() ? "none was written" : hint,
                      "), or choose what to do with a lost shard (lost_shard)");
}

}  // namespace

void Standing::Write(ByteWriter& writer) const {
  writer.I64(steps_finished).Bool(is_torn).Bool(may_lose).Bool(holds_state).Bytes(checkpoint_hint);
}

Standing Standing::Read(ByteReader& reader) {
  Standing standing;
  standing.steps_finished = reader.I64();
  standing.is_torn = reader.Bool();
  standing.may_lose = reader.Bool();
  standing.holds_state = reader.Bool();
  standing.checkpoint_hint = std::string(reader.Bytes());
  return standing;
}

absl::Status CheckSameStep(const std::vector<Standing>& by_rank) {
  int first = -1;
  for (int rank = 0; rank < static_cast<int>(by_rank.size()); ++rank) {
    const Standing& standing = by_rank[rank];
    if (standing.is_torn) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank,
                       " was in the middle of an update of its part of the optimizer's state, "
                       "which cannot be taken back: ",
                       WayOut(by_rank)));
    }
    if (!standing.holds_state) continue;
    if (first < 0) first = rank;
    if (standing.steps_finished == by_rank[first].steps_finished) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", first, " has finished ", by_rank[first].steps_finished, " optimizer steps, rank ",
        rank, " ", standing.steps_finished,
        ", and a part of the optimizer's state cannot be taken back: ", WayOut(by_rank)));
  }
  return absl::OkStatus();
}

absl::Status LostStateError(const std::vector<int>& ranks, const std::vector<Standing>& by_rank) {
  return absl::FailedPreconditionError(absl::StrCat(
      RankList(ranks),
      ranks.size() == 1 ? " is lost, and with it its part" : " are lost, and with them their parts",
      " of the optimizer's state: ", WayOut(by_rank)));
}

}  // namespace evenkeel::internal
