// The position of each rank of a group, as it reports it, and whether the ranks can still make
// progress.
//
//   RankStatus mine{...};  // each rank's, sent to the hub with its heartbeats
//   Judgement judgement = Judge(facts, exchanges);  // at the hub
//   if (!judgement.status.ok()) ...              // a contradiction, for all ranks
//
// There are two kinds of contradictions; neither can be resolved by waiting:
//
// 1. Two ranks have different collectives at the same position of a channel.
// 2. A deadlock: some ranks can only go on after each other. It is found by elimination, where
// "can"
//    means that no known fact contradicts it:
//      a rank can go on if it runs, if it has not reported, if a message of the hub is on its way
//      to it, or if one of its pending events can happen: the end of a thread's wait, of an open
//      operation, or of an exchange that it has begun (their callbacks may do more than wake a
//      thread). Each of these can happen if every rank whose part is missing can go on, or for a
//      receive from any rank, if one other rank can; if no part is missing, it is happening.
//    The remaining ranks are stuck. A rank that has left does nothing more.
//
// A report is older than the hub's other facts. This is harmless: the first of the stuck ranks to
// go on after its report would have needed an action of another stuck rank, which had not happened
// when that one reported, and which could not happen before the first rank went on either. The
// argument needs that positions only grow, and that a rank's report covers every message that the
// hub had sent it (`received`): a message is the one event that reaches a rank without an action of
// the others. For a receive from any rank, all others are stuck or have left: a message that one of
// these sent before was announced before its report, and the announcement counts in `received`.
//
// Threads: pure functions of values.

#ifndef EVENKEEL_COMM_CONTROL_RANK_STATUS_H_
#define EVENKEEL_COMM_CONTROL_RANK_STATUS_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"

namespace evenkeel::internal {

// The prefix of each wait of a rank that has run out of inputs and shadows the others.
inline constexpr char kExhausted[] = "a join without more input: ";
// For errors of ranks that disagree.
inline constexpr char kCallsAdvice[] = "all ranks must make the same calls, in the same order";
inline constexpr char kJoinAdvice[] =
    "a loop over uneven inputs needs a join: RunJoined() in C++, ddp.join() in libtorch, Join in "
    "Python";
inline constexpr char kMessagesAdvice[] =
    "no rank is left that can send or receive: count the messages that each rank sends and "
    "receives";
// The channel of a user's own collectives.
inline constexpr char kUserChannel[] = "user";

// The event that a thread waits for.
struct Wait {
  enum class Kind : uint8_t {
    kCollective,  // channel, sequence: waits for every rank that has not issued it.
    // channel, sequence, peer, is_send, tag: waits for the peer's half; `sequence` is the position
    // among those of the pair, direction and tag. peer = -1: for a message of any other rank, which
    // announces it.
    kPair,
    kExchange,  // topic, sequence: waits for every rank that has not begun it.
    kMessage,   // peer: waits for a message of this rank; -1: of any other rank.
  };
  Kind kind = Kind::kMessage;
  uint64_t channel = 0;
  int64_t sequence = 0;
  int peer = -1;
  bool is_send = false;
  std::string topic;
  // For messages, after "waits in": "#412 barrier (user) on channel \"user\"", "step 5 until all
  // ranks have begun it".
  std::string text;
  int64_t tag = 0;

  static void VisitFields(auto& self, auto& visit) {
    visit(visit.UpTo(self.kind, Kind::kMessage), self.channel, self.sequence, self.peer,
          self.is_send, self.topic, self.text, self.tag);
  }
};

// Returns "#0 barrier (user) on channel "user", and in step 5 until all ranks have begun it".
std::string WaitsText(const std::vector<Wait>& waits);

// One collective that a rank has issued.
struct Issued {
  int64_t sequence = 0;
  uint64_t hash = 0;  // HashOf(Collective): the fields on which ranks must agree.
  std::string text;   // "all_reduce bucket 2/5 float32[1048576] sum"
  bool is_open = false;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.sequence, self.hash, self.text, self.is_open);
  }
};

struct ChannelStatus {
  uint64_t id = 0;
  std::string name;
  int64_t position = 0;        // Collectives issued so far.
  std::vector<Issued> recent;  // The last few, and the oldest that is open; oldest first.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.id, self.name, self.position, self.recent);
  }
};

// The number of sends (or recvs) with a tag that a rank has issued to (from) a peer on a channel.
struct PairLane {
  uint64_t channel = 0;
  int peer = -1;
  bool is_send = false;
  int64_t position = 0;
  int64_t tag = 0;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.channel, self.peer, self.is_send, self.position, self.tag);
  }
};

// An open send or recv.
struct OpenPair {
  uint64_t channel = 0;
  int64_t sequence = 0;
  int peer = -1;
  bool is_send = false;
  int64_t tag = 0;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.channel, self.sequence, self.peer, self.is_send, self.tag);
  }
};

// A rank's report.
struct RankStatus {
  bool everyone_waits = false;  // Waits::EveryoneWaits().
  std::vector<Wait> waits;      // The longest one first.
  std::vector<ChannelStatus> channels;
  std::vector<PairLane> lanes;       // The used ones; optional unless everyone_waits.
  bool lacks_lanes = false;          // There are too many to report: halves may have been issued.
  std::vector<OpenPair> open_pairs;  // The oldest one of each lane is enough.
  // The hub's messages that this rank has handled, without heartbeats. Read before the rest.
  int64_t received = 0;
  // For messages, one line: "waits in #412 barrier (user)", "runs, 12 s after #411 ...".
  std::string doing;
  // For observers: the duration of the longest of the waits, and GroupExtension::StatusJson().
  int64_t waited_ms = 0;
  std::string details;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.everyone_waits, self.waits, self.channels, self.lanes, self.lacks_lanes,
          self.open_pairs, self.received, self.doing, self.waited_ms, self.details);
  }
  std::string Serialize() const { return ToBytes(*this); }
  static absl::StatusOr<RankStatus> Parse(absl::string_view bytes) {
    return FromBytes<RankStatus>(bytes, "rank status");
  }
};

// The hub's facts about one rank.
struct RankFacts {
  bool has_report = false;
  RankStatus report;
  bool has_left = false;  // Cleanly: it does nothing more, and its report is its last one.
  int64_t sent = 0;       // Messages of the hub to it, without heartbeats.
};

// An exchange that some ranks have begun.
struct OpenExchange {
  std::string topic;
  int64_t sequence = 0;
  std::vector<bool> arrived;  // By rank.
};

struct Judgement {
  // OK, or FailedPrecondition: "rank 1 is at #412 barrier (user) on channel "user"; ranks 0,2,3 are
  // at #412 all_reduce ...: the ranks disagree", "rank 0 waits in ...; rank 1 waits in ...: none of
  // them can go on: the ranks disagree".
  absl::Status status;
  int culprit = -1;  // A rank of the smallest party.
  // The ranks of a deadlock, which must last for a moment before it counts. Empty: final at once.
  std::set<int> stuck;
};

Judgement Judge(const std::vector<RankFacts>& ranks, const std::vector<OpenExchange>& exchanges);

// Returns the ranks whose parts were missing, by their last reports, from the wait of `rank`. For
// an exchange the hub has better information.
std::vector<int> MissingFrom(const Wait& wait, int rank, const std::vector<RankFacts>& ranks);

// Returns "rank 1 waits in ...; ranks 0,2 run, ...": the last reports of those ranks, for warnings.
std::string DescribeRankStatus(const std::vector<RankFacts>& facts, const std::vector<int>& ranks);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_RANK_STATUS_H_
