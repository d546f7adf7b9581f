#include "evenkeel/comm/net/peer_greeting.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr uint32_t kMagic = 0x70476b45;  // "EkGp"
// The version of the handshake and of the traffic after it; raised with each change.
constexpr uint32_t kVersion = 1;

ByteWriter Begin() {
  ByteWriter writer;
  writer.U32(kMagic).U32(kVersion);
  return writer;
}

absl::Status CheckBegin(ByteReader& reader, absl::string_view what) {
  if (reader.U32() != kMagic)
    return absl::InvalidArgumentError(absl::StrCat(what, ": not evenkeel's protocol"));
  if (const uint32_t version = reader.U32(); version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": protocol version ", version, ", not ",
                                                   kVersion,
                                                   ": all ranks must run the same build"));
  }
  return absl::OkStatus();
}

absl::Status WrongSize(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": a field has the wrong size"));
}

std::string Proof(absl::string_view direction, const PeerGroup& group, int lower,
                  const PeerChallenge& challenge, const PeerHello& hello) {
  return HmacSha256(group.key, Begin()
                                   .Bytes(direction)
                                   .Bytes(group.name)
                                   .I32(group.world_size)
                                   .I32(lower)
                                   .I32(hello.rank)
                                   .Bytes(challenge.nonce)
                                   .Bytes(hello.nonce)
                                   .Take());
}

}  // namespace

std::string PeerChallenge::Serialize() const { return Begin().Bytes(nonce).Take(); }

absl::StatusOr<PeerChallenge> PeerChallenge::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  EK_RETURN_IF_ERROR(CheckBegin(reader, "challenge"));
  PeerChallenge challenge{.nonce = std::string(reader.Bytes())};
  EK_RETURN_IF_ERROR(reader.Finish("challenge"));
  if (challenge.nonce.size() != kPeerNonceSize) return WrongSize("challenge");
  return challenge;
}

std::string PeerHello::Serialize() const {
  return Begin().I32(rank).Bytes(nonce).Bytes(proof).Take();
}

absl::StatusOr<PeerHello> PeerHello::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  EK_RETURN_IF_ERROR(CheckBegin(reader, "hello"));
  PeerHello hello;
  hello.rank = reader.I32();
  hello.nonce = std::string(reader.Bytes());
  hello.proof = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("hello"));
  if (hello.nonce.size() != kPeerNonceSize || hello.proof.size() != kDigestSize)
    return WrongSize("hello");
  return hello;
}

std::string UnixHello::Serialize() const {
  return ByteWriter().Bytes(listener_nonce).Bytes(hello.Serialize()).Take();
}

absl::StatusOr<UnixHello> UnixHello::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  UnixHello message{.listener_nonce = std::string(reader.Bytes())};
  const absl::string_view hello = reader.Bytes();
  EK_RETURN_IF_ERROR(reader.Finish("hello"));
  EK_ASSIGN_OR_RETURN(message.hello, PeerHello::Parse(hello));
  return message;
}

std::string PeerVerdict::Serialize() const { return Begin().Status(status).Bytes(proof).Take(); }

absl::StatusOr<PeerVerdict> PeerVerdict::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  EK_RETURN_IF_ERROR(CheckBegin(reader, "verdict"));
  PeerVerdict verdict{.status = reader.Status(), .proof = std::string(reader.Bytes())};
  EK_RETURN_IF_ERROR(reader.Finish("verdict"));
  if (verdict.proof.size() != (verdict.status.ok() ? kDigestSize : 0)) return WrongSize("verdict");
  return verdict;
}

std::string HelloProof(const PeerGroup& group, int lower, const PeerChallenge& challenge,
                       const PeerHello& hello) {
  return Proof("higher to lower", group, lower, challenge, hello);
}

std::string VerdictProof(const PeerGroup& group, int lower, const PeerChallenge& challenge,
                         const PeerHello& hello) {
  return Proof("lower to higher", group, lower, challenge, hello);
}

}  // namespace evenkeel::internal
