// The end of a group on this rank: its first cause, and the reports of it to the other ranks.
//
//   state    entered by                             from then on
//   works    the constructor
//   failed   OnBackendFailure(), Abort(), Fail(),   status() is the first cause; operations fail
//            AbortProvisionally()
//   ended    Fail(), after the failure              nothing is in flight on this rank
//   left     EndCleanly(): Finalize(), Leave()      this rank's silence is not a failure; what is
//                                                   in flight ends next
//
// A failed group has a provisional reason from AbortProvisionally() until the Abort() that follows,
// or until it is due: then the other ranks receive it.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_GROUP_GROUP_END_H_
#define EVENKEEL_COMM_GROUP_GROUP_END_H_

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator_options.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/control/watchdog.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/group/any_source.h"
#include "evenkeel/comm/group/extension_slot.h"
#include "evenkeel/comm/group/kept_flight.h"

namespace evenkeel::internal {

class GroupEnd {
 public:
  GroupEnd(ControlChannel& control, Backend& backend, ReceivesFromAny& receives_from_any,
           KeptFlight& flight, Watchdog& watchdog, const ExtensionSlot& extension,
           const WatchOptions& watch)
      : control_(control),
        backend_(backend),
        receives_from_any_(receives_from_any),
        flight_(flight),
        watchdog_(watchdog),
        extension_(extension),
        watch_(watch) {}

  // OK while the group works; then the first cause of its end.
  absl::Status status() const;
  enum class State { kOpen, kEnded, kLeft };  // kOpen: it works, or has failed and not ended.
  State state() const;

  // See Communicator.
  void Abort(const absl::Status& why, absl::string_view did);
  void AbortProvisionally(const absl::Status& why, absl::string_view did);
  // Reports the provisional reason to the other ranks if it is due at `now`. Returns the time until
  // it is due; infinite if there is none, or none any more.
  absl::Duration ReportProvisional(absl::Time now);
  // Ends the group on this rank only: the other ranks have been notified.
  enum class End { kFailure, kClean };
  void Fail(const absl::Status& why, End end = End::kFailure);
  // Informs the other ranks through the hub. If this rank receives nothing and considers the hub
  // lost, the hub decides which of the two is at fault.
  void Report(const absl::Status& why);
  // Ends the group with an error that every rank detects by itself. The hub is notified
  // nevertheless: otherwise ranks that have not detected the error yet would report a rank whose
  // process ends early as lost.
  void FailWithAll(const absl::Status& why);
  // Ends the group on every rank because an operation failed. May be called with locks held.
  void OnBackendFailure(const absl::Status& why);
  // Does the same because `wait` has missed its deadline after `waited`, on a thread that waits and
  // holds no locks; afterwards nothing is in flight on this rank.
  void OnDeadline(const Wait& wait, absl::Duration waited);
  // Leaves the group, at the end of Finalize() and Leave().
  void EndCleanly();

 private:
  int rank() const { return control_.rank(); }
  // Keeps the first cause; returns false if there is one already.
  bool SetStatus(const absl::Status& why);
  // Returns the error that the other ranks receive when this one aborts with `why`.
  absl::Status AsOthersSee(const absl::Status& why, absl::string_view did) const;
  absl::Status DeadlineStatus(const Wait& wait, absl::Duration waited) const;
  // Returns `why` with its FailureInfo, or with `otherwise` if it has none, and with the training
  // step.
  absl::Status Informed(const absl::Status& why, const FailureInfo& otherwise) const;

  ControlChannel& control_;
  Backend& backend_;
  ReceivesFromAny& receives_from_any_;
  KeptFlight& flight_;
  Watchdog& watchdog_;
  const ExtensionSlot& extension_;
  const WatchOptions& watch_;

  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
  // The reason of AbortProvisionally(), until the other ranks are informed.
  struct Provisional {
    absl::Status why;  // As the other ranks receive it.
    absl::Time report_at;
  };
  std::optional<Provisional> provisional_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_GROUP_END_H_
