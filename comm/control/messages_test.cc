// Each message that crosses a socket of the control plane is read as it was written.
// messages_fuzz_test.cc tests that no bytes do harm.

#include "evenkeel/comm/control/messages.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/control/key_value.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/testing/filled.h"
#include "evenkeel/comm/version.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

const std::string kNonce(kNonceSize, '\x5a');
const std::string kProof(kDigestSize, '\xa5');

Hello SomeHello() {
  return {.kind = Hello::Kind::kControl,
          .group = "world",
          .rank = 3,
          .world_size = 8,
          .nonce = kNonce,
          .proof = kProof};
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

  const Verdict verdict{
      .status = absl::PermissionDeniedError("no"), .host = "rank 0", .proof = kProof};
  const absl::StatusOr<Verdict> verdict2 = Verdict::Parse(verdict.Serialize());
  ASSERT_TRUE(verdict2.ok());
  EXPECT_EQ(verdict2->status, verdict.status);
  EXPECT_EQ(verdict2->host, "rank 0");
}

TEST(WireTest, AnotherVersionIsRecognisedWhateverFollows) {
  const auto begin = [] { return ByteWriter().U32(0x4b6e7645).U32(kProtocolVersion + 1); };
  for (const std::string& rest :
       {ByteWriter().Bytes("1.2.3").Bytes("job").U32(7).Take(), std::string("?"), std::string()}) {
    EXPECT_EQ(Hello::Parse(begin().Take() + rest).value().version, kProtocolVersion + 1);
    EXPECT_EQ(Challenge::Parse(begin().Take() + rest).value().version, kProtocolVersion + 1);
  }
  const std::string challenge = begin().Bytes("1.2.3").Bytes("job").Bytes("who knows").Take();
  EXPECT_EQ(Hello::Parse(challenge).value().build, "1.2.3");
  EXPECT_EQ(Challenge::Parse(challenge).value().build, "1.2.3");
  EXPECT_EQ(Challenge::Parse(challenge).value().job, "job");
}

TEST(WireTest, OnlyTheSameVersionAndBuildMayMeet) {
  EXPECT_TRUE(CheckSameBuild("the store", kProtocolVersion, kBuild, "rank 3").ok());
  const absl::Status other =
      CheckSameBuild("the store", kProtocolVersion + 1, std::string(1000, '\n'), "rank 3");
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_LT(other.message().size(), 400u) << other;
  EXPECT_EQ(std::string(other.message()).find('\n'), std::string::npos) << other;
  EXPECT_NE(std::string(other.message()).find(absl::StrCat("rank 3 runs evenkeel ", kBuild)),
            std::string::npos)
      << other;
}

template <typename Message>
class ControlMessageTest : public testing::Test {};
using Directions = testing::Types<ToHub, ToRank>;
TYPED_TEST_SUITE(ControlMessageTest, Directions);

TYPED_TEST(ControlMessageTest, EachTypeComesBackAsItWas) {
  for (const TypeParam& message : OneOfEach<TypeParam>()) {
    SCOPED_TRACE(message.index());
    const std::string bytes = Serialize(message);
    const absl::StatusOr<TypeParam> again = ParseControlMessage<TypeParam>(bytes);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->index(), message.index());
    EXPECT_EQ(Serialize(*again), bytes);
  }
}

TYPED_TEST(ControlMessageTest, EachTypeIsRefusedIfItIsCutOrTooLong) {
  for (const TypeParam& message : OneOfEach<TypeParam>()) {
    SCOPED_TRACE(message.index());
    const std::string bytes = Serialize(message);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = ParseControlMessage<TypeParam>(absl::string_view(bytes).substr(0, size));
      EXPECT_EQ(cut.status(), absl::InvalidArgumentError("control message: bytes are missing"));
    }
    EXPECT_EQ(ParseControlMessage<TypeParam>(bytes + "x").status(),
              absl::InvalidArgumentError("control message: 1 bytes too many"));
  }
}

TYPED_TEST(ControlMessageTest, AnUnknownTypeIsRefused) {
  const char next = std::variant_size_v<TypeParam>;
  EXPECT_EQ(ParseControlMessage<TypeParam>(absl::string_view(&next, 1)).status(),
            absl::InvalidArgumentError("control message: value out of range"));
}

TEST(WireTest, ControlMessagesComeBackAsTheyWere) {
  const to_rank::Exchanged sent{.id = {"steps", int64_t{1} << 40},
                                .parts = {{1, "a"}, {2, ""}, {1, std::string(300, 'x')}}};
  const ToRank message = ParseControlMessage<ToRank>(Serialize(ToRank(sent))).value();
  const auto* exchanged = std::get_if<to_rank::Exchanged>(&message);
  ASSERT_NE(exchanged, nullptr);
  EXPECT_EQ(exchanged->id, sent.id);
  EXPECT_EQ(exchanged->parts, sent.parts);
}

TEST(WireTest, ProofsDependOnEverythingThatIsSaid) {
  const Challenge challenge{.job = "job", .nonce = kNonce};
  const std::string proof = ProofOf("secret", challenge, SomeHello());
  EXPECT_EQ(proof, ProofOf("secret", challenge, SomeHello()));
  std::vector<Hello> others(6, SomeHello());
  others[0].rank = 2;
  others[1].world_size = 9;
  others[2].group = "other";
  others[3].kind = Hello::Kind::kStore;
  others[4].nonce[0] ^= 1;
  others[5].build += "+";
  for (const Hello& other : others) EXPECT_NE(ProofOf("secret", challenge, other), proof);
  EXPECT_NE(ProofOf("Secret", challenge, SomeHello()), proof);
  EXPECT_NE(ProofOf("secret", {.job = "job", .nonce = std::string(kNonceSize, 'n')}, SomeHello()),
            proof);
  EXPECT_NE(ProofOf("secret", challenge, SomeHello(), Verdict()), proof)
      << "the directions must differ";
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

TEST(ByteReaderTest, ReadsNothingPastTheEnd) {
  ByteReader reader(absl::string_view("\x05\x00\x00\x00ab", 6));
  EXPECT_EQ(reader.Bytes(), "");
  EXPECT_EQ(reader.U64(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(reader.Finish("it")));
}

}  // namespace
}  // namespace evenkeel::internal
