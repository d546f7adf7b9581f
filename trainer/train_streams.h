// The streams to which a run writes its text.

#ifndef EVENKEEL_TRAINER_TRAIN_STREAMS_H_
#define EVENKEEL_TRAINER_TRAIN_STREAMS_H_

#include <cstdio>

namespace evenkeel {

struct TrainStreams {
  std::FILE* out;  // Rank 0: the run's description and progress.
  std::FILE* log;  // Warnings and errors.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAIN_STREAMS_H_
