// Where processes listen, as an attacker on the same host finds out.
//
//   for (const internal::HostPort& address : ListenersOf(pids)) ...
//
// From /proc: the sockets among a process's open files, and the addresses of those that listen.

#ifndef EVENKEEL_TESTS_HOSTILE_LISTENERS_H_
#define EVENKEEL_TESTS_HOSTILE_LISTENERS_H_

#include <sys/types.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "evenkeel/comm/net/socket.h"

namespace evenkeel {

// Their TCP listeners; each address once.
std::vector<internal::HostPort> ListenersOf(const std::vector<pid_t>& pids);

// The resources that a process holds.
struct Holdings {
  int descriptors = 0, threads = 0;
  friend bool operator==(const Holdings&, const Holdings&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Holdings& holdings) {
    return out << holdings.descriptors << " descriptors and " << holdings.threads << " threads";
  }
};
std::vector<Holdings> HoldingsOf(const std::vector<pid_t>& pids);

// Returns a process's resident memory, in bytes; 0 if there is no such process.
int64_t ResidentBytesOf(pid_t pid);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_HOSTILE_LISTENERS_H_
