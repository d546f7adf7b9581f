// Everything that crosses a socket of the control plane: comes back as it was, and no bytes whatever do harm.

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/internal/control_wire.h"
#include "evenkeel/comm/internal/frame.h"
#include "evenkeel/comm/internal/handshake.h"
#include "evenkeel/comm/internal/hmac.h"
#include "evenkeel/comm/internal/key_value.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

const std::string kNonce(kNonceSize, '\x5a');
const std::string kProof(kDigestSize, '\xa5');

Hello SomeHello() {
  return {
      .kind = Hello::Kind::kControl, .group = "world", .rank = 3, .world_size = 8, .nonce = kNonce, .proof = kProof};
}

ControlMessage SomeMessage() {
  return {.type = ControlMessage::Type::kExchanged,
          .rank = -1,
          .sequence = 1ll << 40,
          .request = 7,
          .code = absl::StatusCode::kUnavailable,
          .topic = "steps",
          .payload = std::string("\0\1", 2),
          .parts = {"a", "", std::string(300, 'x')}};
}

TEST(WireTest, HandshakeComesBackAsItWas) {
  const Challenge challenge{.job = "job 7", .nonce = kNonce};
  const absl::StatusOr<Challenge> challenge2 = Challenge::Parse(challenge.Serialize());
  ASSERT_TRUE(challenge2.ok());
  EXPECT_EQ(challenge2->Serialize(), challenge.Serialize());
  EXPECT_EQ(challenge2->job, "job 7");

  const absl::StatusOr<Hello> hello = Hello::Parse(SomeHello().Serialize());
  ASSERT_TRUE(hello.ok());
  EXPECT_EQ(hello->Serialize(), SomeHello().Serialize());
  EXPECT_EQ(hello->rank, 3);
  EXPECT_EQ(hello->kind, Hello::Kind::kControl);

  const Verdict verdict{.status = absl::PermissionDeniedError("no"), .host = "rank 0", .proof = kProof};
  const absl::StatusOr<Verdict> verdict2 = Verdict::Parse(verdict.Serialize());
  ASSERT_TRUE(verdict2.ok());
  EXPECT_EQ(verdict2->status, verdict.status);
  EXPECT_EQ(verdict2->host, "rank 0");
}

TEST(WireTest, AnotherVersionIsRecognisedWhateverFollows) {
  const std::string hello = ByteWriter().U32(0x4b6e7645).U32(kProtocolVersion + 1).Bytes("who knows").Take();
  EXPECT_EQ(Hello::Parse(hello).value().version, kProtocolVersion + 1);
  EXPECT_EQ(Challenge::Parse(hello).value().version, kProtocolVersion + 1);
}

TEST(WireTest, ControlMessagesComeBackAsTheyWere) {
  const absl::StatusOr<ControlMessage> message = ParseControlMessage(Serialize(SomeMessage()));
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(Serialize(*message), Serialize(SomeMessage()));
  EXPECT_EQ(message->parts, SomeMessage().parts);
  EXPECT_EQ(message->sequence, 1ll << 40);
  EXPECT_EQ(message->request, 7);
}

TEST(WireTest, ProofsDependOnEverythingThatIsSaid) {
  const Challenge challenge{.job = "job", .nonce = kNonce};
  const std::string proof = ProofOf("secret", challenge, SomeHello());
  EXPECT_EQ(proof, ProofOf("secret", challenge, SomeHello()));
  std::vector<Hello> others(5, SomeHello());
  others[0].rank = 2;
  others[1].world_size = 9;
  others[2].group = "other";
  others[3].kind = Hello::Kind::kStore;
  others[4].nonce[0] ^= 1;
  for (const Hello& other : others) EXPECT_NE(ProofOf("secret", challenge, other), proof);
  EXPECT_NE(ProofOf("Secret", challenge, SomeHello()), proof);
  EXPECT_NE(ProofOf("secret", {.job = "job", .nonce = std::string(kNonceSize, 'n')}, SomeHello()), proof);
  EXPECT_NE(ProofOf("secret", challenge, SomeHello(), Verdict()), proof) << "the directions must differ";
}

TEST(FrameParserTest, GivesTheSameFramesHoweverTheBytesArrive) {
  const std::vector<std::string> payloads = {"one", "", std::string(1000, 'x'), "four"};
  std::string stream;
  for (const std::string& payload : payloads) stream += Frame(payload);
  for (const size_t chunk : {1, 2, 3, 7, 100, 5000}) {
    SCOPED_TRACE(chunk);
    FrameParser parser(1000);
    std::vector<std::string> got;
    for (size_t at = 0; at < stream.size(); at += chunk) {
      parser.Append(absl::string_view(stream).substr(at, chunk));
      while (true) {
        absl::StatusOr<std::optional<std::string>> frame = parser.Next();
        ASSERT_TRUE(frame.ok());
        if (!frame->has_value()) break;
        got.push_back(**frame);
      }
    }
    EXPECT_EQ(got, payloads);
  }
}

TEST(FrameParserTest, RefusesAFrameThatIsTooLargeForGood) {
  FrameParser parser(1000);
  parser.Append(Frame(std::string(1001, 'x')).substr(0, 4));
  EXPECT_TRUE(absl::IsInvalidArgument(parser.Next().status()));
  parser.Append(Frame("good"));
  EXPECT_TRUE(absl::IsInvalidArgument(parser.Next().status()));
}

// Random bytes, and good messages with a few bytes changed, cut or added. What is accepted must be a message: it comes
// back as the same bytes.
TEST(WireTest, NoBytesDoHarm) {
  struct Format {
    const char* name;
    std::string good;
    std::function<absl::StatusOr<std::string>(absl::string_view)> parse_and_serialize;
  };
  const auto again = [](const auto& parsed) -> absl::StatusOr<std::string> {
    if (!parsed.ok()) return parsed.status();
    return parsed->Serialize();
  };
  const std::vector<Format> formats = {
      {"hello", SomeHello().Serialize(), [&](absl::string_view b) { return again(Hello::Parse(b)); }},
      {"challenge", Challenge{.job = "j", .nonce = kNonce}.Serialize(),
       [&](absl::string_view b) { return again(Challenge::Parse(b)); }},
      {"verdict", Verdict{.host = "rank 0", .proof = kProof}.Serialize(),
       [&](absl::string_view b) { return again(Verdict::Parse(b)); }},
      {"request", StoreRequest{.op = StoreRequest::Op::kAdd, .id = 5, .key = "k", .value = "v"}.Serialize(),
       [&](absl::string_view b) { return again(StoreRequest::Parse(b)); }},
      {"reply", StoreReply{.id = 5, .status = absl::UnknownError("x"), .value = "v"}.Serialize(),
       [&](absl::string_view b) { return again(StoreReply::Parse(b)); }},
      {"control message", Serialize(SomeMessage()),
       [](absl::string_view b) -> absl::StatusOr<std::string> {
         absl::StatusOr<ControlMessage> message = ParseControlMessage(b);
         if (!message.ok()) return message.status();
         return Serialize(*message);
       }},
  };
  constexpr int kSeed = 20240607;
  std::mt19937 random(kSeed);
  for (const Format& format : formats) {
    SCOPED_TRACE(format.name);
    int accepted = 0;
    for (int round = 0; round < 20000; ++round) {
      std::string bytes = format.good;
      if (round % 4 == 0) {
        bytes.resize(random() % 200);
        for (char& byte : bytes) byte = static_cast<char>(random());
      } else {
        for (int changes = random() % 3; changes >= 0; --changes) bytes[random() % bytes.size()] ^= 1 << (random() % 8);
        if (round % 4 == 2) bytes.resize(random() % bytes.size());
        if (round % 4 == 3) bytes.insert(random() % bytes.size(), std::string(1 + random() % 5, '\xff'));
      }
      const absl::StatusOr<std::string> result = format.parse_and_serialize(bytes);
      if (!result.ok()) continue;
      ++accepted;
      // Another version keeps the first eight bytes and nothing else; an OK status has no text.
      const bool is_other_version =
          bytes.substr(0, 4) == format.good.substr(0, 4) && bytes.substr(4, 4) != format.good.substr(4, 4);
      if (!is_other_version && result->size() == bytes.size()) {
        EXPECT_EQ(*result, bytes);
      }
    }
    EXPECT_LT(accepted, 20000);
  }
}

TEST(FrameParserTest, NoBytesDoHarm) {
  constexpr int kSeed = 4711;
  std::mt19937 random(kSeed);
  for (int round = 0; round < 2000; ++round) {
    FrameParser parser(random() % 300);
    for (int part = 0; part < 20; ++part) {
      std::string bytes(random() % 50, '\0');
      for (char& byte : bytes) byte = random() % 3 == 0 ? static_cast<char>(random()) : '\0';
      parser.Append(bytes);
      while (true) {
        const absl::StatusOr<std::optional<std::string>> frame = parser.Next();
        if (!frame.ok() || !frame->has_value()) break;
        EXPECT_LE((*frame)->size(), 300u);
      }
    }
  }
}

TEST(ByteReaderTest, ReadsNothingPastTheEnd) {
  ByteReader reader(absl::string_view("\x05\x00\x00\x00ab", 6));
  EXPECT_EQ(reader.Bytes(), "");
  EXPECT_EQ(reader.U64(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(reader.Finish("it")));
}

}  // namespace
}  // namespace evenkeel::internal
