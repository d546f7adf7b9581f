#include "evenkeel/bucket/replica_transfer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int kAttempts = 3;

absl::StatusOr<std::optional<Divergence>> Compare(Communicator& comm, const ReplicaMove& state,
                                                  std::vector<int> among) {
  const absl::StatusOr<std::vector<NamedView>> tensors = state.tensors();
  if (!tensors.ok()) {  // Its device fails; the others must not wait for it.
    comm.Abort(tensors.status());
    return tensors.status();
  }
  return FindDivergence(*tensors, comm,
                        {.stream = state.stream, .topic = "transfer", .among = std::move(among)});
}

absl::Status Damaged(absl::string_view message, const Divergence& found,
                     const StateTransfer& transfer) {
  return WithFailureInfo(
      absl::DataLossError(message),
      {.kind = FailureKind::kDisagreement, .ranks = found.ranks, .step = transfer.steps});
}

}  // namespace

absl::Status TransferReplicas(Communicator& comm, StateTransfer& transfer,
                              const ReplicaMove& state) {
  int source = transfer.source;
  if (transfer.holders.size() > 1) {
    EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found,
                        Compare(comm, state, transfer.holders));
    if (found.has_value()) {
      const auto right = std::ranges::find_if(transfer.holders, [&](int rank) {
        return !std::ranges::binary_search(found->any_tensor, rank);
      });
      const std::string what =
          absl::StrCat("replicas differ after step ", transfer.steps, ": ", ToString(*found));
      if (right == transfer.holders.end()) {
        return Damaged(absl::StrCat(what, ": no rank is known to be right; load a checkpoint"),
                       *found, transfer);
      }
      source = *right;
      transfer.repaired.push_back(what);
    }
  }
  for (int attempt = 1;; ++attempt) {
    EK_RETURN_IF_ERROR(state.move(source));
    EK_ASSIGN_OR_RETURN(std::optional<Divergence> found, Compare(comm, state, {}));
    if (!found.has_value()) return absl::OkStatus();
    const std::string what = absl::StrCat("the state that rank ", source,
                                          " sent has not arrived unchanged: ", ToString(*found));
    if (attempt == kAttempts) {
      return Damaged(absl::StrCat(what,
                                  ", also not when it was sent again: look for a damaged "
                                  "network adapter or memory"),
                     *found, transfer);
    }
    transfer.repaired.push_back(what);
  }
}

}  // namespace evenkeel
