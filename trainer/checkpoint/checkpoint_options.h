// When a run writes down where it is, and whether it begins where another one has stopped.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_OPTIONS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_OPTIONS_H_

#include <cstdint>
#include <string>

namespace evenkeel {

inline constexpr char kResumeAuto[] = "auto";
inline constexpr char kResumeNever[] = "never";

struct CheckpointOptions {
  std::string folder;  // Of all checkpoints of the run, seen by all ranks; empty: none are written.
  int64_t every = 0;   // Steps; 0: only when the run is stopped, and at its end.
  int keep = 3;        // So many of the newest; 0: all.
  // kResumeAuto: the newest in `folder`, if there is one; kResumeNever: refuses a folder that has one; else the path of
  // a checkpoint.
  std::string resume = kResumeAuto;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_CHECKPOINT_OPTIONS_H_
