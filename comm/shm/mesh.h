// The Unix sockets between the ranks of one host, over which they hand each other shared memory.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<ShmMesh> mesh,
//                       ShmMesh::Listen(/*rank=*/1, {"world", 4, key}));
//   // ... mesh->address() goes to all ranks over the control plane, which names missing ranks ...
//   EK_RETURN_IF_ERROR(mesh->Connect(addresses, deadline));
//
//   EK_RETURN_IF_ERROR(mesh->Give(7, memory));        // on rank 1
//   auto theirs = mesh->Find(1, 7);                   // on another rank
//   mesh->TakeBack(7);                                // on rank 1; the others unmap it later
//
// Sockets have names in the abstract name space, chosen by the kernel, so no file is left and no
// path is too long. Both ends prove that they have `key`, which is never sent, and the other end
// must run as the same user. Any other connection is closed, and delays no rank.
//
// Threads: Listen() and Connect() first; then thread-safe, and nothing blocks.

#ifndef EVENKEEL_COMM_SHM_MESH_H_
#define EVENKEEL_COMM_SHM_MESH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/ranks/rank_names.h"

namespace evenkeel::internal {

class PeerMeeting;

class ShmMesh {
 public:
  static absl::StatusOr<std::unique_ptr<ShmMesh>> Listen(int rank, const PeerGroup& group);
  ~ShmMesh();

  // Text, for Connect() of all ranks. Contains no secret.
  const std::string& address() const;
  // `addresses`: those of all ranks, by rank. Stops listening before it returns.
  // Errors: DeadlineExceeded names the missing ranks; PermissionDenied names the peer whose key
  //         differs; Cancelled after Close().
  absl::Status Connect(const std::vector<std::string>& addresses, absl::Time deadline);

  // Hands memory from SharedMemory::Create() to these peers, or to all, under a number that this
  // rank has not given before. Returns OK at once for memory that they have already. Unavailable: a
  // peer has not read its socket for long, and the socket is full; the call may be repeated.
  absl::Status Give(uint64_t id, const SharedMemory& memory, absl::Span<const int> to);
  absl::Status Give(uint64_t id, const SharedMemory& memory);
  // Peers may unmap it.
  void TakeBack(uint64_t id);

  // Returns the memory that `peer` has given under that number; it lives as long as this rank's
  // users of it do. NotFound: there is none yet.
  absl::StatusOr<std::shared_ptr<SharedMemory>> Find(int peer, uint64_t id);

  // Ends Connect() on this rank, from any thread.
  void Close();

 private:
  class Outbox;
  struct Peer;

  ShmMesh(int rank, const PeerGroup& group, std::unique_ptr<PeerMeeting> meeting);

  absl::Status CheckGivable(uint64_t id, const SharedMemory& memory) const;
  // Sets `has` for each peer that it was sent to, or whose process is gone.
  absl::Status GiveTo(absl::Span<const int> to, std::vector<bool>& has, uint64_t id,
                      const SharedMemory& memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int rank_;
  const int world_size_;
  const RankNames names_;
  const std::unique_ptr<PeerMeeting> meeting_;
  std::vector<std::unique_ptr<Peer>>
      peers_;  // By rank, once connected; this rank's has no descriptor.

  absl::Mutex mutex_;
  std::vector<Outbox> outboxes_ ABSL_GUARDED_BY(mutex_);                 // By rank.
  std::map<uint64_t, std::vector<bool>> given_ ABSL_GUARDED_BY(mutex_);  // By rank: has it.
};

// Returns a text that is equal for processes that can hand each other memory (same kernel, same
// network name space, same user), and different for others.
absl::StatusOr<std::string> HostIdentity();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_MESH_H_
