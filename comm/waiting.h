// The communicator of a newcomer, before it is in the group: it knows its rank and the size of the
// job's first group, and reaches no other rank (Communicator::waiting()).
//
//   std::unique_ptr<Communicator> comm = internal::MakeWaiting(
//       2, 4, {.make_group = maker, .open_link = opener, .allocate = AllocateRegistered});
//
// Exchanges, broadcasts and gathers end at once, as if all ranks had passed what this one passes;
// the results of other collectives are unspecified.

#ifndef EVENKEEL_COMM_WAITING_H_
#define EVENKEEL_COMM_WAITING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/memory.h"

namespace evenkeel::internal {

struct WaitingOptions {
  std::string group = "world";
  CommunicatorOptions communicator;
  GroupMaker make_group;   // Makes the group that it enters, over that group's backend.
  NewcomerLink open_link;  // To the process that hosts the job's store.
  std::function<absl::StatusOr<Memory>(int64_t bytes)> allocate;  // Null: ordinary memory.
};

std::unique_ptr<Communicator> MakeWaiting(int rank, int world_size, WaitingOptions options);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_WAITING_H_
