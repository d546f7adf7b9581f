// Turns SIGTERM and SIGINT into requests that the program checks between steps.
//
//   WatchStopSignals();                       // once, before threads are started
//   ... wait for the other ranks: a signal still ends the process ...
//   DeferStopSignals();                       // once there is something to save
//   if (const int signal = StopSignal(); signal != 0) ...          // between two steps
//
// After DeferStopSignals() the first signal is only noted. The second one, of either kind, ends the
// process at once.
//
// Threads: safe from any thread.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_STOP_SIGNALS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_STOP_SIGNALS_H_

namespace evenkeel {

void WatchStopSignals();
void DeferStopSignals();
// Returns the first signal after DeferStopSignals(); 0: none.
int StopSignal();

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_STOP_SIGNALS_H_
