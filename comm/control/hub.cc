#include "evenkeel/comm/control/hub.h"

#include <algorithm>
#include <numeric>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/parties.h"
#include "evenkeel/comm/failure_info.h"

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
bool IsForTheChannel(const ControlMessage& message) {
  if (message.type == ControlMessage::Type::kBeat ||
      message.type == ControlMessage::Type::kHaveCome)
    return false;
  return message.type != ControlMessage::Type::kValue || message.request >= 0;
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
  Outbox outbox;
  {
    absl::MutexLock lock(&mutex_);
    handle(outbox);
    for (const auto& [to, message] : outbox) {
      if (!IsForTheChannel(message)) continue;
      for (const int rank : to) ++facts_[rank].sent;
    }
  }
  for (const auto& [to, message] : outbox) deliver_(to, message);
}

void ControlHub::OnMessage(int rank, ControlMessage message) {
  Deliver([&](Outbox& outbox)
              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { Handle(rank, std::move(message), outbox); });
}

void ControlHub::OnDisconnect(int rank) {
  Deliver([&](Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!left_.contains(rank) && lost_.insert(rank).second) {
      OnLost(rank,
             absl::UnavailableError(absl::StrCat(
                 "rank ", rank, " of ", world_size_,
                 " is lost: it was killed, crashed, or ended without leaving the group")),
             outbox);
    }
    RegroupIfComplete(outbox);
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
  Deliver([&](Outbox& outbox) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (left_.contains(rank) || !lost_.insert(rank).second) return;
    std::string doing;
    if (facts_[rank].has_report)
      absl::StrAppend(&doing, "; at its last heartbeat it ", facts_[rank].report.doing);
    // It may have been suspended only: then it must learn why it receives nothing more.
    outbox.push_back(
        {{rank},
         {.type = ControlMessage::Type::kFailed,
          .rank = rank,
          .sequence = 1,
          .status = WithFailureInfo(
              absl::UnavailableError(absl::StrCat("rank ", rank, " ", to_it,
                                                  ", so the others have declared it lost", doing)),
              {.kind = FailureKind::kRankLost, .ranks = {rank}})}});
    OnLost(rank, absl::UnavailableError(absl::StrCat("rank ", rank, " ", to_others, doing)),
           outbox);
    RegroupIfComplete(outbox);
  });
}

void ControlHub::OnLost(int rank, const absl::Status& why, Outbox& outbox) {
  FailAll(FailureKind::kRankLost, rank, why, outbox);
  if (survivors_.erase(rank) == 0) return;
  outbox.push_back(
      {{survivors_.begin(), survivors_.end()},
       {.type = ControlMessage::Type::kRegrouped,
        .sequence = regrouped_,
        .request = -1,
        .status = WithFailureInfo(why, {.kind = FailureKind::kRankLost, .ranks = {rank}})}});
  survivors_.clear();  // They regroup.
}

HubView ControlHub::View() {
  absl::MutexLock lock(&mutex_);
  HubView view{.status = failure_.status, .ranks = std::vector<HubView::Rank>(world_size_)};
  const std::vector<OpenExchange> exchanges = OpenExchanges();
  std::map<std::pair<std::string, int64_t>, std::vector<int>> awaited_at;  // Exchange.
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

void ControlHub::Handle(int rank, ControlMessage message, Outbox& outbox) {
  using Type = ControlMessage::Type;
  // These continue after a failure.
  if (message.type == Type::kBeat) return HandleBeat(rank, message, outbox);
  if (message.type == Type::kRegroup) {
    // It continues in another group, so this group has ended on it, with or without a message.
    FailAll(
        FailureKind::kRankFailed, rank,
        absl::UnavailableError(absl::StrCat("rank ", rank, " has left the group for a new one")),
        outbox);
    regrouping_[rank] = message.request;
    return RegroupIfComplete(outbox);
  }
  if (message.type == Type::kMissing) return HandleMissing(rank, message, outbox);
  if (message.type == Type::kHaveCome) return HandleHaveCome(rank, message, outbox);
  if (!failure_.status.ok()) {
    // A rank that still sends requests has not received the failure yet.
    if (message.type == Type::kExchange || message.type == Type::kGet)
      outbox.push_back({{rank}, failure_});
    if (message.type == Type::kLeave) left_.insert(rank);
    return RegroupIfComplete(outbox);
  }
  switch (message.type) {
    case Type::kExchange:
      return HandleExchange(rank, std::move(message), outbox);
    case Type::kPut: {
      for (const auto& [waiter, request] : waiting_[message.topic]) {
        outbox.push_back(
            {{waiter}, {.type = Type::kValue, .request = request, .payload = message.payload}});
      }
      waiting_.erase(message.topic);
      values_[std::move(message.topic)] = std::move(message.payload);
      return;
    }
    case Type::kGet: {
      auto value = values_.find(message.topic);
      if (value == values_.end()) {
        waiting_[message.topic].emplace_back(rank, message.request);
      } else {
        outbox.push_back(
            {{rank}, {.type = Type::kValue, .request = message.request, .payload = value->second}});
      }
      return;
    }
    case Type::kSend: {
      std::vector<int> to;
      const auto add = [&](int64_t receiver) {
        if (receiver >= 0 && receiver < world_size_) to.push_back(static_cast<int>(receiver));
      };
      add(message.rank);
      for (const EqualParts& receiver : std::exchange(message.parts, {})) add(receiver.count);
      message.rank = rank;
      outbox.push_back({std::move(to), std::move(message)});
      return;
    }
    case Type::kNotice: {
      if (message.sequence == 1 && !passed_on_.emplace(message.topic, message.payload).second)
        return;
      std::vector<int> to;
      if (message.rank < 0) {
        to = AllRanks();
      } else if (message.rank < world_size_) {
        to = {static_cast<int>(message.rank)};
      }
      std::erase(to, rank);
      message.rank = rank;
      outbox.push_back({std::move(to), std::move(message)});
      return;
    }
    case Type::kFailed:
      return FailAll(absl::IsFailedPrecondition(message.status) ? FailureKind::kDisagreement
                                                                : FailureKind::kRankFailed,
                     rank,
                     message.status.ok() ? absl::UnknownError("no reason given") : message.status,
                     outbox);
    case Type::kLeave:
      return HandleLeave(rank, outbox);
    case Type::kBeat:
    case Type::kMissing:
    case Type::kRegroup:
    case Type::kHaveCome:
      return;  // Done above.
    case Type::kExchanged:
    case Type::kRegrouped:
    case Type::kValue:
      return;  // Sent by the hub only.
  }
}

void ControlHub::HandleBeat(int rank, const ControlMessage& beat, Outbox& outbox) {
  outbox.push_back({{rank}, {.type = ControlMessage::Type::kBeat}});
  come_[rank].clear();
  for (const EqualParts& open : beat.parts) come_[rank].emplace(open.part, open.count);
  if (beat.payload.empty()) return;
  absl::StatusOr<RankStatus> report = RankStatus::Parse(beat.payload);
  if (!report.ok()) return;
  RankFacts& facts = facts_[rank];
  waiting_ranks_ -= IsWaiting(facts);
  facts.has_report = true;
  facts.report = *std::move(report);
  waiting_ranks_ += IsWaiting(facts);
  if (failure_.status.ok()) JudgeGroup(rank, outbox);
}

void ControlHub::JudgeGroup(int reporter, Outbox& outbox) {
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
    FailAll(FailureKind::kDisagreement, judgement.culprit, judgement.status, outbox);
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

void ControlHub::HandleExchange(int rank, ControlMessage message, Outbox& outbox) {
  const ExchangeKey key(message.topic, message.sequence);
  if (message.request > 0)
    fanout_ = static_cast<int>(std::min<int64_t>(message.request, world_size_));
  const bool is_subtree = !shape().is_star();
  const std::vector<int> whose = is_subtree ? shape().SubtreeOf(rank) : std::vector<int>{rank};
  std::vector<EqualParts> parts = std::move(message.parts);
  if (!is_subtree) parts = {{1, std::move(message.payload)}};
  int64_t count = 0;
  for (const EqualParts& run : parts)
    count += run.count < 1 || run.count > world_size_ ? world_size_ + 1 : run.count;
  if (count != static_cast<int64_t>(whose.size()) || shape().ParentOf(rank) != kHub) {
    return FailAll(
        FailureKind::kRankFailed, rank,
        absl::InternalError(absl::StrCat("the message of rank ", rank, " for \"", key.first, "\" #",
                                         key.second, " does not fit a tree of fanout ", fanout_,
                                         " over ", world_size_, " ranks")),
        outbox);
  }
  Pending& pending = pending_[key];
  if (pending.parts.empty()) {
    pending.parts.resize(world_size_);
    pending.arrived.resize(world_size_);
    pending.missing = world_size_;
  }
  if (pending.arrived[rank]) return;
  auto of = whose.begin();
  for (EqualParts& run : parts) {
    for (int64_t i = 0; i < run.count; ++i, ++of) {
      pending.arrived[*of] = true;
      pending.parts[*of] = run.part;
    }
  }
  pending.missing -= static_cast<int>(whose.size());
  if (pending.missing == 0) {
    ControlMessage answer{
        .type = ControlMessage::Type::kExchanged, .sequence = key.second, .topic = key.first};
    for (std::string& part : pending.parts) AppendParts(answer.parts, {1, std::move(part)});
    pending_.erase(key);
    if (absl::Status size = CheckSize(answer); !size.ok())
      return FailAll(FailureKind::kRankFailed, /*culprit=*/-1, std::move(size), outbox);
    outbox.push_back({shape().ChildrenOf(kHub), std::move(answer)});
    for (int to = fanout_; to < world_size_; ++to)
      ++facts_[to].sent;  // Other ranks pass it on to them.
    return;
  }
  for (int gone : left_) {
    // The part of a rank further down the tree may still arrive; its parent checks that.
    if (pending.arrived[gone] || shape().ParentOf(gone) != kHub) continue;
    return FailLeft(gone, {rank}, key, outbox);
  }
}

void ControlHub::HandleLeave(int rank, Outbox& outbox) {
  left_.insert(rank);
  waiting_ranks_ -= IsWaiting(facts_[rank]);
  facts_[rank].has_left = true;
  if (shape().ParentOf(rank) != kHub) return;
  for (const auto& [key, pending] : pending_) {
    if (pending.arrived[rank]) continue;
    std::vector<int> waiting;
    for (int r = 0; r < world_size_; ++r) {
      if (pending.arrived[r]) waiting.push_back(r);
    }
    return FailLeft(rank, waiting, key, outbox);
  }
}

void ControlHub::FailLeft(int gone, const std::vector<int>& waiting, const ExchangeKey& key,
                          Outbox& outbox) {
  const auto& [topic, sequence] = key;
  FailAll(FailureKind::kDisagreement, gone,
          WithFailureInfo(absl::FailedPreconditionError(absl::StrCat(
                              "rank ", gone, " has left the group while ", RankList(waiting),
                              waiting.size() == 1 ? " is" : " are", " at \"", topic, "\" #",
                              sequence, ": the ranks disagree")),
                          {.kind = FailureKind::kDisagreement,
                           .ranks = {gone},
                           .operation = topic,
                           .position = sequence}),
          outbox);
}

std::vector<OpenExchange> ControlHub::OpenExchanges() const {
  std::map<ExchangeKey, std::vector<bool>> arrived;
  for (const auto& [key, pending] : pending_) arrived[key] = pending.arrived;
  for (int rank = 0; rank < world_size_; ++rank) {
    for (const auto& key : come_[rank]) {
      std::vector<bool>& ranks = arrived[key];
      ranks.resize(world_size_);
      ranks[rank] = true;
    }
  }
  std::vector<OpenExchange> exchanges;
  for (auto& [key, ranks] : arrived) {
    exchanges.push_back({.topic = key.first, .sequence = key.second, .arrived = std::move(ranks)});
  }
  return exchanges;
}

void ControlHub::HandleMissing(int rank, const ControlMessage& message, Outbox& outbox) {
  absl::StatusOr<RankStatus> asked = RankStatus::Parse(message.payload);
  const Wait wait = asked.ok() && !asked->waits.empty() ? std::move(asked->waits[0]) : Wait();
  if (message.rank > 0) fanout_ = std::min(message.rank, world_size_);
  const auto reply = [&](absl::Status status) {
    outbox.push_back({{rank},
                      {.type = ControlMessage::Type::kValue,
                       .request = message.request,
                       .status = std::move(status)}});
  };
  const bool is_poll =
      wait.kind == Wait::Kind::kExchange && wait.topic != kRegroupTopic && !shape().is_star();
  if (!is_poll) {
    return reply(NameMissing(wait.kind == Wait::Kind::kExchange
                                 ? MissingFromExchange(wait.topic, wait.sequence)
                                 : MissingFrom(wait, rank, facts_)));
  }
  const ExchangeKey key(wait.topic, wait.sequence);
  const auto [found, is_new] = polls_.try_emplace(key);
  Poll& poll = found->second;
  if (!is_new && message.sequence == 1) {
    poll.askers.erase(rank);
    poll.next_askers.erase(rank);
    return reply(ResultOf(poll));
  }
  poll.next_askers[rank] = message.request;
  if (is_new || SteadyNow() - poll.start >= kPollPatience) StartPoll(key, poll, outbox);
}

void ControlHub::StartPoll(const ExchangeKey& key, Poll& poll, Outbox& outbox) {
  poll.next_askers.merge(poll.askers);
  poll = {.id = next_poll_++,
          .start = SteadyNow(),
          .askers = std::move(poll.next_askers),
          .answered = std::vector<bool>(world_size_),
          .has_come = std::vector<bool>(world_size_),
          .missing_answers = world_size_};
  outbox.push_back({AllRanks(),
                    {.type = ControlMessage::Type::kHaveCome,
                     .sequence = key.second,
                     .request = poll.id,
                     .topic = key.first}});
}

void ControlHub::HandleHaveCome(int rank, const ControlMessage& message, Outbox& outbox) {
  const auto found = std::ranges::find_if(
      polls_, [&](const auto& poll) { return poll.second.id == message.request; });
  if (found == polls_.end()) return;
  auto& [key, poll] = *found;
  poll.missing_answers -= !poll.answered[rank];
  poll.answered[rank] = true;
  poll.has_come[rank] = message.sequence == 1;
  if (!IsComplete(poll)) return;
  const absl::Status result = ResultOf(poll);
  for (const auto& [asker, request] : std::exchange(poll.askers, {})) {
    outbox.push_back(
        {{asker}, {.type = ControlMessage::Type::kValue, .request = request, .status = result}});
  }
  if (poll.next_askers.empty()) {
    polls_.erase(found);
  } else {
    StartPoll(key, poll, outbox);
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
    if (!poll.has_come[rank]) missing.push_back(rank);
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

std::vector<int> ControlHub::MissingFromExchange(const std::string& topic, int64_t sequence) const {
  std::vector<int> missing;
  if (topic == kRegroupTopic) {
    for (int r = 0; r < world_size_; ++r) {
      if (!regrouping_.contains(r) && !left_.contains(r) && !lost_.contains(r))
        missing.push_back(r);
    }
    return missing;
  }
  auto pending = pending_.find({topic, sequence});
  for (int r = 0; pending != pending_.end() && r < world_size_; ++r) {
    if (!pending->second.arrived[r]) missing.push_back(r);
  }
  return missing;
}

void ControlHub::RegroupIfComplete(Outbox& outbox) {
  // The sum may count a rank twice; it only saves most of the searches.
  const size_t heard_of = regrouping_.size() + left_.size() + lost_.size();
  if (regrouping_.empty() || heard_of < static_cast<size_t>(world_size_) ||
      !MissingFromExchange(kRegroupTopic, 0).empty())
    return;
  ++regrouped_;
  survivors_.clear();
  for (const auto& [rank, request] : regrouping_) {
    if (!lost_.contains(rank)) survivors_.insert(rank);
  }
  const std::string list = absl::StrJoin(survivors_, ",");
  for (const auto& [rank, request] : regrouping_) {
    outbox.push_back({{rank},
                      {.type = ControlMessage::Type::kRegrouped,
                       .sequence = regrouped_,
                       .request = request,
                       .payload = list}});
  }
  regrouping_.clear();
}

void ControlHub::FailAll(FailureKind kind, int culprit, absl::Status why, Outbox& outbox) {
  if (!failure_.status.ok()) return;
  if (!FailureInfoOf(why).has_value()) {
    FailureInfo info{.kind = kind};
    if (culprit >= 0) info.ranks = {culprit};
    why = WithFailureInfo(std::move(why), info);
  }
  failure_ = {.type = ControlMessage::Type::kFailed, .rank = culprit, .status = std::move(why)};
  std::vector<int> to = AllRanks();
  std::erase_if(to, [&](int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return left_.contains(rank) || lost_.contains(rank);
  });
  outbox.push_back({std::move(to), failure_});
}

}  // namespace evenkeel::internal
