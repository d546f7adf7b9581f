#include "evenkeel/tests/hostile/stranger.h"

#include <sys/socket.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/net/peer_greeting.h"

namespace evenkeel {
namespace {

using internal::Challenge;
using internal::Hello;
using internal::PeerChallenge;
using internal::PeerHello;
using internal::PeerVerdict;
using internal::Verdict;

// Returns the verdict of the store or of a rank's listener. Only members get other frames.
absl::Status VerdictIn(absl::string_view frame) {
  if (const absl::StatusOr<PeerVerdict> verdict = PeerVerdict::Parse(frame); verdict.ok())
    return verdict->status;
  const absl::StatusOr<Verdict> verdict = Verdict::Parse(frame);
  return verdict.ok() ? verdict->status : absl::OkStatus();
}

constexpr absl::Duration kToConnect = absl::Milliseconds(200);
constexpr size_t kMostNoise = 8192;
constexpr size_t kNested = size_t{1} << 16;

}  // namespace

absl::string_view ToString(Trick trick) {
  switch (trick) {
    case Trick::kNoise:
      return "noise";
    case Trick::kSilence:
      return "silence";
    case Trick::kSlowHello:
      return "slow hello";
    case Trick::kSlowRequest:
      return "slow request";
    case Trick::kPlayBack:
      return "play back";
    case Trick::kWrongProof:
      return "wrong proof";
    case Trick::kHugeLength:
      return "huge length";
    case Trick::kJson:
      return "json";
    case Trick::kReset:
      return "reset";
  }
  return "?";
}

void Stranger::Turn(const std::vector<internal::HostPort>& addresses) {
  for (const internal::HostPort& address : addresses) Go(address);
  for (auto visit = visits_.begin(); visit != visits_.end();) {
    visit = Continue(*visit) ? std::next(visit) : visits_.erase(visit);
  }
}

void Stranger::Hangup() {
  for (Visit& visit : visits_) Continue(visit);
  visits_.clear();
  flood_.clear();
}

void Stranger::Flood(const internal::HostPort& address, int connections) {
  for (int i = 0; i < connections; ++i) {
    absl::StatusOr<internal::UniqueFd> fd = internal::ConnectTo(address, SteadyNow() + kToConnect);
    if (!fd.ok()) return;
    ++flooded_;
    internal::SendSome(*fd, internal::Frame("nonsense"));
    flood_.push_back(*std::move(fd));
    if (flood_.size() > most_open_) flood_.pop_front();
  }
}

// Returns the bytes that are sent before any reply.
std::string Stranger::FirstWords(Trick trick) {
  std::string noise(random_() % kMostNoise, '\0');
  for (char& byte : noise) byte = static_cast<char>(random_());
  switch (trick) {
    case Trick::kNoise:
      return random_() % 2 == 0 ? noise : internal::Frame(noise);
    case Trick::kHugeLength:
      return std::string(4, '\xff') + noise;
    case Trick::kJson: {
      const std::string nested(kNested, '[');
      return random_() % 2 == 0 ? internal::Frame(nested)
                                : absl::StrCat(
                                      "POST /status.json HTTP/1.1\r\nHost: x\r\nContent-Length: "
                                      "99999999999\r\n\r\n",
                                      nested);
    }
    case Trick::kSlowRequest:
      return absl::StrCat("GET /status.json HTTP/1.1\r\nHost: ", std::string(4096, 'h'));
    case Trick::kPlayBack:
      return heard_;
    default:
      return "";
  }
}

void Stranger::Go(const internal::HostPort& address) {
  absl::StatusOr<internal::UniqueFd> fd = internal::ConnectTo(address, SteadyNow() + kToConnect);
  if (!fd.ok()) return;  // Nobody listens there any more, or the queue is full.
  const Trick trick = kTricks[random_() % std::size(kTricks)];
  ++tried_[trick];
  if (trick == Trick::kReset) {
    const linger at_once = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    return;
  }
  visits_.push_back({.trick = trick, .fd = *std::move(fd), .to_send = FirstWords(trick)});
  if (visits_.size() > most_open_) visits_.pop_front();
}

bool Stranger::Continue(Visit& visit) {
  std::string bytes;
  const bool is_over = internal::ReceiveSome(visit.fd, bytes).is_over;
  visit.received.Append(bytes);
  while (true) {
    const absl::StatusOr<std::optional<std::string>> frame = visit.received.Next();
    if (!frame.ok() || !frame->has_value()) break;
    OnFrame(visit, **frame);
  }
  if (is_over) return false;
  const bool is_slow = visit.trick == Trick::kSlowHello || visit.trick == Trick::kSlowRequest;
  const size_t size = is_slow ? 1 : visit.to_send.size();
  const internal::Transfer sent =
      internal::SendSome(visit.fd, absl::string_view(visit.to_send).substr(0, size));
  visit.to_send.erase(0, sent.bytes);
  return !sent.is_over;
}

// The first frame is a challenge, the second one what became of it.
void Stranger::OnFrame(Visit& visit, absl::string_view frame) {
  if (visit.has_greeting) {
    const absl::Status verdict = VerdictIn(frame);
    if (verdict.ok()) ++admitted_;
    if (verdict.ok()) return;
    ++refused_;
    refusals_[visit.trick] = std::string(verdict.message());
    return;
  }
  visit.has_greeting = true;
  if (visit.trick == Trick::kWrongProof || visit.trick == Trick::kSlowHello)
    visit.to_send = GuessedHello(frame);
}

// With a proof as who doesn't know the secret can make it.
std::string Stranger::GuessedHello(absl::string_view frame) {
  if (const absl::StatusOr<PeerChallenge> challenge = PeerChallenge::Parse(frame); challenge.ok()) {
    PeerHello hello{.rank = static_cast<int>(random_() % 3), .nonce = challenge->nonce};
    hello.proof = internal::HelloProof({.name = "world", .world_size = 3, .key = "a guess"}, 0,
                                       *challenge, hello);
    return internal::Frame(hello.Serialize());
  }
  const absl::StatusOr<Challenge> challenge = Challenge::Parse(frame);
  if (!challenge.ok()) return "";
  Hello hello{.kind = random_() % 2 == 0 ? Hello::Kind::kStore : Hello::Kind::kControl,
              .group = random_() % 2 == 0 ? "world" : "another",
              .rank = static_cast<int>(random_() % 3),
              .world_size = 3,
              .nonce = challenge->nonce};
  hello.proof = internal::ProofOf("a guess", *challenge, hello);
  return internal::Frame(hello.Serialize());
}

void Impostor::Turn() {
  while (true) {
    absl::StatusOr<internal::UniqueFd> fd = internal::AcceptFrom(listener_);
    if (!fd.ok() || !*fd) return;
    const Challenge challenge{.job = job_, .nonce = std::string(internal::kNonceSize, 'n')};
    internal::SendSome(*fd, internal::Frame(challenge.Serialize()));
    victims_.push_back(*std::move(fd));
  }
}

}  // namespace evenkeel
