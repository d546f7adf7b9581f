// The place where the ranks of a job find each other: the store that the environment names, hosted
// by this process if necessary.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<Rendezvous> job, Rendezvous::Join(environment));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, job->OpenGroup({.name = "world"}));
//
// Ownership: links keep the rendezvous, and with it the server, alive.
// Threads:   thread-safe.
// Errors:    those of TcpStore::Connect, and errors of the secret's file and of the address on
//            which to listen; AlreadyExists for a second rank 0 of a job whose store is in a
//            folder.
// Ending:    if rank 0 hosts the server, its last owner waits for ranks that are about to leave,
//            for seconds at most.

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

namespace evenkeel {

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  // Waits for the server, not for other ranks. The job must have more than one rank.
  static absl::StatusOr<std::shared_ptr<Rendezvous>> Join(
      const Environment& environment, absl::Duration timeout = absl::Minutes(2));
  // The same for the one group of `environment`, among many of this process. Its ranks find its hub
  // in a store of the caller, which no other group uses: in the process of its rank 0, which hosts
  // one server for all groups of which it is that. A process has one connection to such a server,
  // and so a further group costs neither descriptors nor threads here. Whoever reads that store can
  // join these groups. `through` must live until the group has been made.
  static absl::StatusOr<std::shared_ptr<Rendezvous>> JoinThrough(const Environment& environment,
                                                                 absl::Duration timeout,
                                                                 std::shared_ptr<Store> through);
  // Returns the address and the secret of a running job, for an observer (TcpObserver). Creates
  // nothing. NotFound if no job is in the folder that the environment names.
  static absl::StatusOr<TcpStoreOptions> Find(const Environment& environment);
  ~Rendezvous();

  // Opens this rank's link to the control hub of a group. Each rank of the group opens it once.
  absl::StatusOr<std::unique_ptr<TcpControlLink>> OpenGroup(const GroupSeat& seat = {});
  // Tells the other ranks of a group in that store that this one does not come.
  static void GiveUp(int rank, const absl::Status& why, Store& through);
  // After JoinThrough(): returns the error of a rank that does not come. Looks into the store once
  // per second at most, and is for one thread.
  absl::Status OthersStatus();
  // Returns the job's key-value store; not after JoinThrough().
  Store& store() { return *store_; }

 private:
  class Host;
  Rendezvous() = default;

  TcpStoreOptions options_;
  std::string group_id_;
  std::shared_ptr<FileStore> folder_;
  bool removes_folder_ = false;
  std::shared_ptr<Host> host_;  // Null: another process hosts the server.
  std::unique_ptr<TcpStore> store_;
  std::shared_ptr<Store> through_;
  absl::Time look_again_ = absl::InfinitePast();  // In `through_`.
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_RENDEZVOUS_H_
