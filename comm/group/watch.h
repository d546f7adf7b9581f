// One rank's watch over its group: the work of the watchdog's thread, this rank's report, warnings
// of long waits, and the ranks that have left, with the operations that they will never join.
//
// Threads: Look() runs on the watchdog's thread; all else is thread-safe.

#ifndef EVENKEEL_COMM_GROUP_WATCH_H_
#define EVENKEEL_COMM_GROUP_WATCH_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator_options.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group/agreements.h"
#include "evenkeel/comm/group/channel_record.h"
#include "evenkeel/comm/group/extension_slot.h"
#include "evenkeel/comm/group/group_end.h"
#include "evenkeel/comm/group/kept_flight.h"

namespace evenkeel::internal {

class Watch {
 public:
  Watch(ControlChannel& control, GroupEnd& end, KeptFlight& kept_flight,
        const FlightRecorder& flight, const ChannelRecords& channels,
        const ExtensionSlot& extension, const Agreements& agreements, const WatchOptions& options)
      : control_(control),
        end_(end),
        kept_flight_(kept_flight),
        flight_(flight),
        channels_(channels),
        extension_(extension),
        agreements_(agreements),
        options_(options) {}

  // Returns whether there are heartbeats.
  bool is_on() const { return options_.beat < absl::InfiniteDuration(); }
  // Sends an empty heartbeat, also over another connection to the hub. Returns the time until the
  // next one.
  absl::Duration Beat() { return Beat(control_); }
  absl::Duration Beat(ControlChannel& control) const;
  // Sends a heartbeat with this rank's report.
  void Report() { control_.Beat(RankStatusNow().Serialize(), absl::ZeroDuration()); }
  // Sends the heartbeat, ends operations that have missed their deadline, and logs warnings.
  // Returns the time until the next call.
  absl::Duration Look();
  // Returns a description of the wait for an operation. OnOperationDeadline() ends the group if the
  // operation is still open.
  Wait WaitFor(const ChannelRecord& channel, int64_t number) const;
  void OnOperationDeadline(const ChannelRecord& channel, int64_t number);

  // Returns this rank's positions for AnnounceEnd(), which sends them to all other ranks at once: a
  // rank that waits for a collective which this rank will never join gets an error.
  std::string Positions() const { return channels_.Positions(extension_.position()); }
  void AnnounceEnd(const std::string& positions);
  // The notice of AnnounceEnd() has the topic kFinalizes.
  static constexpr char kFinalizes[] = "finalize";
  void OnAnnouncedEnd(int peer, absl::string_view positions);
  // Returns an error, and ends the group, if a peer has left and will never reach `position` of
  // `channel`, where this rank issues `next`. Always OK while any_left() is false.
  absl::Status CheckAgainstLeft(absl::string_view channel, int64_t position,
                                absl::string_view next);
  bool any_left() const { return any_left_; }

 private:
  Wait WaitFor(const ChannelRecord& channel, const FlightEntry& entry) const;
  // Returns the silence after which the hub declares a rank lost; 0: never.
  absl::Duration LongestSilence() const;
  RankStatus RankStatusNow() const;
  void CheckHub();
  void CheckDeadlines();
  void WarnOfStalls();

  ControlChannel& control_;
  GroupEnd& end_;
  KeptFlight& kept_flight_;
  const FlightRecorder& flight_;
  const ChannelRecords& channels_;
  const ExtensionSlot& extension_;
  const Agreements& agreements_;
  const WatchOptions& options_;
  std::set<int64_t> warned_;         // Waits with a warning; the watchdog's thread only.
  absl::Duration reported_silence_;  // At the last report of it.
  std::atomic<bool> any_left_ = false;
  absl::Mutex mutex_;
  // The positions of ranks that have left: rank -> channel -> position.
  std::map<int, std::map<std::string, int64_t>> left_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_WATCH_H_
