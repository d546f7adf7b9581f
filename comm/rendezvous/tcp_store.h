// Clients of a job's server (comm/rendezvous/tcp_store_server.h): the key-value store, a rank's
// link to its control hub, and an observer, which is no rank of the job.
//
//   TcpStoreOptions options{
//       .addresses = {"10.0.0.7:29400"}, .secret = secret, .rank = 1, .world_size = 4};
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpStore> store, TcpStore::Connect(options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
//                       TcpControlLink::Connect(options, {.name = "world"}));
//
// Connecting retries at growing intervals until the timeout, since ranks start in any order.
//
// Errors: DeadlineExceeded with the address if no server of the job is found; PermissionDenied:
//         another secret; InvalidArgument: a wrong rank or world size; FailedPrecondition: another
//         build. Unavailable if the server is gone, with its address and its host.

#ifndef EVENKEEL_COMM_RENDEZVOUS_TCP_STORE_H_
#define EVENKEEL_COMM_RENDEZVOUS_TCP_STORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/rendezvous/store.h"

namespace evenkeel {

namespace internal {
class Connection;
struct StoreReply;
struct StoreRequest;
}  // namespace internal

struct TcpStoreOptions {
  std::vector<std::string> addresses;  // "host:port"; the job's server is at one of them.
  std::shared_ptr<Store>
      published;    // Instead: the store that contains the server's address, under kAddressKey.
  std::string job;  // Empty: any job.
  std::string secret;
  int rank = 0;  // Within the job.
  int world_size = 1;
  std::string host = {};  // The server's host, for messages: "rank 0".
  int host_rank = -1;     // The rank that hosts the server, if one does: it is lost with it.
  absl::Duration timeout =
      absl::Minutes(2);  // To connect; and for a reply that does not depend on another rank.
  // All links of this process to this server share one connection and its thread: a callback that
  // waits delays all groups.
  bool shares_connection = false;
  // Groups with more ranks exchange over a tree in which no rank has more children. Equal on all
  // ranks.
  int fanout = 32;
};

inline constexpr char kAddressKey[] = "address";
inline constexpr char kSecretKey[] = "secret";

class TcpStore : public Store {
 public:
  static absl::StatusOr<std::unique_ptr<TcpStore>> Connect(const TcpStoreOptions& options);
  ~TcpStore() override;

  absl::Status Set(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout) override;
  absl::StatusOr<std::string> GetOrSet(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t amount) override;
  absl::StatusOr<bool> Check(absl::string_view key) override;
  absl::StatusOr<bool> Delete(absl::string_view key) override;

 private:
  TcpStore(std::unique_ptr<internal::Connection> connection, absl::Duration timeout);
  absl::StatusOr<internal::StoreReply> Call(absl::string_view key, internal::StoreRequest request,
                                            absl::Duration timeout);
  void OnFrame(absl::string_view frame);
  void OnLost(const absl::Status& why);

  const absl::Duration timeout_;
  absl::Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::unique_ptr<internal::StoreReply>> pending_
      ABSL_GUARDED_BY(mutex_);  // Null: no reply yet.
  const std::unique_ptr<internal::Connection>
      connection_;  // Last, because its thread uses the rest.
};

// Asks for the state of the job's groups: it needs the job's secret, and changes nothing in the
// job. Thread-safe.
class TcpObserver {
 public:
  // Rank, world size and fanout of the options are not used.
  static absl::StatusOr<std::unique_ptr<TcpObserver>> Connect(const TcpStoreOptions& options);
  ~TcpObserver();

  // Returns a JSON array with an object for each group that has ranks:
  //   {"group": "world", "error": "...", "ranks": [
  //     {"state": "connected", "doing": "waits in #412 ...", "waited_ms": 900, "waits_for": [1],
  //      "silent_ms": 100, "steps": {...}}]}
  // `state` is "not connected", "connected", "lost" or "left"; `error` is the one with which the
  // group has ended, or empty. `doing` is the rank's own report, which it sends with each
  // heartbeat; `waits_for` has the first 100 ranks whose part is missing; `silent_ms` is the time
  // without a message. `steps` is in join/steps/step_status.h, for groups that train.
  // Errors: DeadlineExceeded: the process that hosts the server hangs, or the network is down.
  //         Unavailable: it is gone. OutOfRange: it has ended, and sent the last state before. In
  //         that a group that has failed is as it was when it did, also if its ranks have gone;
  //         it is not there if its ranks have continued in another group.
  absl::StatusOr<std::string> Status(absl::Duration timeout);
  // Returns "the store at 10.0.0.7:29400, hosted by rank 0".
  std::string ServerName() const;

 private:
  explicit TcpObserver(std::unique_ptr<internal::Connection> connection);

  absl::Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  int64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string answer_ ABSL_GUARDED_BY(mutex_);  // The newest.
  const std::unique_ptr<internal::Connection>
      connection_;  // Last, because its thread uses the rest.
};

// A group of ranks within the job.
struct GroupSeat {
  std::string name = "world";
  std::string id = {};            // Separates groups of one name; equal on all ranks.
  std::vector<int> members = {};  // Its ranks' numbers in the job; empty: not compared.
  int rank = -1;                  // -1: the rank in the job.
  int world_size = -1;            // -1: that of the job.
  int incarnation = 0;            // Not 0: of a newcomer (comm/net/handshake.h).
  absl::Duration timeout = absl::InfiniteDuration();  // Of connecting, if less than the options'.
  ControlLink::Origin origin = {};                    // An error of its status ends connecting.
};

class TcpControlLink : public ControlLink {
 public:
  // `keep` is kept alive as long as the link, for instance the host of the server.
  static absl::StatusOr<std::unique_ptr<TcpControlLink>> Connect(
      const TcpStoreOptions& options, const GroupSeat& seat = {},
      std::shared_ptr<void> keep = nullptr);
  ~TcpControlLink() override { Stop(); }

  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override {
    link_->Start(std::move(receive), std::move(lost));
  }
  void Send(ToHub message) override { link_->Send(std::move(message)); }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank,
                                                    int world_size, absl::Duration timeout,
                                                    const Origin& origin) override {
    return link_->Open(group, rank, world_size, timeout, origin);
  }
  std::string Key(absl::string_view purpose) const override { return link_->Key(purpose); }
  absl::Duration Silence() const override { return link_->Silence(); }
  int HubRank() const override { return link_->HubRank(); }
  ControlCounters Counters() const override { return link_->Counters(); }
  void Stop() override { link_->Stop(); }

  // Returns the address of this host on the route to the server, without port: other hosts that can
  // reach the server can reach it, too.
  const std::string& local_host() const { return local_host_; }

 private:
  TcpControlLink(std::unique_ptr<ControlLink> link, std::string local_host);

  const std::string local_host_;
  const std::unique_ptr<ControlLink> link_;  // To the hub only, or with the tree.
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_TCP_STORE_H_
