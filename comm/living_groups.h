// The communicators of this process, for functions that visit all of them.
//
//   ForEachLiving([](const Communicator& comm) { ... });
//
// Threads: thread-safe. A visited communicator is not destroyed before the visit ends. A visit must
//          not make or destroy communicators.

#ifndef EVENKEEL_COMM_LIVING_GROUPS_H_
#define EVENKEEL_COMM_LIVING_GROUPS_H_

#include <functional>

namespace evenkeel {

class Communicator;

namespace internal {

void AddLiving(const Communicator* comm);
void RemoveLiving(const Communicator* comm);
void ForEachLiving(const std::function<void(const Communicator&)>& visit);

}  // namespace internal
}  // namespace evenkeel

#endif  // EVENKEEL_COMM_LIVING_GROUPS_H_
