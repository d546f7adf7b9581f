// Measures collectives at several sizes, with all contenders in turn.
//
//   EK_ASSIGN_OR_RETURN(const std::vector<Row> rows,
//                       RunSweep(contenders, cells, {.world = 2}, observer));
//
// For each cell: rounds of one block of each contender (tools/measure/rounds.h). A contender's
// blocks are as long as `block_time`. The ratios of the blocks of one round compare the contenders.
// When a cell is over, a fresh run of each contender is checked, value by value.
//
// Order:  every rank runs the same sweep; its decisions depend only on the contenders' results.
// Errors: DataLoss for a wrong result, else those of the contenders. A contender that does not
//         support a cell is left out of it, which is reported once; so is a cell that needs more
//         memory than there is.

#ifndef EVENKEEL_TOOLS_BENCH_SWEEP_H_
#define EVENKEEL_TOOLS_BENCH_SWEEP_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/rows.h"

namespace evenkeel::bench {

struct Block {
  Timing timing = Timing::kEach;
  int warmups = 0;
  int repetitions = 1;
};

// A transport with the memory in which it is measured.
class Contender {
 public:
  virtual ~Contender() = default;

  virtual const std::string& name() const = 0;
  virtual bool registered() const = 0;  // In memory that the transport has given out.
  // Returns the slowest rank's seconds for each repetition, from the moment when all ranks have
  // met; for a loop one number, the mean of calls back to back. Returns Unimplemented if the
  // transport does not support the case.
  virtual absl::StatusOr<std::vector<double>> Time(const Case& what, const Block& block) = 0;
  // Returns DataLoss if the result of a fresh run is wrong.
  virtual absl::Status Check(const Case& what) = 0;
  // Frees the buffers of the last case.
  virtual void Forget() = 0;
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

struct SweepOptions {
  int world = 2;
  absl::Duration block_time = absl::Milliseconds(10);
  int pairs = 10;  // Rounds per cell.
  // Bytes that the buffers of all ranks may take together; the same on all ranks.
  int64_t memory = std::numeric_limits<int64_t>::max();
  std::vector<std::string> bases;  // The backends with which the others are compared.
};

struct SweepObserver {
  std::function<void(std::span<const Row> rows)> on_cell = [](std::span<const Row>) {};
  std::function<void(const std::string& sentence)> on_left_out = [](const std::string&) {};
};

absl::StatusOr<std::vector<Row>> RunSweep(std::span<Contender* const> contenders,
                                          std::span<const Cell> cells, const SweepOptions& options,
                                          const SweepObserver& observer = {});

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_SWEEP_H_
