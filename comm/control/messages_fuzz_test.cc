// No bytes that a socket of the control plane receives do harm.

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/key_value.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/testing/filled.h"
#include "evenkeel/comm/testing/fuzz.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

const std::string kNonce(kNonceSize, '\x5a');
const std::string kProof(kDigestSize, '\xa5');

std::vector<std::string> SomeHellos() {
  return {Hello{.nonce = kNonce, .proof = kProof}.Serialize(),
          Hello{.build = "",
                .kind = Hello::Kind::kControl,
                .group = std::string(kMaxName, 'g'),
                .rank = -1,
                .world_size = std::numeric_limits<int>::max(),
                .nonce = kNonce,
                .proof = kProof}
              .Serialize()};
}

// Only the beginning of another version's bytes is read, so they can't be written again.
template <typename Greeting>
absl::StatusOr<std::string> AgainIfSameVersion(absl::string_view bytes) {
  const absl::StatusOr<Greeting> greeting = Greeting::Parse(bytes);
  if (!greeting.ok()) return greeting.status();
  if (greeting->version != kProtocolVersion) return std::string(bytes);
  return greeting->Serialize();
}

TEST(WireFuzzTest, Challenge) {
  Fuzz({Challenge{.nonce = kNonce}.Serialize(),
        Challenge{.build = "b", .job = "job 7", .nonce = kNonce}.Serialize()},
       AgainIfSameVersion<Challenge>);
}

TEST(WireFuzzTest, Hello) { Fuzz(SomeHellos(), AgainIfSameVersion<Hello>); }

TEST(WireFuzzTest, Verdict) {
  Fuzz({Verdict{.host = "rank 0", .proof = kProof}.Serialize(),
        Verdict{.status = absl::PermissionDeniedError("the secrets differ")}.Serialize()},
       Again<Verdict>);
}

TEST(WireFuzzTest, StoreRequest) {
  std::vector<std::string> good;
  for (const StoreRequest::Op op :
       {StoreRequest::Op::kSet, StoreRequest::Op::kGet, StoreRequest::Op::kAdd,
        StoreRequest::Op::kCheck, StoreRequest::Op::kGetOrSet, StoreRequest::Op::kDelete}) {
    good.push_back(
        StoreRequest{.op = op, .id = 5, .key = "key", .value = "value", .amount = -1}.Serialize());
  }
  Fuzz(good, Again<StoreRequest>);
}

TEST(WireFuzzTest, StoreReply) {
  Fuzz({StoreReply{.id = 5, .value = "value", .number = 7}.Serialize(),
        StoreReply{.status = absl::UnknownError("why")}.Serialize()},
       Again<StoreReply>);
}

template <typename Message>
void FuzzControlMessages(std::vector<std::string> good) {
  for (const Message& message : OneOfEach<Message>()) good.push_back(Serialize(message));
  Fuzz(good, [](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::StatusOr<Message> message = ParseControlMessage<Message>(bytes);
    if (!message.ok()) return message.status();
    return Serialize(*message);
  });
}

TEST(WireFuzzTest, ControlMessage) {
  const ExchangeParts parts = {{1, "a"}, {2, ""}, {1, std::string(100, 'x')}};
  FuzzControlMessages<ToHub>({Serialize(ToHub(to_hub::Exchange{.parts = parts, .fanout = 32})),
                              Serialize(ToHub(to_hub::Notice()))});
  FuzzControlMessages<ToRank>({Serialize(ToRank(to_rank::Exchanged{.parts = parts})),
                               Serialize(ToRank(to_rank::Notice()))});
}

TEST(WireFuzzTest, RankStatus) {
  RankStatus busy{.everyone_waits = true, .received = 12, .doing = "waits in #412 barrier (user)"};
  busy.waits.push_back(
      {.kind = Wait::Kind::kExchange, .sequence = 5, .peer = 1, .topic = "step", .text = "step 5"});
  busy.waits.push_back(
      {.kind = Wait::Kind::kPair, .channel = 7, .sequence = 3, .peer = 2, .is_send = true});
  busy.channels.push_back({.id = 7,
                           .name = "user",
                           .position = 413,
                           .recent = {{.sequence = 412, .hash = 9, .text = "barrier"}}});
  busy.open_pairs.push_back({.channel = 7, .sequence = 3, .peer = 2, .is_send = true});
  Fuzz({RankStatus().Serialize(), busy.Serialize()}, Again<RankStatus>);
}

// Addresses come from what others publish.
TEST(WireFuzzTest, HostPort) {
  const auto again = [](absl::string_view bytes) -> absl::StatusOr<std::string> {
    const absl::StatusOr<HostPort> address = HostPort::Parse(bytes);
    if (!address.ok()) return address.status();
    return address->ToString();
  };
  Fuzz({"127.0.0.1:29500", "[::1]:1", "host.example.org:0"}, again, {.is_canonical = false});
}

// A stream comes out as the frames that are in it, however it is cut, and costs memory for what has
// arrived only.
TEST(WireFuzzTest, FrameParser) {
  std::string stream;
  for (const size_t size : {0, 1, 7, 100}) stream += Frame(std::string(size, 'x'));
  std::mt19937_64 random(7);
  for (int round = 0; round < 5000; ++round) {
    const std::string bytes = Broken({stream}, random);
    const size_t most = random() % 300;
    std::string framed;
    size_t given = 0;
    const size_t memory = MemoryTakenBy([&] {
      FrameParser parser(most);
      while (given < bytes.size()) {
        const size_t size = std::min<size_t>(bytes.size() - given, 1 + random() % 40);
        parser.Append(absl::string_view(bytes).substr(given, size));
        given += size;
        while (true) {
          const absl::StatusOr<std::optional<std::string>> frame = parser.Next();
          if (!frame.ok()) {
            ASSERT_TRUE(absl::IsInvalidArgument(frame.status())) << frame.status();
            return;
          }
          if (!frame->has_value()) break;
          ASSERT_LE((*frame)->size(), most);
          framed += Frame(**frame);
        }
      }
    });
    EXPECT_EQ(framed, bytes.substr(0, framed.size()));
    EXPECT_LE(memory, 64 * bytes.size() + 4096);
  }
}

// A connected rank may request anything: the table replies to each request once, or not yet.
TEST(WireFuzzTest, KeyValueTable) {
  KeyValueTable table;
  std::vector<std::string> good;
  for (const StoreRequest::Op op :
       {StoreRequest::Op::kSet, StoreRequest::Op::kGet, StoreRequest::Op::kAdd}) {
    good.push_back(
        StoreRequest{.op = op, .id = 5, .key = "key", .value = "12", .amount = 1}.Serialize());
  }
  std::mt19937_64 random(8);
  int handled = 0;
  for (int round = 0; round < 20000; ++round) {
    absl::StatusOr<StoreRequest> request = StoreRequest::Parse(Broken(good, random));
    if (!request.ok()) continue;
    ++handled;
    table.Handle(static_cast<KeyValueTable::ClientId>(random() % 3), *std::move(request));
    if (random() % 100 == 0) table.Forget(static_cast<KeyValueTable::ClientId>(random() % 3));
  }
  EXPECT_GT(handled, 100);
}

}  // namespace
}  // namespace evenkeel::internal
