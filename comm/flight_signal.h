// Has a process write the flight records of its communicators when it gets a signal: to look into a job that hangs.
//
//   absl::Status status = DumpFlightOnSignal(SIGUSR1, "/tmp/job");      // once, early in the program
//   kill -USR1 <pid>                                                    // /tmp/job/<group>.rank<r>.json appears
//
// The job goes on. The signal's handler only wakes a thread, which does the work; a dump that fails is told on stderr.
//
// Any thread may be interrupted for it. Generated kernels, such as oneDNN's matrix products, may keep data below their
// stack pointer, where the handler's frame would lie: block the signal in threads that compute, after this call, and
// the thread that does the work takes it.
//
// Threads: thread-safe. The last call for a signal counts; the process's other signals stay as they are.
// Errors:  InvalidArgument: no such signal, or one that can't be caught.

#ifndef EVENKEEL_COMM_FLIGHT_SIGNAL_H_
#define EVENKEEL_COMM_FLIGHT_SIGNAL_H_

#include <string>

#include "absl/status/status.h"

namespace evenkeel {

absl::Status DumpFlightOnSignal(int signal, std::string folder);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FLIGHT_SIGNAL_H_
