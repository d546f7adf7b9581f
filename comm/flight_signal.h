// Makes a process write the flight records of its communicators when it receives a signal, to
// examine a job that hangs.
//
//   absl::Status status = DumpFlightOnSignal(SIGUSR1, "/tmp/job");  // once, early in the program
//   kill -USR1 <pid>  // writes /tmp/job/<group>.rank<r>.json
//
// The job continues. The signal's handler only wakes a thread, which does the work; if it fails, it
// logs the error to stderr.
//
// Call it before the program starts threads: it blocks the signal in the calling thread, and so in
// those that this one starts, and a thread of its own receives it. Generated kernels, such as
// oneDNN's matrix products, may keep data below their stack pointer, where the frame of a handler
// in a thread that computes would lie.
//
// Threads: thread-safe. The last call for a signal counts; other signals of the process are not
//          changed.
// Errors:  InvalidArgument: no such signal, or one that cannot be caught.

#ifndef EVENKEEL_COMM_FLIGHT_SIGNAL_H_
#define EVENKEEL_COMM_FLIGHT_SIGNAL_H_

#include <string>

#include "absl/status/status.h"

namespace evenkeel {

absl::Status DumpFlightOnSignal(int signal, std::string folder);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FLIGHT_SIGNAL_H_
