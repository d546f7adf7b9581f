// Somebody who wants to disturb a job, or to take part in it without knowing its secret.
//
//   Stranger stranger(seed);
//   while (...) stranger.Turn(addresses);     // does a little of everything, never waits long
//   stranger.Hangup();                        // cuts all connections, and says what came of them
//
// Its tricks: random bytes; silent connections; handshakes of one byte at a time; recorded good
// handshakes, played back; good hellos with a wrong proof; lengths of gigabytes; connections that
// are reset at once.
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

enum class Trick { kNoise, kSilence, kSlowHello, kPlayBack, kWrongProof, kHugeLength, kReset };
inline constexpr Trick kTricks[] = {Trick::kNoise,    Trick::kSilence,    Trick::kSlowHello,
                                    Trick::kPlayBack, Trick::kWrongProof, Trick::kHugeLength,
                                    Trick::kReset};
absl::string_view ToString(Trick trick);

class Stranger {
 public:
  // Keeps at most `most_open` connections: the oldest makes room for the next.
  explicit Stranger(uint64_t seed, size_t most_open = 300) : random_(seed), most_open_(most_open) {}

  // A handshake that it has heard: what a rank of the job said.
  void Heard(std::string handshake) { heard_ = std::move(handshake); }

  // One new connection for each address, and a little more on those that are open.
  void Turn(const std::vector<internal::HostPort>& addresses);
  void Hangup();

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
  size_t next_trick_ = 0;
  std::deque<Visit> visits_;  // By age.
  std::map<Trick, int> tried_;
  std::map<Trick, std::string> refusals_;
  int refused_ = 0, admitted_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_HOSTILE_STRANGER_H_
