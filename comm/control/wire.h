// Control messages as bytes.

#ifndef EVENKEEL_COMM_CONTROL_WIRE_H_
#define EVENKEEL_COMM_CONTROL_WIRE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/control/link.h"

namespace evenkeel::internal {

inline std::string Serialize(const ControlMessage& message) { return ToBytes(message); }
// InvalidArgument for anything that Serialize() does not give, whatever the bytes.
inline absl::StatusOr<ControlMessage> ParseControlMessage(absl::string_view bytes) {
  return FromBytes<ControlMessage>(bytes, "control message");
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_WIRE_H_
