// Somebody who wants to disturb a job, or to take part in it without knowing its secret.
//
//   Stranger stranger(seed);
//   while (...) stranger.Turn(addresses);     // does a little of everything, never waits long
//   stranger.Hangup();                        // cuts all connections, and says what came of them
//
// Its tricks: random bytes; silent connections; handshakes and HTTP requests of one byte at a time;
// recorded good handshakes, played back; good hellos with a wrong proof; lengths of gigabytes;
// nested JSON; connections that are reset at once; floods.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TESTS_HOSTILE_STRANGER_H_
#define EVENKEEL_TESTS_HOSTILE_STRANGER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel {

enum class Trick {
  kNoise,
  kSilence,
  kSlowHello,
  kSlowRequest,
  kPlayBack,
  kWrongProof,
  kHugeLength,
  kJson,
  kReset
};
inline constexpr Trick kTricks[] = {Trick::kNoise,       Trick::kSilence,  Trick::kSlowHello,
                                    Trick::kSlowRequest, Trick::kPlayBack, Trick::kWrongProof,
                                    Trick::kHugeLength,  Trick::kJson,     Trick::kReset};
absl::string_view ToString(Trick trick);

class Stranger {
 public:
  // Keeps at most `most_open` connections: the oldest makes room for the next.
  explicit Stranger(uint64_t seed, size_t most_open = 300) : random_(seed), most_open_(most_open) {}

  // A handshake that it has heard: what a rank of the job said.
  void Heard(std::string handshake) { heard_ = std::move(handshake); }

  // One new connection for each address, and a little more on those that are open.
  void Turn(const std::vector<internal::HostPort>& addresses);
  // So many new connections that send a malformed frame and wait for the other end to close them.
  void Flood(const internal::HostPort& address, int connections);
  void Hangup();
  int flooded() const { return flooded_; }

  // Connections made, by what was tried on them.
  const std::map<Trick, int>& tried() const { return tried_; }
  int refused() const { return refused_; }  // Verdicts that said no.
  int admitted() const {
    return admitted_;
  }  // Verdicts that said yes, or frames that only members get.
  // The last refusal of each kind.
  const std::map<Trick, std::string>& refusals() const { return refusals_; }

 private:
  struct Visit {
    Trick trick = Trick::kSilence;
    internal::UniqueFd fd;
    std::string to_send;
    bool has_greeting = false;
    internal::FrameParser received{internal::kMaxFrame};
  };

  std::string FirstWords(Trick trick);
  void Go(const internal::HostPort& address);
  // Reads what has come and sends a little; false: the connection is over.
  bool Continue(Visit& visit);
  void OnFrame(Visit& visit, absl::string_view frame);
  std::string GuessedHello(absl::string_view frame);

  std::mt19937_64 random_;
  const size_t most_open_;
  std::string heard_;
  std::deque<Visit> visits_;  // By age.
  std::deque<internal::UniqueFd> flood_;
  int flooded_ = 0;
  std::map<Trick, int> tried_;
  std::map<Trick, std::string> refusals_;
  int refused_ = 0, admitted_ = 0;
};

// Listens where ranks look for their store, sends a challenge, and nothing else.
class Impostor {
 public:
  explicit Impostor(std::string job) : job_(std::move(job)) {}

  const internal::HostPort& address() const { return address_; }
  int victims() const { return static_cast<int>(victims_.size()); }
  void Turn();  // Takes all that have come.

 private:
  const std::string job_;
  const internal::UniqueFd listener_ = internal::ListenOn({"127.0.0.1", 0}).value();
  const internal::HostPort address_ = internal::LocalAddress(listener_).value();
  std::vector<internal::UniqueFd> victims_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_HOSTILE_STRANGER_H_
