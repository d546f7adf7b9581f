// The flight record of this rank for dumps: the present one, or that of the moment in which the
// group failed.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_GROUP_KEPT_FLIGHT_H_
#define EVENKEEL_COMM_GROUP_KEPT_FLIGHT_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/flight_dump.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group/channel_record.h"

namespace evenkeel::internal {

class KeptFlight {
 public:
  // `rank` has the fields of the header that do not change; `folder` is FlightOptions::folder.
  KeptFlight(const FlightRecorder& flight, const Waits& waits, const ChannelRecords& channels,
             FlightHeader rank, const std::string& folder)
      : flight_(flight),
        waits_(waits),
        channels_(channels),
        rank_(std::move(rank)),
        folder_(folder) {}

  // Keeps the present record; only the first call counts.
  void Keep();
  // Writes the kept record to the folder, if there is one; only the first call counts. `status` is
  // the group's, whose reason may be newer than the record.
  void Write(const absl::Status& status);
  // `status` is called after the moment is chosen, so a failed one has its reason.
  std::string Json(absl::FunctionRef<absl::Status()> status) const;
  std::string Path(absl::string_view folder) const;

 private:
  struct Moment {
    FlightHeader header;
    std::vector<FlightEntry> entries;
  };
  Moment Now() const;

  const FlightRecorder& flight_;
  const Waits& waits_;
  const ChannelRecords& channels_;
  const FlightHeader rank_;
  const std::string folder_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const Moment> kept_ ABSL_GUARDED_BY(mutex_);
  bool is_written_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_KEPT_FLIGHT_H_
