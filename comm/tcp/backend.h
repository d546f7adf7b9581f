// The backend over TCP: a thread per lane.
//
//   auto backend = std::make_unique<TcpBackend>(rank, world_size, "world");
//   // to be given to all ranks
//   EK_ASSIGN_OR_RETURN(std::string mine, backend->Listen("127.0.0.1", key, on_lost));
//   EK_RETURN_IF_ERROR(backend->Connect(addresses_of_all, timeout));
//
// A lane is a channel's collectives, which run one after the other, or its messages in one
// direction between two ranks, which are all under way at a time.
//
// Threads: as Backend; Listen() and Connect() once, before the first operation.

#ifndef EVENKEEL_COMM_TCP_BACKEND_H_
#define EVENKEEL_COMM_TCP_BACKEND_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

class PeerMeeting;
class TcpTransport;

class TcpBackend : public Backend {
 public:
  // `names`: what messages call its ranks. `warn`: see TcpTransportOptions and PeerMeetingOptions.
  TcpBackend(int rank, int world_size, std::string group, const RankNames& names = {},
             WarnFunction warn = nullptr);
  ~TcpBackend() override;

  // Starts to listen, and returns the address for Connect() of all ranks. `key`: the secret of the
  // group's ranks. `on_lost` is called on the transport's thread, until this backend is destroyed,
  // when a connection delivers nothing: operations in flight then end with that cause, but this
  // rank may have none in flight while others wait for it.
  absl::StatusOr<std::string> Listen(const std::string& bind_address, std::string key,
                                     std::function<void(const absl::Status& why)> on_lost);
  // `addresses`: the results of Listen(), by rank. Stops listening before it returns.
  absl::Status Connect(const std::vector<std::string>& addresses, absl::Duration timeout);

  absl::string_view name() const override { return "tcp"; }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override;
  void Abort(const absl::Status& why) override;
  void Flush(absl::Time deadline) override;

 private:
  class Lane;
  using LaneKey =
      std::tuple<uint64_t, CollectiveKind, int>;  // Channel; of messages: direction and peer.

  // Called around a lane's collective, which uses its operation's memory. Enter() returns the error
  // that has ended the group, if any: the lane must not begin then.
  absl::Status Enter();
  void Leave();
  // Connects to the other ranks, and makes the transport.
  absl::Status Meet(const std::vector<std::string>& addresses, absl::Time deadline);
  // Keeps the first cause.
  void SetEnded(const absl::Status& why);
  // Returns the error that has ended the group, or ends it within `patience`; else `seen`.
  absl::Status FirstCause(const absl::Status& seen, absl::Duration patience);

  const int rank_;
  const int world_size_;
  const std::string group_;
  const RankNames names_;
  const WarnFunction warn_;
  const uint64_t generation_;  // In every tag.
  // Each is set once, under the mutex: the transport by Connect(), the others by Listen().
  std::unique_ptr<PeerMeeting> meeting_;
  std::function<void(const absl::Status& why)> on_lost_;
  std::shared_ptr<TcpTransport> transport_;

  absl::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<LaneKey, std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_BACKEND_H_
