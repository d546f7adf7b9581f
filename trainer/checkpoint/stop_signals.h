// SIGTERM and SIGINT as a wish that the program looks at when it can.
//
//   WatchStopSignals();                       // once, before threads are started
//   if (const int signal = StopSignal(); signal != 0) ...          // between two steps
//
// The second one, of either kind, ends the process at once, as the first one would have done without this.
//
// Threads: safe from any thread.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_STOP_SIGNALS_H_
#define EVENKEEL_TRAINER_CHECKPOINT_STOP_SIGNALS_H_

namespace evenkeel {

void WatchStopSignals();
// The first that came; 0: none.
int StopSignal();

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_STOP_SIGNALS_H_
