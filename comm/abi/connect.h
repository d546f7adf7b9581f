// The std types of comm/abi/group.h and the library behind them: for the files that implement an
// interface of libevenkeel.so.

#ifndef EVENKEEL_COMM_ABI_CONNECT_H_
#define EVENKEEL_COMM_ABI_CONNECT_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/abi/group.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::abi {

Failure FailureOf(const absl::Status& status);

// Waits until all ranks have called it.
absl::StatusOr<std::unique_ptr<Communicator>> Connect(Store& store, const Options& options);

}  // namespace evenkeel::abi

#endif  // EVENKEEL_COMM_ABI_CONNECT_H_
