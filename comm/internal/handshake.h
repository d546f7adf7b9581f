// How a rank and a store prove to each other that they know the job's secret, without sending it.
//
//   server -> client   Challenge   what it speaks, which job it serves, a nonce
//   client -> server   Hello       who it is, a nonce of its own, a proof over both nonces and all it says
//   server -> client   Verdict     a proof over both nonces; or a refusal with a sentence
//
// Sides of another protocol version or another build are refused, and both sides' are in the sentence.
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
#include "evenkeel/comm/version.h"

namespace evenkeel::internal {

// Of everything that is said over these sockets; raised with each change of it.
inline constexpr uint32_t kProtocolVersion = 2;
inline constexpr size_t kNonceSize = 32;
inline constexpr size_t kMaxName = 256;  // Of a job, a group or a build.

struct Challenge {
  uint32_t version = kProtocolVersion;
  std::string build = std::string(kBuild);
  std::string job;
  std::string nonce;

  std::string Serialize() const;
  // Of another version it gives version, build and job as far as they can be read.
  static absl::StatusOr<Challenge> Parse(absl::string_view bytes);
};

struct Hello {
  enum class Kind : uint8_t { kStore, kControl };
  uint32_t version = kProtocolVersion;
  std::string build = std::string(kBuild);
  Kind kind = Kind::kStore;
  std::string group;   // Of a control connection.
  int rank = 0;        // Within the group; of a store connection: within the job.
  int world_size = 1;  // Likewise.
  std::string nonce;
  std::string proof;

  std::string Serialize() const;
  // Of another version it gives version and build as far as they can be read.
  static absl::StatusOr<Hello> Parse(absl::string_view bytes);
};

struct Verdict {
  absl::Status status;  // Why the client is refused.
  std::string host;     // Who hosts the store: "rank 0", "the launcher".
  std::string proof;

  std::string Serialize() const;
  static absl::StatusOr<Verdict> Parse(absl::string_view bytes);
};

// OK if a peer that speaks so is of our protocol version and build; else FailedPrecondition that names both sides'.
// `peer` and `self` are how the sentence calls them: "the store", "rank 3".
absl::Status CheckSameBuild(absl::string_view peer, uint32_t version, absl::string_view build, absl::string_view self);

// What `hello.proof` must be, and what the server's proof in the verdict must be.
std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello);
std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello, const Verdict& verdict);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_HANDSHAKE_H_
