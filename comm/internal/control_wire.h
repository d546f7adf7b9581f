// Control messages as bytes.

#ifndef EVENKEEL_COMM_INTERNAL_CONTROL_WIRE_H_
#define EVENKEEL_COMM_INTERNAL_CONTROL_WIRE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/control_link.h"

namespace evenkeel::internal {

std::string Serialize(const ControlMessage& message);
// InvalidArgument for anything that Serialize() does not give, whatever the bytes.
absl::StatusOr<ControlMessage> ParseControlMessage(absl::string_view bytes);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_CONTROL_WIRE_H_
