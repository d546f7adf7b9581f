// The groups of one RunJoined(): the one it began in, and those without the ranks that have left.
//
//   JoinGroups groups(home, joinables, leave_after);
//   groups.Note(answer);                                  // of each step, on all ranks
//   // all ranks of here(), together
//   if (groups.IsDue()) EK_ASSIGN_OR_RETURN(const bool stays, groups.Divide());
//   ...
//   // at the end, all ranks of the first group
//   EK_RETURN_IF_ERROR(groups.Return(is_last_joiner, has_stopped).status());
//
// Who leaves follows from the steps' answers, which all ranks have, so nobody has to be asked. A
// rank that has left waits, without any traffic but heartbeats, in the group that it left, which
// the others keep alive; when the loop has ended on them, they come back to it, group by group. In
// the first one every Joinable is taken home, and gets the state of the highest rank that had
// inputs to the end.
//
// Threads: one thread per rank.
// Errors:  a failure of one of the groups ends all of them, with names: at once for those who wait,
//          before their next step for the others.

#ifndef EVENKEEL_JOIN_INTERNAL_JOIN_GROUPS_H_
#define EVENKEEL_JOIN_INTERNAL_JOIN_GROUPS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

class JoinGroups {
 public:
  JoinGroups(Communicator* home, std::vector<Joinable*> joinables, int64_t leave_after);

  Communicator& here() const { return *groups_.back(); }
  Communicator& home() const { return *home_; }
  // Which ranks of home() those of here() are.
  const std::vector<int>& members() const { return members_; }
  // Returns whether ranks can leave.
  bool is_on() const { return is_on_; }

  // A step's answer, of each step once, in order.
  void Note(const StepAnswer& answer);
  // Ranks leave before the next step.
  bool IsDue() const { return is_due_; }
  // False: this rank has left. Else it is in another group, with all Joinables.
  absl::StatusOr<bool> Divide();
  // Nothing, if nobody has left. On a rank that has left it waits for the end of the others' loop.
  // Returns whether the loop stopped early, by the messages of the ranks that have not left.
  absl::StatusOr<bool> Return(bool is_last_joiner, bool has_stopped);

  // That of the groups that this rank is in beside here().
  absl::Status CheckOuter();
  // Ends all groups. Returns `why` with its causes as ranks of home().
  absl::Status Abort(const absl::Status& why, absl::string_view did);

 private:
  absl::Status Move(Communicator& to, int source);
  // Returns the group whose ranks the error names: the loop may return that of any group.
  const Communicator& SourceOf(const absl::Status& why) const;
  std::string Counts() const;

  Communicator* const home_;
  std::vector<Joinable*> joinables_;  // By phase and name: the same order on all ranks.
  const int64_t leave_after_;
  const bool is_on_;
  std::vector<Communicator*> groups_;                 // The first is home.
  std::vector<std::shared_ptr<Communicator>> owned_;  // The others.
  Communicator* awaited_ = nullptr;                   // The one whose end Return() waits for.
  std::vector<int> members_;
  std::vector<int64_t> shadowed_;  // By rank of here(): steps without inputs.
  bool is_due_ = false;
  bool has_left_ = false;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_INTERNAL_JOIN_GROUPS_H_
