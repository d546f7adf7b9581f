// How two ranks of a group prove to each other who they are before their connection carries data. The higher rank
// connects to the lower one:
//
//   lower  -> higher   PeerChallenge   a nonce
//   higher -> lower    PeerHello       which rank it is, a nonce of its own, a proof over all of it
//   lower  -> higher   PeerVerdict     a proof likewise, or a refusal with a sentence
//
// A proof is an HMAC under the group's key, which never travels, over the direction, the group's name and size, both
// ranks and both nonces. So nothing can be played back: not to the other side, not in another group, not between other
// ranks, not later.
//
// Errors: Parse functions answer InvalidArgument for anything that is not exactly such a message, whatever the bytes.

#ifndef EVENKEEL_COMM_INTERNAL_GLOO_TRANSPORT_GREETING_H_
#define EVENKEEL_COMM_INTERNAL_GLOO_TRANSPORT_GREETING_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/internal/rank_names.h"

namespace evenkeel::internal {

inline constexpr size_t kPeerNonceSize = 32;

struct PeerChallenge {
  std::string nonce;

  std::string Serialize() const;
  static absl::StatusOr<PeerChallenge> Parse(absl::string_view bytes);
};

struct PeerHello {
  int rank = 0;
  std::string nonce;
  std::string proof;

  std::string Serialize() const;
  static absl::StatusOr<PeerHello> Parse(absl::string_view bytes);
};

struct PeerVerdict {
  absl::Status status;
  std::string proof;  // Empty if refused.

  std::string Serialize() const;
  static absl::StatusOr<PeerVerdict> Parse(absl::string_view bytes);
};

// What both ends know without being told.
struct PeerGroup {
  std::string name;
  int world_size = 1;
  std::string key;
  RankNames names = {};  // For messages; not part of what is proved.
};

// What `hello.proof` must be, and what `verdict.proof`, when `hello` answers `challenge` of rank `lower`.
std::string HelloProof(const PeerGroup& group, int lower, const PeerChallenge& challenge, const PeerHello& hello);
std::string VerdictProof(const PeerGroup& group, int lower, const PeerChallenge& challenge, const PeerHello& hello);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_GLOO_TRANSPORT_GREETING_H_
