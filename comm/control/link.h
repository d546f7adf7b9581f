// A rank's link to the hub of its group, and the messages on it.
//
//   link->Start(receive, lost);
//   link->Send({.type = ControlMessage::Type::kPut, .topic = "key", .payload = "value"});
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

namespace evenkeel {

// Equal bytes of consecutive ranks. In most exchanges all ranks send the same.
struct EqualParts {
  int64_t count = 0;  // The number of ranks.
  std::string part;

  friend bool operator==(const EqualParts&, const EqualParts&) = default;

  static void VisitFields(auto& self, auto& visit) { visit(self.count, self.part); }
};

// A message between a rank and the hub. The comments list the fields that are used.
struct ControlMessage {
  enum class Type : uint8_t {
    // To the hub: topic, sequence, payload. For a whole subtree: its parts in order, request = the
    // fanout.
    kExchange,
    kExchanged,  // To a rank: topic, sequence, parts (of all ranks, in order).
    kPut,        // To the hub: topic = key, payload.
    kGet,        // To the hub: topic = key, request.
    // To the hub: request, payload = RankStatus with the wait in question; asks which ranks the
    // wait is for. rank = the fanout of a tree. sequence = 1: reply at once, without asking those
    // ranks.
    kMissing,
    kValue,  // To a rank: request, payload.
    // To the hub: rank = receiver, topic, payload; rank = -1: several receivers, the counts of
    // `parts`. To a rank: rank = sender.
    kSend,
    // As kSend, with rank = -1 to all other ranks; sequence = 1: unless an equal notice of any rank
    // was passed on.
    kNotice,
    // To the hub: this rank ends the group, status. To every rank, the sender too: status, rank =
    // the culprit; sequence = 1: the receiver is cut off for it. To the hub: request = the time in
    // microseconds for which the rank has received nothing from the hub, if this is the reason.
    kFailed,
    kLeave,  // To the hub: this rank leaves cleanly; its disconnection is not a failure.
    // To the hub: this rank lives; payload = its RankStatus, or empty; request = the longest
    // permitted silence in microseconds, 0: unlimited; parts, in a tree: topics (part) and
    // sequences (count) of the exchanges that the rank has begun. To a rank, as the reply: the hub
    // lives.
    kBeat,
    // To the hub, also after a failure: this rank requests a new group of the surviving ranks;
    // request.
    kRegroup,
    // To a rank, in a tree: topic, sequence, request: has it begun that exchange? To the hub:
    // request, sequence = 1 if so.
    kHaveCome,
    // To a rank: request, payload = the survivors as "0,2,3", sequence = the number of times that
    // ranks have regrouped. Later, with request = -1: status = the loss of one of these survivors.
    kRegrouped,
  };
  Type type = Type::kNotice;
  int rank = -1;
  int64_t sequence = 0;
  int64_t request = 0;  // Chosen by the requesting rank, returned in the reply.
  absl::Status status;
  std::string topic;
  std::string payload;
  std::vector<EqualParts> parts;

  static void VisitFields(auto& self, auto& visit) {
    visit(visit.UpTo(self.type, Type::kRegrouped), self.rank, self.sequence, self.request,
          self.status, self.topic, self.payload, self.parts);
  }
};

// The topic of a wait (Wait::Kind::kExchange) for the reply to kRegroup. It contains a tab, so no
// exchange has this name.
inline constexpr char kRegroupTopic[] = "\tregroup";

// The traffic of a link without heartbeats.
struct ControlCounters {
  int64_t messages_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_sent = 0;  // In memory: topics, payloads and parts.
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
  virtual void Start(std::function<void(ControlMessage)> receive,
                     std::function<void(absl::Status)> lost) = 0;
  // Never waits for a peer. A lost link drops the message.
  virtual void Send(ControlMessage message) = 0;
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
  // Returns the hub's name for messages: "the store at 10.0.0.7:29400, hosted by rank 0".
  virtual std::string HubName() const { return "the hub"; }
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
