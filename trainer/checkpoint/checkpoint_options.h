// When a run writes checkpoints, and from which one it begins.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_OPTIONS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_OPTIONS_H_

#include <cstdint>
#include <string>

namespace evenkeel {

inline constexpr char kResumeAuto[] = "auto";
inline constexpr char kResumeNever[] = "never";

struct CheckpointOptions {
  std::string folder;  // For all checkpoints, seen by all ranks; empty: none are written.
  int64_t every = 0;   // Steps; 0: only when the run is stopped, and at its end.
  int keep = 3;        // Number of the newest checkpoints to keep; 0: all.
  // kResumeAuto: the newest in `folder`, if any; kResumeNever: none, `folder` must not contain any;
  // else the path of a checkpoint.
  std::string resume = kResumeAuto;
  // With kResumeAuto: a checkpoint that does not load is passed over for the one before it. For
  // restarted jobs, whose user may be absent.
  bool passes_over_damaged = false;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_OPTIONS_H_
