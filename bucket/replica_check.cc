#include "evenkeel/bucket/replica_check.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

int64_t EveryOf(const ReplicaCheckOptions& options, const Communicator& comm) {
  return options.every != 0 ? options.every : comm.check_replicas_every();
}

}  // namespace

absl::Status CheckRange(const ReplicaCheckOptions& options) {
  if (options.every >= 0 && options.parts >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("check_replicas: every ", options.every, " steps in ", options.parts,
                   " parts is out of range: steps must be at least 0, parts at least 1"));
}

std::string ToString(const ReplicaCheckOptions& options, const Communicator& comm) {
  return absl::StrCat("every ", EveryOf(options, comm), " steps in ", options.parts,
                      options.parts == 1 ? " part" : " parts");
}

bool IsCheckDue(const ReplicaCheckOptions& options, const Communicator& comm, int64_t step) {
  const int64_t every = EveryOf(options, comm);
  return every > 0 && step > 0 && step % every == 0 && comm.world_size() > 1;
}

absl::Status CompareReplicas(absl::string_view name, absl::Span<const NamedView> tensors,
                             Communicator& comm, const ReplicaCheckOptions& options, int64_t step,
                             StreamRef stream) {
  EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found,
                      Annotate(FindDivergence(tensors, comm,
                                              {.part = step / EveryOf(options, comm),
                                               .parts = options.parts,
                                               .stream = stream}),
                               absl::StrCat(name, ": comparing replicas after step ", step)));
  if (!found.has_value()) return absl::OkStatus();
  return WithFailureInfo(absl::InternalError(absl::StrCat(name, ": replicas differ after step ",
                                                          step, ": ", ToString(*found))),
                         {.kind = FailureKind::kDisagreement, .ranks = found->ranks, .step = step});
}

}  // namespace evenkeel
