// NCCL over simulated devices, for tests: with its order, its silence about mistakes, and failures
// that are scripted.
//
//   SimulatedDevices devices({.count = 2});
//   SimulatedNccl nccl(devices);
//   NcclApi& mine = nccl.Library(rank);            // what the process of that rank has loaded
//   nccl.SetState(1, {NcclCode::kRemoteError, "connection closed"});      // from now on, on rank 1
//
// Kernels go to the ranks' simulated streams and meet there (simulated_nccl_meeting.h).
// Communicators are non-blocking as NCCL's: connecting takes until all ranks have come, and a group
// of calls is on the stream only once State() has said so. Ranks with different versions never
// connect; two on one device get kInvalidUsage. A failed call of a group ends the whole group of
// calls, and stays the communicator's state. Memory comes with anything in it.
//
// A use that NCCL does not allow is a mistake, see mistakes(): two calls at a time into one
// communicator (for tsan a data race as well), one into a communicator that is gone, a group of
// calls that ends without having begun.
//
// Threads:   thread-safe.
// Ownership: outlives the communicators; the devices outlive it.

#ifndef EVENKEEL_COMM_TESTING_SIMULATED_NCCL_H_
#define EVENKEEL_COMM_TESTING_SIMULATED_NCCL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

class SimulatedNccl {
 public:
  // `kernels_at_once`: how many kernels find room on a device, where they wait for their peers;
  // others wait until one of them has gone. 0: any number.
  explicit SimulatedNccl(SimulatedDevices& devices, int kernels_at_once = 0);
  ~SimulatedNccl();

  struct Process {
    int version = 22809;
    std::string host = "host";
    bool may_share_device = false;
    bool registers = true;  // NCCL_LOCAL_REGISTER=0: Register() does nothing, well.
  };
  // The first call for a process makes its library. Lives as long as this.
  NcclApi& Library(int process, const Process& options);
  NcclApi& Library(int process) { return Library(process, Process()); }

  // Scripts. Calls are named as in NcclApi.
  // The next call of that name, after so many, answers so.
  void FailNext(int process, absl::string_view call, NcclAnswer answer, int after = 0);
  // The next call of that name does not come back before Release(), or before its communicator is
  // aborted.
  void HangNext(int process, absl::string_view call);
  void Release();       // Waits until aborts have come back.
  int hanging() const;  // Calls that do not come back now.
  // Sets the answer of State() for all the process's communicators, from now on.
  void SetState(int process, NcclAnswer answer);
  // Its communicators are never connected.
  void NeverConnect(int process);

  // Counters.
  int64_t garbage() const;        // Meetings of different calls.
  int64_t kernels() const;        // Launched.
  int64_t registered() const;     // Registrations that live.
  int64_t allocated() const;      // Pieces of AllocateMemory() that live.
  int64_t communicators() const;  // That live.
  std::vector<std::string> mistakes() const;

 private:
  struct World;
  class Loaded;
  struct Group;
  struct Comm;
  const std::shared_ptr<World> world_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_SIMULATED_NCCL_H_
