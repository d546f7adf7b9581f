// The operations that this rank has issued on each channel: the counters behind sequence numbers
// and positions.
//
//   // lives as long as `records`
//   EK_ASSIGN_OR_RETURN(ChannelRecord* record, records.Open("gradients"));
//   absl::MutexLock lock(&record->mutex);
//   operation.sequence = record->position++;
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_GROUP_CHANNEL_RECORD_H_
#define EVENKEEL_COMM_GROUP_CHANNEL_RECORD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {

struct AnySource;

struct ChannelRecord {
  explicit ChannelRecord(absl::string_view channel_name);

  const std::string name;
  const uint64_t id;
  // Held while an operation is passed to the backend, so that operations start in the order of
  // their sequence numbers.
  mutable absl::Mutex mutex;
  int64_t position ABSL_GUARDED_BY(mutex) = 0;
  uint64_t issued_hash ABSL_GUARDED_BY(mutex) = 0;
  std::optional<Collective> last_issued ABSL_GUARDED_BY(mutex);
  // The number of sends and receives by peer (-1: any), direction and tag.
  std::map<std::tuple<int, CollectiveKind, int64_t>, int64_t> pair_positions ABSL_GUARDED_BY(mutex);
  // Null until a rank receives from any other rank on this channel (any_source.h).
  std::shared_ptr<AnySource> any ABSL_GUARDED_BY(mutex);
};

class ChannelRecords {
 public:
  // Returns the record of that name; the first call makes it. InvalidArgument for a name that a
  // channel cannot have.
  absl::StatusOr<ChannelRecord*> Open(absl::string_view name);
  // Returns all records in the order of their names.
  std::vector<ChannelRecord*> all() const;
  // Returns the positions on all channels as text for other ranks (comm/control/positions.h).
  // `steps` is the number of training steps that this rank has begun.
  std::string Positions(int64_t steps) const;

 private:
  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<ChannelRecord>, std::less<>> records_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_GROUP_CHANNEL_RECORD_H_
