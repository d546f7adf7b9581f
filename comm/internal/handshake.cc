#include "evenkeel/comm/internal/handshake.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/internal/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr uint32_t kMagic = 0x4b6e7645;  // "EvnK"

// The first two words stay as they are in every version, so that versions can tell each other apart.
ByteWriter Begin(uint32_t version) {
  ByteWriter writer;
  writer.U32(kMagic).U32(version);
  return writer;
}

absl::StatusOr<uint32_t> BeginOf(ByteReader& reader, absl::string_view what) {
  if (reader.U32() != kMagic) return absl::InvalidArgumentError(absl::StrCat(what, ": not evenkeel's protocol"));
  const uint32_t version = reader.U32();
  if (!reader.ok()) return reader.Finish(what);
  return version;
}

ByteWriter WithoutProof(const Hello& hello) {
  ByteWriter writer = Begin(hello.version);
  writer.U8(static_cast<uint8_t>(hello.kind)).Bytes(hello.group).I32(hello.rank).I32(hello.world_size);
  writer.Bytes(hello.nonce);
  return writer;
}

}  // namespace

std::string Challenge::Serialize() const { return Begin(version).Bytes(job).Bytes(nonce).Take(); }

absl::StatusOr<Challenge> Challenge::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  Challenge challenge;
  EK_ASSIGN_OR_RETURN(challenge.version, BeginOf(reader, "challenge"));
  if (challenge.version != kProtocolVersion) return challenge;
  challenge.job = std::string(reader.Bytes());
  challenge.nonce = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("challenge"));
  if (challenge.nonce.size() != kNonceSize || challenge.job.size() > kMaxName) {
    return absl::InvalidArgumentError("challenge: a field has the wrong size");
  }
  return challenge;
}

std::string Hello::Serialize() const { return WithoutProof(*this).Bytes(proof).Take(); }

absl::StatusOr<Hello> Hello::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  Hello hello;
  EK_ASSIGN_OR_RETURN(hello.version, BeginOf(reader, "hello"));
  if (hello.version != kProtocolVersion) return hello;
  const uint8_t kind = reader.U8();
  hello.kind = static_cast<Kind>(kind);
  hello.group = std::string(reader.Bytes());
  hello.rank = reader.I32();
  hello.world_size = reader.I32();
  hello.nonce = std::string(reader.Bytes());
  hello.proof = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("hello"));
  if (kind > static_cast<uint8_t>(Kind::kControl)) return absl::InvalidArgumentError("hello: unknown kind");
  if (hello.nonce.size() != kNonceSize || hello.proof.size() != kDigestSize || hello.group.size() > kMaxName) {
    return absl::InvalidArgumentError("hello: a field has the wrong size");
  }
  return hello;
}

std::string Verdict::Serialize() const {
  return ByteWriter().I32(static_cast<int>(status.code())).Bytes(status.message()).Bytes(host).Bytes(proof).Take();
}

absl::StatusOr<Verdict> Verdict::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  Verdict verdict;
  const int code = reader.I32();
  const absl::string_view message = reader.Bytes();
  verdict.host = std::string(reader.Bytes());
  verdict.proof = std::string(reader.Bytes());
  EK_RETURN_IF_ERROR(reader.Finish("verdict"));
  if (code < 0 || code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return absl::InvalidArgumentError("verdict: unknown code");
  }
  verdict.status = absl::Status(static_cast<absl::StatusCode>(code), message);
  return verdict;
}

std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello) {
  return HmacSha256(secret,
                    ByteWriter().Bytes("client").Bytes(challenge.Serialize()).Bytes(WithoutProof(hello).Take()).Take());
}

std::string ProofOf(absl::string_view secret, const Challenge& challenge, const Hello& hello, const Verdict& verdict) {
  return HmacSha256(secret, ByteWriter()
                                .Bytes("server")
                                .Bytes(challenge.Serialize())
                                .Bytes(WithoutProof(hello).Take())
                                .Bytes(verdict.host)
                                .Take());
}

}  // namespace evenkeel::internal
