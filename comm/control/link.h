// A rank's link to the hub of its group.
//
//   link->Start(receive, lost);
//   link->Send(to_hub::Put{.key = "key", .value = "value"});
//
// Users call a ControlChannel (comm/control/control.h), which owns a link.
//
// Threads: Send(), Open(), Key(), Silence() and Counters() from any thread.

#ifndef EVENKEEL_COMM_CONTROL_LINK_H_
#define EVENKEEL_COMM_CONTROL_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/cpp20.h"
#include "evenkeel/comm/control/messages.h"

namespace evenkeel {

// The traffic of a link without heartbeats.
struct ControlCounters {
  int64_t messages_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_sent = 0;  // In memory: the strings of the messages.
  int64_t bytes_received = 0;
  absl::Duration cpu_time;  // CPU time of the link's thread, with its callbacks and the heartbeats.

  friend ControlCounters operator+(const ControlCounters& a, const ControlCounters& b) {
    return {a.messages_sent + b.messages_sent, a.messages_received + b.messages_received,
            a.bytes_sent + b.bytes_sent, a.bytes_received + b.bytes_received,
            a.cpu_time + b.cpu_time};
  }
};

// A rank's connection to the hub. Implementations: in memory (comm/local/local.h) and TCP
// (comm/rendezvous/tcp_store.h).
class ControlLink {
 public:
  virtual ~ControlLink() = default;
  // Called once, before anything else. `receive` gets each message on the link's own thread, one at
  // a time; `lost` is called on that thread at most once, when the hub is gone.
  virtual void Start(std::function<void(ToRank)> receive,
                     std::function<void(absl::Status)> lost) = 0;
  // Never waits for a peer. A lost link drops the message.
  virtual void Send(ToHub message) = 0;
  // Facts of the group from which another one is made.
  struct Origin {
    std::function<absl::Status()> status = nullptr;  // Null: its failure does not end the wait.
    int hub_rank = -1;                               // HubRank() in the new group.
    std::vector<int> members = {};                   // The new group's ranks, by number in the job.
  };
  // Opens this process's link to another group of the same job. The first link to a group creates
  // it. An error of the origin ends the wait for the hub.
  virtual absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank,
                                                            int world_size, absl::Duration timeout,
                                                            const Origin& origin) = 0;
  // Returns 32 bytes that only processes of this job can compute: different for each purpose, equal
  // on all ranks.
  virtual std::string Key(absl::string_view purpose) const = 0;
  // Returns for how long the hub has owed a reply to a heartbeat and sent nothing else; zero if it
  // cannot fall silent by itself. Time in which this process did not run does not count.
  virtual absl::Duration Silence() const { return absl::ZeroDuration(); }
  // Split() sets the status of the origin before Start(), and clears it when all ranks have
  // arrived: if the old group fails meanwhile, some ranks may never arrive in this one.
  void SetOrigin(std::function<absl::Status()> status) { origin_ = std::move(status); }
  absl::Status OriginStatus() const { return origin_ ? origin_() : absl::OkStatus(); }
  // Returns the rank of the group whose process is the hub's; -1 if there is none, or if it is not
  // known.
  virtual int HubRank() const { return -1; }
  virtual ControlCounters Counters() const = 0;
  // Stops the link's thread; no callback runs after it returns. Messages that were sent before are
  // still delivered. Not to be called on the link's own thread.
  virtual void Stop() = 0;

 private:
  std::function<absl::Status()> origin_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_CONTROL_LINK_H_
