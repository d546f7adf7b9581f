// The key-value side of a store server: what clients ask, what they get, and who still waits. No sockets, no threads.
//
//   KeyValueTable table;
//   for (auto& [client, reply] : table.Handle(client, request)) Send(client, reply.Serialize());
//
// A request's answer comes when it comes: at once, or, for a Get, when another client has set the key.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_INTERNAL_KEY_VALUE_H_
#define EVENKEEL_COMM_INTERNAL_KEY_VALUE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

inline constexpr size_t kMaxKey = 4096;

struct StoreRequest {
  enum class Op : uint8_t { kSet, kGet, kAdd, kCheck, kGetOrSet, kDelete };
  Op op = Op::kGet;
  uint64_t id = 0;  // The client's; comes back with the reply.
  std::string key;
  std::string value;   // Of set and get_or_set.
  int64_t amount = 0;  // Of add.

  std::string Serialize() const;
  static absl::StatusOr<StoreRequest> Parse(absl::string_view bytes);
};

struct StoreReply {
  uint64_t id = 0;
  absl::Status status;
  std::string value;   // Of get and get_or_set.
  int64_t number = 0;  // Of add: the sum. Of check and delete: 1 if the key was there.

  std::string Serialize() const;
  static absl::StatusOr<StoreReply> Parse(absl::string_view bytes);
};

// OK for a key that stores take; else InvalidArgument.
absl::Status CheckKey(absl::string_view key);
// What Add() makes of a value: a decimal number, no key counts as 0.
absl::StatusOr<int64_t> AddTo(absl::string_view key, absl::string_view value, int64_t amount);

class KeyValueTable {
 public:
  using ClientId = int64_t;
  using Replies = std::vector<std::pair<ClientId, StoreReply>>;

  Replies Handle(ClientId client, StoreRequest request);
  // The client is gone; what it waits for is dropped.
  void Forget(ClientId client);

 private:
  void Put(const std::string& key, std::string value, Replies& replies);

  std::map<std::string, std::string> values_;
  std::map<std::string, std::vector<std::pair<ClientId, uint64_t>>> waiting_;  // Key: client, request.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_KEY_VALUE_H_
