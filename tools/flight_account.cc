#include "evenkeel/tools/flight_account.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::ordered_json;
using Entry = FlightDump::Entry;
using State = FlightDump::State;

constexpr int64_t kVersion = 1;
constexpr int kMaxDepth = 16;  // More than a record has: a newer evenkeel may write more.

// ---- Reading ----

// A value as a message shows it: on one line, and not all of a long one.
std::string Shown(const Json& value) {
  constexpr size_t kMaxShown = 60;
  if (value.is_array()) return absl::StrCat("a list of ", value.size());
  if (value.is_object()) return "an object";
  const std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  return text.size() > kMaxShown ? absl::StrCat(text.substr(0, kMaxShown), "...") : text;
}

// Reads the members of an object and remembers the first that is not as it should be. Members that
// nobody asks for do no harm: a newer evenkeel may write more.
class Members {
 public:
  Members(const Json& object, std::string where, absl::Status* error)
      : object_(object), where_(std::move(where)), error_(error) {
    if (!object.is_object()) Complain(where_, object, "an object");
  }

  std::string Text(const char* name) {
    const Json* value = Find(name);
    if (value == nullptr) return "";
    if (!value->is_string()) return Complain(Path(name), *value, "a text"), "";
    return value->get<std::string>();
  }
  int64_t Number(const char* name, int64_t least,
                 int64_t most = std::numeric_limits<int64_t>::max()) {
    const Json* value = Find(name);
    return value == nullptr ? least : NumberOf(*value, Path(name), least, most);
  }
  std::optional<int64_t> NumberOrNull(const char* name, int64_t least) {
    const Json* value = Find(name);
    if (value == nullptr || value->is_null()) return std::nullopt;
    return NumberOf(*value, Path(name), least, std::numeric_limits<int64_t>::max());
  }
  const Json& List(const char* name) {
    static const Json kEmpty = Json::array();
    const Json* value = Find(name);
    if (value != nullptr && !value->is_array()) Complain(Path(name), *value, "a list");
    return value != nullptr && value->is_array() ? *value : kEmpty;
  }
  const Json& Object(const char* name) {
    static const Json kEmpty = Json::object();
    const Json* value = Find(name);
    return value == nullptr ? kEmpty : *value;
  }

  std::string Path(absl::string_view name) const {
    return absl::StrCat(where_, where_.empty() ? "" : ".", name);
  }
  void Complain(absl::string_view what, const Json& value, absl::string_view wanted) {
    if (!error_->ok()) return;
    *error_ = absl::InvalidArgumentError(
        absl::StrCat(what.empty() ? "the file" : what, " is ", Shown(value), ", not ", wanted));
  }

 private:
  const Json* Find(const char* name) {
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(name);
    if (found != object_.end()) return &*found;
    if (error_->ok())
      *error_ =
          absl::InvalidArgumentError(absl::StrCat("the field \"", Path(name), "\" is missing"));
    return nullptr;
  }
  int64_t NumberOf(const Json& value, absl::string_view path, int64_t least, int64_t most) {
    const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= uint64_t{INT64_MAX}
                                                 : value.is_number_integer();
    if (fits && value.get<int64_t>() >= least && value.get<int64_t>() <= most)
      return value.get<int64_t>();
    Complain(path, value, absl::StrCat("a whole number from ", least, " to ", most));
    return least;
  }

  const Json& object_;
  const std::string where_;
  absl::Status* const error_;
};

State ReadState(Members& members, const Json& entry) {
  const std::string state = members.Text("state");
  if (state == "done") return State::kDone;
  if (state == "failed") return State::kFailed;
  if (state != "open" && entry.is_object() && entry.contains("state")) {
    members.Complain(members.Path("state"), entry["state"], "open, done or failed");
  }
  return State::kOpen;
}

Entry ReadEntry(const Json& json, std::string where, absl::Status* error) {
  Members members(json, std::move(where), error);
  Entry entry{.number = members.Number("number", 0),
              .channel = members.Text("channel"),
              .sequence = members.Number("sequence", 0),
              .kind = members.Text("kind"),
              .text = members.Text("text"),
              .hash = members.Text("hash"),
              .code = members.Text("code"),
              .issued_us = members.Number("issued_us", 0),
              .ended_us = members.NumberOrNull("ended_us", 0)};
  entry.state = ReadState(members, json);
  if (error->ok() && entry.state != State::kOpen && !entry.ended_us.has_value()) {
    members.Complain(members.Path("ended_us"), Json(), "the time at which it ended");
  }
  return entry;
}

// ---- Comparing ----

const FlightDump::Channel* FindChannel(const FlightDump& dump, const std::string& id) {
  const auto found = std::find_if(dump.channels.begin(), dump.channels.end(),
                                  [&](const auto& c) { return c.id == id; });
  return found == dump.channels.end() ? nullptr : &*found;
}

double SecondsBetween(int64_t from_us, int64_t to_us) {
  return (static_cast<double>(to_us) - static_cast<double>(from_us)) * 1e-6;
}

std::string Seconds(double seconds) { return absl::StrFormat("%.3g s", seconds); }

std::string StateText(const Entry& entry, const FlightDump& dump) {
  if (entry.state == State::kDone) return "done";
  if (entry.state == State::kFailed) return absl::StrCat("failed: ", entry.code);
  return absl::StrCat("open for ",
                      Seconds(SecondsBetween(entry.issued_us, absl::ToUnixMicros(dump.time))));
}

// The collectives of a channel by rank and place.
using Grid = std::map<int, std::map<int64_t, const Entry*>>;

Grid GridOf(const std::map<int, FlightDump>& dumps, const std::string& channel) {
  Grid grid;
  for (const auto& [rank, dump] : dumps) {
    std::map<int64_t, const Entry*>& row = grid[rank];
    for (const Entry& entry : dump.entries) {
      if (entry.channel == channel && !entry.is_message()) row[entry.sequence] = &entry;
    }
  }
  return grid;
}

// The ranks at one place of a channel: by what they have there; who does not know any more is in
// none.
std::vector<FlightSide> SidesAt(int64_t sequence, const Grid& grid, const GroupAccount& account,
                                const std::string& channel) {
  std::map<std::pair<std::string, std::string>, FlightSide> by_collective;  // Hash and text.
  FlightSide absent;
  int64_t first_us = std::numeric_limits<int64_t>::max();
  for (const auto& [rank, row] : grid) {
    const auto here = row.find(sequence);
    if (here != row.end()) first_us = std::min(first_us, here->second->issued_us);
  }
  for (const auto& [rank, row] : grid) {
    const FlightDump& dump = account.dumps.at(rank);
    const auto here = row.find(sequence);
    if (here == row.end()) {
      const FlightDump::Channel* known = FindChannel(dump, channel);
      if (known == nullptr || known->position <= sequence) absent.ranks.push_back(rank);
      continue;
    }
    const Entry& entry = *here->second;
    FlightSide& side = by_collective[{entry.hash, entry.text}];
    if (side.ranks.empty()) side = {.text = entry.text, .state = StateText(entry, dump)};
    side.ranks.push_back(rank);
    side.issued_after = std::max(side.issued_after, SecondsBetween(first_us, entry.issued_us));
  }
  std::vector<FlightSide> sides;
  for (auto& [collective, side] : by_collective) sides.push_back(std::move(side));
  std::sort(sides.begin(), sides.end(),
            [](const auto& a, const auto& b) { return a.ranks[0] < b.ranks[0]; });
  if (!absent.ranks.empty()) sides.push_back(std::move(absent));
  return sides;
}

void FindDifference(const GroupAccount& account, ChannelAccount& channel) {
  const Grid grid = GridOf(account.dumps, channel.id);
  std::set<int64_t> sequences;
  for (const auto& [rank, row] : grid) {
    for (const auto& [sequence, entry] : row) sequences.insert(sequence);
  }
  for (const int64_t sequence : sequences) {
    std::vector<FlightSide> sides = SidesAt(sequence, grid, account, channel.id);
    if (sides.size() < 2) continue;
    channel.differs_at = sequence;
    channel.is_contradiction = !sides[1].text.empty();
    channel.sides = std::move(sides);
    return;
  }
}

ChannelAccount AccountFor(const GroupAccount& group, const std::string& id,
                          const std::string& name) {
  ChannelAccount account{.id = id, .name = name};
  for (const auto& [rank, dump] : group.dumps) {
    ChannelAccount::Place place;
    const FlightDump::Channel* channel = FindChannel(dump, id);
    if (channel != nullptr) place.position = channel->position;
    for (const Entry& entry : dump.entries) {
      if (entry.channel != id) continue;
      if (entry.state == State::kOpen) {
        place.open.push_back(entry);
      } else if (!place.last_finished || *place.last_finished->ended_us <= *entry.ended_us) {
        place.last_finished = entry;
      }
    }
    account.places[rank] = std::move(place);
  }
  FindDifference(group, account);
  return account;
}

// Keeps the latest record of each rank.
void Add(FlightDump dump, GroupAccount& group) {
  if (group.dumps.empty()) {
    group.world_size = dump.world_size;
    group.backend = dump.backend;
  }
  if (dump.world_size != group.world_size) {
    group.notes.push_back(absl::StrCat(dump.file, " states that the group has ", dump.world_size,
                                       " ranks, other records state ", group.world_size,
                                       ": records of different jobs?"));
    group.world_size = std::max(group.world_size, dump.world_size);
  }
  const auto [place, is_new] = group.dumps.try_emplace(dump.rank);
  if (!is_new) {
    const bool is_later = place->second.time < dump.time;
    group.notes.push_back(absl::StrCat(
        "two records of rank ", dump.rank, ": ", is_later ? dump.file : place->second.file,
        " is used, ", is_later ? place->second.file : dump.file, " is older and is ignored"));
    if (!is_later) return;
  }
  place->second = std::move(dump);
}

// ---- Saying ----

// "rank 1", "ranks 0,2,3", "ranks 0-6,8".
std::string Ranks(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i > 3) {
      parts.push_back(absl::StrCat(ranks[i], "-", ranks[end - 1]));
    } else {
      for (size_t k = i; k < end; ++k) parts.push_back(absl::StrCat(ranks[k]));
    }
    i = end;
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(parts, ","));
}

std::string Numbered(const Entry& entry) {
  return absl::StrCat("#", entry.sequence, " ", entry.text);
}

std::string SideText(const FlightSide& side) {
  if (side.text.empty()) {
    return absl::StrCat(Ranks(side.ranks), side.ranks.size() == 1 ? " has" : " have",
                        " not reached it");
  }
  std::string text = absl::StrCat(Ranks(side.ranks), ": ", side.text, ", ", side.state);
  if (side.issued_after >= 0.0005)
    absl::StrAppend(&text, ", issued ", Seconds(side.issued_after), " after the first");
  return text;
}

std::string Headline(const ChannelAccount& channel) {
  if (channel.differs_at < 0) return "no difference in the records";
  if (channel.is_contradiction) return absl::StrCat("THE RANKS DISAGREE at #", channel.differs_at);
  std::vector<int> absent = channel.sides.back().ranks;
  return absl::StrCat(Ranks(absent), absent.size() == 1 ? " has" : " have", " not reached #",
                      channel.differs_at);
}

// Ranks that are at the same place share a line.
void AppendPlaces(const GroupAccount& group, const ChannelAccount& channel, std::string* out) {
  std::vector<std::pair<std::string, std::vector<int>>> lines;
  for (const auto& [rank, place] : channel.places) {
    const int64_t now = absl::ToUnixMicros(group.dumps.at(rank).time);
    std::vector<std::string> parts = {absl::StrCat(place.position, " issued")};
    if (place.last_finished) {
      parts.push_back(absl::StrCat(
          "last ended ", Numbered(*place.last_finished),
          place.last_finished->state == State::kFailed ? " (failed), " : ", ",
          Seconds(SecondsBetween(*place.last_finished->ended_us, now)), " before the record"));
    }
    for (const Entry& entry : place.open) {
      parts.push_back(absl::StrCat("open ", Numbered(entry), " for ",
                                   Seconds(SecondsBetween(entry.issued_us, now))));
    }
    std::string line = absl::StrJoin(parts, "; ");
    if (lines.empty() || lines.back().first != line) lines.push_back({std::move(line), {}});
    lines.back().second.push_back(rank);
  }
  for (const auto& [line, ranks] : lines)
    absl::StrAppend(out, "    ", Ranks(ranks), ": ", line, "\n");
}

// "rank 2 #412 barrier (user): UNAVAILABLE after 5.01 s".
std::vector<std::pair<int, const Entry*>> FailedOf(const GroupAccount& account) {
  std::vector<std::pair<int, const Entry*>> failed;
  for (const auto& [rank, dump] : account.dumps) {
    for (const Entry& entry : dump.entries) {
      if (entry.state == State::kFailed) failed.emplace_back(rank, &entry);
    }
  }
  std::sort(failed.begin(), failed.end(), [](const auto& a, const auto& b) {
    return std::tuple(*a.second->ended_us, a.first) < std::tuple(*b.second->ended_us, b.first);
  });
  return failed;
}

std::string ChannelName(const GroupAccount& account, const std::string& id) {
  for (const ChannelAccount& channel : account.channels) {
    if (channel.id == id) return channel.name;
  }
  return id;
}

Json JsonOf(const Entry& entry, int64_t now_us) {
  Json json = {{"sequence", entry.sequence}, {"text", entry.text}, {"issued_us", entry.issued_us}};
  json["ended_us"] = entry.ended_us ? Json(*entry.ended_us) : Json();
  json["seconds"] = SecondsBetween(entry.issued_us, entry.ended_us.value_or(now_us));
  json["code"] = entry.code;
  return json;
}

Json JsonOf(const GroupAccount& group, const ChannelAccount& channel) {
  Json json = {{"id", channel.id}, {"name", channel.name}};
  if (channel.differs_at < 0) {
    json["difference"] = nullptr;
  } else {
    Json sides = Json::array();
    for (const FlightSide& side : channel.sides) {
      sides.push_back({{"ranks", side.ranks},
                       {"text", side.text.empty() ? Json() : Json(side.text)},
                       {"state", side.text.empty() ? Json("absent") : Json(side.state)},
                       {"issued_after", side.issued_after}});
    }
    json["difference"] = {{"sequence", channel.differs_at},
                          {"kind", channel.is_contradiction ? "different" : "behind"},
                          {"sides", sides}};
  }
  Json ranks = Json::array();
  for (const auto& [rank, place] : channel.places) {
    const int64_t now = absl::ToUnixMicros(group.dumps.at(rank).time);
    Json open = Json::array();
    for (const Entry& entry : place.open) open.push_back(JsonOf(entry, now));
    ranks.push_back(
        {{"rank", rank},
         {"position", place.position},
         {"last_finished", place.last_finished ? JsonOf(*place.last_finished, now) : Json()},
         {"open", open}});
  }
  json["ranks"] = ranks;
  return json;
}

Json JsonOf(const GroupAccount& account) {
  Json ranks = Json::array(), channels = Json::array(), failed = Json::array();
  for (const auto& [rank, dump] : account.dumps) {
    ranks.push_back(
        {{"rank", rank},
         {"file", dump.file},
         {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", dump.time, absl::UTCTimeZone())},
         {"status", {{"code", dump.code}, {"message", dump.message}}},
         {"waits", dump.waits}});
  }
  for (const ChannelAccount& channel : account.channels)
    channels.push_back(JsonOf(account, channel));
  for (const auto& [rank, entry] : FailedOf(account)) {
    Json one = JsonOf(*entry, *entry->ended_us);
    one["rank"] = rank;
    one["channel"] = ChannelName(account, entry->channel);
    failed.push_back(std::move(one));
  }
  return {{"group", account.group},
          {"backend", account.backend},
          {"world_size", account.world_size},
          {"missing", account.missing},
          {"notes", account.notes},
          {"ranks", ranks},
          {"channels", channels},
          {"failed", failed}};
}

}  // namespace

absl::StatusOr<FlightDump> ReadFlightDump(absl::string_view text) {
  EK_ASSIGN_OR_RETURN(const Json json, internal::ParseStrictJson(text, kMaxDepth, "the input",
                                                                 internal::JsonRoot::kAny));
  absl::Status error;
  Members members(json, "", &error);
  const int64_t version = members.Number("version", 0);
  EK_RETURN_IF_ERROR(error);
  if (version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("the record is of version ", version,
                                                   ", but this program reads version ", kVersion));
  }
  constexpr int kMost = 10'000'000;
  FlightDump dump{.group = members.Text("group"), .backend = members.Text("backend")};
  dump.world_size = static_cast<int>(members.Number("world_size", 1, kMost));
  dump.rank = static_cast<int>(members.Number("rank", 0, kMost));
  const std::string time = members.Text("time");
  Members status(members.Object("status"), "status", &error);
  dump.code = status.Text("code");
  dump.message = status.Text("message");
  for (const Json& wait : members.List("waits")) {
    if (!wait.is_string()) members.Complain("waits", wait, "a list of texts");
    if (wait.is_string()) dump.waits.push_back(wait.get<std::string>());
  }
  for (const Json& channel : members.List("channels")) {
    Members of(channel, absl::StrCat("channels[", dump.channels.size(), "]"), &error);
    dump.channels.push_back({of.Text("id"), of.Text("name"), of.Number("position", 0)});
  }
  for (const Json& entry : members.List("entries")) {
    dump.entries.push_back(
        ReadEntry(entry, absl::StrCat("entries[", dump.entries.size(), "]"), &error));
    EK_RETURN_IF_ERROR(error);
  }
  EK_RETURN_IF_ERROR(error);
  if (dump.rank >= dump.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", dump.rank, " is out of range for a group of ", dump.world_size));
  }
  std::string why;
  if (!absl::ParseTime(absl::RFC3339_full, time, &dump.time, &why)) {
    return absl::InvalidArgumentError(
        absl::StrCat("time is ", Shown(Json(time)), ", not a time: ", why));
  }
  return dump;
}

std::vector<GroupAccount> AccountFor(std::vector<FlightDump> dumps) {
  std::map<std::string, GroupAccount> groups;
  for (FlightDump& dump : dumps) {
    GroupAccount& group = groups[dump.group];
    group.group = dump.group;
    Add(std::move(dump), group);
  }
  std::vector<GroupAccount> accounts;
  for (auto& [name, group] : groups) {
    for (int rank = 0; rank < group.world_size; ++rank) {
      if (!group.dumps.contains(rank)) group.missing.push_back(rank);
    }
    std::map<std::string, std::string> names;  // Channel names, by id.
    for (const auto& [rank, dump] : group.dumps) {
      for (const FlightDump::Channel& channel : dump.channels)
        names.try_emplace(channel.id, channel.name);
      for (const Entry& entry : dump.entries) names.try_emplace(entry.channel, entry.channel);
    }
    for (const auto& [id, channel] : names)
      group.channels.push_back(AccountFor(group, id, channel));
    std::stable_sort(group.channels.begin(), group.channels.end(),
                     [](const auto& a, const auto& b) { return a.name < b.name; });
    accounts.push_back(std::move(group));
  }
  return accounts;
}

std::string ToText(const GroupAccount& account) {
  std::string out = absl::StrCat("group ", account.group, " (", account.backend, "): records of ",
                                 account.dumps.size(), " of ", account.world_size, " ranks");
  if (!account.missing.empty()) absl::StrAppend(&out, "; MISSING: ", Ranks(account.missing));
  absl::StrAppend(&out, "\n");
  for (const std::string& note : account.notes) absl::StrAppend(&out, "  note: ", note, "\n");
  for (const auto& [rank, dump] : account.dumps) {
    absl::StrAppend(&out, "  rank ", rank, ": ", dump.code, dump.message.empty() ? "" : ": ",
                    dump.message, "\n");
    for (const std::string& wait : dump.waits) absl::StrAppend(&out, "    waits for ", wait, "\n");
  }
  for (const ChannelAccount& channel : account.channels) {
    absl::StrAppend(&out, "  channel ", channel.name, ": ", Headline(channel), "\n");
    for (const FlightSide& side : channel.sides)
      absl::StrAppend(&out, "    > ", SideText(side), "\n");
    AppendPlaces(account, channel, &out);
  }
  const std::vector<std::pair<int, const Entry*>> failed = FailedOf(account);
  if (!failed.empty()) absl::StrAppend(&out, "  failed operations, in the order of their end:\n");
  for (const auto& [rank, entry] : failed) {
    absl::StrAppend(&out, "    rank ", rank, " ", ChannelName(account, entry->channel), " ",
                    Numbered(*entry), ": ", entry->code, " after ",
                    Seconds(SecondsBetween(entry->issued_us, *entry->ended_us)), "\n");
  }
  return out;
}

std::string ToJson(const std::vector<GroupAccount>& accounts,
                   const std::vector<RefusedFile>& refused) {
  Json groups = Json::array(), files = Json::array();
  for (const GroupAccount& account : accounts) groups.push_back(JsonOf(account));
  for (const RefusedFile& file : refused) files.push_back({{"file", file.file}, {"why", file.why}});
  const Json json = {{"version", kVersion}, {"groups", groups}, {"refused", files}};
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
}

}  // namespace evenkeel
