// The messages between the ranks of a group and its hub: a struct for each, a variant for each
// direction.
//
//   link->Send(to_hub::Put{.key = "key", .value = "value"});
//   std::visit([&](auto& it) { Handle(rank, std::move(it)); }, message);
//
// To add a message, add a struct and its place in the variant. It compiles when the receiver
// (hub.h, control.h) has a Handle() for it and, if it is a reply, ControlChannel::requests_ has a
// place for it. VisitFields() also defines its form in bytes. The compiler does not demand two more
// decisions, both in hub.cc: IsForTheChannel() for a message to a rank, OutlivesTheGroup() for one
// to the hub; nor the next kProtocolVersion (comm/net/handshake.h).
//
// A request has a number, unique on the rank that sends it, and a type of reply, which repeats the
// number. A tree link (tree_link.h) sets the fields whose comments name it, and passes
// to_hub::Exchange, to_hub::Leave and to_rank::Exchanged between ranks.

#ifndef EVENKEEL_COMM_CONTROL_MESSAGES_H_
#define EVENKEEL_COMM_CONTROL_MESSAGES_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/cpp20.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/control/rank_status.h"

namespace evenkeel {

// Equal bytes of consecutive ranks.
struct EqualParts {
  int64_t count = 0;  // The number of ranks.
  std::string part;

  friend bool operator==(const EqualParts&, const EqualParts&) = default;

  static void VisitFields(auto& self, auto& visit) { visit(self.count, self.part); }
};
// In most exchanges all ranks send equal bytes, so one element is enough.
using ExchangeParts = absl::InlinedVector<EqualParts, 1>;

struct ExchangeId {
  std::string topic;
  int64_t sequence = 0;  // Among the exchanges of the topic, from 0.

  friend auto operator<=>(const ExchangeId&, const ExchangeId&) = default;

  static void VisitFields(auto& self, auto& visit) { visit(self.topic, self.sequence); }
};

namespace to_rank {

// The end of an exchange.
struct Exchanged {
  ExchangeId id;
  ExchangeParts parts;  // The parts of all ranks, in order.
  static void VisitFields(auto& self, auto& visit) { visit(self.id, self.parts); }
};

struct Value {
  int64_t request = 0;
  std::string value;
  static void VisitFields(auto& self, auto& visit) { visit(self.request, self.value); }
};

struct Missing {
  int64_t request = 0;
  absl::Status status;  // OK: no rank is missing. Else message and FailureInfo name the ranks.
  static void VisitFields(auto& self, auto& visit) { visit(self.request, self.status); }
};

// The members of the group that continues one that has ended. Ranks are those of the ended group.
struct Regrouped {
  int64_t request = 0;
  absl::Status refusal;      // Of a newcomer: the reason.
  std::vector<int> ranks;    // The new group's, in its order.
  std::vector<int> entered;  // Those of them that are newcomers.
  int64_t round = 0;         // The number of times that ranks have regrouped.
  // To a newcomer: the ended group's name, and its ranks' numbers in the job.
  std::string group;
  std::vector<int> members;
  static void VisitFields(auto& self, auto& visit) {
    visit(self.request, self.refusal, self.ranks, self.entered, self.round, self.group,
          self.members);
  }
};

// Follows Regrouped: one of its ranks is lost.
struct SurvivorLost {
  absl::Status why;
  static void VisitFields(auto& self, auto& visit) { visit(self.why); }
};

struct Message {
  int from = -1;
  std::string topic, payload;
  static void VisitFields(auto& self, auto& visit) { visit(self.from, self.topic, self.payload); }
};

struct Notice {
  int from = -1;
  std::string topic, payload;
  static void VisitFields(auto& self, auto& visit) { visit(self.from, self.topic, self.payload); }
};

// In a tree: asks whether the rank has begun this exchange. The reply is to_hub::PollReply.
struct Poll {
  int64_t number = 0;
  ExchangeId id;
  static void VisitFields(auto& self, auto& visit) { visit(self.number, self.id); }
};

// The group has ended. The culprit receives this, too.
struct Failed {
  absl::Status why;
  int culprit = -1;         // -1: no rank, or the hub itself.
  bool is_cut_off = false;  // The hub ends the receiver's connection for this reason.
  static void VisitFields(auto& self, auto& visit) {
    visit(self.why, self.culprit, self.is_cut_off);
  }
};

// The reply to a heartbeat: the hub is alive.
struct Beat {};

}  // namespace to_rank

using ToRank = std::variant<to_rank::Beat, to_rank::Exchanged, to_rank::Message, to_rank::Notice,
                            to_rank::Value, to_rank::Missing, to_rank::Poll, to_rank::Failed,
                            to_rank::Regrouped, to_rank::SurvivorLost>;

namespace to_hub {

struct Exchange {
  ExchangeId id;
  ExchangeParts parts;  // This rank's part. In a tree: the parts of its subtree, in order.
  int fanout = 0;       // The tree's; 0: no tree. A tree link sets it.
  static void VisitFields(auto& self, auto& visit) { visit(self.id, self.parts, self.fanout); }
};

struct Put {
  std::string key, value;
  static void VisitFields(auto& self, auto& visit) { visit(self.key, self.value); }
};

// The hub replies when the value is published.
struct Get {
  using Reply = to_rank::Value;
  int64_t request = 0;
  std::string key;
  static void VisitFields(auto& self, auto& visit) { visit(self.request, self.key); }
};

// Asks which ranks are missing for a wait.
struct WhoIsMissing {
  using Reply = to_rank::Missing;
  int64_t request = 0;
  internal::Wait wait;
  bool is_urgent = false;  // The hub replies without waiting for the ranks' replies to a poll.
  int fanout = 0;          // See Exchange.
  static void VisitFields(auto& self, auto& visit) {
    visit(self.request, self.wait, self.is_urgent, self.fanout);
  }
};

struct PollReply {
  int64_t number = 0;  // The poll's.
  bool has_begun = false;
  static void VisitFields(auto& self, auto& visit) { visit(self.number, self.has_begun); }
};

// For ControlChannel::Receive() on these ranks.
struct Message {
  absl::InlinedVector<int, 1> to;
  std::string topic, payload;
  static void VisitFields(auto& self, auto& visit) { visit(self.to, self.topic, self.payload); }
};

// For the handler of ControlChannel::SetHandlers().
struct Notice {
  int to = -1;           // -1: all other ranks.
  bool is_once = false;  // Dropped if an equal notice of any rank was passed on.
  std::string topic, payload;
  static void VisitFields(auto& self, auto& visit) {
    visit(self.to, self.is_once, self.topic, self.payload);
  }
};

// The sender ends the group.
struct Failed {
  absl::Status why;
  int64_t unheard_us = 0;  // How long it has received nothing; 0: not the reason.
  static void VisitFields(auto& self, auto& visit) { visit(self.why, self.unheard_us); }
};

// The sender leaves cleanly: its disconnection is not a failure.
struct Leave {};

// The sender is alive.
struct Beat {
  std::string rank_status;          // RankStatus::Serialize(), or empty.
  int64_t silence_us = 0;           // The longest permitted silence; 0: unlimited.
  std::vector<ExchangeId> unended;  // Exchanges begun and not ended. A tree link sets it.
  static void VisitFields(auto& self, auto& visit) {
    visit(self.rank_status, self.silence_us, self.unended);
  }
};

// Also after a failure: requests a new group of the surviving ranks. A newcomer sends it when it is
// ready, and leaves the other fields empty.
struct Regroup {
  using Reply = to_rank::Regrouped;
  int64_t request = 0;
  int64_t wait_us = 0;       // How long the survivors wait for newcomers; -1: without limit.
  std::vector<int> members;  // The numbers in the job of the group's ranks.
  static void VisitFields(auto& self, auto& visit) {
    visit(self.request, self.wait_us, self.members);
  }
};

}  // namespace to_hub

using ToHub = std::variant<to_hub::Beat, to_hub::Exchange, to_hub::Message, to_hub::Notice,
                           to_hub::Put, to_hub::Get, to_hub::WhoIsMissing, to_hub::PollReply,
                           to_hub::Failed, to_hub::Leave, to_hub::Regroup>;

// Heartbeats do not count in the traffic of a link.
inline bool IsBeat(const ToRank& message) { return std::holds_alternative<to_rank::Beat>(message); }
inline bool IsBeat(const ToHub& message) { return std::holds_alternative<to_hub::Beat>(message); }

// The topic of a wait (Wait::Kind::kExchange) for the reply to Regroup. It contains a tab, so no
// exchange has this name.
inline constexpr char kRegroupTopic[] = "\tregroup";

// The topic of the exchange by which the ranks of a successor group agree that it is made.
inline constexpr char kMadeTopic[] = "made";

namespace internal {

// Returns the bytes of a ToHub or ToRank. A template, because few of the files that include this
// header convert messages.
template <typename Message>
std::string Serialize(const Message& message) requires std::is_same_v<Message, ToHub> ||
    std::is_same_v<Message, ToRank> {
  return ToBytes(message);
}
// Returns InvalidArgument for any bytes that Serialize() does not produce.
template <typename Message>
absl::StatusOr<Message> ParseControlMessage(absl::string_view bytes) {
  return FromBytes<Message>(bytes, "control message");
}

}  // namespace internal
}  // namespace evenkeel

#endif  // EVENKEEL_COMM_CONTROL_MESSAGES_H_
