// The handshake in which two ranks of a group prove their identities to each other before their
// connection carries data. The higher rank connects to the lower one:
//
//   lower  -> higher   PeerChallenge   a nonce
//   higher -> lower    PeerHello       its rank, a nonce of its own, a proof over all of it
//   lower  -> higher   PeerVerdict     a proof likewise, or a refusal with a message
//
// Within a host, over Unix sockets, the nonce of the challenge is a part of the listener's address,
// and the higher rank begins:
//
//   higher -> lower    UnixHello       the listener's nonce and a PeerHello
//   lower  -> higher   PeerVerdict
//
// A proof is an HMAC under the group's key, which never travels, over the direction, the group's
// name and size, both ranks and both nonces. So no message can be replayed: to the other side, in
// another group, between other ranks, or later.
//
// Errors: Parse functions return InvalidArgument for anything that is not exactly such a message,
//         whatever the bytes.

#ifndef EVENKEEL_COMM_NET_PEER_GREETING_H_
#define EVENKEEL_COMM_NET_PEER_GREETING_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/ranks/rank_names.h"

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

struct UnixHello {
  std::string listener_nonce;
  PeerHello hello = {};

  std::string Serialize() const;
  static absl::StatusOr<UnixHello> Parse(absl::string_view bytes);
};

struct PeerVerdict {
  absl::Status status;
  std::string proof;  // Empty if refused.

  std::string Serialize() const;
  static absl::StatusOr<PeerVerdict> Parse(absl::string_view bytes);
};

// The facts that both ends know before the handshake.
struct PeerGroup {
  std::string name;
  int world_size = 1;
  std::string key;
  RankNames names = {};  // For messages; not part of the proof.
};

// Return the correct `hello.proof` and `verdict.proof` for a `hello` that replies to a challenge of
// rank `lower`.
std::string HelloProof(const PeerGroup& group, int lower, const PeerChallenge& challenge,
                       const PeerHello& hello);
std::string VerdictProof(const PeerGroup& group, int lower, const PeerChallenge& challenge,
                         const PeerHello& hello);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_PEER_GREETING_H_
