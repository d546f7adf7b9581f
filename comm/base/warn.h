// Sends a warning to the program's function (WatchOptions::warn), or to stderr.
//
//   Warn(options.watch.warn, "rank 1 has waited 10s in ...");

#ifndef EVENKEEL_COMM_BASE_WARN_H_
#define EVENKEEL_COMM_BASE_WARN_H_

#include <cstdio>
#include <functional>
#include <string>

#include "absl/time/time.h"

namespace evenkeel::internal {

// A rank that waits longer than this for others logs which ranks are missing.
inline constexpr absl::Duration kSilentWait = absl::Seconds(5);

using WarnFunction = std::function<void(const std::string& text)>;

// The line is one write, since all ranks of a host may write to the same file: printf's pieces have
// 128 bytes (since glibc 2.37).
inline void Warn(const WarnFunction& warn, const std::string& text) {
  if (warn != nullptr) return warn(text);
  std::fputs(("evenkeel: " + text + "\n").c_str(), stderr);
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_WARN_H_
