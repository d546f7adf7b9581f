#include "evenkeel/zero_optim/internal/slice_move.h"

#include <cstdint>
#include <cstring>
#include <map>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {
namespace {

using Part = ParameterUpdater::Part;

int64_t CountOf(const TensorList& parts) {
  int64_t count = 0;
  for (const TensorView& part : parts) count += part.count;
  return count;
}

}  // namespace

void StateMove::Start(absl::Span<const OwnerChange> changes) {
  std::map<int, TensorList> sends, receives;  // By peer.
  for (const OwnerChange& change : changes) {
    const HeldRange range = RangeOf(change.to, rank_);
    before_.emplace_back(change.param, change.from);
    parts_.emplace_back(change.param, updater_->SetPart(change.param, range.begin, range.end - range.begin));
    Part& old = parts_.back().second;
    std::vector<StateTensor>& now = updater_->tensors(change.param);
    if (updater_->step(change.param) == 0) continue;
    for (const Transfer& transfer : TransfersBetween(change.from, change.to)) {
      for (size_t t = 0; t < now.size(); ++t) {
        const auto here = [&] { return old.tensors[t].view().Slice(transfer.begin - old.begin, transfer.count); };
        const auto there = [&] { return now[t].view().Slice(transfer.begin - range.begin, transfer.count); };
        if (transfer.from == rank_ && transfer.to == rank_) {
          std::memcpy(there().data, here().data, here().bytes());
        } else if (transfer.from == rank_) {
          sends[transfer.to].push_back(here());
        } else if (transfer.to == rank_) {
          receives[transfer.from].push_back(there());
        }
      }
    }
  }
  for (const auto& [peer, parts] : sends) {
    const Collective what{
        .kind = CollectiveKind::kSend, .dtype = parts[0].dtype, .count = CountOf(parts), .root = peer};
    works_.push_back(channel_->Issue(what, parts, {}, {}));
  }
  for (const auto& [peer, parts] : receives) {
    const Collective what{
        .kind = CollectiveKind::kRecv, .dtype = parts[0].dtype, .count = CountOf(parts), .root = peer};
    works_.push_back(channel_->Issue(what, {}, parts, {}));
  }
}

absl::Status StateMove::Wait() const {
  absl::Status status;
  for (const Work& work : works_) status.Update(work.Wait());
  return status;
}

void StateMove::Undo() {
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    updater_->PutBack(part->first, std::move(part->second));
  }
  parts_.clear();
}

}  // namespace evenkeel::internal
