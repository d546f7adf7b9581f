// The backend over memory that the ranks of one host share.
//
//   auto backend = std::make_unique<ShmBackend>(rank, world_size, "world");
//   EK_ASSIGN_OR_RETURN(std::string mine, backend->Listen(key));  // to be given to all ranks
//   EK_RETURN_IF_ERROR(backend->Connect(everybodys, timeout));
//
// Who moves the data: an operation goes on wherever a thread of its rank looks after it: small ones
// in the call that issues them, if this rank came last; others in Wait() of the thread that waits
// for them; all others, and all that have callbacks, on the communication thread. That sleeps on a
// futex until another rank has made progress possible: it takes no processor time while ranks
// compute. Who waits looks for a while before it sleeps.
//
// Abort: a rank that is stopped in the middle of a reduction may go on to write after the others
//        have given up. So the memory of this rank that others may write to is fenced before
//        Abort() returns (SharedMemory::Fence()).
//
// Threads: as Backend; Listen() and Connect() once, before the first operation.

#ifndef EVENKEEL_COMM_SHM_BACKEND_H_
#define EVENKEEL_COMM_SHM_BACKEND_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

class ShmBackend : public Backend {
 public:
  // `names`: what messages call its ranks.
  ShmBackend(int rank, int world_size, std::string group, const RankNames& names = {});
  ~ShmBackend() override;

  // Starts to listen; the address for Connect() of all ranks. `key`: what the group's ranks share
  // with nobody else.
  absl::StatusOr<std::string> Listen(std::string key);
  // `addresses`: what Listen() gave, by rank. Nobody listens any more when it returns.
  absl::Status Connect(const std::vector<std::string>& addresses, absl::Duration timeout);

  absl::string_view name() const override { return "shm"; }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override;
  void Abort(const absl::Status& why) override;
  absl::StatusOr<Memory> Allocate(int64_t bytes) override;

 private:
  class Core;
  const std::shared_ptr<Core> core_;  // Also of threads that wait for operations.
  std::thread thread_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_BACKEND_H_
