// Groups of ranks that are threads, over every transport that a test may want.
//
//   absl::Status status = RunRanksOver(Transport::kTcp, 3, body, options);
//
// Threads, errors: as RunRanks() of comm/local/local.h.

#ifndef EVENKEEL_COMM_TESTING_GROUPS_H_
#define EVENKEEL_COMM_TESTING_GROUPS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::internal {

enum class Transport {
  kLocal,
  kBlind,  // Local, without headers: different collectives of equal size complete, with garbage.
  kTcp,
};
std::string ToString(Transport transport);

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateGroupOver(
    Transport transport, int world_size, const CommunicatorOptions& options = {});

absl::Status RunRanksOver(Transport transport, int world_size,
                          absl::FunctionRef<absl::Status(Communicator&)> body,
                          const CommunicatorOptions& options = {});

// Each rank has options of its own; not over TCP.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateGroupOver(
    Transport transport, const std::vector<CommunicatorOptions>& options);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_GROUPS_H_
