// The watch of a communicator over its group: the work of the watchdog's thread, this rank's
// report, warnings of long waits, and the flight record at the end.

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/control/watchdog.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/flight_dump.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
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

std::string Texts(const std::vector<internal::Waits::Seen>& waits) {
  std::vector<std::string> texts;
  for (const internal::Waits::Seen& seen : waits) {
    if (std::find(texts.begin(), texts.end(), seen.wait.text) == texts.end())
      texts.push_back(seen.wait.text);
  }
  return absl::StrJoin(texts, ", and in ");
}

internal::ChannelStatus Describe(const std::string& name, uint64_t id, int64_t position,
                                 const std::vector<FlightEntry>& open,
                                 const std::vector<FlightEntry>& last) {
  std::map<int64_t, const FlightEntry*> reported;  // By sequence.
  for (const FlightEntry& entry : open) {
    if (entry.channel == id && !IsPair(entry.what.kind) && reported.size() < kReportedOpen)
      reported[entry.sequence] = &entry;
  }
  for (const FlightEntry& entry : last) reported[entry.sequence] = &entry;
  internal::ChannelStatus channel{.id = id, .name = name, .position = position};
  for (const auto& [sequence, entry] : reported) {
    channel.recent.push_back({.sequence = sequence,
                              .hash = HashOf(entry->what),
                              .text = ToString(entry->what),
                              .is_open = entry->is_open()});
    channel.position = std::max(channel.position, sequence + 1);
  }
  return channel;
}

// Returns `name` with characters that are safe in a file's name.
std::string Harmless(std::string name) {
  for (char& c : name) {
    const bool is_good = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
                         c == '_' || c == '-' || c == '+';
    if (!is_good) c = '_';
  }
  return name;
}

}  // namespace

struct Communicator::FlightMoment {
  FlightHeader header;
  std::vector<FlightEntry> entries;
};

// Waits and deadlines -----------------------------------------------------------------------------

internal::Wait Communicator::WaitFor(const Channel& channel, const FlightEntry& entry) const {
  const Collective& what = entry.what;
  const internal::GroupExtension* extension = extension_in_use_;
  const bool is_exhausted = extension != nullptr && extension->is_exhausted();
  return {
      .kind = IsPair(what.kind) ? internal::Wait::Kind::kPair : internal::Wait::Kind::kCollective,
      .channel = entry.channel,
      .sequence = entry.sequence,
      .peer = IsPair(what.kind) ? what.root : -1,
      .is_send = what.kind == CollectiveKind::kSend,
      .text = absl::StrCat(is_exhausted ? internal::kExhausted : "", "#", entry.sequence, " ",
                           ToString(what), " on channel \"", channel.name_, "\""),
      .tag = what.tag};
}

void Communicator::OnOperationDeadline(const Channel& channel, int64_t number) {
  const std::optional<FlightEntry> entry = flight_.Get(number);
  if (!entry.has_value() || !entry->is_open()) return;
  OnDeadline(DeadlineStatus(WaitFor(channel, *entry), entry->deadline - entry->issued));
}

absl::Status Communicator::DeadlineStatus(const internal::Wait& wait, absl::Duration waited) {
  const ControlChannel::Missing missing = control_->WhoIsMissing(wait);
  return internal::MissedDeadline(
      absl::StrCat("rank ", rank_, " waited ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " in ",
                   wait.text, missing.text.empty() ? "" : " for ", missing.text),
      missing.ranks, wait.text, wait.sequence);
}

// The watchdog ------------------------------------------------------------------------------------

absl::Duration Communicator::LongestSilence() const {
  // Counted from the overdue beat. 0 disables the check.
  if (options_.watch.silence <= absl::ZeroDuration()) return absl::ZeroDuration();
  return options_.watch.silence + std::max(options_.watch.beat, kShortestBeat);
}

absl::Duration Communicator::Look() {
  const absl::Duration beat = std::max(options_.watch.beat, kShortestBeat);
  const absl::Duration silence = LongestSilence();
  const absl::Duration until_report = ReportProvisional(SteadyNow());
  bool has_finalized = false, has_ended = false;
  {
    absl::MutexLock lock(&mutex_);
    has_finalized = has_finalized_;
    has_ended = has_ended_;
  }
  if (has_finalized) return absl::InfiniteDuration();
  if (has_ended) {
    // This rank stays available for a new group, unless it is cut off.
    control_->Beat("", silence);
    CheckHub();
    if (until_report == absl::InfiniteDuration()) WriteKeptFlight();
    return std::min(beat, until_report);
  }
  bool everyone_waits = false;
  if (verify_level() == VerifyLevel::kOff) {
    control_->Beat("", silence);
  } else {
    const internal::RankStatus mine = RankStatusNow();
    everyone_waits = mine.everyone_waits;
    control_->Beat(mine.Serialize(), silence);
  }
  CheckHub();
  CheckDeadlines();
  WarnOfStalls();
  return everyone_waits ? beat / 2 : beat;
}

void Communicator::CheckHub() {
  if (options_.watch.silence <= absl::ZeroDuration()) return;
  const absl::Duration silence = control_->link().Silence();
  const bool has_reported = std::exchange(has_reported_silence_, silence > options_.watch.silence);
  if (has_reported || !has_reported_silence_) return;
  const absl::Status why = WithFailureInfo(
      absl::UnavailableError(
          absl::StrCat("rank ", rank_, " has received nothing for ", Short(silence),
                       " from the job's store: its process (rank 0, or the launcher) hangs, or the "
                       "network is down")),
      control_->HubLost());
  // A hub that recovers, or whose messages get lost on their way here, informs the other ranks.
  Report(why);
  Fail(why);
}

void Communicator::CheckDeadlines() {
  const absl::Time now = SteadyNow();
  for (const FlightEntry& entry : flight_.OpenEntries()) {
    if (entry.deadline > now) continue;
    for (const Channel* channel : channels()) {
      if (channel->id_ == entry.channel) return OnOperationDeadline(*channel, entry.number);
    }
  }
}

void Communicator::WarnOfStalls() {
  const absl::Time now = SteadyNow();
  std::set<int64_t> still;
  for (const internal::Waits::Seen& seen : waits_->Now().waits) {
    if (now - seen.since < options_.watch.stall_warning) continue;
    still.insert(seen.id);
    if (warned_.contains(seen.id)) continue;
    const std::string missing = control_->WhoIsMissing(seen.wait).text;
    internal::Warn(options_.watch.warn,
                   absl::StrCat("rank ", rank_, " has waited ", Short(now - seen.since), " in ",
                                seen.wait.text, missing.empty() ? "" : " for ", missing));
  }
  warned_ = std::move(still);
}

internal::RankStatus Communicator::RankStatusNow() const {
  internal::RankStatus mine;
  mine.received = control_->received();  // First: the rest may lack messages that arrive later.
  const internal::Waits::Snapshot waits = waits_->Now();
  mine.everyone_waits = waits.everyone_waits;
  for (const internal::Waits::Seen& seen : waits.waits) {
    mine.waits.push_back(seen.wait);
    const int64_t ms = (SteadyNow() - seen.since) / absl::Milliseconds(1);
    if (ms <= mine.waited_ms) continue;
    mine.waited_ms = ms;
    std::swap(mine.waits.front(), mine.waits.back());
  }
  if (const internal::GroupExtension* extension = extension_in_use_; extension != nullptr)
    mine.details = extension->StatusJson();

  const std::vector<FlightEntry> open = flight_.OpenEntries();
  for (const Channel* channel : channels()) {
    int64_t position = 0;
    {
      absl::MutexLock lock(&channel->mutex_);
      position = channel->position_;
      for (const auto& [lane, count] : channel->pair_positions_) {
        const auto& [peer, kind, tag] = lane;
        if (peer < 0) continue;  // No other rank waits for a receive from any.
        if (mine.lacks_lanes = mine.lanes.size() >= kReportedLanes; mine.lacks_lanes) break;
        mine.lanes.push_back({.channel = channel->id_,
                              .peer = peer,
                              .is_send = kind == CollectiveKind::kSend,
                              .position = count,
                              .tag = tag});
      }
    }
    if (position == 0) continue;
    mine.channels.push_back(Describe(channel->name_, channel->id_, position, open,
                                     flight_.Recent(channel->id_, kReportedLast)));
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

  if (!waits.waits.empty()) {
    mine.doing = absl::StrCat("waits in ", Texts(waits.waits));
  } else if (const std::optional<FlightEntry> last = flight_.Get(flight_.issued() - 1);
             last.has_value()) {
    mine.doing = absl::StrCat("runs, ", Short(SteadyNow() - last->issued), " after #",
                              last->sequence, " ", ToString(last->what));
  } else {
    mine.doing = "runs, and has issued nothing";
  }
  return mine;
}

// The flight record -------------------------------------------------------------------------------

Communicator::FlightMoment Communicator::FlightNow() const {
  FlightMoment moment;
  FlightHeader& header = moment.header;
  header.group = group_;
  header.rank = rank_;
  header.world_size = world_size_;
  header.backend = std::string(backend_name());
  header.status = status();
  for (const internal::Waits::Seen& seen : waits_->Now().waits)
    header.waits.push_back(seen.wait.text);
  for (const Channel* channel : channels()) {
    header.channels.push_back(
        {.id = channel->id_, .name = channel->name_, .position = channel->position()});
  }
  moment.entries = flight_.Entries();
  // Readers compare the records of several hosts, and those with logs: in the time of day.
  header.time = absl::Now();
  const absl::Duration ahead = header.time - SteadyNow();
  for (FlightEntry& entry : moment.entries) {
    entry.issued += ahead;
    entry.ended += ahead;
    entry.deadline += ahead;
  }
  return moment;
}

void Communicator::KeepFlight() {
  {
    absl::MutexLock lock(&mutex_);
    if (has_finalized_ || kept_flight_ != nullptr) return;
  }
  auto moment = std::make_shared<const FlightMoment>(FlightNow());
  absl::MutexLock lock(&mutex_);
  if (kept_flight_ == nullptr) kept_flight_ = std::move(moment);
}

void Communicator::WriteKeptFlight() {
  if (options_.flight.folder.empty()) return;
  {
    absl::MutexLock lock(&mutex_);
    if (kept_flight_ == nullptr || flight_is_written_) return;
    flight_is_written_ = true;
  }
  std::error_code ignored;  // A failed write reports the reason.
  std::filesystem::create_directories(options_.flight.folder, ignored);
  const std::string path = FlightPath(options_.flight.folder);
  if (absl::Status status = DumpFlight(path); !status.ok()) {
    internal::Warn(nullptr, absl::StrCat("rank ", rank_, ": ", status.message()));
  }
}

std::string Communicator::FlightJson() const {
  std::shared_ptr<const FlightMoment> moment;
  {
    absl::MutexLock lock(&mutex_);
    moment = kept_flight_;
  }
  if (moment == nullptr) moment = std::make_shared<const FlightMoment>(FlightNow());
  FlightHeader header = moment->header;
  header.status = status();  // Its reason may have come since.
  return evenkeel::FlightJson(header, moment->entries);
}

absl::Status Communicator::DumpFlight(const std::string& path) const {
  return WriteFlight(path, FlightJson());
}

std::string Communicator::FlightPath(absl::string_view folder) const {
  return absl::StrCat(folder, "/", Harmless(group_), ".rank", rank_, ".json");
}

}  // namespace evenkeel
