// Stands between a rank and its store, and can be cut.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<StoreProxy> proxy, StoreProxy::Create(server->port()));
//   ... EVENKEEL_STORE=proxy->address() ...
//   proxy->Cut(StoreProxy::How::kReset);
//
// Threads: thread-safe; a thread of its own carries the bytes.

#ifndef EVENKEEL_TESTS_FAULTS_STORE_PROXY_H_
#define EVENKEEL_TESTS_FAULTS_STORE_PROXY_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace evenkeel {

class StoreProxy {
 public:
  enum class How {
    kReset,   // Both ends see that the connection is gone.
    kSilent,  // Connections stay; nothing passes any more.
  };

  // To this port of the loopback address.
  static absl::StatusOr<std::unique_ptr<StoreProxy>> Create(int port);
  ~StoreProxy();

  const std::string& address() const { return address_; }
  // When it returns, nothing passes any more.
  void Cut(How how);

 private:
  struct Pipe {
    int near = -1, far = -1;
  };

  StoreProxy(int listener, int wake_read, int wake_write, std::string address, int port);
  void Carry();
  void Accept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int listener_, wake_read_, wake_write_;
  const std::string address_;
  const int port_;
  absl::Mutex mutex_;
  bool is_cut_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Pipe> pipes_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_FAULTS_STORE_PROXY_H_
