// Gloo itself in the benchmark: its ring over its own TCP transport on loopback, and its own
// rendezvous.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Transport> gloo, ConnectRawGloo(folder, rank, world));
//
// Blocking: waits for the other ranks, in the folder.

#ifndef EVENKEEL_TOOLS_BENCH_RAW_GLOO_H_
#define EVENKEEL_TOOLS_BENCH_RAW_GLOO_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/tools/bench/transport.h"

namespace evenkeel::bench {

absl::StatusOr<std::unique_ptr<Transport>> ConnectRawGloo(const std::string& folder, int rank,
                                                          int world);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_RAW_GLOO_H_
