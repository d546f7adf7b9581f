// A small shared key-value store, where ranks that do not know each other yet leave what the others need.
//
//   EK_RETURN_IF_ERROR(store.Set("address", "10.0.0.7:29400"));
//   EK_ASSIGN_OR_RETURN(std::string address, store.Get("address", absl::Seconds(30)));   // waits until it is there
//
// Implementations: files in a folder (comm/file_store.h), a server over TCP (comm/tcp_store.h). Keys and values are any
// bytes; a value is there completely or not at all.
//
// Threads: thread-safe.
// Errors:  DeadlineExceeded names the key that did not appear; Unavailable: the store is gone; InvalidArgument: a key
//          that is empty or too long.

#ifndef EVENKEEL_COMM_STORE_H_
#define EVENKEEL_COMM_STORE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel {

class Store {
 public:
  virtual ~Store() = default;

  // Creates the value, or replaces it.
  virtual absl::Status Set(absl::string_view key, absl::string_view value) = 0;
  // The value, as soon as there is one.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout) = 0;
  // The value; where there is none, `value` becomes it. All who ask get the same answer.
  virtual absl::StatusOr<std::string> GetOrSet(absl::string_view key, absl::string_view value) = 0;
  // Adds to a decimal number and gives the sum; what is not there counts as 0.
  virtual absl::StatusOr<int64_t> Add(absl::string_view key, int64_t amount) = 0;
  // Whether there is a value now.
  virtual absl::StatusOr<bool> Check(absl::string_view key) = 0;
  // Takes the value away, and says whether there was one.
  virtual absl::StatusOr<bool> Delete(absl::string_view key) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_STORE_H_
