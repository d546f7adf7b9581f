// The connections of one rank with all others: a meeting, then a transport over them.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpMesh> mesh,
//                       TcpMesh::Create(rank, {"world", world_size, key}, "10.0.0.7"));
//   EK_RETURN_IF_ERROR(mesh->Connect(addresses, deadline));      // mesh->address() of every rank
//   mesh->transport()->Send(...)
//
// Threads: Connect() once; Abort() from any thread, at any time.
// Errors:  as PeerMeeting.

#ifndef EVENKEEL_COMM_TCP_MESH_H_
#define EVENKEEL_COMM_TCP_MESH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/tcp/transport.h"

namespace evenkeel::internal {

class PeerMeeting;

class TcpMesh {
 public:
  // Starts to listen. The names in `options` are the group's.
  static absl::StatusOr<std::unique_ptr<TcpMesh>> Create(int rank, const PeerGroup& group,
                                                         const std::string& bind_address,
                                                         TcpTransportOptions options = {});
  ~TcpMesh();

  const std::string& address() const;
  // `addresses`: by rank. Blocks until all are connected.
  absl::Status Connect(const std::vector<std::string>& addresses, absl::Time deadline);
  // Ends every wait on this rank's connections with `why`; the peers see closed connections. When
  // it has returned, the transport touches nobody's memory any more.
  void Abort(const absl::Status& why);

  // Null until connected.
  const std::shared_ptr<TcpTransport>& transport() const { return transport_; }

 private:
  TcpMesh(int rank, TcpTransportOptions options, std::unique_ptr<PeerMeeting> meeting);

  const int rank_;
  const TcpTransportOptions options_;
  const std::unique_ptr<PeerMeeting> meeting_;
  std::shared_ptr<TcpTransport> transport_;  // Set once, under the mutex.

  absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_MESH_H_
