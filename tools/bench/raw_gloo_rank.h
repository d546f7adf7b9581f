// Gloo itself in the benchmark: its own algorithms over its own TCP transport on loopback, and its
// own rendezvous.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Collectives> gloo, ConnectRawGloo({folder, rank, world}));
//
// all_reduce is Gloo's ring, reduce_scatter its halving and doubling (the only one that it has),
// send_recv two unbound buffers; the others are the functions of these names. bfloat16 is not among
// Gloo's types.
//
// Blocking: waits for the other ranks, in the seat's folder.

#ifndef EVENKEEL_TOOLS_BENCH_RAW_GLOO_RANK_H_
#define EVENKEEL_TOOLS_BENCH_RAW_GLOO_RANK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/tools/bench/rank_side.h"

namespace evenkeel::bench {

absl::StatusOr<std::unique_ptr<Collectives>> ConnectRawGloo(const Seat& seat);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_RAW_GLOO_RANK_H_
