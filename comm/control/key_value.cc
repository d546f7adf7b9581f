#include "evenkeel/comm/control/key_value.h"

#include <iterator>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace evenkeel::internal {

absl::Status CheckKey(absl::string_view key) {
  if (key.empty()) return absl::InvalidArgumentError("a store's key must not be empty");
  if (key.size() > kMaxKey) {
    return absl::InvalidArgumentError(absl::StrCat("a store's key has ", key.size(),
                                                   " bytes, at most ", kMaxKey, " are allowed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> AddTo(absl::string_view key, absl::string_view value, int64_t amount) {
  int64_t sum = 0;
  if (!value.empty() && !absl::SimpleAtoi(value, &sum)) {
    return absl::FailedPreconditionError(
        absl::StrCat("store key ", key, ": the value is not a number"));
  }
  if (__builtin_add_overflow(sum, amount, &sum)) {
    return absl::FailedPreconditionError(
        absl::StrCat("store key ", key, ": the sum does not fit in 64 bits"));
  }
  return sum;
}

KeyValueTable::Replies KeyValueTable::Handle(ClientId client, StoreRequest request) {
  Replies replies;
  StoreReply reply{.id = request.id, .status = CheckKey(request.key)};
  const auto found = values_.find(request.key);
  const bool exists = found != values_.end();
  if (!reply.status.ok()) {
    replies.emplace_back(client, std::move(reply));
    return replies;
  }
  switch (request.op) {
    case StoreRequest::Op::kSet:
      Put(request.key, std::move(request.value), replies);
      break;
    case StoreRequest::Op::kGet:
      if (!exists) {
        waiting_[request.key].emplace_back(client, request.id);
        return replies;
      }
      reply.value = found->second;
      break;
    case StoreRequest::Op::kAdd: {
      const absl::StatusOr<int64_t> sum =
          AddTo(request.key, exists ? found->second : "", request.amount);
      reply.status = sum.status();
      if (!sum.ok()) break;
      reply.number = *sum;
      Put(request.key, absl::StrCat(*sum), replies);
      break;
    }
    case StoreRequest::Op::kCheck:
      reply.number = exists;
      break;
    case StoreRequest::Op::kGetOrSet:
      reply.value = exists ? found->second : request.value;
      if (!exists) Put(request.key, std::move(request.value), replies);
      break;
    case StoreRequest::Op::kDelete:
      reply.number = exists;
      if (exists) values_.erase(found);
      break;
  }
  replies.emplace_back(client, std::move(reply));
  return replies;
}

void KeyValueTable::Forget(ClientId client) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    std::erase_if(it->second, [&](const auto& waiter) { return waiter.first == client; });
    it = it->second.empty() ? waiting_.erase(it) : std::next(it);
  }
}

void KeyValueTable::Put(const std::string& key, std::string value, Replies& replies) {
  const std::string& stored = values_[key] = std::move(value);
  const auto waiting = waiting_.find(key);
  if (waiting == waiting_.end()) return;
  for (const auto& [client, id] : waiting->second)
    replies.emplace_back(client, StoreReply{.id = id, .value = stored});
  waiting_.erase(waiting);
}

}  // namespace evenkeel::internal
