// The backend over memory that the ranks of one host share.
//
//   auto backend = std::make_unique<ShmBackend>(rank, world_size, "world");
//   EK_ASSIGN_OR_RETURN(std::string mine, backend->Listen(key));  // to be given to all ranks
//   EK_RETURN_IF_ERROR(backend->Connect(addresses_of_all, timeout));
//
// Threads that move the data: a small operation runs in the call that issues it, if this rank came
// last; others run in Wait() of the thread that waits for them; all others, and all with callbacks,
// run on the communication thread. It sleeps on a futex until another rank has made progress
// possible, and takes no processor time while ranks compute. A waiting thread polls for a while
// before it sleeps.
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

  // Starts to listen, and returns the address for Connect() of all ranks. `key`: the secret of the
  // group's ranks.
  absl::StatusOr<std::string> Listen(std::string key);
  // `addresses`: the results of Listen(), by rank. Stops listening before it returns.
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
