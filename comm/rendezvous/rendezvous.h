// The place where the ranks of a job find each other: the store that the environment names, hosted
// by this process if necessary.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<Rendezvous> job, Rendezvous::Join(environment));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, job->OpenGroup({.name = "world"}));
//
// Ownership: links keep the rendezvous, and with it the server, alive.
// Threads:   thread-safe.
// Errors:    those of TcpStore::Connect, and errors of the secret's file and of the address to
// listen
//            on; AlreadyExists for a second rank 0 of a job whose store is in a folder.
// Ending:    if rank 0 hosts the server, its last owner waits for ranks that are about to leave,
// for
//            seconds at most.

#ifndef EVENKEEL_COMM_RENDEZVOUS_RENDEZVOUS_H_
#define EVENKEEL_COMM_RENDEZVOUS_RENDEZVOUS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/rendezvous/file_store.h"
#include "evenkeel/comm/rendezvous/store.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"

namespace evenkeel {

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  // Waits for the server, not for other ranks. The job must have more than one rank. Ranks find the
  // server and its secret in `through`, if it is given: rank 0 hosts the server then. Whoever reads
  // that store can join the job.
  static absl::StatusOr<std::shared_ptr<Rendezvous>> Join(const Environment& environment,
                                                          absl::Duration timeout = absl::Minutes(2),
                                                          std::shared_ptr<Store> through = nullptr);
  // Returns the address and the secret of a running job, for an observer (TcpObserver). Creates
  // nothing. NotFound if no job is in the folder that the environment names.
  static absl::StatusOr<TcpStoreOptions> Find(const Environment& environment);
  ~Rendezvous();

  // Opens this rank's link to the control hub of a group. Each rank of the group opens it once.
  absl::StatusOr<std::unique_ptr<TcpControlLink>> OpenGroup(const GroupSeat& seat = {});
  // Returns the job's key-value store.
  Store& store() { return *store_; }

 private:
  Rendezvous() = default;
  // Starts the server, and publishes its address in the store of the options, if there is one.
  absl::Status Host(const Environment& environment);
  void TellObservers(const std::string& folder);

  TcpStoreOptions options_;
  std::shared_ptr<FileStore> folder_;
  bool removes_folder_ = false;
  std::shared_ptr<FileStore> for_observers_;  // Has the address and the secret of `server_`.
  std::unique_ptr<TcpStoreServer> server_;    // Null: another process hosts it.
  std::unique_ptr<TcpStore> store_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_RENDEZVOUS_H_
