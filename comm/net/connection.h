// One framed connection to a store, with a thread of its own.
//
//   EK_ASSIGN_OR_RETURN(Greeted greeted, Greet(find, hello, job, deadline));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
//                       Connection::Create(std::move(greeted)));
//   connection->Start(on_frame, on_lost);
//   connection->Send(payload);
//
// Threads: Send() from any thread; it never waits. Callbacks run on the connection's thread, one at
//          a time. Close() and destruction from any other thread; no callback runs after them.

#ifndef EVENKEEL_COMM_NET_CONNECTION_H_
#define EVENKEEL_COMM_NET_CONNECTION_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/greet.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

class Connection {
 public:
  static absl::StatusOr<std::unique_ptr<Connection>> Create(Greeted greeted);
  ~Connection() { Close(absl::ZeroDuration()); }

  // Called once. `on_lost` is called at most once, after the last frame; after an error never.
  absl::Status Start(std::function<void(std::string)> on_frame,
                     std::function<void(absl::Status)> on_lost);
  // Queues a frame. A lost connection drops it.
  void Send(absl::string_view payload);
  // Runs `task` on the connection's thread, unless Close() is called before.
  void Post(std::function<void()> task);
  // The peer owes a reply to what is sent next; any frame counts. Called before Send(): a reply
  // that arrived between the two would leave the wait for it open.
  void ExpectAnswer();
  // Returns for how long a reply has been due without any frame. Time in which this thread did not
  // run does not count.
  absl::Duration Silence() const;
  // Sends what is queued and half-closes the connection, for at most `linger`; then ends the
  // thread.
  void Close(absl::Duration linger);

  const HostPort& local_address() const { return greeted_.local; }
  const HostPort& server() const { return greeted_.server; }
  // Returns "the store at 10.0.0.7:29400, hosted by rank 0".
  std::string ServerName() const;
  // Returns Unavailable: "the store at 10.0.0.7:29400 is gone: rank 0, which hosts it, is gone".
  absl::Status GoneStatus() const;

 private:
  Connection(Greeted greeted, WakeUp wake) : greeted_(std::move(greeted)), wake_(std::move(wake)) {}

  void Run();
  // The next actions on the socket.
  struct Plan {
    absl::Status error;  // From Send().
    bool has_data = false;
    absl::Time close_by;   // Finite: Close() was called.
    bool listens = false;  // A reply is due.
    std::vector<std::function<void()>> tasks;
  };
  Plan NextPlan();
  void Flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for an event, and handles it.
  absl::Status Turn(const Plan& plan);
  absl::Status Receive();
  void PassTime(absl::Duration time);
  absl::Status HandleFrames();

  Greeted greeted_;
  const WakeUp wake_;
  std::function<void(std::string)> on_frame_;
  std::function<void(absl::Status)> on_lost_;
  std::thread thread_;

  mutable absl::Mutex mutex_;
  std::string outgoing_ ABSL_GUARDED_BY(mutex_);
  size_t sent_ ABSL_GUARDED_BY(mutex_) = 0;  // The number of bytes of outgoing_ that are sent.
  absl::Status send_error_ ABSL_GUARDED_BY(mutex_);
  bool is_lost_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool answer_is_due_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration silence_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();  // While a reply is due.
  absl::Time close_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_CONNECTION_H_
