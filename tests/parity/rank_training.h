// The same training as a user's program does it, on one rank of a group.
//
//   EK_ASSIGN_OR_RETURN(Trained<double> mine, TrainRank<double>(combination, comm));
//
// Threads: as the communicator.
// Errors:  those of the libraries, as they are.

#ifndef EVENKEEL_TESTS_PARITY_RANK_TRAINING_H_
#define EVENKEEL_TESTS_PARITY_RANK_TRAINING_H_

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tests/parity/combination.h"
#include "evenkeel/tests/parity/reference.h"

namespace evenkeel {

// `weights` are those after each step of this rank, and at last those at the end of the group's.
template <typename T>
absl::StatusOr<Trained<T>> TrainRank(const Combination& combination, Communicator& comm);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_PARITY_RANK_TRAINING_H_
