// The state that a layer above comm keeps for each communicator: join/steps keeps the training
// steps of a group in one.
//
//   class StepControl final : public internal::GroupExtension { ... };
//   StepControl& steps = comm.Extension<StepControl>();   // StepControl(&comm), by the first call
//
// A communicator has at most one, and all calls of Extension() name its type. It includes the
// extension's position and state in its messages and in Finalize(), and passes on the notices of
// other ranks in the order of their arrival. It keeps notices that arrive before the first call of
// Extension(), because a peer may be a step ahead.
//
// Threads:   OnNotice() runs on the control thread, or in the first call of Extension(); position()
//            and is_exhausted() are called from any thread.
// Ownership: the communicator owns it, and destroys it after the control channel has stopped and
//            before it destroys the control channel.

#ifndef EVENKEEL_COMM_GROUP_EXTENSION_H_
#define EVENKEEL_COMM_GROUP_EXTENSION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace evenkeel {

class Communicator;

namespace internal {

class Waits;
struct Wait;

class GroupExtension {
 public:
  explicit GroupExtension(Communicator* comm) : comm_(comm) {}
  virtual ~GroupExtension() = default;
  GroupExtension(const GroupExtension&) = delete;
  GroupExtension& operator=(const GroupExtension&) = delete;

  // Handles a notice that rank `from` has sent to all ranks (ControlChannel::Notify()). Must not
  // block.
  virtual void OnNotice(int from, absl::string_view topic, absl::string_view notice) = 0;
  // Returns the number of steps that this rank has begun: its position in the group's
  // pseudo-channel of steps.
  virtual int64_t position() const = 0;
  // Returns whether this rank has no more inputs, for messages about its waits.
  virtual bool is_exhausted() const = 0;
  // Returns a JSON object with what this rank does, for observers of the job; or "". It travels
  // with each heartbeat.
  virtual std::string StatusJson() const { return ""; }
  // For Finalize(): returns a state of this rank; "" if there is none to compare.
  virtual std::string FinalState() const { return ""; }
  // For Finalize(): returns an error, the same on all ranks, if their FinalState() contradict each
  // other. `states` has those of all ranks, "" for a rank without an extension, which gets the
  // error of the lowest of the others.
  virtual absl::Status CompareFinalStates(absl::Span<const std::string> /*states*/) const {
    return absl::OkStatus();
  }

 protected:
  // The functions of the communicator that its operations use, too.
  const std::shared_ptr<Waits>& waits() const;
  // Ends the group: `wait` has exceeded the communicator's timeout.
  void OnDeadline(const Wait& wait);
  // Ends the group with an error that every rank detects by itself.
  void FailWithAll(const absl::Status& why);
  // Returns an error, and ends the group, if a peer that leaves will never reach `position`.
  absl::Status CheckAgainstLeft(int64_t position);

  Communicator* const comm_;
};

}  // namespace internal
}  // namespace evenkeel

#endif  // EVENKEEL_COMM_GROUP_EXTENSION_H_
