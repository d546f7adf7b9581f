// Control messages as bytes.

#ifndef EVENKEEL_COMM_CONTROL_WIRE_H_
#define EVENKEEL_COMM_CONTROL_WIRE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/control/messages.h"

namespace evenkeel::internal {

inline std::string Serialize(const ToHub& message) { return ToBytes(message); }
inline std::string Serialize(const ToRank& message) { return ToBytes(message); }
// ToHub or ToRank. InvalidArgument for anything that Serialize() does not give, whatever the bytes.
template <typename Message>
absl::StatusOr<Message> ParseControlMessage(absl::string_view bytes) {
  return FromBytes<Message>(bytes, "control message");
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_WIRE_H_
