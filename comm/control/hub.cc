#include "evenkeel/comm/control/hub.h"

#include <algorithm>
#include <numeric>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/ranks/parties.h"

namespace evenkeel::internal {
namespace {

// A judgement reads the reports of all ranks, so in a large group the hub makes this many while
// each rank reports once.
constexpr int kJudgementsPerRound = 8;
// After a judgement that took longer, the hub makes none for kRest times what it took.
constexpr absl::Duration kLongJudgement = absl::Milliseconds(1);
constexpr int kRest = 20;
// A poll that has lasted longer is started again if a rank asks, because its first replies are out
// of date.
constexpr absl::Duration kPollPatience = absl::Seconds(1);
// The maximum number of ranks in HubView::Rank::waits_for.
constexpr size_t kMostAwaited = 100;

// Returns whether the rank's link passes it on, so that it counts in RankStatus::received.
bool IsForTheChannel(const ToRank& message) {
  if (const auto* value = std::get_if<to_rank::Value>(&message)) return value->request >= 0;
  return !IsBeat(message) && !std::holds_alternative<to_rank::Poll>(message);
}

// Returns whether the hub handles it as before when the group has ended.
bool OutlivesTheGroup(const ToHub& message) {
  return IsBeat(message) || std::holds_alternative<to_hub::Regroup>(message) ||
         std::holds_alternative<to_hub::WhoIsMissing>(message) ||
         std::holds_alternative<to_hub::PollReply>(message);
}

// Returns whether the rank waits, by its last report.
bool IsWaiting(const RankFacts& facts) {
  return facts.has_report && facts.report.everyone_waits && !facts.has_left;
}

}  // namespace

ControlHub::ControlHub(int world_size, DeliverFunction deliver, HubOptions options)
    : world_size_(world_size),
      deliver_(std::move(deliver)),
      options_(options),
      fanout_(world_size),
      facts_(world_size),
      come_(world_size) {}

template <typename Handler>
void ControlHub::Deliver(Handler handle) {
  std::vector<Outgoing> outbox;
  {
    absl::MutexLock lock(&mutex_);
    handle();
    outbox.swap(outbox_);
    for (const auto& [to, message] : outbox) {
      if (!IsForTheChannel(message)) continue;
      for (const int rank : to) ++facts_[rank].sent;
    }
  }
  for (const auto& [to, message] : outbox) deliver_(to, message);
}

void ControlHub::OnMessage(int rank, ToHub message) {
  Deliver([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto handle = [&](auto& it)
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { Handle(rank, std::move(it)); };
    if (failure_.why.ok() || OutlivesTheGroup(message)) return std::visit(handle, message);
    // A rank that still sends requests has not received the failure yet.
    if (std::holds_alternative<to_hub::Exchange>(message) ||
        std::holds_alternative<to_hub::Get>(message))
      outbox_.push_back({{rank}, failure_});
    if (std::holds_alternative<to_hub::Leave>(message)) left_.insert(rank);
    RegroupIfComplete();
  });
}

void ControlHub::OnDisconnect(int rank) {
  Deliver([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!left_.contains(rank) && lost_.insert(rank).second) {
      OnLost(rank, absl::UnavailableError(absl::StrCat(
                       "rank ", rank, " of ", world_size_,
                       " is lost: it was killed, crashed, or ended without leaving the group")));
    }
    RegroupIfComplete();
  });
}

void ControlHub::OnSilence(int rank, absl::Duration silence) {
  const std::string time = absl::FormatDuration(silence);
  Lose(rank, absl::StrCat("sent no heartbeat for ", time),
       absl::StrCat("is silent: no heartbeat for ", time));
}

void ControlHub::OnDeafness(int rank, absl::Duration unheard) {
  const std::string what =
      absl::StrCat("received nothing for ", absl::FormatDuration(unheard), " from the job's store");
  Lose(rank, what,
       absl::StrCat("is cut off: it ", what,
                    ", which received its messages and those of other ranks; check the network "
                    "between that rank's host and the store's"));
}

void ControlHub::Lose(int rank, absl::string_view to_it, absl::string_view to_others) {
  Deliver([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (left_.contains(rank) || !lost_.insert(rank).second) return;
    std::string doing;
    if (facts_[rank].has_report)
      absl::StrAppend(&doing, "; at its last heartbeat it ", facts_[rank].report.doing);
    // It may have been suspended only: then it must learn why it receives nothing more.
    outbox_.push_back({{rank},
                       to_rank::Failed{.why = WithFailureInfo(
                                           absl::UnavailableError(absl::StrCat(
                                               "rank ", rank, " ", to_it,
                                               ", so the others have declared it lost", doing)),
                                           {.kind = FailureKind::kRankLost, .ranks = {rank}}),
                                       .culprit = rank,
                                       .is_cut_off = true}});
    OnLost(rank, absl::UnavailableError(absl::StrCat("rank ", rank, " ", to_others, doing)));
    RegroupIfComplete();
  });
}

void ControlHub::OnNewcomers(std::set<int> places) {
  Deliver([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    newcomers_ = std::move(places);
    RegroupIfComplete();
  });
}

void ControlHub::OnNewcomerLost(int rank) {
  Deliver([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    LoseSurvivor(rank, absl::UnavailableError(absl::StrCat(
                           "the newcomer in the place of rank ", rank,
                           " is lost: it was killed, crashed, or ended before it entered")));
  });
}

void ControlHub::OnTime() {
  Deliver([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { RegroupIfComplete(); });
}

bool ControlHub::AwaitsNewcomers() const {
  absl::MutexLock lock(&mutex_);
  return wait_.begins > 0;
}

bool ControlHub::IsMade() const {
  absl::MutexLock lock(&mutex_);
  return is_made_;
}

std::vector<int> ControlHub::PlacesLeftOut() const {
  absl::MutexLock lock(&mutex_);
  return places_left_out_;
}

void ControlHub::OnLost(int rank, const absl::Status& why) {
  FailAll(FailureKind::kRankLost, rank, why);
  LoseSurvivor(rank, why);
}

void ControlHub::LoseSurvivor(int rank, const absl::Status& why) {
  if (survivors_.erase(rank) == 0) return;
  outbox_.push_back({{survivors_.begin(), survivors_.end()},
                     to_rank::SurvivorLost{
                         WithFailureInfo(why, {.kind = FailureKind::kRankLost, .ranks = {rank}})}});
  survivors_.clear();  // They regroup.
}

HubView ControlHub::View() {
  absl::MutexLock lock(&mutex_);
  HubView view{.status = failure_.why, .ranks = std::vector<HubView::Rank>(world_size_)};
  const std::vector<OpenExchange> exchanges = OpenExchanges();
  std::map<ExchangeId, std::vector<int>> awaited_at;
  for (const OpenExchange& exchange : exchanges) {
    std::vector<int>& awaited = awaited_at[{exchange.topic, exchange.sequence}];
    for (int rank = 0; rank < world_size_ && awaited.size() < kMostAwaited; ++rank) {
      if (!exchange.arrived[rank]) awaited.push_back(rank);
    }
  }
  std::map<std::pair<uint64_t, int64_t>, std::vector<int>> awaited_in;  // Channel, position.
  for (int rank = 0; rank < world_size_; ++rank) {
    const RankStatus& report = facts_[rank].report;
    HubView::Rank& seen = view.ranks[rank];
    seen = {.has_left = left_.contains(rank),
            .is_lost = lost_.contains(rank),
            .doing = report.doing,
            .details = report.details,
            .waited_ms = report.waited_ms};
    if (report.waits.empty()) continue;
    const Wait& wait = report.waits[0];
    if (wait.kind == Wait::Kind::kExchange) {
      const auto found = awaited_at.find({wait.topic, wait.sequence});
      if (found != awaited_at.end()) seen.waits_for = found->second;
    } else if (wait.kind == Wait::Kind::kCollective) {
      const auto [found, is_new] = awaited_in.try_emplace({wait.channel, wait.sequence});
      if (is_new) {
        found->second = MissingFrom(wait, /*rank=*/-1, facts_);
        found->second.resize(std::min(found->second.size(), kMostAwaited + 1));
      }
      seen.waits_for = found->second;
      std::erase(seen.waits_for, rank);
    } else {
      seen.waits_for = MissingFrom(wait, rank, facts_);
    }
    seen.waits_for.resize(std::min(seen.waits_for.size(), kMostAwaited));
  }
  return view;
}

void ControlHub::Handle(int rank, to_hub::Message message) {
  std::vector<int> to;
  for (const int receiver : message.to) {
    if (receiver >= 0 && receiver < world_size_) to.push_back(receiver);
  }
  outbox_.push_back({std::move(to), to_rank::Message{.from = rank,
                                                     .topic = std::move(message.topic),
                                                     .payload = std::move(message.payload)}});
}

void ControlHub::Handle(int rank, to_hub::Notice notice) {
  if (notice.is_once && !passed_on_.emplace(notice.topic, notice.payload).second) return;
  std::vector<int> to;
  if (notice.to < 0) {
    to = AllRanks();
  } else if (notice.to < world_size_) {
    to = {notice.to};
  }
  std::erase(to, rank);
  outbox_.push_back({std::move(to), to_rank::Notice{.from = rank,
                                                    .topic = std::move(notice.topic),
                                                    .payload = std::move(notice.payload)}});
}

void ControlHub::Handle(int, to_hub::Put put) {
  for (const auto& [waiter, request] : waiting_[put.key])
    outbox_.push_back({{waiter}, to_rank::Value{.request = request, .value = put.value}});
  waiting_.erase(put.key);
  values_[std::move(put.key)] = std::move(put.value);
}

void ControlHub::Handle(int rank, const to_hub::Get& get) {
  const auto found = values_.find(get.key);
  if (found == values_.end()) {
    waiting_[get.key].emplace_back(rank, get.request);
  } else {
    outbox_.push_back({{rank}, to_rank::Value{.request = get.request, .value = found->second}});
  }
}

void ControlHub::Handle(int rank, const to_hub::Failed& failed) {
  FailAll(absl::IsFailedPrecondition(failed.why) ? FailureKind::kDisagreement
                                                 : FailureKind::kRankFailed,
          rank, failed.why.ok() ? absl::UnknownError("no reason given") : failed.why);
}

void ControlHub::Handle(int rank, const to_hub::Regroup& regroup) {
  // It continues in another group, so this group has ended on it, with or without a message.
  FailAll(FailureKind::kRankFailed, rank,
          absl::UnavailableError(absl::StrCat("rank ", rank, " has left the group for a new one")));
  regrouping_[rank] = regroup.request;
  if (places_.empty() && regroup.members.size() == static_cast<size_t>(world_size_))
    places_ = regroup.members;
  wait_.longest =
      std::max(wait_.longest, regroup.wait_us < 0 ? absl::InfiniteDuration()
                                                  : absl::Microseconds(regroup.wait_us));
  RegroupIfComplete();
}

void ControlHub::Handle(int rank, const to_hub::Beat& beat) {
  outbox_.push_back({{rank}, to_rank::Beat()});
  come_[rank] = {beat.unended.begin(), beat.unended.end()};
  if (beat.rank_status.empty()) return;
  absl::StatusOr<RankStatus> report = RankStatus::Parse(beat.rank_status);
  if (!report.ok()) return;
  RankFacts& facts = facts_[rank];
  waiting_ranks_ -= IsWaiting(facts);
  facts.has_report = true;
  facts.report = *std::move(report);
  waiting_ranks_ += IsWaiting(facts);
  if (failure_.why.ok()) JudgeGroup(rank);
}

void ControlHub::JudgeGroup(int reporter) {
  // A rank that was stuck and goes on ends the suspicion, also while the hub makes no judgement.
  if (suspicion_.stuck.contains(reporter) && !IsWaiting(facts_[reporter])) suspicion_ = {};
  if (!suspicion_.stuck.empty()) suspicion_.confirmed.insert(reporter);
  // If ranks have different collectives, some rank waits for ever sooner or later.
  if (waiting_ranks_ == 0) return;
  const int reporting = world_size_ - static_cast<int>(left_.size());
  if (++reports_since_judgement_ * kJudgementsPerRound < reporting) return;
  const absl::Time now = SteadyNow();
  if (now < judge_again_) return;
  reports_since_judgement_ = 0;
  const Judgement judgement = Judge(facts_, OpenExchanges());
  const absl::Duration took = SteadyNow() - now;
  if (took > kLongJudgement) judge_again_ = now + kRest * took;
  if (judgement.status.ok()) {
    suspicion_ = {};
  } else if (judgement.stuck.empty() || IsConfirmed(judgement.stuck, now)) {
    FailAll(FailureKind::kDisagreement, judgement.culprit, judgement.status);
  }
}

bool ControlHub::IsConfirmed(const std::set<int>& stuck, absl::Time now) {
  // More ranks may get stuck; this does not free the earlier ones.
  const bool goes_on =
      !suspicion_.stuck.empty() &&
      std::includes(stuck.begin(), stuck.end(), suspicion_.stuck.begin(), suspicion_.stuck.end());
  if (!goes_on) {
    suspicion_ = {.stuck = stuck, .since = now};
    return false;
  }
  suspicion_.stuck = stuck;
  if (now - suspicion_.since < options_.patience) return false;
  // If a rank has fallen silent, the others may wait for one of its messages, and the silent rank
  // will soon be declared lost.
  for (int rank = 0; rank < world_size_; ++rank) {
    const bool must_confirm =
        stuck.contains(rank) || (facts_[rank].has_report && !facts_[rank].has_left);
    if (must_confirm && !suspicion_.confirmed.contains(rank)) return false;
  }
  return true;
}

void ControlHub::SetFanout(int fanout) {
  if (fanout > 0) fanout_ = std::min(fanout, world_size_);
}

void ControlHub::Handle(int rank, to_hub::Exchange part) {
  SetFanout(part.fanout);
  const std::vector<int> whose =
      shape().is_star() ? std::vector<int>{rank} : shape().SubtreeOf(rank);
  if (CountRanks(part.parts, world_size_) != static_cast<int64_t>(whose.size()) ||
      shape().ParentOf(rank) != kHub) {
    return FailAll(
        FailureKind::kRankFailed, rank,
        absl::InternalError(absl::StrCat(
            "the message of rank ", rank, " for \"", part.id.topic, "\" #", part.id.sequence,
            " does not fit a tree of fanout ", fanout_, " over ", world_size_, " ranks")));
  }
  Pending& pending = pending_[part.id];
  if (pending.parts.empty()) {
    pending.parts.resize(world_size_);
    pending.arrived.resize(world_size_);
    pending.missing = world_size_;
  }
  if (pending.arrived[rank]) return;
  auto of = whose.begin();
  for (EqualParts& run : part.parts) {
    for (int64_t i = 0; i < run.count; ++i, ++of) {
      pending.arrived[*of] = true;
      pending.parts[*of] = run.part;
    }
  }
  pending.missing -= static_cast<int>(whose.size());
  if (pending.missing == 0) return EndExchange(std::move(part.id), pending);
  for (int gone : left_) {
    // The part of a rank further down the tree may still arrive; its parent checks that.
    if (pending.arrived[gone] || shape().ParentOf(gone) != kHub) continue;
    return FailLeft(gone, {rank}, part.id);
  }
}

void ControlHub::EndExchange(ExchangeId id, Pending& pending) {
  to_rank::Exchanged result{.id = std::move(id)};
  for (std::string& part : pending.parts) AppendParts(result.parts, {1, std::move(part)});
  pending_.erase(result.id);
  is_made_ = is_made_ || result.id.topic == kMadeTopic;
  if (absl::Status size = CheckSize(result.id, result.parts); !size.ok())
    return FailAll(FailureKind::kRankFailed, /*culprit=*/-1, std::move(size));
  outbox_.push_back({shape().ChildrenOf(kHub), std::move(result)});
  for (int to = fanout_; to < world_size_; ++to)
    ++facts_[to].sent;  // Other ranks pass it on to them.
}

void ControlHub::Handle(int rank, const to_hub::Leave&) {
  left_.insert(rank);
  waiting_ranks_ -= IsWaiting(facts_[rank]);
  facts_[rank].has_left = true;
  if (shape().ParentOf(rank) != kHub) return;
  for (const auto& [id, pending] : pending_) {
    if (pending.arrived[rank]) continue;
    std::vector<int> waiting;
    for (int r = 0; r < world_size_; ++r) {
      if (pending.arrived[r]) waiting.push_back(r);
    }
    return FailLeft(rank, waiting, id);
  }
}

void ControlHub::FailLeft(int gone, const std::vector<int>& waiting, const ExchangeId& id) {
  FailAll(FailureKind::kDisagreement, gone,
          WithFailureInfo(absl::FailedPreconditionError(absl::StrCat(
                              "rank ", gone, " has left the group while ", RankList(waiting),
                              waiting.size() == 1 ? " is" : " are", " at \"", id.topic, "\" #",
                              id.sequence, ": the ranks disagree")),
                          {.kind = FailureKind::kDisagreement,
                           .ranks = {gone},
                           .operation = id.topic,
                           .position = id.sequence}));
}

std::vector<OpenExchange> ControlHub::OpenExchanges() const {
  std::map<ExchangeId, std::vector<bool>> arrived;
  for (const auto& [id, pending] : pending_) arrived[id] = pending.arrived;
  for (int rank = 0; rank < world_size_; ++rank) {
    for (const ExchangeId& id : come_[rank]) {
      std::vector<bool>& ranks = arrived[id];
      ranks.resize(world_size_);
      ranks[rank] = true;
    }
  }
  std::vector<OpenExchange> exchanges;
  for (auto& [id, ranks] : arrived) {
    exchanges.push_back({.topic = id.topic, .sequence = id.sequence, .arrived = std::move(ranks)});
  }
  return exchanges;
}

void ControlHub::Handle(int rank, to_hub::WhoIsMissing question) {
  SetFanout(question.fanout);
  const auto reply = [&](absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    outbox_.push_back({{rank}, to_rank::Missing{question.request, std::move(status)}});
  };
  Wait& wait = question.wait;
  if (wait.kind != Wait::Kind::kExchange)
    return reply(NameMissing(MissingFrom(wait, rank, facts_)));
  const ExchangeId id{std::move(wait.topic), wait.sequence};
  if (id.topic == kRegroupTopic || shape().is_star())
    return reply(NameMissing(MissingFromExchange(id)));
  const auto [found, is_new] = polls_.try_emplace(id);
  Poll& poll = found->second;
  if (!is_new && question.is_urgent) {
    poll.askers.erase(rank);
    poll.next_askers.erase(rank);
    return reply(ResultOf(poll));
  }
  poll.next_askers[rank] = question.request;
  if (is_new || SteadyNow() - poll.start >= kPollPatience) StartPoll(id, poll);
}

void ControlHub::StartPoll(const ExchangeId& id, Poll& poll) {
  poll.next_askers.merge(poll.askers);
  poll = {.id = next_poll_++,
          .start = SteadyNow(),
          .askers = std::move(poll.next_askers),
          .answered = std::vector<bool>(world_size_),
          .has_begun = std::vector<bool>(world_size_),
          .missing_answers = world_size_};
  outbox_.push_back({AllRanks(), to_rank::Poll{.number = poll.id, .id = id}});
}

void ControlHub::Handle(int rank, const to_hub::PollReply& reply) {
  const auto found = std::ranges::find_if(
      polls_, [&](const auto& poll) { return poll.second.id == reply.number; });
  if (found == polls_.end()) return;
  auto& [id, poll] = *found;
  poll.missing_answers -= !poll.answered[rank];
  poll.answered[rank] = true;
  poll.has_begun[rank] = reply.has_begun;
  if (!IsComplete(poll)) return;
  const absl::Status result = ResultOf(poll);
  for (const auto& [asker, request] : std::exchange(poll.askers, {}))
    outbox_.push_back({{asker}, to_rank::Missing{request, result}});
  if (poll.next_askers.empty()) {
    polls_.erase(found);
  } else {
    StartPoll(id, poll);
  }
}

bool ControlHub::IsComplete(const Poll& poll) const {
  if (poll.missing_answers > static_cast<int>(left_.size() + lost_.size())) return false;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!poll.answered[rank] && !left_.contains(rank) && !lost_.contains(rank)) return false;
  }
  return true;
}

absl::Status ControlHub::ResultOf(const Poll& poll) const {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!poll.has_begun[rank]) missing.push_back(rank);
  }
  return NameMissing(missing);  // If no rank is missing, the exchange is over.
}

std::vector<int> ControlHub::AllRanks() const {
  std::vector<int> ranks(world_size_);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

absl::Status ControlHub::NameMissing(const std::vector<int>& missing) const {
  if (missing.empty()) return absl::OkStatus();
  const bool is_known = std::any_of(
      missing.begin(), missing.end(),
      [this](int r) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return facts_[r].has_report; });
  return MissedDeadline(
      absl::StrCat(RankList(missing),
                   is_known ? absl::StrCat(" (", DescribeRankStatus(facts_, missing), ")") : ""),
      missing);
}

std::vector<int> ControlHub::MissingFromExchange(const ExchangeId& id) const {
  std::vector<int> missing;
  if (id.topic == kRegroupTopic) {
    for (int r = 0; r < world_size_; ++r) {
      if (!regrouping_.contains(r) && !left_.contains(r) && !lost_.contains(r))
        missing.push_back(r);
    }
    return missing;
  }
  auto pending = pending_.find(id);
  for (int r = 0; pending != pending_.end() && r < world_size_; ++r) {
    if (!pending->second.arrived[r]) missing.push_back(r);
  }
  return missing;
}

void ControlHub::RegroupIfComplete() {
  // The sum may count a rank twice; it only saves most of the searches.
  const size_t heard_of = regrouping_.size() + left_.size() + lost_.size();
  if (regrouping_.empty() || heard_of < static_cast<size_t>(world_size_) ||
      !MissingFromExchange({.topic = kRegroupTopic}).empty())
    return;
  const std::set<int> entered = Replaceable();
  if (entered.size() < lost_.size() && WaitsForNewcomers(lost_.size())) return;
  ++regrouped_;
  survivors_ = entered;
  for (const auto& [rank, request] : regrouping_) {
    if (!lost_.contains(rank)) survivors_.insert(rank);
  }
  to_rank::Regrouped reply{.ranks = {survivors_.begin(), survivors_.end()},
                           .entered = {entered.begin(), entered.end()},
                           .round = regrouped_,
                           .members = places_};
  if (!entered.empty()) outbox_.push_back({reply.entered, reply});
  reply.members.clear();
  for (const auto& [rank, request] : regrouping_) {
    reply.request = request;
    outbox_.push_back({{rank}, reply});
  }
  wait_ = {};
  places_left_out_.clear();
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (!survivors_.contains(static_cast<int>(rank))) places_left_out_.push_back(places_[rank]);
  }
  regrouping_.clear();
}

std::set<int> ControlHub::Replaceable() const {
  std::set<int> ranks;
  if (wait_.longest <= absl::ZeroDuration()) return ranks;
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (lost_.contains(static_cast<int>(rank)) && newcomers_.contains(places_[rank]))
      ranks.insert(static_cast<int>(rank));
  }
  return ranks;
}

bool ControlHub::WaitsForNewcomers(size_t lost) {
  if (!options_.admits_newcomers || wait_.longest <= absl::ZeroDuration()) return false;
  const absl::Time now = SteadyNow();
  if (wait_.begins == 0 || (wait_.begins == 1 && lost > wait_.lost))
    wait_ = {wait_.longest, wait_.begins + 1, lost, now + wait_.longest};
  return now < wait_.ends;
}

void ControlHub::FailAll(FailureKind kind, int culprit, absl::Status why) {
  if (!failure_.why.ok()) return;
  if (!FailureInfoOf(why).has_value()) {
    FailureInfo info{.kind = kind};
    if (culprit >= 0) info.ranks = {culprit};
    why = WithFailureInfo(std::move(why), info);
  }
  failure_ = {.why = std::move(why), .culprit = culprit};
  std::vector<int> to = AllRanks();
  std::erase_if(to, [&](int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return left_.contains(rank) || lost_.contains(rank);
  });
  outbox_.push_back({std::move(to), failure_});
  values_.clear();  // Requests get the failure from now on, and notices are not passed on.
  waiting_.clear();
  passed_on_.clear();
}

}  // namespace evenkeel::internal
