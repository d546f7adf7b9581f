// A rank's link to the hub of its group, and what travels on it.
//
//   link->Start(receive, lost);
//   link->Send({.type = ControlMessage::Type::kPut, .topic = "key", .payload = "value"});
//
// Users see a ControlChannel (comm/control.h), which speaks through a link.
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
#include "evenkeel/comm/cpp20.h"

namespace evenkeel {

// The same bytes from ranks that are neighbours: most of the time all ranks of an exchange say the same.
struct EqualParts {
  int64_t count = 0;  // Of ranks.
  std::string part;

  friend bool operator==(const EqualParts&, const EqualParts&) = default;
};

// What travels between a rank and the hub. The comments say which fields count.
struct ControlMessage {
  enum class Type : uint8_t {
    kExchange,   // to hub: topic, sequence, payload. Or of a whole subtree: parts in its order, request = the fanout.
    kExchanged,  // to rank: topic, sequence, parts (all ranks', in order).
    kPut,        // to hub: topic = key, payload.
    kGet,        // to hub: topic = key, request.
    kMissing,    // to hub: request, payload = Whereabouts with the wait in question: which ranks is it for? rank = the
                 // fanout of a tree; sequence = 1: answer now, without asking those ranks.
    kValue,      // to rank: request, payload.
    kSend,       // to hub: rank = receiver, topic, payload.  To rank: rank = sender.
    kNotice,     // as kSend, to all other ranks.
    kFailed,     // to hub: this rank ends the group, code, payload = message.  To every rank, the sender too:
                 // rank = who failed; sequence = 1: and the receiver is cut off for it.
    kLeave,      // to hub: this rank leaves cleanly; its disconnection is no failure.
    kBeat,       // to hub: this rank lives; payload = its Whereabouts, or empty; request = how long, in microseconds,
                 // its silence is to be borne, 0: for ever; parts, in a tree: topics (part) and sequences (count) of
                 // the exchanges that the rank has come to.  To rank, in answer: the hub lives.
    kRegroup,    // to hub, also after a failure: this rank wants a new group of those that are left; request.
    kHaveCome,   // to rank, in a tree: topic, sequence, request: has it come to that exchange?  To hub: request,
                 // sequence = 1 if so.
    kRegrouped,  // to rank: request, payload = the survivors as "0,2,3", sequence = how many times ranks have
                 // regrouped.
  };
  Type type = Type::kNotice;
  int rank = -1;
  int64_t sequence = 0;
  int64_t request = 0;  // Chosen by the rank that asks, given back in the answer.
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string topic;
  std::string payload;
  std::vector<EqualParts> parts;
};

// The topic of a wait (Wait::Kind::kExchange) for an answer to kRegroup. With a tab: nobody's exchange is called so.
inline constexpr char kRegroupTopic[] = "\tregroup";

// What a link has carried, heartbeats left out.
struct ControlCounters {
  int64_t messages_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_sent = 0;  // In memory: of topics, payloads and parts.
  int64_t bytes_received = 0;
  absl::Duration cpu_time;  // Of the link's thread, with the callbacks that run on it, and heartbeats.
};

// A rank's connection to the hub. Implementations: in memory (comm/local.h) and TCP (comm/tcp_store.h).
class ControlLink {
 public:
  virtual ~ControlLink() = default;
  // Called once, before anything else. `receive` gets each message on the link's own thread, one at a time; `lost` is
  // called at most once, on that thread, when the hub is gone.
  virtual void Start(std::function<void(ControlMessage)> receive, std::function<void(absl::Status)> lost) = 0;
  // Never waits for a peer. A link that is lost swallows it.
  virtual void Send(ControlMessage message) = 0;
  // This process's link to another group of the same job. The group begins with the first link to it.
  virtual absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank, int world_size) = 0;
  // 32 bytes that only processes of this job can compute: another value for each purpose, the same on all ranks.
  virtual std::string Key(absl::string_view purpose) const = 0;
  // For how long the hub has owed an answer to a heartbeat, and said nothing else either; zero where it can't fall
  // silent by itself. Time in which this process did not run is not counted.
  virtual absl::Duration Silence() const { return absl::ZeroDuration(); }
  // What the hub is to people: "the store at 10.0.0.7:29400, hosted by rank 0".
  virtual std::string HubName() const { return "the hub"; }
  virtual ControlCounters Counters() const = 0;
  // Stops the link's thread; no callback runs after it returns. What was sent before is still delivered. Not to be
  // called on the link's own thread.
  virtual void Stop() = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_CONTROL_LINK_H_
