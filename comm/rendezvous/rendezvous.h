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
  // Joins one group, whose rank and world size `environment` has. Its ranks exchange the address of
  // the group's hub through a store of the caller, which no other group may use. A process hosts
  // one server for all groups of which it is rank 0, and has one connection to each server, so a
  // further group adds no descriptor and no thread for its hub. A process that can read the store
  // can join the group. Used until the group has been made: `through`, and what it refers to.
  static absl::StatusOr<std::shared_ptr<Rendezvous>> JoinThrough(const Environment& environment,
                                                                 absl::Duration timeout,
                                                                 std::shared_ptr<Store> through);
  // Returns the address and the secret of a running job, for an observer (TcpObserver). Creates
  // nothing. NotFound if no job is in the folder that the environment names.
  static absl::StatusOr<TcpStoreOptions> Find(const Environment& environment);
  ~Rendezvous();

  // Opens this rank's link to the control hub of a group. Each rank of the group opens it once.
  absl::StatusOr<std::unique_ptr<TcpControlLink>> OpenGroup(const GroupSeat& seat = {});
  // Informs the other ranks of a group of JoinThrough() that this rank cannot make it, and why:
  // they read it in `through`.
  static void GiveUp(int rank, const absl::Status& why, Store& through);
  // After JoinThrough(): returns the error of a rank that has called GiveUp(), else OK. Reads the
  // store at most once a second. Called by one thread at a time.
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
  absl::Time look_again_ = absl::InfinitePast();  // When to read `through_` next.
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_RENDEZVOUS_H_
