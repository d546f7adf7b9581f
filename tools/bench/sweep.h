// Goes through collectives and sizes, with all that are compared in turn.
//
//   EK_ASSIGN_OR_RETURN(const std::vector<Row> rows,
//                       RunSweep(contenders, cells, {.world = 2}, observer));
//
// For each cell: rounds, in each of them one block of each contender, so that whatever the machine
// does meanwhile hits all of them alike; who begins changes from round to round. A contender's
// blocks are as long as `block_time`. Blocks of one round are pairs: their ratios are what
// contenders are compared by. When a cell is over, a fresh run of each contender is checked, value
// by value.
//
// Errors: DataLoss for a wrong result, else those of Peer. A contender that does not do a cell is
//         left out of it, and the observer is told.

#ifndef EVENKEEL_TOOLS_BENCH_SWEEP_H_
#define EVENKEEL_TOOLS_BENCH_SWEEP_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/peer.h"
#include "evenkeel/tools/bench/rows.h"

namespace evenkeel::bench {

struct Contender {
  Peer* peer = nullptr;
  bool registered = false;
};

struct Cell {
  Op op = Op::kAllReduce;
  int64_t bytes = 0;
  Timing timing = Timing::kEach;
};

// Each of `ops` at each of `sizes`, a barrier once; all_reduce also in a loop at each of
// `loop_sizes`.
std::vector<Cell> CellsOf(std::span<const Op> ops, std::span<const int64_t> sizes,
                          std::span<const int64_t> loop_sizes);

// Without a number of pairs as many are measured as time allows, from 3 to 30.
inline constexpr int kLeastPairs = 3, kMostPairs = 30;

struct SweepOptions {
  int world = 2;
  Scalar scalar = Scalar::kFloat32;
  absl::Duration block_time = absl::Milliseconds(10);
  int pairs = 0;                                   // Per cell; 0: as many as fit into
  absl::Duration time_limit = absl::Seconds(200);  // the whole sweep. 3 are measured in any case.
  std::vector<std::string> bases;                  // With which backends the others are compared.
  // Buffers stay from block to block while all of them together are no more than that.
  int64_t memory = INT64_MAX;
  std::function<absl::Time()> now = SteadyNow;
};

struct SweepObserver {
  std::function<void(std::span<const Row> rows)> on_cell = [](std::span<const Row>) {};
  std::function<void(const std::string& sentence)> on_left_out = [](const std::string&) {};
};

absl::StatusOr<std::vector<Row>> RunSweep(std::span<const Contender> contenders,
                                          std::span<const Cell> cells, const SweepOptions& options,
                                          const SweepObserver& observer = {});

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_SWEEP_H_
