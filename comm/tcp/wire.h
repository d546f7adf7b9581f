// The messages on a connection of the transport once both ends have proved their identity: headers
// of 24 bytes, some followed by data.
//
//   kSmall     a message that is sent unasked; its bytes follow
//   kTaken     the oldest small message of the slot that was not taken yet has met its receive
//   kAnnounce  a message that waits at the sender until it is asked for
//   kAsk       one message of the slot may come: its place is known
//   kBody      the oldest announced message of the slot; its bytes follow
//   kDirect    a message that was asked for before it was announced; its bytes follow
//
// Messages of one slot are matched with receives in the order of their first header (kSmall,
// kAnnounce, kDirect).
//
// Errors: Parse returns InvalidArgument for bytes that are not such a header.

#ifndef EVENKEEL_COMM_TCP_WIRE_H_
#define EVENKEEL_COMM_TCP_WIRE_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"

namespace evenkeel::internal {

// Larger messages wait until they are asked for, so that they go straight to their place.
inline constexpr size_t kMaxSmall = 16 << 10;
// The limit on one peer's small messages that the receiver stores without a matching receive; each
// costs a little more than its bytes.
inline constexpr int64_t kSmallBudget = 1 << 20;
inline constexpr int64_t CostOf(size_t small) { return static_cast<int64_t>(small) + 64; }

struct MessageHeader {
  enum class Kind : uint32_t { kSmall = 1, kTaken, kAnnounce, kAsk, kBody, kDirect };
  static constexpr size_t kSize = 24;
  static constexpr uint32_t kMagic = 0x6c476b45;  // "EkGl"

  Kind kind = Kind::kSmall;
  uint64_t slot = 0;
  uint64_t bytes = 0;

  std::array<char, kSize> Serialize() const {
    std::array<char, kSize> out;
    PutInteger(kMagic | uint64_t{static_cast<uint32_t>(kind)} << 32, 8, out.data());
    PutInteger(slot, 8, out.data() + 8);
    PutInteger(bytes, 8, out.data() + 16);
    return out;
  }

  static absl::StatusOr<MessageHeader> Parse(const char* in) {
    const uint64_t first = GetInteger(in, 8);
    const uint32_t kind = static_cast<uint32_t>(first >> 32);
    const MessageHeader header{static_cast<Kind>(kind), GetInteger(in + 8, 8),
                               GetInteger(in + 16, 8)};
    if (static_cast<uint32_t>(first) != kMagic)
      return absl::InvalidArgumentError("not the header of a message");
    if (kind < static_cast<uint32_t>(Kind::kSmall) || kind > static_cast<uint32_t>(Kind::kDirect)) {
      return absl::InvalidArgumentError(absl::StrCat("a message of the unknown kind ", kind));
    }
    if (header.kind == Kind::kSmall && header.bytes > kMaxSmall) {
      return absl::InvalidArgumentError(
          absl::StrCat("a message of ", header.bytes, " unexpected bytes"));
    }
    return header;
  }
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_WIRE_H_
