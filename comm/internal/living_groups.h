// The communicators of this process, for whoever wants something of all of them.
//
//   ForEachLiving([](const Communicator& comm) { ... });
//
// Threads: thread-safe. A communicator that is visited is not destroyed before the visit ends; a visit makes and
//          destroys none.

#ifndef EVENKEEL_COMM_INTERNAL_LIVING_GROUPS_H_
#define EVENKEEL_COMM_INTERNAL_LIVING_GROUPS_H_

#include <functional>

namespace evenkeel {

class Communicator;

namespace internal {

void AddLiving(const Communicator* comm);
void RemoveLiving(const Communicator* comm);
void ForEachLiving(const std::function<void(const Communicator&)>& visit);

}  // namespace internal
}  // namespace evenkeel

#endif  // EVENKEEL_COMM_INTERNAL_LIVING_GROUPS_H_
