// The agreements of the ranks over the control plane: on values, and on the collectives that they
// issue (comm/verify.h). An agreement is an exchange that each rank evaluates by itself, from the
// same parts, so all ranks reach the same result without a further message.
//
// Order:   all ranks begin the agreements of one topic in the same order.
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_GROUP_AGREEMENTS_H_
#define EVENKEEL_COMM_GROUP_AGREEMENTS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator_options.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group/channel_record.h"
#include "evenkeel/comm/group/group_end.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

class Agreements {
 public:
  using Parts = ControlChannel::Parts;
  using Judge = std::function<absl::Status(const Parts&)>;

  Agreements(ControlChannel& control, GroupEnd& end, const Backend& backend,
             const FlightRecorder& flight, const CommunicatorOptions& options)
      : control_(control),
        end_(end),
        backend_(backend),
        flight_(flight),
        timeout_(options.timeout),
        level_(options.verify.value_or(VerifyLevel::kPositions)) {}

  // Begins an agreement and waits for its end. `text` describes it in messages. `judge` runs on
  // each rank; if it returns an error, the group ends with it.
  absl::StatusOr<Parts> Agree(absl::string_view topic, std::string payload, absl::Duration timeout,
                              std::string text, Judge judge = nullptr);

  VerifyLevel level() const { return level_; }
  // Begins to compare the levels with which the ranks make the group.
  void CompareLevels();
  // Implements Communicator::SetVerifyLevel(). `positions` are this rank's.
  absl::Status SetLevel(VerifyLevel level, const std::string& positions);
  // Begins to compare the operation, issued as `what`, with the other ranks. `whole` ends when the
  // comparison and the operation have ended; returns the work of the operation alone.
  std::shared_ptr<WorkState> CompareBeside(const std::string& channel, const Collective& what,
                                           const Operation& operation,
                                           std::shared_ptr<WorkState> whole);
  // Implements Communicator::CompareIssued().
  Work CompareIssued(const ChannelRecord& channel);

 private:
  struct Agreement;
  // Begins an agreement; its end finishes a work.
  std::shared_ptr<Agreement> Begin(absl::string_view topic, std::string payload,
                                   absl::Duration timeout, std::string text, Judge judge = nullptr);

  ControlChannel& control_;
  GroupEnd& end_;
  const Backend& backend_;
  const FlightRecorder& flight_;
  const absl::Duration timeout_;  // The group's.
  std::atomic<VerifyLevel> level_;
  absl::Mutex mutex_;  // Held across ControlChannel::Exchange(), for equal numbering.
  std::map<std::string, int64_t, std::less<>> counts_ ABSL_GUARDED_BY(mutex_);  // By topic.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_AGREEMENTS_H_
