#include "evenkeel/tools/top_view.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// A rank that waits for this long does not merely end its step later than another one; a rank that
// lives sends something each second.
constexpr int64_t kLongWaitMs = 1000, kSilentMs = 2500;
constexpr char kEllipsis[] = "…";

const char* const kPhases[] = {"input", "forward", "backward", "optimizer", "saving"};

struct Rank {
  int rank = 0;
  std::string state, doing, phase, cost_phase;
  int64_t waited_ms = 0, silent_ms = 0, step = 0;
  std::vector<int> waits_for;
  bool trains = false, is_exhausted = false, is_straggler = false;
  double step_ms = 0, cost = 0;
  double samples = 0;  // Of a step; 0: not known.
  std::map<std::string, double> ms;
  std::map<std::string, double> ready_ms;  // Empty: not known.

  bool is_connected() const { return state == "connected"; }
  bool waits() const { return is_connected() && waited_ms >= kLongWaitMs; }
};

// A rank's text may contain anything, and must not control the terminal.
std::string Harmless(std::string text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) text[i] = ' ';
    // U+0080 to U+009F.
    const bool is_control =
        byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (is_control) text[i] = text[i + 1] = ' ';
  }
  return text;
}

Rank ParseRank(int number, const Json& json) {
  Rank rank{.rank = number,
            .state = json.at("state"),
            .doing = Harmless(json.at("doing")),
            .waited_ms = json.at("waited_ms"),
            .silent_ms = json.value("silent_ms", int64_t{0}),
            .waits_for = json.at("waits_for")};
  if (!json.contains("steps")) return rank;
  const Json& steps = json["steps"];
  rank.trains = true;
  rank.step = steps.at("step");
  rank.phase = Harmless(steps.at("phase"));
  rank.is_exhausted = steps.at("exhausted");
  rank.waited_ms = std::max<int64_t>(rank.waited_ms, steps.at("waited_ms"));
  rank.step_ms = steps.value("step_ms", 0.0);
  rank.cost = steps.value("cost", 0.0);
  rank.samples = steps.value("samples", 0.0);
  rank.is_straggler = steps.value("straggler", false);
  rank.cost_phase = Harmless(steps.value("cost_phase", ""));
  if (steps.contains("ms")) rank.ms = steps["ms"].get<std::map<std::string, double>>();
  if (steps.contains("ready_ms"))
    rank.ready_ms = steps["ready_ms"].get<std::map<std::string, double>>();
  return rank;
}

std::vector<Rank> ParseRanks(const Json& group) {
  std::vector<Rank> ranks;
  for (const Json& json : group.at("ranks"))
    ranks.push_back(ParseRank(static_cast<int>(ranks.size()), json));
  return ranks;
}

std::string Seconds(int64_t ms) { return absl::StrFormat("%.1f s", static_cast<double>(ms) / 1e3); }

template <typename Predicate>
std::vector<int> RanksThat(const std::vector<Rank>& ranks, Predicate holds) {
  std::vector<int> found;
  for (const Rank& rank : ranks) {
    if (holds(rank)) found.push_back(rank.rank);
  }
  return found;
}

const char* Have(const std::vector<int>& ranks) { return ranks.size() == 1 ? " has " : " have "; }

// Returns those for whom others wait, and who do not wait themselves; all of them if each waits.
std::vector<int> Awaited(const std::vector<Rank>& ranks) {
  std::set<int> awaited;
  bool is_known = false;
  for (const Rank& rank : ranks) {
    if (!rank.waits() || rank.waits_for.empty()) continue;
    is_known = true;
    awaited.insert(rank.waits_for.begin(), rank.waits_for.end());
  }
  // The data of the group is not evenkeel's: all that is known is who waits.
  if (!is_known) return RanksThat(ranks, [](const Rank& rank) { return !rank.waits(); });
  std::vector<int> roots;
  for (const int rank : awaited) {
    if (!ranks[rank].waits()) roots.push_back(rank);
  }
  return roots.empty() ? std::vector<int>(awaited.begin(), awaited.end()) : roots;
}

std::string PlaceOf(const Rank& rank) {
  if (!rank.is_connected()) return rank.state == "lost" ? "was lost" : rank.state;
  if (rank.waits()) return rank.doing.empty() ? "waits, too" : rank.doing;
  if (rank.silent_ms >= kSilentMs) return "is silent";
  return rank.trains ? absl::StrCat("runs (", rank.phase, ")") : "runs";
}

// Adds a line for each of a few places at which there are some of the ranks, the smallest party
// first: it is usually the cause.
void AddPlaces(const std::map<std::string, std::vector<int>>& ranks_by_place,
               std::vector<std::string>& findings) {
  constexpr size_t kMostPlaces = 4;
  std::vector<std::pair<std::vector<int>, std::string>> parties;
  for (const auto& [place, ranks] : ranks_by_place) parties.emplace_back(ranks, place);
  std::sort(parties.begin(), parties.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.size(), a.first) < std::pair(b.first.size(), b.first);
  });
  std::vector<int> others;
  for (size_t i = 0; i < parties.size(); ++i) {
    const auto& [ranks, place] = parties[i];
    if (i < kMostPlaces) {
      findings.push_back(absl::StrCat(RankList(ranks), ": ", place));
    } else {
      others.insert(others.end(), ranks.begin(), ranks.end());
    }
  }
  std::sort(others.begin(), others.end());
  if (!others.empty()) findings.push_back(absl::StrCat(RankList(others), ": elsewhere"));
}

void AddWaits(const std::vector<Rank>& ranks, std::vector<std::string>& findings) {
  const std::vector<int> waiting = RanksThat(ranks, [](const Rank& rank) { return rank.waits(); });
  if (waiting.empty()) return;
  int64_t longest = 0;
  for (const int rank : waiting) longest = std::max(longest, ranks[rank].waited_ms);
  const std::vector<int> awaited = Awaited(ranks);
  std::map<std::string, std::vector<int>> ranks_by_place;
  for (const int rank : awaited) ranks_by_place[PlaceOf(ranks[rank])].push_back(rank);
  std::string text =
      absl::StrCat(RankList(waiting), Have(waiting), "waited for ", Seconds(longest));
  if (!awaited.empty()) {
    absl::StrAppend(&text, " for ", awaited == waiting ? "each other" : RankList(awaited));
    if (ranks_by_place.size() == 1)
      absl::StrAppend(&text, awaited.size() > 1 ? ": " : ", which ", ranks_by_place.begin()->first);
  }
  findings.push_back(std::move(text));
  if (ranks_by_place.size() > 1) AddPlaces(ranks_by_place, findings);
}

std::string Cut(absl::string_view line, int columns) {
  if (static_cast<int>(line.size()) <= columns) return std::string(line);
  size_t end = std::max(columns - 1, 0);
  while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xc0) == 0x80) --end;
  return absl::StrCat(line.substr(0, end), kEllipsis);
}

std::string Headline(const Json& group, const std::vector<Rank>& ranks) {
  std::string text = absl::StrCat(Harmless(group.at("group")), ": ", ranks.size(), " ranks");
  int64_t step = 0;
  double step_ms = 0;
  for (const Rank& rank : ranks) {
    step = std::max(step, rank.step);
    step_ms = std::max(step_ms, rank.step_ms);
  }
  if (step > 0) absl::StrAppend(&text, ", step ", step);
  if (step_ms > 0) absl::StrAppendFormat(&text, ", %.4g ms a step", step_ms);
  return text;
}

void AddMs(const std::map<std::string, double>& ms, const char* name, std::string& row) {
  const auto found = ms.find(name);
  absl::StrAppendFormat(&row, " %9s",
                        found == ms.end() ? "-" : absl::StrFormat("%.2f", found->second));
}

// The columns for which there is room, and for which there are values; samples if ranks differ in
// them.
struct Columns {
  bool phases = false, buckets = false, samples = false;
};

std::string Row(const Rank& rank, const Columns& columns) {
  const std::string state = !rank.is_connected()          ? rank.state
                            : rank.silent_ms >= kSilentMs ? "silent"
                            : rank.waits()                ? "waits"
                            : rank.is_exhausted           ? "no input"
                                                          : "runs";
  std::string row = absl::StrFormat("%5d  %-8s", rank.rank, state);
  const std::string phase = rank.phase == "outside of the step" ? "outside" : rank.phase;
  absl::StrAppendFormat(&row, " %8d %-9s", rank.step, rank.trains ? phase : "-");
  if (columns.phases) {
    for (const char* name : kPhases) AddMs(rank.ms, name, row);
  }
  if (columns.buckets) {
    for (const char* name : {"first", "last"}) AddMs(rank.ready_ms, name, row);
  }
  if (columns.samples) absl::StrAppendFormat(&row, " %8.4g", rank.samples);
  AddMs(rank.ms, "waiting", row);
  absl::StrAppendFormat(&row, " %5.1f %%  %s", 100 * rank.cost, rank.doing);
  return row;
}

std::string Header(const Columns& columns) {
  std::string row = absl::StrFormat("%5s  %-8s %8s %-9s", "rank", "state", "step", "phase");
  if (columns.phases) {
    for (const char* name : kPhases) absl::StrAppendFormat(&row, " %9s", name);
  }
  if (columns.buckets) absl::StrAppendFormat(&row, " %9s %9s", "1st ready", "all ready");
  if (columns.samples) absl::StrAppendFormat(&row, " %8s", "samples");
  absl::StrAppendFormat(&row, " %9s %7s  %s", "waiting", "cost", "last report");
  return row;
}

// The lower, the sooner it is shown.
int Importance(const Rank& rank, const std::set<int>& awaited) {
  if (!rank.is_connected() || rank.silent_ms >= kSilentMs) return 0;
  if (awaited.contains(rank.rank)) return 1;
  if (rank.is_straggler) return 2;
  return 3;
}

struct GroupView {
  std::vector<std::string> head;
  std::vector<Rank> ranks;
  std::set<int> awaited;  // Those for whom others wait.
  Columns columns;
  int lines() const { return static_cast<int>(head.size() + ranks.size()); }
};

GroupView ViewOf(const Json& group, int columns) {
  constexpr int kRoomForPhases = 130, kRoomForBuckets = 150;
  GroupView view{.ranks = ParseRanks(group)};
  view.columns = {
      .phases = columns >= kRoomForPhases,
      .buckets = columns >= kRoomForBuckets &&
                 std::any_of(view.ranks.begin(), view.ranks.end(),
                             [](const Rank& rank) { return !rank.ready_ms.empty(); }),
      .samples = std::any_of(view.ranks.begin(), view.ranks.end(), [&](const Rank& rank) {
        return rank.samples != view.ranks[0].samples;
      })};
  view.head = {Headline(group, view.ranks)};
  for (std::string& finding : Findings(group)) view.head.push_back(std::move(finding));
  view.head.push_back(Header(view.columns));
  if (std::any_of(view.ranks.begin(), view.ranks.end(),
                  [](const Rank& rank) { return rank.waits(); })) {
    const std::vector<int> awaited = Awaited(view.ranks);
    view.awaited.insert(awaited.begin(), awaited.end());
  }
  return view;
}

// Returns how many lines each group gets of `rows`: small groups all that they have, the others
// equal parts of what is left.
std::vector<int> Share(const std::vector<GroupView>& groups, int rows) {
  std::vector<size_t> by_size(groups.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](size_t a, size_t b) { return groups[a].lines() < groups[b].lines(); });
  std::vector<int> lines(groups.size());
  for (size_t i = 0; i < by_size.size(); ++i) {
    const int part = rows / static_cast<int>(by_size.size() - i);
    rows -= lines[by_size[i]] = std::min(part, groups[by_size[i]].lines());
  }
  return lines;
}

// Adds at most `room` lines, but at least one. If the ranks do not fit, those that explain a delay
// come first; if the head does not, its first lines remain.
void AddGroup(GroupView group, int room, std::vector<std::string>& lines) {
  const int rows = room - static_cast<int>(group.head.size());
  if (rows < 2 && group.lines() > room) {
    group.head.resize(std::clamp(room, 1, static_cast<int>(group.head.size())));
    group.ranks.clear();
  }
  lines.insert(lines.end(), group.head.begin(), group.head.end());
  size_t shown = group.ranks.size();
  if (group.lines() > room && !group.ranks.empty()) {
    std::stable_sort(group.ranks.begin(), group.ranks.end(), [&](const Rank& a, const Rank& b) {
      return Importance(a, group.awaited) < Importance(b, group.awaited);
    });
    shown = rows - 1;  // One line has the number of those that do not fit.
  }
  for (size_t i = 0; i < shown; ++i) lines.push_back(Row(group.ranks[i], group.columns));
  if (shown < group.ranks.size()) {
    const size_t left = group.ranks.size() - shown;
    lines.push_back(absl::StrCat("and ", left, left == 1 ? " other rank" : " other ranks"));
  }
}

}  // namespace

std::vector<std::string> Findings(const Json& group) {
  const std::vector<Rank> ranks = ParseRanks(group);
  std::vector<std::string> findings;
  if (const std::string error = Harmless(group.at("error")); !error.empty())
    findings.push_back(absl::StrCat(kGroupHasEnded, error));
  const auto is_silent = [](const Rank& rank) {
    return rank.is_connected() && rank.silent_ms >= kSilentMs;
  };
  if (const std::vector<int> silent = RanksThat(ranks, is_silent); !silent.empty()) {
    int64_t shortest = std::numeric_limits<int64_t>::max();
    for (const int rank : silent) shortest = std::min(shortest, ranks[rank].silent_ms);
    findings.push_back(
        absl::StrCat(RankList(silent), Have(silent), "sent nothing for ", Seconds(shortest)));
  }
  const std::vector<int> absent =
      RanksThat(ranks, [](const Rank& rank) { return rank.state == "not connected"; });
  if (!absent.empty())
    findings.push_back(absl::StrCat(RankList(absent), Have(absent), "not connected yet"));
  if (findings.empty()) AddWaits(ranks, findings);
  for (const Rank& rank : ranks) {
    if (rank.is_straggler)
      findings.push_back(absl::StrFormat("rank %d costs the group %.0f %% of its time: %s",
                                         rank.rank, 100 * rank.cost, rank.cost_phase));
  }
  const std::vector<int> exhausted =
      RanksThat(ranks, [](const Rank& rank) { return rank.is_exhausted; });
  if (!exhausted.empty())
    findings.push_back(absl::StrCat(RankList(exhausted), Have(exhausted), "no more input"));
  return findings;
}

std::string RenderStatus(const Json& status, const std::string& server, const Screen& screen) {
  std::vector<std::string> lines = {server};
  if (status.empty()) lines.push_back("no rank is connected");
  std::vector<GroupView> groups;
  for (const Json& group : status) groups.push_back(ViewOf(group, screen.columns));
  // The cursor is in the last line.
  const std::vector<int> room = Share(groups, screen.rows - 1 - static_cast<int>(lines.size()));
  for (size_t i = 0; i < groups.size(); ++i) AddGroup(std::move(groups[i]), room[i], lines);
  std::string text;
  for (const std::string& line : lines) absl::StrAppend(&text, Cut(line, screen.columns), "\n");
  return text;
}

}  // namespace evenkeel
