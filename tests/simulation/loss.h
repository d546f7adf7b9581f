// The ways in which a group loses a rank.
//
//   std::set<int> lost = LostRanks(LossKind::kDeaf, 2, stage);  // {2}, if alone on its machine
//   Inflict(LossKind::kDeaf, 2, stage);
//   absl::string_view text = TextOf(LossKind::kDeaf);  // "is deaf"
//
// The network fails for a machine: all of its ranks are lost. If there is no other machine, the
// rank is stopped instead, or killed instead of mute.
//
// Threads: Inflict() is called in an event of the world, or on one of its threads.

#ifndef EVENKEEL_TESTS_SIMULATION_LOSS_H_
#define EVENKEEL_TESTS_SIMULATION_LOSS_H_

#include <functional>
#include <set>

#include "absl/strings/string_view.h"
#include "evenkeel/tests/simulation/play.h"

namespace evenkeel::simulation {

// A deaf rank receives nothing from other machines, and they receive nothing from a mute one. The
// last three take four seconds, which is longer than a rank or the store may be silent.
enum class LossKind {
  kKilled,
  kStopped,
  kIsolated,
  kDeaf,
  kMute,
  kIsolatedForAWhile,
  kStoppedForAWhile,
  kStoreStoppedForAWhile,  // The rank itself runs.
};
inline constexpr int kLossKinds = 8;

absl::string_view TextOf(LossKind kind);
std::set<int> LostRanks(LossKind kind, int rank, const Stage& stage);
void Inflict(LossKind kind, int rank, Stage& stage);
// Calls `strike` at that time, or in the midst of the rank's operations after it.
void Schedule(Stage& stage, int rank, Nanos when, std::function<void()> strike);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_LOSS_H_
