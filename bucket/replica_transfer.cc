#include "evenkeel/bucket/replica_transfer.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int kAttempts = 3;

class ReplicaTransfer {
 public:
  ReplicaTransfer(Communicator& comm, StateTransfer& transfer, const ReplicaMove& state)
      : comm_(comm), transfer_(transfer), state_(state) {}

  absl::Status Run() {
    if (transfer_.holders.size() > 1) EK_RETURN_IF_ERROR(ChooseSource());
    // If the source is lost before all is well, this rank may be the next one.
    const bool may_be_next = comm_.rank() != transfer_.source &&
                             std::ranges::binary_search(transfer_.holders, comm_.rank());
    uint64_t before = 0;
    if (may_be_next) {
      EK_ASSIGN_OR_RETURN(before, Hash());
    }
    absl::Cleanup check = [&] {
      const absl::StatusOr<uint64_t> after = may_be_next ? Hash() : before;
      transfer_.is_torn = !after.ok() || *after != before;
    };
    for (int attempt = 1;; ++attempt) {
      EK_RETURN_IF_ERROR(state_.move(transfer_.source));
      EK_ASSIGN_OR_RETURN(std::optional<Divergence> found, Compare({}));
      if (!found.has_value()) break;
      const std::string what =
          absl::StrCat("the state that rank ", comm_.members()[transfer_.source],
                       " sent has not arrived unchanged: ", TextOf(*found));
      if (attempt == kAttempts) {
        return Damaged(absl::StrCat(what,
                                    ", also not when it was sent again: look for a damaged "
                                    "network adapter or memory"),
                       *found);
      }
      transfer_.repaired.push_back(what);
    }
    std::move(check).Cancel();
    return absl::OkStatus();
  }

 private:
  // The source is a rank whose state is that of most that have it.
  absl::Status ChooseSource() {
    EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found, Compare(transfer_.holders));
    if (!found.has_value()) return absl::OkStatus();
    const auto right = std::ranges::find_if(transfer_.holders, [&](int rank) {
      return !std::ranges::binary_search(found->any_tensor, rank);
    });
    const std::string what =
        absl::StrCat("replicas differ after step ", transfer_.steps, ": ", TextOf(*found));
    if (right == transfer_.holders.end()) {
      return Damaged(absl::StrCat(what, ": no rank is known to be right; load a checkpoint"),
                     *found);
    }
    transfer_.source = *right;
    transfer_.repaired.push_back(what);
    return absl::OkStatus();
  }

  absl::StatusOr<std::optional<Divergence>> Compare(std::vector<int> among) {
    const absl::StatusOr<std::vector<NamedView>> tensors = state_.tensors();
    if (!tensors.ok()) {  // Its device fails; the others must not wait for it.
      comm_.Abort(tensors.status());
      return tensors.status();
    }
    return FindDivergence(
        *tensors, comm_, {.stream = state_.stream, .topic = "transfer", .among = std::move(among)});
  }

  absl::StatusOr<uint64_t> Hash() {
    EK_ASSIGN_OR_RETURN(const std::vector<NamedView> tensors, state_.tensors());
    return HashOf(tensors, comm_, state_.stream);
  }

  // With the numbers of the job: the caller never sees this group if it fails.
  std::string TextOf(Divergence found) const { return ToString(Renumbered(std::move(found))); }
  Divergence Renumbered(Divergence found) const {
    for (int& rank : found.ranks) rank = comm_.members()[rank];
    return found;
  }
  absl::Status Damaged(absl::string_view message, const Divergence& found) const {
    return WithFailureInfo(absl::DataLossError(message), {.kind = FailureKind::kDisagreement,
                                                          .ranks = Renumbered(found).ranks,
                                                          .step = transfer_.steps});
  }

  Communicator& comm_;
  StateTransfer& transfer_;
  const ReplicaMove& state_;
};

}  // namespace

absl::Status TransferReplicas(Communicator& comm, StateTransfer& transfer,
                              const ReplicaMove& state) {
  return ReplicaTransfer(comm, transfer, state).Run();
}

}  // namespace evenkeel
