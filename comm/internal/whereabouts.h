// Where each rank of a group is, as it says itself, and whether the ranks can still come together.
//
//   Whereabouts mine{...};                       // each rank's, sent to the hub with its heartbeats
//   Judgement judgement = Judge(facts, exchanges);  // at the hub
//   if (!judgement.status.ok()) ...              // a contradiction, for all ranks
//
// Two things make a contradiction, and both are facts that no waiting can change:
//
// 1. Two ranks have different collectives at the same position of a channel.
// 2. A deadlock: some ranks can only go on after each other. Found by elimination, where "can" means that nothing that
//    is known speaks against it:
//      a rank can go on if it runs, if it has not reported, if a message of the hub is on its way to it, or if one of
//      the things that are under way on it can end: a wait of a thread, an open operation or an exchange that it has
//      come to (their callbacks may do more than wake a thread up);
//      each of those can end if every rank that has yet to do its part can go on; all parts done, it is running.
//    Who is left over is stuck. A rank that has left will do nothing more.
//
// A report is older than what the hub knows. That does no harm: the first of the stuck ranks to go on after its report
// would have needed another one of them to do something, and that one had not done it when it reported, and could not
// go on before the first either. It takes that positions only grow, and that a rank's report tells of every message
// that the hub had sent it (`received`): a message is the one thing that comes to a rank without the others doing more.
//
// Threads: pure functions of values.

#ifndef EVENKEEL_COMM_INTERNAL_WHEREABOUTS_H_
#define EVENKEEL_COMM_INTERNAL_WHEREABOUTS_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Begins the text of each wait of a rank that has run out of inputs and does what others do.
inline constexpr char kDry[] = "RunJoined() without inputs: ";
// The channel of a user's own collectives.
inline constexpr char kUserChannel[] = "user";

// What a thread waits for.
struct Wait {
  enum class Kind : uint8_t {
    kCollective,  // channel, sequence: every rank that has not issued it.
    kPair,        // channel, sequence, peer, is_send: the peer's half, position `sequence` among those of the lane.
    kExchange,    // topic, sequence: every rank that has not come to it.
    kMessage,     // peer: something that this rank sends; -1: that any other rank may send.
  };
  Kind kind = Kind::kMessage;
  uint64_t channel = 0;
  int64_t sequence = 0;
  int peer = -1;
  bool is_send = false;
  std::string topic;
  // For people, after "waits in": "#412 barrier (user) on channel \"user\"", "step 5 until all ranks have begun it".
  std::string text;
};

// One collective that a rank has issued.
struct Issued {
  int64_t sequence = 0;
  uint64_t hash = 0;  // HashOf(Collective): of what ranks must agree on.
  std::string text;   // "all_reduce bucket 2/5 float32[1048576] sum"
  bool is_open = false;
};

struct ChannelWhereabouts {
  uint64_t id = 0;
  std::string name;
  int64_t position = 0;        // Collectives issued so far.
  std::vector<Issued> recent;  // The last few, and the oldest that is open; oldest first.
};

// How many sends (or recvs) a rank has issued to (from) a peer on a channel.
struct PairLane {
  uint64_t channel = 0;
  int peer = -1;
  bool is_send = false;
  int64_t position = 0;
};

// A send or recv that is open.
struct OpenPair {
  uint64_t channel = 0;
  int64_t sequence = 0;
  int peer = -1;
  bool is_send = false;
};

// A rank's report.
struct Whereabouts {
  bool everyone_waits = false;  // Waits::EveryoneWaits().
  std::vector<Wait> waits;
  std::vector<ChannelWhereabouts> channels;
  std::vector<PairLane> lanes;       // Those that were used; may be left out unless everyone waits.
  std::vector<OpenPair> open_pairs;  // The oldest one of each lane is enough.
  int64_t received =
      0;              // Messages of the hub that this rank has dealt with, heartbeats left out; taken before the rest.
  std::string doing;  // For people, in one line: "waits in #412 barrier (user)", "runs, 12 s after #411 ...".

  std::string Serialize() const;
  // InvalidArgument for anything that Serialize() does not give, whatever the bytes.
  static absl::StatusOr<Whereabouts> Parse(absl::string_view bytes);
};

// What the hub knows of one rank.
struct RankFacts {
  bool has_report = false;
  Whereabouts report;
  bool has_left = false;  // Cleanly: it will do nothing more, and its report is its last word.
  int64_t sent = 0;       // Messages that the hub had for it, heartbeats left out.
};

// An exchange that some ranks have come to.
struct OpenExchange {
  std::string topic;
  int64_t sequence = 0;
  std::vector<bool> arrived;  // By rank.
};

struct Judgement {
  // OK, or FailedPrecondition: "rank 1 is at #412 barrier (user) on channel "user"; ranks 0,2,3 are at #412 all_reduce
  // ...: the ranks disagree", "rank 0 waits in ...; rank 1 waits in ...: none of them can go on: the ranks disagree".
  absl::Status status;
  int culprit = -1;     // A rank of the smallest party.
  std::set<int> stuck;  // Of a deadlock, which the caller lets stand for a moment; empty: nothing will change this.
};

Judgement Judge(const std::vector<RankFacts>& ranks, const std::vector<OpenExchange>& exchanges);

// Whose parts were missing, by their last reports, from what `rank` waits for. Of an exchange, the hub knows better.
std::vector<int> MissingFrom(const Wait& wait, int rank, const std::vector<RankFacts>& ranks);

// "rank 1 waits in ...; ranks 0,2 run, ...": where those ranks were by their last reports, for warnings.
std::string DescribeWhereabouts(const std::vector<RankFacts>& facts, const std::vector<int>& ranks);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_WHEREABOUTS_H_
