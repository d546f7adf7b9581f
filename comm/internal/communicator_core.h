// The private half of a Communicator: its parts, each after those that it uses, except that the
// backend comes last, and that the watchdog calls `watch`: ~Communicator() stops the watchdog.

#ifndef EVENKEEL_COMM_INTERNAL_COMMUNICATOR_CORE_H_
#define EVENKEEL_COMM_INTERNAL_COMMUNICATOR_CORE_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/communicator_options.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/watchdog.h"
#include "evenkeel/comm/flight_recorder.h"
#include "evenkeel/comm/group/agreements.h"
#include "evenkeel/comm/group/any_source.h"
#include "evenkeel/comm/group/channel_record.h"
#include "evenkeel/comm/group/extension_slot.h"
#include "evenkeel/comm/group/group_end.h"
#include "evenkeel/comm/group/kept_flight.h"
#include "evenkeel/comm/group/watch.h"

namespace evenkeel::internal {

struct GroupCore {
  GroupCore(std::unique_ptr<Backend> own_backend, std::unique_ptr<ControlChannel> own_control,
            CommunicatorOptions group_options, absl::string_view name, GroupMaker maker,
            NewcomerLink newcomer);

  void OnNotice(int from, absl::string_view topic, absl::string_view notice);
  absl::Status Supports(const Collective& what) const;

  // Implement the functions of Communicator with these names (other_groups.cc).
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key, absl::Duration timeout);
  absl::StatusOr<Regrouped> Regroup(const RegroupOptions& options);
  // The group from which another one is made: this one, or the one that a newcomer continues.
  struct From {
    ControlLink* link;
    int rank = 0;
    int hub_rank = -1;         // ControlLink::HubRank() in that group.
    std::vector<int> members;  // By rank: the numbers in the job.
  };
  // Makes this rank's half of a group of `ranks`, and waits until it is connected. `who` is the
  // calling function, for messages. An error that `status` returns ends the wait.
  absl::StatusOr<std::unique_ptr<Communicator>> MakeOther(const From& from, const std::string& name,
                                                          const std::vector<int>& ranks,
                                                          absl::Time deadline,
                                                          absl::string_view who,
                                                          std::function<absl::Status()> status);

  const std::unique_ptr<ControlChannel> control;
  const CommunicatorOptions options;
  const int rank;
  const int world_size;
  const std::string group;
  std::vector<int> members;  // Constant once the program has the group.

  FlightRecorder flight;
  ExtensionSlot extension;
  ChannelRecords channels;
  Watchdog watchdog;
  ReceivesFromAny receives_from_any;
  KeptFlight kept_flight;
  GroupEnd end;
  Agreements agreements;
  Watch watch;

  const GroupMaker make_group;       // Null if the backend cannot make other groups.
  const NewcomerLink newcomer_link;  // Null: this rank is in the group.
  std::unique_ptr<ControlChannel>
      newcomer_control;         // Over that link, once Regroup() has opened it.
  std::atomic<int> splits = 0;  // Equal on all ranks, which agree on each split.

  absl::Mutex mutex;
  std::map<std::string, std::unique_ptr<Channel>, std::less<>> handles ABSL_GUARDED_BY(mutex);
  absl::flat_hash_map<std::string, int> name_counts ABSL_GUARDED_BY(mutex);
  Channel* user = nullptr;

  std::unique_ptr<Backend> backend;  // Last: its threads use the other parts, and must end first.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_COMMUNICATOR_CORE_H_
