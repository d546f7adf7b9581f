// The key-value table of a store server: the requests of clients, the replies, and the clients that
// still wait. It has no sockets and no threads.
//
//   KeyValueTable table;
//   for (auto& [client, reply] : table.Handle(client, request)) Send(client, reply.Serialize());
//
// A reply may be immediate, or, for a Get, follow when another client has set the key.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_CONTROL_KEY_VALUE_H_
#define EVENKEEL_COMM_CONTROL_KEY_VALUE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"

namespace evenkeel::internal {

inline constexpr size_t kMaxKey = 4096;

struct StoreRequest {
  enum class Op : uint8_t { kSet, kGet, kAdd, kCheck, kGetOrSet, kDelete };
  Op op = Op::kGet;
  uint64_t id = 0;  // Chosen by the client; returned with the reply.
  std::string key;
  std::string value;   // For set and get_or_set.
  int64_t amount = 0;  // For add.

  static void VisitFields(auto& self, auto& visit) {
    visit(visit.UpTo(self.op, Op::kDelete), self.id, self.key, self.value, self.amount);
  }
  std::string Serialize() const { return ToBytes(*this); }
  static absl::StatusOr<StoreRequest> Parse(absl::string_view bytes) {
    return FromBytes<StoreRequest>(bytes, "store request");
  }
};

struct StoreReply {
  uint64_t id = 0;
  absl::Status status;
  std::string value;   // For get and get_or_set.
  int64_t number = 0;  // For add: the sum. For check and delete: 1 if the key existed.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.id, self.status, self.value, self.number);
  }
  std::string Serialize() const { return ToBytes(*this); }
  static absl::StatusOr<StoreReply> Parse(absl::string_view bytes) {
    return FromBytes<StoreReply>(bytes, "store reply");
  }
};

// Returns OK for a valid key, else InvalidArgument.
absl::Status CheckKey(absl::string_view key);
// Returns the sum that Add() stores: of a decimal number, 0 for a missing key, and `amount`.
absl::StatusOr<int64_t> AddTo(absl::string_view key, absl::string_view value, int64_t amount);

class KeyValueTable {
 public:
  using ClientId = int64_t;
  using Replies = std::vector<std::pair<ClientId, StoreReply>>;

  Replies Handle(ClientId client, StoreRequest request);
  // Drops the waits of a client that has disconnected.
  void Forget(ClientId client);

 private:
  void Put(const std::string& key, std::string value, Replies& replies);

  std::map<std::string, std::string> values_;
  std::map<std::string, std::vector<std::pair<ClientId, uint64_t>>>
      waiting_;  // Key: client, request.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_KEY_VALUE_H_
