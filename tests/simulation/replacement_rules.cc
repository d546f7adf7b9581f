#include "evenkeel/tests/simulation/replacement_rules.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

namespace evenkeel::simulation {
namespace {

using Kind = TraceEvent::Kind;
using Members = std::vector<Process>;

// The store's loop turns every 500 ms, and its clock differs from the world's.
constexpr Nanos kTurn = 600 * kMillisecond;
constexpr double kFast = 0.98, kSlow = 1.02;

std::string ToText(const Members& members) {
  return absl::StrJoin(members, " ", [](std::string* out, const Process& process) {
    absl::StrAppend(out, simulation::ToText(process));
  });
}

std::string ToText(Nanos nanos) { return absl::FormatDuration(absl::Nanoseconds(nanos)); }

bool Contains(const Members& members, const Process& process) {
  return std::ranges::find(members, process) != members.end();
}

bool HasPlace(const Members& members, int place) {
  return std::ranges::find(members, place, &Process::place) != members.end();
}

bool HaveSamePlaces(const Members& a, const Members& b) {
  return std::ranges::equal(a, b, {}, &Process::place, &Process::place);
}

}  // namespace

std::string ToText(const Process& process) {
  return absl::StrCat(process.place, "/", process.incarnation);
}

std::string ToText(const TraceEvent& event) {
  constexpr const char* kTexts[] = {
      "is announced", "is refused", "is lost", "gave up",   "all have come", "the store decides",
      "recovered",    "last step",  "starts",  "is struck", "begins",        "finishes",
      "is exhausted", "asks",       "goes on", "ends"};
  return absl::StrCat(ToText(event.process), " ", kTexts[static_cast<int>(event.kind)], ", group ",
                      event.group, " of ", ToText(event.members), ", step ", event.step,
                      ", source ", event.source, ", state ", event.state,
                      event.is_error ? ", with an error" : "");
}

std::string BreakOfR1(const ReplacementTrace& trace) {
  int newest = -1;
  std::set<Process> lost;
  for (const TraceEvent& event : trace.events) {
    const bool is_step = event.kind == Kind::kBegins || event.kind == Kind::kFinishes;
    if (event.kind == Kind::kLost) lost.insert(event.process);
    if (event.kind == Kind::kDecided && event.group <= newest)
      return absl::StrCat("group ", event.group, " is decided after group ", newest);
    if (event.kind == Kind::kDecided) newest = event.group;
    if (is_step && event.group < newest && !lost.contains(event.process)) {
      return absl::StrCat(ToText(event.process), " makes a step in group ", event.group,
                          " after the decision on group ", newest);
    }
  }
  return "";
}

std::string BreakOfR2(const ReplacementTrace& trace) {
  std::map<int, Process> holders;  // By place; none: it was given up.
  std::set<Process> lost, ready;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kAnnounced) ready.insert(event.process);
    if (event.kind == Kind::kRefused || event.kind == Kind::kLost) ready.erase(event.process);
    if (event.kind == Kind::kLost) lost.insert(event.process);
    if (event.kind != Kind::kDecided) continue;
    std::map<int, Process> next;
    for (const Process& member : event.members) {
      if (!next.emplace(member.place, member).second)
        return absl::StrCat("group ", event.group, " has place ", member.place, " twice");
      if (event.group == 0) continue;
      const auto holder = holders.find(member.place);
      if (holder == holders.end())
        return absl::StrCat("place ", member.place, " was given up, and ", ToText(member),
                            " gets it");
      if (holder->second == member) continue;
      if (!lost.contains(holder->second))
        return absl::StrCat(ToText(member), " gets the place of ", ToText(holder->second),
                            ", which is not lost");
      if (member.incarnation <= holder->second.incarnation)
        return absl::StrCat(ToText(member), " comes after ", ToText(holder->second));
      const auto newer = std::ranges::find_if(ready, [&](const Process& process) {
        return process.place == member.place && process > member;
      });
      if (newer != ready.end())
        return absl::StrCat(ToText(member), " is chosen, although ", ToText(*newer), " waits");
    }
    holders = std::move(next);
  }
  return "";
}

std::string BreakOfR3(const ReplacementTrace& trace) {
  std::set<Process> lost;
  std::map<int, Members> groups;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kLost) lost.insert(event.process);
    if (event.kind == Kind::kDecided) groups[event.group] = event.members;
    if (event.kind != Kind::kDecided && event.kind != Kind::kRecovered) continue;
    for (const Process& member : groups[event.group]) {
      if (!lost.contains(member)) continue;
      return absl::StrCat(ToText(member), " is lost, and group ", event.group,
                          event.kind == Kind::kDecided ? " has it" : " recovers with it");
    }
  }
  return "";
}

// The store's messages do not show how often a wait begins, only for how long it waits.
std::string BreakOfR4(const ReplacementTrace& trace) {
  Nanos waited = 0, most = 2 * trace.wait;
  std::optional<Nanos> since;
  Members newest;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kGathered && !since.has_value()) since = event.when;
    // Today: the loss of a newcomer that was chosen begins a further wait.
    if (event.kind == Kind::kLost && event.process.incarnation > 0 &&
        Contains(newest, event.process))
      most = 3 * trace.wait;
    if (event.kind == Kind::kRecovered) {
      waited = 0;
      most = 2 * trace.wait;
    }
    if (event.kind != Kind::kDecided) continue;
    newest = event.members;
    if (since.has_value())
      waited += std::max<Nanos>(event.when - *std::exchange(since, std::nullopt) - kTurn, 0);
    if (static_cast<double>(waited) > kSlow * static_cast<double>(most))
      return absl::StrCat("the store has waited ", ToText(waited), " before group ", event.group);
  }
  return "";
}

std::string BreakOfR5(const ReplacementTrace& trace) {
  std::map<int, Members> groups;
  std::map<int, TraceEvent> first;       // By group: the first that goes on.
  std::map<Process, TraceEvent> states;  // The last ones with a step and a state.
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kDecided) groups[event.group] = event.members;
    if (event.kind == Kind::kExhausted) states.erase(event.process);
    if (event.kind == Kind::kGoesOn) {
      const std::string text = absl::StrCat(ToText(event.process), " goes on in group ",
                                            event.group, " from step ", event.step);
      const Members& members = groups[event.group];
      if (!HaveSamePlaces(event.members, members))
        return absl::StrCat(text, " with ", ToText(event.members), ", but it has ",
                            ToText(members));
      const auto [found, is_first] = first.try_emplace(event.group, event);
      const TraceEvent& other = found->second;
      if (event.step != other.step || event.source != other.source || event.state != other.state)
        return absl::StrCat(text, " of rank ", event.source, ", ", ToText(other.process),
                            " from step ", other.step, " of rank ", other.source,
                            event.state == other.state ? "" : ", with another state");
      if (is_first && event.group > 0) {
        // None has begun another step since all have asked.
        for (const Process& member : members) {
          if (states.contains(member) && states[member].step < event.step)
            return absl::StrCat(text, ", but ", ToText(member), " has finished ",
                                states[member].step);
        }
        const auto source = states.find(members[event.source]);
        if (source == states.end() || source->second.step != event.step ||
            source->second.state != event.state)
          return absl::StrCat(text, ", which is not the state of ", ToText(members[event.source]));
      }
    }
    if (event.kind == Kind::kGoesOn || event.kind == Kind::kFinishes || event.kind == Kind::kAsks)
      states[event.process] = event;
  }
  return "";
}

std::string BreakOfR6(const ReplacementTrace& trace) {
  std::set<int> recovered = {0};
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kRecovered) recovered.insert(event.group);
    if (event.kind == Kind::kGoesOn && !recovered.contains(event.group))
      return absl::StrCat(ToText(event.process), " goes on in group ", event.group,
                          " before all members have recovered");
  }
  return "";
}

std::string BreakOfR7(const ReplacementTrace& trace) {
  std::map<int, Members> groups;
  std::map<Process, int64_t> steps;  // Finished; none: unknown.
  std::set<Process> lost;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kDecided) groups[event.group] = event.members;
    if (event.kind == Kind::kLost) lost.insert(event.process);
    if (event.kind == Kind::kExhausted) steps.erase(event.process);
    if (event.kind == Kind::kGoesOn || event.kind == Kind::kAsks) steps[event.process] = event.step;
    if (event.kind != Kind::kFinishes) continue;
    steps[event.process] = event.step;
    for (const Process& member : groups[event.group]) {
      const auto theirs = steps.find(member);
      if (theirs == steps.end() || lost.contains(member) || lost.contains(event.process) ||
          std::abs(theirs->second - event.step) <= 1)
        continue;
      return absl::StrCat(ToText(event.process), " has finished ", event.step, " steps, ",
                          ToText(member), " ", theirs->second);
    }
  }
  return "";
}

std::string BreakOfR8(const ReplacementTrace& trace) {
  std::map<Process, bool> has_finished;  // Of those that have trained.
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kGoesOn) has_finished[event.process] = false;
    if (event.kind == Kind::kEnds && has_finished.contains(event.process))
      has_finished[event.process] = !event.is_error && event.step == trace.steps;
  }
  // A process with a fault may be lost.
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kStrikes) has_finished.erase(event.process);
  }
  for (const auto& [process, is_so] : has_finished) {
    if (!is_so) return absl::StrCat(ToText(process), " does not finish the last step");
  }
  return "";
}

// Today: a rank that has missed the end of the agreement regroups, but makes no step.
std::string BreakOfR9(const ReplacementTrace& trace) {
  bool is_complete = false;
  std::set<Process> lost;
  for (const TraceEvent& event : trace.events) {
    is_complete |= event.kind == Kind::kLastStep;
    if (event.kind == Kind::kLost) lost.insert(event.process);
    if (event.kind == Kind::kBegins && is_complete && !lost.contains(event.process))
      return absl::StrCat(ToText(event.process), " begins step ", event.step, " in group ",
                          event.group, " after the agreement on the last step");
  }
  return "";
}

std::string BreakOfR10(const ReplacementTrace& trace) {
  std::set<Process> waiting;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kStarts) waiting.insert(event.process);
  }
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kEnds || event.kind == Kind::kStrikes) waiting.erase(event.process);
  }
  return waiting.empty() ? "" : absl::StrCat(ToText(*waiting.begin()), " has no end");
}

std::string BreakOfPhase4(const ReplacementTrace& trace) {
  std::set<Process> ready, lost;
  Members newest;
  Nanos since = kNever;
  bool is_first_wait = true;  // In this pause. Later ones may be shorter.
  for (const TraceEvent& event : trace.events) {
    if (event.kind == Kind::kAnnounced) ready.insert(event.process);
    if (event.kind == Kind::kRefused || event.kind == Kind::kLost) ready.erase(event.process);
    if (event.kind == Kind::kLost) lost.insert(event.process);
    if (event.kind == Kind::kRecovered) is_first_wait = true;
    if (event.kind == Kind::kGathered) since = std::min(since, event.when);
    if (event.kind == Kind::kLastStep) return "";  // The others have left.
    if (event.kind != Kind::kDecided) continue;
    for (const Process& member : event.members) ready.erase(member);
    for (const Process& before : newest) {
      if (HasPlace(event.members, before.place)) continue;
      const std::string text =
          absl::StrCat("group ", event.group, " gives up place ", before.place);
      const auto newcomer = std::ranges::find(ready, before.place, &Process::place);
      // One that is not lost keeps its place, also where it has not come in time.
      const bool is_held = before.incarnation > 0 && !lost.contains(before);
      if (newcomer != ready.end() && !is_held)
        return absl::StrCat(text, ", for which ", ToText(*newcomer), " waits");
      const Nanos waited = std::max<Nanos>(event.when - since, 0);
      if (is_first_wait && static_cast<double>(waited) < kFast * static_cast<double>(trace.wait))
        return absl::StrCat(text, " after ", ToText(waited));
    }
    newest = event.members;
    since = kNever;
    is_first_wait = event.group == 0;
  }
  return "";
}

std::vector<std::string> BrokenRules(const ReplacementTrace& trace) {
  constexpr std::pair<const char*, std::string (*)(const ReplacementTrace&)> kRules[] = {
      {"R1", BreakOfR1}, {"R2", BreakOfR2},   {"R3", BreakOfR3},          {"R4", BreakOfR4},
      {"R5", BreakOfR5}, {"R6", BreakOfR6},   {"R7", BreakOfR7},          {"R8", BreakOfR8},
      {"R9", BreakOfR9}, {"R10", BreakOfR10}, {"phase 4", BreakOfPhase4},
  };
  std::vector<std::string> broken;
  for (const auto& [name, rule] : kRules) {
    if (const std::string text = rule(trace); !text.empty())
      broken.push_back(absl::StrCat(name, ": ", text));
  }
  return broken;
}

}  // namespace evenkeel::simulation
