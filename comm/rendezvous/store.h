// A small shared key-value store, with which ranks that are not connected yet exchange addresses.
//
//   EK_RETURN_IF_ERROR(store.Set("address", "10.0.0.7:29400"));
//   // Waits for the value:
//   EK_ASSIGN_OR_RETURN(std::string address, store.Get("address", absl::Seconds(30)));
//
// Implementations: files in a folder (comm/rendezvous/file_store.h), a server over TCP
// (comm/rendezvous/tcp_store.h). Keys and values are any bytes; a value is complete or absent.
//
// Threads: thread-safe.
// Errors:  DeadlineExceeded names the key that did not appear; Unavailable: the store is gone;
//          InvalidArgument: a key that is empty or too long.

#ifndef EVENKEEL_COMM_RENDEZVOUS_STORE_H_
#define EVENKEEL_COMM_RENDEZVOUS_STORE_H_

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
  // Waits for the value and returns it.
  virtual absl::StatusOr<std::string> Get(absl::string_view key, absl::Duration timeout) = 0;
  // Returns the value; if there is none, sets it to `value` first. All callers return the same.
  virtual absl::StatusOr<std::string> GetOrSet(absl::string_view key, absl::string_view value) = 0;
  // Adds to a decimal number and returns the sum; a missing value counts as 0.
  virtual absl::StatusOr<int64_t> Add(absl::string_view key, int64_t amount) = 0;
  // Returns whether there is a value now.
  virtual absl::StatusOr<bool> Check(absl::string_view key) = 0;
  // Deletes the value; returns whether there was one.
  virtual absl::StatusOr<bool> Delete(absl::string_view key) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_STORE_H_
