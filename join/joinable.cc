#include "evenkeel/join/joinable.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

Joinable::Joinable(Communicator* comm, absl::string_view kind) : comm_(comm), name_(comm->UniqueName(kind)) {
  comm_->steps().EndStep();  // What is made between steps has no part in the one before.
}

absl::StatusOr<std::shared_ptr<StepTicket>> Joinable::Notify() {
  StepControl& steps = comm_->steps();
  if (steps.scope() != config_.scope) {
    return absl::FailedPreconditionError(
        absl::StrCat(name_, " on rank ", comm_->rank(),
                     " is used inside RunJoined() but is not in its list: ranks that run dry could not shadow it"));
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, steps.Enter(this, name_, static_cast<int>(join_phase())));
  if (config_.enable && config_.throw_on_early_termination) {
    EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
    if (!answer.everyone_active()) {
      *config_.stopped_early = true;
      return absl::OutOfRangeError(absl::StrCat("rank ", comm_->rank(),
                                                ": at least one rank has exhausted its inputs; all ranks stop at step ",
                                                answer.step));
    }
  }
  return ticket;
}

}  // namespace evenkeel
