#include "evenkeel/comm/control/rank_status.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/control/positions.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The maximum number of different reports in a message.
constexpr size_t kMostDescribed = 8;

// Looking things up in a report -------------------------------------------------------------------

const ChannelStatus* FindChannel(const RankStatus& report, uint64_t id) {
  for (const ChannelStatus& channel : report.channels) {
    if (channel.id == id) return &channel;
  }
  return nullptr;
}

bool HasIssued(const RankStatus& report, uint64_t channel, int64_t sequence) {
  const ChannelStatus* found = FindChannel(report, channel);
  return found != nullptr && found->position > sequence;
}

// Returns whether a rank has issued, or may have issued, its half of the message for which `peer`
// waits.
bool HasIssuedHalf(const RankStatus& report, int peer, const Wait& wait) {
  const auto is_lane = [&](const auto& one) {
    return one.channel == wait.channel && one.peer == peer && one.is_send != wait.is_send &&
           one.tag == wait.tag;
  };
  const auto lane = std::find_if(report.lanes.begin(), report.lanes.end(), is_lane);
  if (lane != report.lanes.end() ? lane->position > wait.sequence : report.lacks_lanes) return true;
  return std::any_of(report.open_pairs.begin(), report.open_pairs.end(), [&](const OpenPair& pair) {
    return is_lane(pair) && pair.sequence >= wait.sequence;
  });
}

bool WaitsInExchange(const RankStatus& report, const OpenExchange& exchange) {
  return std::any_of(report.waits.begin(), report.waits.end(), [&](const Wait& wait) {
    return wait.kind == Wait::Kind::kExchange && wait.topic == exchange.topic &&
           wait.sequence == exchange.sequence;
  });
}

bool IsExhausted(const RankStatus& report) {
  return std::any_of(report.waits.begin(), report.waits.end(),
                     [](const Wait& wait) { return absl::StartsWith(wait.text, kExhausted); });
}

// Returns a rank's pending events as waits: the open operations of its report and the hub's
// exchanges.
std::vector<Wait> UnderWay(int rank, const RankFacts& facts,
                           const std::vector<OpenExchange>& exchanges) {
  std::vector<Wait> all = facts.report.waits;
  for (const ChannelStatus& channel : facts.report.channels) {
    for (const Issued& issued : channel.recent) {
      if (!issued.is_open) continue;
      all.push_back(
          {.kind = Wait::Kind::kCollective, .channel = channel.id, .sequence = issued.sequence});
      break;  // The later ones need all that it needs.
    }
  }
  for (const OpenPair& pair : facts.report.open_pairs) {
    all.push_back({.kind = Wait::Kind::kPair,
                   .channel = pair.channel,
                   .sequence = pair.sequence,
                   .peer = pair.peer,
                   .is_send = pair.is_send,
                   .tag = pair.tag});
  }
  for (const OpenExchange& exchange : exchanges) {
    if (!exchange.arrived[rank]) continue;
    all.push_back(
        {.kind = Wait::Kind::kExchange, .sequence = exchange.sequence, .topic = exchange.topic});
  }
  // A call of a rank that still has inputs may be the next thing that this rank must do.
  if (IsExhausted(facts.report)) all.push_back({.kind = Wait::Kind::kMessage, .peer = -1});
  return all;
}

// Elimination -------------------------------------------------------------------------------------

class Elimination {
 public:
  Elimination(const std::vector<RankFacts>& ranks, const std::vector<OpenExchange>& exchanges)
      : ranks_(ranks), exchanges_(exchanges), can_go_on_(ranks.size()) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const RankFacts& facts = ranks[rank];
      can_go_on_[rank] = !facts.has_left && (!facts.has_report || !facts.report.everyone_waits ||
                                             facts.report.received != facts.sent);
      can_any_go_on_ |= can_go_on_[rank];
      under_way_.push_back(can_go_on_[rank] || facts.has_left
                               ? std::vector<Wait>()
                               : UnderWay(static_cast<int>(rank), facts, exchanges));
    }
    while (Round()) {
    }
  }

  // Returns the ranks that cannot go on, without those that have left.
  std::set<int> Stuck() const {
    std::set<int> stuck;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!can_go_on_[rank] && !ranks_[rank].has_left) stuck.insert(static_cast<int>(rank));
    }
    return stuck;
  }

 private:
  bool Round() {
    bool has_changed = false;
    // Goes alternately from both ends: ranks may wait for each other in a chain, in either
    // direction.
    is_upwards_ = !is_upwards_;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const size_t rank = is_upwards_ ? i : ranks_.size() - 1 - i;
      if (can_go_on_[rank]) continue;
      const bool can =
          std::any_of(under_way_[rank].begin(), under_way_[rank].end(),
                      [&](const Wait& wait) { return CanEnd(static_cast<int>(rank), wait); });
      if (!can) continue;
      can_go_on_[rank] = can_any_go_on_ = has_changed = true;
    }
    return has_changed;
  }

  bool CanEnd(int rank, const Wait& wait) {
    switch (wait.kind) {
      case Wait::Kind::kCollective:
        return CanAllCome(behind_in_[{wait.channel, wait.sequence}], [&](int each) {
          return HasIssued(ReportOf(each), wait.channel, wait.sequence);
        });
      case Wait::Kind::kPair:
        if (wait.peer == -1) return can_any_go_on_;
        if (!IsRank(wait.peer)) return true;
        return can_go_on_[wait.peer] || HasIssuedHalf(ReportOf(wait.peer), rank, wait);
      case Wait::Kind::kExchange: {
        const auto open =
            std::find_if(exchanges_.begin(), exchanges_.end(), [&](const OpenExchange& exchange) {
              return exchange.topic == wait.topic && exchange.sequence == wait.sequence;
            });
        if (open == exchanges_.end()) return true;
        return CanAllCome(behind_at_[&*open], [&](int each) {
          return open->arrived[each] || WaitsInExchange(ReportOf(each), *open);
        });
      }
      case Wait::Kind::kMessage:
        if (IsRank(wait.peer)) return can_go_on_[wait.peer];
        return can_any_go_on_;
    }
    return true;
  }

  // The ranks that have not done their part in an event and could not go on at its last check. They
  // are stored because thousands of ranks may wait for the same event.
  struct Behind {
    bool is_known = false;
    std::vector<int> ranks;
  };
  // Returns whether each rank has done its part or can go on. A rank may wait for its own part,
  // too, if a callback issues it.
  template <typename HasDone>
  bool CanAllCome(Behind& behind, HasDone has_done) const {
    if (!std::exchange(behind.is_known, true)) {
      for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
        if (!can_go_on_[rank] && !has_done(rank)) behind.ranks.push_back(rank);
      }
    }
    while (!behind.ranks.empty() && can_go_on_[behind.ranks.back()]) behind.ranks.pop_back();
    return behind.ranks.empty();
  }

  const RankStatus& ReportOf(int rank) const { return ranks_[rank].report; }
  bool IsRank(int rank) const { return rank >= 0 && rank < static_cast<int>(ranks_.size()); }

  const std::vector<RankFacts>& ranks_;
  const std::vector<OpenExchange>& exchanges_;
  bool is_upwards_ = false;
  std::vector<bool> can_go_on_;
  bool can_any_go_on_ = false;
  std::vector<std::vector<Wait>> under_way_;                  // By rank.
  std::map<std::pair<uint64_t, int64_t>, Behind> behind_in_;  // By channel and position.
  std::map<const OpenExchange*, Behind> behind_at_;
};

// The two rules -----------------------------------------------------------------------------------

// By rank: the collective at one position of a channel.
using AtPosition = std::map<int, const Issued*>;

Judgement Contradiction(const std::string& channel, const AtPosition& ranks) {
  std::map<std::string, std::set<uint64_t>> hashes;
  for (const auto& [rank, issued] : ranks) hashes[issued->text].insert(issued->hash);
  std::map<int, AtOperation> parties;
  for (const auto& [rank, issued] : ranks) {
    AtOperation& at = parties[rank];
    at = {issued->sequence, issued->text};
    // Hashes cover more fields than texts.
    if (hashes[issued->text].size() > 1)
      absl::StrAppend(&at.detail, " (hash ", absl::Hex(issued->hash), ")");
    absl::StrAppend(&at.detail, " on channel \"", channel, "\"");
  }
  const absl::Status status = Disagreement(parties);
  return {.status = status, .culprit = FailureInfoOf(status)->ranks.front()};
}

// Finds the first position of a channel at which two ranks have different collectives.
Judgement FindContradiction(const std::vector<RankFacts>& ranks) {
  using ChannelKey = std::pair<std::string, uint64_t>;
  std::map<ChannelKey, std::map<int64_t, uint64_t>> hash_at;  // Channel; position.
  std::set<std::pair<ChannelKey, int64_t>> contradictions;
  for (const RankFacts& facts : ranks) {
    for (const ChannelStatus& channel : facts.report.channels) {
      const ChannelKey key(channel.name, channel.id);
      std::map<int64_t, uint64_t>& hashes = hash_at[key];
      for (const Issued& issued : channel.recent) {
        const auto [at, is_first] = hashes.emplace(issued.sequence, issued.hash);
        if (at->second != issued.hash) contradictions.emplace(key, issued.sequence);
      }
    }
  }
  if (contradictions.empty()) return {};
  const auto& [key, sequence] = *contradictions.begin();
  AtPosition at;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const ChannelStatus& channel : ranks[rank].report.channels) {
      if (channel.name != key.first || channel.id != key.second) continue;
      for (const Issued& issued : channel.recent) {
        if (issued.sequence == sequence) at[static_cast<int>(rank)] = &issued;
      }
    }
  }
  return Contradiction(key.first, at);
}

bool WaitsForMessages(const RankStatus& report) {
  return std::all_of(report.waits.begin(), report.waits.end(),
                     [](const Wait& wait) { return wait.kind == Wait::Kind::kPair; });
}

bool WaitsOnUserChannel(const RankStatus& report) {
  return std::any_of(report.waits.begin(), report.waits.end(), [&](const Wait& wait) {
    if (wait.kind != Wait::Kind::kCollective) return false;
    const ChannelStatus* channel = FindChannel(report, wait.channel);
    return channel != nullptr && channel->name == kUserChannel;
  });
}

// Returns the wait of a rank inside of a step of an optimizer; null if there is none.
const Wait* WaitInStep(const RankStatus& report) {
  for (const Wait& wait : report.waits) {
    const ChannelStatus* channel = FindChannel(report, wait.channel);
    if (wait.kind == Wait::Kind::kCollective && channel != nullptr &&
        !OptimizerIn(wait.text, channel->name).empty())
      return &wait;
  }
  return nullptr;
}

// Returns the ranks that have not begun the step of an optimizer in which others wait, without
// those that have no more input and only follow, if there are others; and the text that names them.
std::pair<std::vector<int>, std::string> FindOmission(const std::vector<RankFacts>& ranks,
                                                      const std::set<int>& stuck) {
  const Wait* awaited = nullptr;
  std::vector<int> waiting, omitters, exhausted;
  for (const int rank : stuck) {
    const Wait* wait = WaitInStep(ranks[rank].report);
    if (wait == nullptr || (awaited != nullptr && wait->channel != awaited->channel)) continue;
    awaited = wait;
    waiting.push_back(rank);
  }
  if (awaited == nullptr) return {};
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankStatus& report = ranks[rank].report;
    if ((!stuck.contains(rank) && !ranks[rank].has_left) || WaitInStep(report) != nullptr ||
        HasIssued(report, awaited->channel, awaited->sequence))
      continue;
    (IsExhausted(report) ? exhausted : omitters).push_back(rank);
  }
  if (omitters.empty()) omitters = std::move(exhausted);
  if (omitters.empty()) return {};
  const ChannelStatus* channel = FindChannel(ranks[waiting[0]].report, awaited->channel);
  return {omitters, OmittedStep(omitters, OptimizerIn(awaited->text, channel->name), waiting)};
}

Judgement Deadlock(const std::vector<RankFacts>& ranks, std::set<int> stuck) {
  Parties parties;
  std::vector<int> left, exhausted;
  bool user_waits = false, all_wait_for_messages = true;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (ranks[rank].has_left) left.push_back(rank);
    if (!stuck.contains(rank)) continue;
    parties[rank] = WaitsText(ranks[rank].report.waits);
    all_wait_for_messages &= WaitsForMessages(ranks[rank].report);
    if (IsExhausted(ranks[rank].report)) {
      exhausted.push_back(rank);
    } else if (WaitsOnUserChannel(ranks[rank].report)) {
      user_waits = true;
    }
  }
  std::string text = Describe(parties, "waits in", "wait in");
  if (!left.empty())
    absl::StrAppend(&text, "; ", RankList(left), left.size() == 1 ? " has left" : " have left");
  absl::StrAppend(&text, stuck.size() == 1 ? ": it cannot go on" : ": they cannot go on",
                  ": the ranks disagree");
  int culprit = Suspect(parties);
  if (const auto [omitters, omission] = FindOmission(ranks, stuck); !omitters.empty()) {
    culprit = omitters.front();
    absl::StrAppend(&text, " (", omission, ")");
  } else if (user_waits && !exhausted.empty()) {
    absl::StrAppend(&text, " (with no more input on ", RankList(exhausted),
                    ", the loop does not run there: move collectives that exhausted ranks do not "
                    "shadow out of the join)");
  } else if (all_wait_for_messages) {
    absl::StrAppend(&text, " (", kMessagesAdvice, ")");
  } else {
    absl::StrAppend(&text, " (", kCallsAdvice,
                    exhausted.empty() ? absl::StrCat("; ", kJoinAdvice) : "", ")");
  }
  return {
      .status = absl::FailedPreconditionError(text), .culprit = culprit, .stuck = std::move(stuck)};
}

}  // namespace

std::string WaitsText(const std::vector<Wait>& waits) {
  std::vector<std::string> texts;
  for (const Wait& wait : waits) {
    if (std::find(texts.begin(), texts.end(), wait.text) == texts.end()) texts.push_back(wait.text);
  }
  return absl::StrJoin(texts, ", and in ");
}

Judgement Judge(const std::vector<RankFacts>& ranks, const std::vector<OpenExchange>& exchanges) {
  if (Judgement judgement = FindContradiction(ranks); !judgement.status.ok()) return judgement;
  std::set<int> stuck = Elimination(ranks, exchanges).Stuck();
  return stuck.empty() ? Judgement() : Deadlock(ranks, std::move(stuck));
}

std::vector<int> MissingFrom(const Wait& wait, int rank, const std::vector<RankFacts>& ranks) {
  std::vector<int> missing;
  for (int each = 0; each < static_cast<int>(ranks.size()); ++each) {
    const RankFacts& facts = ranks[each];
    if (each == rank || !facts.has_report) continue;
    const bool is_pair = wait.kind == Wait::Kind::kPair;
    const bool is_missing =
        wait.kind == Wait::Kind::kCollective
            ? !HasIssued(facts.report, wait.channel, wait.sequence)
            : (is_pair && wait.peer == -1 && !facts.has_left) ||
                  (each == wait.peer && (wait.kind == Wait::Kind::kMessage ||
                                         (is_pair && !HasIssuedHalf(facts.report, rank, wait))));
    if (is_missing) missing.push_back(each);
  }
  return missing;
}

std::string DescribeRankStatus(const std::vector<RankFacts>& facts, const std::vector<int>& ranks) {
  std::map<std::string, std::vector<int>> ranks_doing;
  for (int rank : ranks) {
    const RankFacts& one = facts[rank];
    std::string doing = one.has_left      ? "has left"
                        : !one.has_report ? "has not reported"
                                          : one.report.doing;
    ranks_doing[std::move(doing)].push_back(rank);
  }
  std::vector<std::pair<std::vector<int>, std::string>>
      parts;  // In the order of their first ranks.
  for (auto& [doing, who] : ranks_doing) parts.emplace_back(who, doing);
  std::sort(parts.begin(), parts.end());
  size_t others = 0;
  for (; parts.size() > kMostDescribed; parts.pop_back()) others += parts.back().first.size();
  const std::string text = absl::StrJoin(parts, "; ", [](std::string* out, const auto& part) {
    const auto& [who, doing] = part;
    absl::StrAppend(out, RankList(who), who.size() == 1 ? " " : ": ", doing);
  });
  return others == 0 ? text : absl::StrCat(text, "; and ", others, " more");
}

}  // namespace evenkeel::internal
