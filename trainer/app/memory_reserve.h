// Reserves memory for reporting that the rest is used up.
//
//   int main() {
//     KeepMemoryReserve();
//
// An allocation that does not fit releases the reserve and is tried again. A large one still
// fails, and its caller reports it. The message, its way to the other ranks and
// the end of this process take their memory from the reserve.
//
// Threads: call it once, before other threads start. It replaces std::set_new_handler()'s function.

#ifndef EVENKEEL_TRAINER_APP_MEMORY_RESERVE_H_
#define EVENKEEL_TRAINER_APP_MEMORY_RESERVE_H_

namespace evenkeel {

void KeepMemoryReserve();

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_MEMORY_RESERVE_H_
