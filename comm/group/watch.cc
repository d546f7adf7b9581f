#include "evenkeel/comm/group/watch.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/control/positions.h"
#include "evenkeel/comm/failure_info.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kShortestBeat = absl::Milliseconds(10);

// The collectives of a channel in a report: the oldest open ones, which this rank waits for, and
// the last ones, which ranks behind it may have reached.
constexpr size_t kReportedOpen = 4, kReportedLast = 4;
// The counters of messages in a report: some 30 KB.
constexpr size_t kReportedLanes = 1000;

// "12s", "150ms", "0ms".
std::string Short(absl::Duration duration) {
  if (duration < absl::Milliseconds(1)) return "0ms";
  return absl::FormatDuration(absl::Trunc(
      duration, duration < absl::Seconds(1) ? absl::Milliseconds(1) : absl::Seconds(1)));
}

ChannelStatus Describe(const std::string& name, uint64_t id, int64_t position,
                       const std::vector<FlightEntry>& open, const std::vector<FlightEntry>& last) {
  std::map<int64_t, const FlightEntry*> reported;  // By sequence.
  for (const FlightEntry& entry : open) {
    if (entry.channel == id && !IsPair(entry.what.kind) && reported.size() < kReportedOpen)
      reported[entry.sequence] = &entry;
  }
  for (const FlightEntry& entry : last) reported[entry.sequence] = &entry;
  ChannelStatus channel{.id = id, .name = name, .position = position};
  for (const auto& [sequence, entry] : reported) {
    channel.recent.push_back({.sequence = sequence,
                              .hash = HashOf(entry->what),
                              .text = ToString(entry->what),
                              .is_open = entry->is_open()});
    channel.position = std::max(channel.position, sequence + 1);
  }
  return channel;
}

}  // namespace

// Waits and deadlines -----------------------------------------------------------------------------

Wait Watch::WaitFor(const ChannelRecord& channel, int64_t number) const {
  const std::optional<FlightEntry> entry = flight_.Get(number);
  return entry.has_value() ? WaitFor(channel, *entry) : Wait{};
}

Wait Watch::WaitFor(const ChannelRecord& channel, const FlightEntry& entry) const {
  const Collective& what = entry.what;
  const GroupExtension* extension = extension_.in_use();
  const bool is_exhausted = extension != nullptr && extension->is_exhausted();
  return {.kind = IsPair(what.kind) ? Wait::Kind::kPair : Wait::Kind::kCollective,
          .channel = entry.channel,
          .sequence = entry.sequence,
          .peer = IsPair(what.kind) ? what.root : -1,
          .is_send = what.kind == CollectiveKind::kSend,
          .text = absl::StrCat(is_exhausted ? kExhausted : "", "#", entry.sequence, " ",
                               ToString(what), " on channel \"", channel.name, "\""),
          .tag = what.tag};
}

void Watch::OnOperationDeadline(const ChannelRecord& channel, int64_t number) {
  const std::optional<FlightEntry> entry = flight_.Get(number);
  if (!entry.has_value() || !entry->is_open()) return;
  end_.OnDeadline(WaitFor(channel, *entry), entry->deadline - entry->issued);
}

// Ranks that leave -------------------------------------------------------------------------------

void Watch::AnnounceEnd(const std::string& positions) {
  // Ranks at the same positions send equal messages, of which one is enough.
  control_.NotifyOnce(kFinalizes, positions);
}

void Watch::OnAnnouncedEnd(int peer, absl::string_view text) {
  std::map<std::string, int64_t> theirs;
  for (auto& [name, at] : ParsePositions(text)) theirs[name] = at.position;
  {
    absl::MutexLock lock(&mutex_);
    left_[peer] = theirs;
  }
  any_left_ = true;
  for (const auto& [name, mine] : ParsePositions(Positions())) {
    if (mine.position == 0) continue;
    if (!CheckAgainstLeft(name, mine.position - 1, mine.last).ok()) return;
  }
}

absl::Status Watch::CheckAgainstLeft(absl::string_view channel, int64_t position,
                                     absl::string_view next) {
  const int rank = control_.rank();
  absl::Status contradiction;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [peer, positions] : left_) {
      auto at = positions.find(std::string(channel));
      const int64_t theirs = at == positions.end() ? 0 : at->second;
      if (position < theirs) continue;
      const absl::string_view optimizer = OptimizerIn(next, channel);
      const std::string advice = channel == kStepsChannel ? kJoinAdvice
                                 : optimizer.empty()      ? ""
                                                          : OmittedStep({peer}, optimizer, {rank});
      contradiction = WithFailureInfo(
          absl::FailedPreconditionError(absl::StrCat(
              "rank ", rank, " is at #", position, next.empty() ? "" : " ", next, " on channel \"",
              channel, "\"; rank ", peer, " has left the group after ", theirs,
              " there: the ranks disagree", advice.empty() ? "" : absl::StrCat(" (", advice, ")"))),
          {.kind = FailureKind::kDisagreement,
           .ranks = {peer},
           .operation = std::string(next),
           .position = position});
      break;
    }
  }
  if (!contradiction.ok()) end_.OnBackendFailure(contradiction);
  return contradiction;
}

// The watchdog ------------------------------------------------------------------------------------

absl::Duration Watch::LongestSilence() const {
  // Counted from the overdue beat. 0 disables the check.
  if (options_.silence <= absl::ZeroDuration()) return absl::ZeroDuration();
  return options_.silence + std::max(options_.beat, kShortestBeat);
}

absl::Duration Watch::Beat(ControlChannel& control) const {
  control.Beat("", LongestSilence());
  return std::max(options_.beat, kShortestBeat);
}

absl::Duration Watch::Look() {
  const absl::Duration beat = std::max(options_.beat, kShortestBeat);
  const absl::Duration silence = LongestSilence();
  const absl::Duration until_report = end_.ReportProvisional(SteadyNow());
  const GroupEnd::State state = end_.state();
  if (state == GroupEnd::State::kLeft) return absl::InfiniteDuration();
  if (state == GroupEnd::State::kEnded) {
    // This rank stays available for a new group, unless it is cut off.
    control_.Beat("", silence);
    CheckHub();
    if (until_report == absl::InfiniteDuration()) kept_flight_.Write(end_.status());
    return std::min(beat, until_report);
  }
  bool everyone_waits = false;
  if (agreements_.level() == VerifyLevel::kOff) {
    control_.Beat("", silence);
  } else {
    const RankStatus mine = RankStatusNow();
    everyone_waits = mine.everyone_waits;
    control_.Beat(mine.Serialize(), silence);
  }
  CheckHub();
  CheckDeadlines();
  WarnOfStalls();
  return everyone_waits ? beat / 2 : beat;
}

void Watch::CheckHub() {
  if (options_.silence <= absl::ZeroDuration()) return;
  const absl::Duration silence = control_.link().Silence();
  if (silence <= options_.silence) reported_silence_ = absl::ZeroDuration();
  // Reports again after as long: a hub that did not run for a while judges no report then.
  if (silence <= reported_silence_ + options_.silence) return;
  reported_silence_ = silence;
  const absl::Status why = WithFailureInfo(
      absl::UnavailableError(
          absl::StrCat("rank ", control_.rank(), " has received nothing for ", Short(silence),
                       " from the job's store: its process (rank 0, or the launcher) hangs, or the "
                       "network is down")),
      control_.HubLost());
  // A hub that recovers, or whose messages get lost on their way here, informs the other ranks.
  end_.Report(why);
  end_.Fail(why);
}

void Watch::CheckDeadlines() {
  const absl::Time now = SteadyNow();
  for (const FlightEntry& entry : flight_.OpenEntries()) {
    if (entry.deadline > now) continue;
    for (const ChannelRecord* channel : channels_.all()) {
      if (channel->id == entry.channel) return OnOperationDeadline(*channel, entry.number);
    }
  }
}

void Watch::WarnOfStalls() {
  const absl::Time now = SteadyNow();
  std::set<int64_t> still;
  for (const Waits::Seen& seen : control_.waits()->Now().waits) {
    if (now - seen.since < options_.stall_warning) continue;
    still.insert(seen.id);
    if (warned_.contains(seen.id)) continue;
    const std::string missing = control_.WhoIsMissing(seen.wait).text;
    Warn(options_.warn,
         absl::StrCat("rank ", control_.rank(), " has waited ", Short(now - seen.since), " in ",
                      seen.wait.text, missing.empty() ? "" : " for ", missing));
  }
  warned_ = std::move(still);
}

RankStatus Watch::RankStatusNow() const {
  RankStatus mine;
  mine.received = control_.received();  // First: the rest may lack messages that arrive later.
  const Waits::Snapshot waits = control_.waits()->Now();
  mine.everyone_waits = waits.everyone_waits;
  for (const Waits::Seen& seen : waits.waits) mine.waits.push_back(seen.wait);
  if (!waits.waits.empty())  // The first one began first.
    mine.waited_ms = (SteadyNow() - waits.waits.front().since) / absl::Milliseconds(1);
  if (const GroupExtension* extension = extension_.in_use(); extension != nullptr)
    mine.details = extension->StatusJson();

  const std::vector<FlightEntry> open = flight_.OpenEntries();
  for (const ChannelRecord* channel : channels_.all()) {
    int64_t position = 0;
    {
      absl::MutexLock lock(&channel->mutex);
      position = channel->position;
      for (const auto& [lane, count] : channel->pair_positions) {
        const auto& [peer, kind, tag] = lane;
        if (peer < 0) continue;  // No other rank waits for a receive from any.
        if (mine.lacks_lanes = mine.lanes.size() >= kReportedLanes; mine.lacks_lanes) break;
        mine.lanes.push_back({.channel = channel->id,
                              .peer = peer,
                              .is_send = kind == CollectiveKind::kSend,
                              .position = count,
                              .tag = tag});
      }
    }
    if (position == 0) continue;
    mine.channels.push_back(Describe(channel->name, channel->id, position, open,
                                     flight_.Recent(channel->id, kReportedLast)));
  }
  std::set<std::tuple<uint64_t, int, CollectiveKind, int64_t>> lanes;
  for (const FlightEntry& entry : open) {
    if (!IsPair(entry.what.kind) ||
        !lanes.emplace(entry.channel, entry.what.root, entry.what.kind, entry.what.tag).second)
      continue;
    mine.open_pairs.push_back({.channel = entry.channel,
                               .sequence = entry.sequence,
                               .peer = entry.what.root,
                               .is_send = entry.what.kind == CollectiveKind::kSend,
                               .tag = entry.what.tag});
  }

  if (!mine.waits.empty()) {
    mine.doing = absl::StrCat("waits in ", WaitsText(mine.waits));
  } else if (const std::optional<FlightEntry> last = flight_.Get(flight_.issued() - 1);
             last.has_value()) {
    mine.doing = absl::StrCat("runs, ", Short(SteadyNow() - last->issued), " after #",
                              last->sequence, " ", ToString(last->what));
  } else {
    mine.doing = "runs, and has issued nothing";
  }
  return mine;
}

}  // namespace evenkeel::internal
