// How a rank and a store prove to each other that they know the job's secret, without sending it.
//
//   server -> client   Challenge   what it speaks, which job it serves, a nonce
//   client -> server   Hello       who it is, a nonce of its own, a proof over both nonces and all it says
//   server -> client   Verdict     a proof over both nonces; or a refusal with a sentence
//
// A proof is an HMAC under the secret, with the direction in what is hashed, so neither side's proof can be played back
// to it. The handshake admits and identifies a peer; it does not encrypt what follows.
//
// Errors: Parse functions answer InvalidArgument for anything that is not exactly such a message, whatever the bytes.

#ifndef EVENKEEL_COMM_INTERNAL_HANDSHAKE_H_
#define EVENKEEL_COMM_INTERNAL_HANDSHAKE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Of everything that is said over these sockets; raised with each change of it.
inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr size_t kNonceSize = 32;
inline constexpr size_t kMaxName = 256;  // Of a job or a group.

struct Challenge {
  uint32_t version = kProtocolVersion;
  std::string job;
  std::string nonce;

  std::string Serialize() const;
  static absl::StatusOr<Challenge> Parse(absl::string_view bytes);
};

struct Hello {
  enum class Kind : uint8_t { kStore, kControl };
  uint32_t version = kProtocolVersion;
  Kind kind = Kind::kStore;
  std::string group;   // Of a control connection.
  int rank = 0;        // Within the group; of a store connection: within the job.
  int world_size = 1;  // Likewise.
  std::string nonce;
  std::string proof;

  std::string Serialize() const;
  static absl::StatusOr<Hello> Parse(absl::string_view bytes);
};

struct Verdict {
  absl::Status status;  // Why the client is refused.
  std::string host;     // Who hosts the store: "rank 0", "the launcher".
  std::string proof;

  std::string Serialize() const;
  static absl::StatusOr<Verdict> Parse(absl::string_view bytes);
};

// What `hello.proof` must be, and what the server's proof in the verdict must be.
std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello);
std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello, const Verdict& verdict);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_HANDSHAKE_H_
