#include "evenkeel/comm/net/handshake.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr uint32_t kMagic = 0x4b6e7645;  // "EvnK"

// These fields are equal in every version, so that different versions can recognise each other; in
// a challenge, the job, too.
ByteWriter Begin(uint32_t version, absl::string_view build) {
  ByteWriter writer;
  writer.U32(kMagic).U32(version).Bytes(build);
  return writer;
}

constexpr size_t kMaxShown = 40;

// Returns the form of a build's name in messages; it may be arbitrary bytes.
std::string Shown(absl::string_view build) {
  const std::string text = absl::CHexEscape(build.substr(0, kMaxShown));
  return text.empty() ? "unknown" : text;
}

std::string BuildText(uint32_t version, absl::string_view build) {
  return absl::StrCat("evenkeel ", Shown(build), " (protocol ", version, ")");
}

absl::StatusOr<uint32_t> BeginOf(ByteReader& reader, absl::string_view what) {
  if (reader.U32() != kMagic)
    return absl::InvalidArgumentError(absl::StrCat(what, ": not evenkeel's protocol"));
  const uint32_t version = reader.U32();
  if (!reader.ok()) return reader.Finish(what);
  return version;
}

ByteWriter WithoutProof(const Hello& hello) {
  ByteWriter writer = Begin(hello.version, hello.build);
  writer.U8(static_cast<uint8_t>(hello.kind))
      .Bytes(hello.group)
      .Bytes(hello.id)
      .Bytes(hello.members)
      .I32(hello.rank)
      .I32(hello.world_size)
      .I32(hello.incarnation);
  writer.Bytes(hello.nonce);
  return writer;
}

}  // namespace

std::string Challenge::Serialize() const {
  return Begin(version, build).Bytes(job).Bytes(nonce).Take();
}

absl::StatusOr<Challenge> Challenge::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  Challenge challenge;
  EK_ASSIGN_OR_RETURN(challenge.version, BeginOf(reader, "challenge"));
  challenge.build = std::string(reader.Bytes());
  challenge.job = std::string(reader.Bytes());
  if (challenge.version != kProtocolVersion) return challenge;
  challenge.nonce = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("challenge"));
  if (challenge.nonce.size() != kNonceSize || challenge.job.size() > kMaxName ||
      challenge.build.size() > kMaxName) {
    return absl::InvalidArgumentError("challenge: a field has the wrong size");
  }
  return challenge;
}

std::string Hello::Serialize() const { return WithoutProof(*this).Bytes(proof).Take(); }

absl::StatusOr<Hello> Hello::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  Hello hello;
  EK_ASSIGN_OR_RETURN(hello.version, BeginOf(reader, "hello"));
  hello.build = std::string(reader.Bytes());
  if (hello.version != kProtocolVersion) return hello;
  const uint8_t kind = reader.U8();
  hello.kind = static_cast<Kind>(kind);
  hello.group = std::string(reader.Bytes());
  hello.id = std::string(reader.Bytes());
  hello.members = std::string(reader.Bytes());
  hello.rank = reader.I32();
  hello.world_size = reader.I32();
  hello.incarnation = reader.I32();
  hello.nonce = std::string(reader.Bytes());
  hello.proof = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("hello"));
  if (kind > static_cast<uint8_t>(Kind::kLinks))
    return absl::InvalidArgumentError("hello: unknown kind");
  if (hello.nonce.size() != kNonceSize || hello.proof.size() != kDigestSize ||
      hello.group.size() > kMaxName || hello.id.size() > kMaxName ||
      hello.members.size() > kMaxName || hello.build.size() > kMaxName) {
    return absl::InvalidArgumentError("hello: a field has the wrong size");
  }
  return hello;
}

std::string MembersText(absl::Span<const int> members) {
  const std::string text = absl::StrJoin(members, ",");
  if (text.size() <= kMaxName) return text;
  return absl::StrCat(text.substr(0, kMaxShown), "... (", members.size(), " ranks, ",
                      absl::BytesToHexString(HmacSha256("members", text)), ")");
}

absl::Status CheckSameBuild(absl::string_view peer, uint32_t version, absl::string_view build,
                            absl::string_view self) {
  if (version == kProtocolVersion && build == kBuild) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      peer, " runs ", BuildText(version, build), ", ", self, " runs ",
      BuildText(kProtocolVersion, kBuild), ": all ranks and the launcher must run the same build"));
}

std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello) {
  return HmacSha256(secret, ByteWriter()
                                .Bytes("client")
                                .Bytes(challenge.Serialize())
                                .Bytes(WithoutProof(hello).Take())
                                .Take());
}

std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello,
                    const Verdict& verdict) {
  return HmacSha256(secret, ByteWriter()
                                .Bytes("server")
                                .Bytes(challenge.Serialize())
                                .Bytes(WithoutProof(hello).Take())
                                .Bytes(Verdict{verdict.status, verdict.host, ""}.Serialize())
                                .Take());
}

}  // namespace evenkeel::internal
