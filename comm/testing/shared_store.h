// A store (comm/abi/group.h) for tests whose ranks are threads of one process.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_TESTING_SHARED_STORE_H_
#define EVENKEEL_COMM_TESTING_SHARED_STORE_H_

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "evenkeel/comm/abi/group.h"

namespace evenkeel::abi {

class SharedStore final : public Store {
 public:
  bool Set(const std::string& key, const std::string& value, std::string*) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return true;
  }
  bool Get(const std::string& key, std::chrono::milliseconds timeout, std::string* value,
           std::string* error) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; })) {
      *error = "no rank has set " + key;
      return false;
    }
    *value = values_[key];
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace evenkeel::abi

#endif  // EVENKEEL_COMM_TESTING_SHARED_STORE_H_
