// Where the ranks of a job come together: the store that the environment names, hosted by this process if it must.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<Rendezvous> job, Rendezvous::Join(environment));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, job->OpenGroup({.name = "world"}));
//
// Ownership: links keep the rendezvous, and with it the server, alive.
// Threads:   thread-safe.
// Errors:    as TcpStore::Connect; and for the file of a secret or an address to listen on that is no good;
//            AlreadyExists for a second rank 0 of a job that meets in a folder.
// Ending:    where rank 0 hosts the server, its last owner waits for ranks that are about to leave, for seconds at
// most.

#ifndef EVENKEEL_COMM_RENDEZVOUS_H_
#define EVENKEEL_COMM_RENDEZVOUS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/file_store.h"
#include "evenkeel/comm/store.h"
#include "evenkeel/comm/tcp_store.h"
#include "evenkeel/comm/tcp_store_server.h"

namespace evenkeel {

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  // Waits for the server, not for other ranks. The job must have more than one rank.
  static absl::StatusOr<std::shared_ptr<Rendezvous>> Join(const Environment& environment,
                                                          absl::Duration timeout = absl::Minutes(2));
  ~Rendezvous();

  // This rank's link to the control hub of a group; each rank of the group opens it once.
  absl::StatusOr<std::unique_ptr<TcpControlLink>> OpenGroup(const GroupSeat& seat = {});
  // The job's key-value store.
  Store& store() { return *store_; }

 private:
  Rendezvous() = default;
  absl::Status Host(const Environment& environment);

  TcpStoreOptions options_;
  std::shared_ptr<FileStore> folder_;
  bool removes_folder_ = false;
  std::unique_ptr<TcpStoreServer> server_;  // Null: somebody else hosts it.
  std::unique_ptr<TcpStore> store_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_H_
