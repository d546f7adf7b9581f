// The neighbours of a rank in the tree, over TCP: it listens for its children, and connects to its
// parent.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpEdges> edges,
//       TcpEdges::Create({.job = job, .group = "world", .rank = 2, .shape = shape, .host = host}));
//
// Both sides prove to each other that they have the job's secret, as with the job's store. A parent
// accepts its children of this group, each once, and listens on the given address only.
//
// Errors: Create() returns errors of listening. A parent that cannot be reached, or is lost, is
//         reported to `lost` after a short delay: if its process has died, the hub's report, which
//         is more precise, comes first.

#ifndef EVENKEEL_COMM_CONTROL_TCP_EDGES_H_
#define EVENKEEL_COMM_CONTROL_TCP_EDGES_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/control/link_meter.h"
#include "evenkeel/comm/control/tree_link.h"
#include "evenkeel/comm/net/connection.h"
#include "evenkeel/comm/net/greet.h"

namespace evenkeel::internal {

class EdgeSeats;
class ServerLoop;

struct TcpEdgesOptions {
  JobSecret job;
  std::string group;
  int rank = 0;
  TreeShape shape;
  std::string host;  // The address to listen on for children.
  absl::Duration timeout;
};

class TcpEdges : public TreeEdges {
 public:
  static absl::StatusOr<std::unique_ptr<TcpEdges>> Create(const TcpEdgesOptions& options);
  ~TcpEdges() override;

  void Start(std::function<void(int, ToHub)> from_child, std::function<void(ToRank)> from_parent,
             std::function<void(int, const absl::Status&)> lost) override;
  bool HasAddress() const override { return true; }
  std::string Address() const override { return address_; }
  void AttachParent(const std::string& address) override;
  void SendToParent(const ToHub& message) override;
  void SendToChildren(absl::Span<const int> to, const ToRank& message) override;
  void Stop() override;
  ControlCounters Counters() const override;

 private:
  explicit TcpEdges(const TcpEdgesOptions& options);

  // On threads of their own.
  void ConnectToParent(const std::string& address);
  void OnParentLost(const absl::Status& why);

  const TcpEdgesOptions options_;
  const int parent_;
  std::string address_;
  std::function<void(int, ToHub)> from_child_;
  std::function<void(ToRank)> from_parent_;
  std::function<void(int, const absl::Status&)> lost_;
  LinkMeter up_, down_;

  absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Connection> to_parent_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> for_parent_ ABSL_GUARDED_BY(mutex_);  // Kept until it is connected.
  std::thread connecting_ ABSL_GUARDED_BY(mutex_);

  EdgeSeats* seats_ = nullptr;  // Owned by the loop; null: no children.
  std::unique_ptr<ServerLoop> loop_;
  std::thread serving_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_TCP_EDGES_H_
