// Starts a thread, or returns an error where the system has none left.
//
//   EK_ASSIGN_OR_RETURN(thread_, StartThread("the watchdog", [this] { Run(); }));
//
// For the threads of a group of processes: a std::thread that cannot start throws, and its
// exception would end the process.
//
// Errors: ResourceExhausted, with the purpose and what to do.

#ifndef EVENKEEL_COMM_BASE_START_THREAD_H_
#define EVENKEEL_COMM_BASE_START_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

absl::StatusOr<std::thread> StartThread(absl::string_view purpose, std::function<void()> body);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_START_THREAD_H_
