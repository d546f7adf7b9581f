// The rules of docs/replacement.md, checked on the trace of a run: one function for each.
//
//   ReplacementTrace trace{.steps = 6, .wait = 5 * kSecond};
//   trace.events.push_back({.kind = TraceEvent::Kind::kDecided, .group = 0, .members = {{0},
//   {1}}}); std::vector<std::string> broken = BrokenRules(trace);  // "R2: place 1 goes from 1/0 to
//   ..."
//
// Events are in the order in which they happened. Those of the store are seen where it receives and
// sends messages (observed_store.h), those of a process on its thread.
//
// Threads: pure functions of values.

#ifndef EVENKEEL_TESTS_SIMULATION_REPLACEMENT_RULES_H_
#define EVENKEEL_TESTS_SIMULATION_REPLACEMENT_RULES_H_

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/tests/simulation/nanos.h"

namespace evenkeel::simulation {

struct Process {
  int place = 0, incarnation = 0;
  friend auto operator<=>(const Process&, const Process&) = default;
};
std::string ToText(const Process& process);  // "3/0": the first one in place 3.

struct TraceEvent {
  enum class Kind {
    // At the store:
    kAnnounced,  // The newcomer waits for its place.
    kRefused,    // The newcomer receives a refusal, and waits no longer.
    kLost,       // The process is declared lost.
    kGaveUp,     // In place of kLost: its connection has ended, and it asks again later.
    kGathered,   // Each member of `group` has asked or is lost; the store waits for newcomers.
    kDecided,    // `group` has these `members`.
    kRecovered,  // All members of `group` have come to "recovered".
    kLastStep,   // The agreement on the last step is complete in `group`.
    // At a process:
    kStarts,
    kStrikes,    // A fault begins, after which the process may be lost.
    kBegins,     // It begins a step in `group`.
    kFinishes,   // It has finished `step` steps; `state` is a hash of its state.
    kExhausted,  // It has no more input: its steps are not seen until it asks.
    kAsks,       // It calls Recover() with `step` finished steps and this state.
    kGoesOn,     // In `group` of `members` (without incarnations), from `step`, with the state of
                 // the member `source`.
    kEnds,       // It has finished the last step, or (`is_error`) returns an error.
  } kind;
  Nanos when = 0;
  Process process;
  int group = 0;
  std::vector<Process> members;  // In the order of ranks.
  int64_t step = 0;
  int source = 0;  // A rank in `members`.
  uint64_t state = 0;
  bool is_error = false;
};

std::string ToText(const TraceEvent& event);

struct ReplacementTrace {
  int64_t steps = 0;  // Of the training.
  Nanos wait = 0;     // RecoveryOptions::wait_for_replacement.
  std::vector<TraceEvent> events;
};

// Each returns the first break of its rule; empty: there is none.
std::string BreakOfR1(const ReplacementTrace& trace);
std::string BreakOfR2(const ReplacementTrace& trace);
std::string BreakOfR3(const ReplacementTrace& trace);
std::string BreakOfR4(const ReplacementTrace& trace);
std::string BreakOfR5(const ReplacementTrace& trace);
std::string BreakOfR6(const ReplacementTrace& trace);
std::string BreakOfR7(const ReplacementTrace& trace);
std::string BreakOfR8(const ReplacementTrace& trace);
std::string BreakOfR9(const ReplacementTrace& trace);
std::string BreakOfR10(const ReplacementTrace& trace);
// Phase 4: a lost place is given to the newcomer that waits for it, and given up only after W.
std::string BreakOfPhase4(const ReplacementTrace& trace);

// Returns all breaks, each with its rule in front.
std::vector<std::string> BrokenRules(const ReplacementTrace& trace);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_REPLACEMENT_RULES_H_
