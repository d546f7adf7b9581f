// The output of the benchmark: a row for each backend, collective and size, as text and as JSON.
//
//   Row row = MakeRow("shm", /*registered=*/true, what, Timing::kEach, seconds_of_blocks);
//   std::cout << Headline() << TextOf(row);
//   file << JsonOf(row);
//
// Units:   GB/s are 10^9 bytes a second. Algorithm bandwidth is bytes / time; bus bandwidth is that
//          times the part of the bytes that must cross each rank's link: 2 (n - 1) / n for
//          all_reduce, (n - 1) / n for reduce_scatter, all_gather and all_to_all, 1 for the others,
//          as nccl-tests define them.
// Source:  https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
// Threads: values and pure functions.

#ifndef EVENKEEL_TOOLS_BENCH_ROWS_H_
#define EVENKEEL_TOOLS_BENCH_ROWS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/measure/paired_ratio.h"

namespace evenkeel::bench {

enum class Timing {
  kEach,  // Each repetition by itself, from when all ranks have met; the slowest rank's time.
  kLoop,  // Calls back to back, as a program issues them; the mean of a block.
};
const char* NameOf(Timing timing);  // "each", "loop"

struct Row {
  std::string mpi;  // The MPI that has started the ranks; empty: the launcher.
  std::string backend;
  bool registered = false;
  Case what;
  Timing timing = Timing::kEach;
  int64_t repetitions = 0;     // Over all blocks; of a loop, blocks.
  double seconds = 0;          // Their median.
  double spread = 0;           // Their interquartile range over the median.
  std::vector<double> blocks;  // The median of each block, by round.
  std::map<std::string, PairedRatio>
      times;  // This one's time over that backend's in the same round.

  double algorithm_bandwidth() const;  // Bytes a second; 0 for what has no bytes.
  double bus_bandwidth() const;
};

// Returns the factor from algorithm bandwidth to bus bandwidth.
double BusFactor(const Case& what);

// From the repetitions of each block. At least one block, none of them empty.
Row MakeRow(const std::string& backend, bool registered, const Case& what, Timing timing,
            std::span<const std::vector<double>> seconds_of_blocks);

std::string Headline();
std::string TextOf(const Row& row);

// For each row and each backend that it is compared with, the ratio of times with its interval.
std::string RatioTable(std::span<const Row> rows, std::span<const std::string> bases);

// An object in one line.
std::string JsonOf(const Row& row);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_ROWS_H_
