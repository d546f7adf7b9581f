// Keyed hashes and random bytes, from OpenSSL.

#ifndef EVENKEEL_COMM_NET_HMAC_H_
#define EVENKEEL_COMM_NET_HMAC_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

inline constexpr size_t kDigestSize = 32;

// Returns HMAC-SHA256 of `data` (RFC 2104): kDigestSize bytes; or an empty string, which is not a
// digest, if OpenSSL has no SHA-256.
std::string HmacSha256(absl::string_view key, absl::string_view data);

// Returns whether `proof` equals the digest, in a time that does not depend on where they differ.
// Nothing equals an empty digest.
bool IsDigest(absl::string_view proof, absl::string_view digest);

// Returns unpredictable bytes.
absl::StatusOr<std::string> RandomBytes(size_t size);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_HMAC_H_
