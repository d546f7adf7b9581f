#include "evenkeel/comm/ranks/rank_names.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

std::string RankNames::Place(int rank, int64_t position, const Collective& what) const {
  return absl::StrCat("rank ", (*this)[rank], " at #", position, " ", TextOf(what));
}

absl::Status RankNames::AtOperation(const absl::Status& status, int rank, int64_t position,
                                    const Collective& what) const {
  const int named = (*this)[rank];
  const absl::Status own = AsErrorOf(named, status);
  if (own.ok()) return own;
  FailureInfo info = *FailureInfoOf(own);
  if (info.kind == FailureKind::kDisagreement) return status;
  info.operation = TextOf(what);
  info.position = position;
  return WithFailureInfo(Annotate(status, Place(rank, position, what)), info);
}

}  // namespace evenkeel::internal
