#include "evenkeel/bucket/replica_check.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status Complete(ReplicaCheckOptions& options) {
  EK_ASSIGN_OR_RETURN(const int every, ReadNumber("EVENKEEL_CHECK_REPLICAS", 0, 10'000'000, 0));
  if (options.every == 0) options.every = every;
  if (options.every >= 0 && options.parts >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("check_replicas: every ", options.every, " steps in ", options.parts,
                   " parts is out of range: steps must be at least 0, parts at least 1"));
}

std::string ToString(const ReplicaCheckOptions& options) {
  return absl::StrCat("every ", options.every, " steps in ", options.parts,
                      options.parts == 1 ? " part" : " parts");
}

bool IsCheckDue(const ReplicaCheckOptions& options, const Communicator& comm, int64_t step) {
  return options.every > 0 && step > 0 && step % options.every == 0 && comm.world_size() > 1;
}

absl::Status CompareReplicas(absl::string_view name, absl::Span<const NamedView> tensors,
                             Communicator& comm, const ReplicaCheckOptions& options, int64_t step,
                             StreamRef stream) {
  EK_ASSIGN_OR_RETURN(
      const std::optional<Divergence> found,
      Annotate(
          FindDivergence(tensors, comm,
                         {.part = step / options.every, .parts = options.parts, .stream = stream}),
          absl::StrCat(name, ": comparing replicas after step ", step)));
  if (!found.has_value()) return absl::OkStatus();
  return WithFailureInfo(absl::InternalError(absl::StrCat(name, ": replicas differ after step ",
                                                          step, ": ", ToString(*found))),
                         {.kind = FailureKind::kDisagreement, .ranks = found->ranks, .step = step});
}

}  // namespace evenkeel
