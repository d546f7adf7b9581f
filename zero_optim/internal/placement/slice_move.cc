#include "evenkeel/zero_optim/internal/placement/slice_move.h"

#include <cstdint>
#include <map>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/open_works.h"

namespace evenkeel::internal {
namespace {

using Part = ParameterUpdater::Part;

int64_t CountOf(const TensorList& parts) {
  int64_t count = 0;
  for (const TensorView& part : parts) count += part.count;
  return count;
}

}  // namespace

absl::Status StateMove::Start(absl::Span<const OwnerChange> changes) {
  std::map<int, TensorList> sends, receives;  // By peer.
  for (const OwnerChange& change : changes) {
    const HeldRange range = RangeOf(change.to, rank_);
    before_.emplace_back(change.param, change.from);
    EK_ASSIGN_OR_RETURN(Part before,
                        updater_->SetPart(change.param, range.begin, range.end - range.begin));
    parts_.emplace_back(change.param, std::move(before));
    Part& old = parts_.back().second;
    std::vector<HeldTensor>& now = updater_->tensors(change.param);
    if (updater_->step(change.param) == 0) continue;
    for (const Transfer& transfer : TransfersBetween(change.from, change.to)) {
      for (size_t t = 0; t < now.size(); ++t) {
        const auto here = [&] {
          return old.tensors[t].view().Slice(transfer.begin - old.begin, transfer.count);
        };
        const auto there = [&] {
          return now[t].view().Slice(transfer.begin - range.begin, transfer.count);
        };
        if (transfer.from == rank_ && transfer.to == rank_) {
          EK_RETURN_IF_ERROR(updater_->Copy(there(), here()));
        } else if (transfer.from == rank_) {
          sends[transfer.to].push_back(here());
        } else if (transfer.to == rank_) {
          receives[transfer.from].push_back(there());
        }
      }
    }
  }
  const auto issue = [&](CollectiveKind kind, int peer, const TensorList& parts) {
    const bool is_send = kind == CollectiveKind::kSend;
    works_.push_back(channel_->Issue(
        {.kind = kind, .dtype = parts[0].dtype, .count = CountOf(parts), .root = peer},
        is_send ? parts : TensorList(), is_send ? TensorList() : parts,
        {.after = updater_->stream()}));
  };
  for (const auto& [peer, parts] : sends) issue(CollectiveKind::kSend, peer, parts);
  for (const auto& [peer, parts] : receives) issue(CollectiveKind::kRecv, peer, parts);
  return absl::OkStatus();
}

StateMove::~StateMove() {
  for (auto& [param, part] : parts_) updater_->Drop(std::move(part));
}

absl::Status StateMove::OrderBefore(StreamRef stream) const {
  return OrderAllBefore(works_, stream);
}

absl::Status StateMove::Wait() const { return WaitForAll(works_); }

void StateMove::Undo() {
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    updater_->PutBack(part->first, std::move(part->second));
  }
  parts_.clear();
}

}  // namespace evenkeel::internal
