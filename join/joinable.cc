#include "evenkeel/join/joinable.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// Returns a name that no object has brought along from another group.
std::string NewName(Communicator& comm, absl::string_view kind) {
  std::string name = comm.UniqueName(kind);
  while (!StepControl::Of(comm).HoldName(name)) name = comm.UniqueName(kind);
  return name;
}

// Agrees on the object to move and on whether all ranks can move it; all ranks get the same result.
// There is one topic for all objects, so that ranks that move them in another order get an error.
absl::Status AgreeToMove(Communicator& comm, const std::string& name, const absl::Status& own) {
  const absl::StatusOr<std::vector<std::string>> names = AgreeOn(comm, "replace_group", own, name);
  if (!names.ok()) return Annotate(names.status(), absl::StrCat("ReplaceGroup of ", name));
  for (size_t rank = 0; rank < names->size(); ++rank) {
    if ((*names)[rank] == (*names)[0]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ReplaceGroup: rank 0 passes ", (*names)[0], ", rank ", rank, " ",
                     (*names)[rank], ": all ranks must pass the same, in the same order"));
  }
  return absl::OkStatus();
}

}  // namespace

Joinable::Joinable(Communicator* comm, absl::string_view kind)
    : comm_(comm), group_(StepControl::Of(*comm).lifetime()), name_(NewName(*comm, kind)) {
  StepControl::Of(*comm_).EndStep();  // Joinables made between steps have no part in the last.
}

Joinable::~Joinable() {
  ReportUnwinding();
  if (Communicator* comm = living_group()) StepControl::Of(*comm).ReleaseName(name_);
}

// The exception's text is out of reach until it is caught. RunJoined() catches it, and reports it
// by itself.
void Joinable::ReportUnwinding() {
  if (std::uncaught_exceptions() <= exceptions_at_creation_) return;
  Communicator* const comm = living_group();
  if (comm == nullptr || comm->world_size() == 1 || StepControl::Of(*comm).in_loop()) return;
  try {
    const int64_t begun = StepControl::Of(*comm).steps_begun();
    comm->AbortProvisionally(
        absl::UnknownError(absl::StrCat("a C++ exception destroyed ", name_,
                                        " (in a join its text would be reported)")),
        begun == 0 ? "failed before its first step" : absl::StrCat("failed in step ", begun));
  } catch (...) {  // No memory for the report: the others see that the connection breaks.
  }
}

absl::StatusOr<ControlChannel::Parts> Joinable::Exchange(absl::string_view topic,
                                                         std::string mine) const {
  return comm_->control().Exchange(absl::StrCat(topic, "/", name_), std::move(mine),
                                   comm_->timeout());
}

absl::StatusOr<std::shared_ptr<StepTicket>> Joinable::Notify() {
  StepControl& steps = StepControl::Of(*comm_);
  if (steps.in_loop() != config_.in_loop) {
    return absl::FailedPreconditionError(
        absl::StrCat(name_, " on rank ", comm_->rank(),
                     " is used inside a join but takes no part in it, so exhausted ranks could not "
                     "shadow it: use it outside of the loop, or pass it to the join, too"));
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket,
                      steps.Enter(name_, static_cast<int>(join_phase())));
  if (config_.enable && config_.min_active_ranks > 1) {
    EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
    if (answer.active < config_.min_active_ranks) {
      *config_.stopped_at = answer;
      return absl::OutOfRangeError(
          absl::StrCat("rank ", comm_->rank(), ": ",
                       config_.min_active_ranks == answer.world_size
                           ? "at least one rank has exhausted its inputs"
                           : absl::StrCat("only ", answer.active, " of ", answer.world_size,
                                          " ranks have inputs, and at least ",
                                          config_.min_active_ranks, " are asked for"),
                       "; all ranks stop before step ", answer.step));
    }
  }
  return ticket;
}

absl::Status Joinable::ReplaceGroup(Communicator* comm, const GroupChange& change) {
  if (comm == nullptr)
    return absl::InvalidArgumentError(absl::StrCat("ReplaceGroup of ", name_, ": no communicator"));
  EK_RETURN_IF_ERROR(
      Annotate(comm->status(), absl::StrCat("ReplaceGroup of ", name_, ": the new group")));
  Communicator* const old = living_group();
  absl::Status own = CheckGroup(*comm);
  if (config_.in_loop) own.Update(absl::FailedPreconditionError("inside RunJoined()"));
  if (old == comm) own.Update(absl::FailedPreconditionError("it is in that group already"));
  bool holds_name = false;
  if (own.ok()) {
    holds_name = StepControl::Of(*comm).HoldName(name_);
    if (!holds_name)
      own = absl::FailedPreconditionError("another object in the new group has that name");
  }
  if (absl::Status agreed = AgreeToMove(*comm, name_, own); !agreed.ok()) {
    if (holds_name) StepControl::Of(*comm).ReleaseName(name_);
    return agreed;
  }
  LeaveGroup(old, change);
  if (old != nullptr) StepControl::Of(*old).ReleaseName(name_);
  comm_ = comm;
  group_ = StepControl::Of(*comm).lifetime();
  StepControl::Of(*comm_).EndStep();
  last_update_ = 0;
  absl::Status entered = Annotate(EnterGroup(change), name_);
  if (!entered.ok()) comm->Abort(entered);
  return entered;
}

}  // namespace evenkeel
