// The ways in which a group loses a rank.
//
//   Inflict(LossKind::kDeaf, stage.ranks[2], stage);
//   absl::string_view text = TextOf(LossKind::kDeaf);  // "is deaf"
//
// Threads: Inflict() is called in an event of the world, or on one of its threads.

#ifndef EVENKEEL_TESTS_SIMULATION_LOSS_H_
#define EVENKEEL_TESTS_SIMULATION_LOSS_H_

#include "absl/strings/string_view.h"
#include "evenkeel/tests/simulation/play.h"

namespace evenkeel::simulation {

// A deaf rank receives nothing from the other hosts, and nothing is received from a mute one. The
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
void Inflict(LossKind kind, Host* host, Stage& stage);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_LOSS_H_
