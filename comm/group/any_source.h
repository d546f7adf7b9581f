// Receives from any rank.
//
// Backends do not implement such receives. The first such receive for a tag asks all ranks for
// announcements. From then on each send with that tag announces, over the control plane, how many
// there have been. The receiver compares this number with the number of its own receives from the
// sender, and so finds the messages that no receive has taken yet
// (comm/control/announced_messages.h). The oldest receive from any rank takes the first of these:
// it becomes a receive from that rank, and is passed to the backend.
//
// The detection of deadlocks requires that a sender sends its announcement before it reports that
// it waits, and that the receiver handles the announcement before it reports that it has received
// it (comm/control/rank_status.h).
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_GROUP_ANY_SOURCE_H_
#define EVENKEEL_COMM_GROUP_ANY_SOURCE_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group/channel_record.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

class ReceivesFromAny {
 public:
  ReceivesFromAny(ControlChannel& control, Backend& backend, FlightRecorder& flight,
                  ChannelRecords& channels)
      : control_(control), backend_(backend), flight_(flight), channels_(channels) {}

  // Begins a receive. The caller has found, with this lock held, that the group has not ended: a
  // later End() finds the receive.
  void Receive(ChannelRecord& channel, Operation operation, int64_t number,
               std::shared_ptr<WorkState> work, int* from)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(channel.mutex);
  // Handles a send, or a receive from a named rank, the `count`-th with its peer and tag. Only for
  // a channel whose `any` is not null.
  void OnPair(const ChannelRecord& channel, const Collective& what, int64_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(channel.mutex);
  static bool IsTopic(absl::string_view topic);
  // Handles a notice of IsTopic(). The caller ends the group if it returns an error.
  absl::Status OnNotice(int from, absl::string_view topic, absl::string_view notice);
  // Ends the open receives with `why`.
  void End(const absl::Status& why);

 private:
  // Handles the request of another rank to announce the sends to it with the tag.
  void OnAsked(ChannelRecord& channel, int from, int64_t tag);
  // Handles an announcement: rank `from` has issued `sends` sends with the tag to this rank.
  void OnAnnouncement(ChannelRecord& channel, int from, int64_t tag, int64_t sends);

  ControlChannel& control_;
  Backend& backend_;
  FlightRecorder& flight_;
  ChannelRecords& channels_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_ANY_SOURCE_H_
