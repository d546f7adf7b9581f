// Where each rank of a group is, as it says itself, and whether the ranks can still come together.
//
//   Whereabouts mine{...};                                   // each rank's, sent to the hub with its heartbeats
//   if (absl::Status verdict = Judge(group); !verdict.ok()) ...   // at the hub: a contradiction, on all ranks
//
// Two things make a contradiction, and both are facts that no waiting can change:
//
// 1. Two ranks have different collectives at the same position of a channel.
// 2. A deadlock: some ranks can only go on after each other. Every thread of such a rank that uses the group waits, and
//    each of the waits needs a rank that is itself one of them (or has left). Found by elimination: a rank that runs
//    can go on; a wait can end if every rank it needs can go on; a rank can go on if one of its waits can end. Who is
//    left over is stuck.
//
// A report is older than the hub's knowledge. That does no harm: the first of the stuck ranks to go on after its report
// would need something from another one that was not there yet, and that one could not go on either. It needs two
// conditions: nothing that the hub has sent to a stuck rank is still on its way (`received` tells), and an operation
// that all its ranks have issued counts as running.
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

// What a thread waits for.
struct Wait {
  enum class Kind : uint8_t {
    kCollective,  // channel, sequence: every rank that has not issued it.
    kPair,        // channel, sequence, peer, is_send: the peer's half, position `sequence` among those of the pair.
    kExchange,    // topic, sequence: every rank that has not come to it.
    kMessage,     // peer: something that this rank sends; -1: that any other rank may send.
  };
  Kind kind = Kind::kMessage;
  uint64_t channel = 0;
  int64_t sequence = 0;
  int peer = -1;
  bool is_send = false;
  std::string topic;
  std::string text;  // For people: "#412 barrier (user)", "step 5, until all ranks have begun it".
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
  std::vector<Issued> recent;  // The last few, oldest first.
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
  std::vector<OpenPair> open_pairs;
  int64_t received = 0;     // Messages of the hub that this rank has dealt with.
  std::string doing;        // For people, in one line: "waits in #412 barrier (user)", "runs, 12 s after #411 ...".

  std::string Serialize() const;
  // InvalidArgument for anything that Serialize() does not give, whatever the bytes.
  static absl::StatusOr<Whereabouts> Parse(absl::string_view bytes);
};

// What the hub knows of one rank.
struct RankFacts {
  bool has_report = false;
  Whereabouts report;
  bool has_left = false;       // Cleanly: it will do nothing more.
  int64_t sent = 0;            // Messages that the hub had for it, heartbeats left out.
};

// An exchange that some ranks have come to.
struct OpenExchange {
  std::string topic;
  int64_t sequence = 0;
  std::vector<bool> arrived;  // By rank.
};

// OK, or FailedPrecondition: "rank 1 is at #412 barrier (user); ranks 0,2,3 are at #412 all_reduce bucket 2/5 ...: the
// ranks disagree". Sets `stuck` (may be null) to the ranks of a deadlock, which the caller lets stand for a moment.
absl::Status Judge(const std::vector<RankFacts>& ranks, const std::vector<OpenExchange>& exchanges,
                   std::set<int>* stuck);

// "rank 1 waits in ...; ranks 0,2 run, ...": where everybody is, for warnings.
std::string Describe(const std::vector<RankFacts>& ranks);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_WHEREABOUTS_H_
