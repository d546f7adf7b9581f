// Reserves address space, so that a process whose memory is limited (ulimit -v) can still report
// that the rest is used up.
//
//   int main() {
//     KeepMemoryReserve();
//
// The first allocation by operator new that does not fit releases the reserve and is tried again. A
// large one still fails, and its caller reports the error. The message, its way to the other ranks
// and the end of this process then take their memory from the released space.
//
// Threads: call it once, before other threads start. It sets the process's std::new_handler.

#ifndef EVENKEEL_TRAINER_APP_MEMORY_RESERVE_H_
#define EVENKEEL_TRAINER_APP_MEMORY_RESERVE_H_

namespace evenkeel {

void KeepMemoryReserve();

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_MEMORY_RESERVE_H_
