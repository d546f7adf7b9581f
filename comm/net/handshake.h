// The handshake in which a rank and a store prove to each other that they have the job's secret,
// without sending it.
//
//   server -> client   Challenge   its protocol, its job, a nonce
//   client -> server   Hello       its rank, a nonce of its own, a proof over both nonces and this
//   server -> client   Verdict     OK or a refusal with a message, a proof over all of the above
//
// Sides of another protocol version or another build are refused, with both sides' in the message.
//
// A proof is an HMAC under the secret. The hashed text includes the direction, so neither side's
// proof can be replayed to it. The handshake admits and identifies a peer; it does not encrypt what
// follows.
//
// Errors: Parse functions return InvalidArgument for anything that is not exactly such a message,
//         whatever the bytes.

#ifndef EVENKEEL_COMM_NET_HANDSHAKE_H_
#define EVENKEEL_COMM_NET_HANDSHAKE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/version.h"

namespace evenkeel::internal {

// The version of all messages over these sockets; raised with each change.
inline constexpr uint32_t kProtocolVersion = 8;
inline constexpr size_t kNonceSize = 32;
inline constexpr size_t kMaxName = 256;  // For names of jobs, groups and builds.

struct Challenge {
  uint32_t version = kProtocolVersion;
  std::string build = std::string(kBuild);
  std::string job;
  std::string nonce;

  std::string Serialize() const;
  // For another version, returns version, build and job as far as they can be read.
  static absl::StatusOr<Challenge> Parse(absl::string_view bytes);
};

struct Hello {
  enum class Kind : uint8_t {
    kStore,
    kControl,
    kObserver,  // No rank of the job: asks for its status, and changes nothing.
    // A connection with many links, each of which serves a rank of a group. A link has a number,
    // begins with a kControl hello and its verdict, without proofs, and ends with an empty payload.
    kLinks,
  };
  uint32_t version = kProtocolVersion;
  std::string build = std::string(kBuild);
  Kind kind = Kind::kStore;
  // For a control connection, equal on all ranks of the group: its name; its id, which
  // distinguishes groups of one name; and MembersText() of its members, empty if they are unknown.
  std::string group;
  std::string id = {};
  std::string members = {};
  int rank = 0;        // Within the group; for a store connection, within the job.
  int world_size = 1;  // Likewise.
  // Not 0: a newcomer. It takes the place that `rank` had in the job's group of that name, and in
  // the groups that continue it, once that rank is lost. Of two newcomers for one place, the one
  // with the higher number counts.
  int32_t incarnation = 0;
  std::string nonce;
  std::string proof;

  std::string Serialize() const;
  // For another version, returns version and build as far as they can be read.
  static absl::StatusOr<Hello> Parse(absl::string_view bytes);
};

struct Verdict {
  absl::Status status;  // The reason of a refusal.
  std::string host;     // The process that hosts the store: "rank 0", "the launcher".
  std::string proof;

  static void VisitFields(auto& self, auto& visit) { visit(self.status, self.host, self.proof); }
  std::string Serialize() const { return ToBytes(*this); }
  static absl::StatusOr<Verdict> Parse(absl::string_view bytes) {
    return FromBytes<Verdict>(bytes, "verdict");
  }
};

// Returns a list of members as text: "0,3"; of a long list the beginning, the length, and a hash of
// all.
std::string MembersText(absl::Span<const int> members);

// Returns OK if the peer has our protocol version and build, else FailedPrecondition with both
// sides'. `peer` and `self` are the names in the message: "the store", "rank 3".
absl::Status CheckSameBuild(absl::string_view peer, uint32_t version, absl::string_view build,
                            absl::string_view self);

// Returns the correct `hello.proof`; and the correct proof of the server in the verdict.
std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello);
std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello,
                    const Verdict& verdict);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_HANDSHAKE_H_
