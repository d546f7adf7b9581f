#include "evenkeel/comm/internal/key_value.h"

#include <iterator>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

std::string StoreRequest::Serialize() const {
  return ByteWriter().U8(static_cast<uint8_t>(op)).U64(id).Bytes(key).Bytes(value).I64(amount).Take();
}

absl::StatusOr<StoreRequest> StoreRequest::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  StoreRequest request;
  const uint8_t op = reader.U8();
  request.op = static_cast<Op>(op);
  request.id = reader.U64();
  request.key = std::string(reader.Bytes());
  request.value = std::string(reader.Bytes());
  request.amount = reader.I64();
  EK_RETURN_IF_ERROR(reader.Finish("store request"));
  if (op > static_cast<uint8_t>(Op::kDelete)) return absl::InvalidArgumentError("store request: unknown operation");
  return request;
}

std::string StoreReply::Serialize() const {
  return ByteWriter()
      .U64(id)
      .I32(static_cast<int>(status.code()))
      .Bytes(status.message())
      .Bytes(value)
      .I64(number)
      .Take();
}

absl::StatusOr<StoreReply> StoreReply::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  StoreReply reply;
  reply.id = reader.U64();
  const int code = reader.I32();
  const absl::string_view message = reader.Bytes();
  reply.value = std::string(reader.Bytes());
  reply.number = reader.I64();
  EK_RETURN_IF_ERROR(reader.Finish("store reply"));
  if (code < 0 || code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return absl::InvalidArgumentError("store reply: unknown code");
  }
  if (code == 0 && !message.empty()) return absl::InvalidArgumentError("store reply: a reason for no error");
  reply.status = absl::Status(static_cast<absl::StatusCode>(code), message);
  return reply;
}

absl::Status CheckKey(absl::string_view key) {
  if (key.empty()) return absl::InvalidArgumentError("a store's key must not be empty");
  if (key.size() > kMaxKey) {
    return absl::InvalidArgumentError(
        absl::StrCat("a store's key may have ", kMaxKey, " bytes, this one has ", key.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> AddTo(absl::string_view key, absl::string_view value, int64_t amount) {
  int64_t sum = 0;
  if (!value.empty() && !absl::SimpleAtoi(value, &sum)) {
    return absl::FailedPreconditionError(absl::StrCat("store key ", key, " holds no number that could be added to"));
  }
  if (__builtin_add_overflow(sum, amount, &sum)) {
    return absl::FailedPreconditionError(absl::StrCat("store key ", key, ": the sum does not fit in 64 bits"));
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
      const absl::StatusOr<int64_t> sum = AddTo(request.key, exists ? found->second : "", request.amount);
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
  for (const auto& [client, id] : waiting->second) replies.emplace_back(client, StoreReply{.id = id, .value = stored});
  waiting_.erase(waiting);
}

}  // namespace evenkeel::internal
