// A few numbers that ranks tell each other between steps: by a collective on the CPU, and over the control plane where
// tensors lie on devices, and these numbers on the host.
//
//   EK_ASSIGN_OR_RETURN(const Evaluation whole, SumOverRanks(comm, mine));
//   EK_ASSIGN_OR_RETURN(const std::vector<int64_t> batches, CountsOfRanks(comm, done));    // by rank
//
// All ranks together.
//
// Errors: whatever ends the group.

#ifndef EVENKEEL_TRAINER_RANK_NUMBERS_H_
#define EVENKEEL_TRAINER_RANK_NUMBERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/evaluate.h"

namespace evenkeel {

absl::StatusOr<Evaluation> SumOverRanks(Communicator& comm, const Evaluation& mine);

absl::StatusOr<std::vector<int64_t>> CountsOfRanks(Communicator& comm, int64_t mine);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_RANK_NUMBERS_H_
