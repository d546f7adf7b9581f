// The bytes that hexadecimal digits stand for.
//
//   BytesFromHex("6f6b");  // "ok"

#ifndef EVENKEEL_COMM_BASE_HEX_H_
#define EVENKEEL_COMM_BASE_HEX_H_

#include <string>

#include "absl/base/config.h"
#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// The result for a text that is not hexadecimal is unspecified.
inline std::string BytesFromHex(absl::string_view hex) {
#if defined(ABSL_LTS_RELEASE_VERSION) && ABSL_LTS_RELEASE_VERSION < 20240722
  return absl::HexStringToBytes(hex);
#else  // Deprecates the function above.
  std::string bytes;
  return absl::HexStringToBytes(hex, &bytes) ? bytes : "";
#endif
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_HEX_H_
