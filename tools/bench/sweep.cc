#include "evenkeel/tools/bench/sweep.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/measure/paired_ratio.h"

namespace evenkeel::bench {
namespace {

constexpr int kMostRepetitions = 1000;
constexpr int kMostCallsOfALoop = 10'000;
// Calls that take longer are not repeated to warm up, or to find out how long they take.
constexpr absl::Duration kLong = absl::Milliseconds(50);

// A cell's share of the time: large blocks are over their length with a single repetition, and take
// longest to check.
double WeightOf(const Cell& cell) {
  double weight = 1;
  for (int64_t bytes = 1 << 20; bytes < cell.bytes; bytes *= 4) weight *= 1.6;
  return weight;
}

struct Entrant {
  Contender contender;
  Case what;
  Block block;
  std::vector<std::vector<double>> blocks;  // Seconds of repetitions.
};

class CellRun {
 public:
  CellRun(const Cell& cell, const SweepOptions& options) : cell_(cell), options_(options) {}

  absl::StatusOr<std::vector<Row>> Run(std::span<const Contender> contenders, absl::Duration budget,
                                       const std::function<void(const std::string&)>& on_left_out) {
    const absl::Time end = options_.now() + budget;
    keeps_buffers_ = NeededMemory(contenders) <= options_.memory;
    for (const Contender& contender : contenders) {
      absl::Status status = Enter(contender);
      if (absl::IsUnimplemented(status)) {
        on_left_out(std::string(status.message()));
        continue;
      }
      EK_RETURN_IF_ERROR(status);
    }
    for (int round = 0; !entrants_.empty() && GoesOn(round, end); ++round) {
      const absl::Time begin = options_.now();
      for (size_t i = 0; i < entrants_.size(); ++i) {
        EK_RETURN_IF_ERROR(
            RunBlock(entrants_[(i + static_cast<size_t>(round)) % entrants_.size()]));
      }
      last_round_ = options_.now() - begin;
    }
    for (const Entrant& entrant : entrants_) {
      EK_RETURN_IF_ERROR(entrant.contender.peer->Check(entrant.what));
      EK_RETURN_IF_ERROR(entrant.contender.peer->Forget());
    }
    return Rows();
  }

 private:
  Case CaseOf(const Contender& contender) const {
    Case what{.op = cell_.op,
              .scalar = options_.scalar,
              .bytes = cell_.bytes,
              .world = options_.world,
              .registered = contender.registered};
    what.bytes = WholeBytes(what);
    return what;
  }

  // A transport needs about as much again for itself.
  int64_t NeededMemory(std::span<const Contender> contenders) const {
    int64_t bytes = 0;
    for (const Contender& contender : contenders) {
      const Case what = CaseOf(contender);
      bytes += 2 * options_.world * (what.in_bytes() + what.out_bytes());
    }
    return bytes;
  }

  // Warms it up, and finds out how many repetitions fill a block.
  absl::Status Enter(const Contender& contender) {
    Entrant entrant{.contender = contender, .what = CaseOf(contender)};
    EK_ASSIGN_OR_RETURN(std::vector<double> seconds, contender.peer->Time(entrant.what, {}));
    if (absl::Seconds(seconds[0]) < kLong) {
      EK_ASSIGN_OR_RETURN(seconds,
                          contender.peer->Time(entrant.what, {.warmups = 1, .repetitions = 3}));
    }
    const double each = std::max(MedianOf(seconds), 1e-9);
    const int most = cell_.timing == Timing::kLoop ? kMostCallsOfALoop : kMostRepetitions;
    const double fit = absl::ToDoubleSeconds(options_.block_time) / each;
    entrant.block.repetitions = static_cast<int>(std::clamp(fit, 1.0, static_cast<double>(most)));
    // After the others' blocks caches are cold, and the ranks have slept.
    if (absl::Seconds(each) < kLong || !keeps_buffers_) {
      entrant.block.warmups = std::clamp(entrant.block.repetitions / 10, 1, 20);
    }
    if (!keeps_buffers_) EK_RETURN_IF_ERROR(contender.peer->Forget());
    entrants_.push_back(std::move(entrant));
    return absl::OkStatus();
  }

  bool GoesOn(int rounds, absl::Time end) const {
    if (options_.pairs > 0) return rounds < options_.pairs;
    return rounds < kLeastPairs || (rounds < kMostPairs && options_.now() + last_round_ <= end);
  }

  absl::Status RunBlock(Entrant& entrant) {
    Peer& peer = *entrant.contender.peer;
    if (cell_.timing == Timing::kLoop) {
      EK_ASSIGN_OR_RETURN(const double mean, peer.Loop(entrant.what, entrant.block));
      entrant.blocks.push_back({mean});
    } else {
      EK_ASSIGN_OR_RETURN(std::vector<double> seconds, peer.Time(entrant.what, entrant.block));
      entrant.blocks.push_back(std::move(seconds));
    }
    return keeps_buffers_ ? absl::OkStatus() : peer.Forget();
  }

  std::vector<Row> Rows() const {
    std::vector<Row> rows;
    for (const Entrant& entrant : entrants_) {
      rows.push_back(
          MakeRow(entrant.contender.peer->name(), entrant.what, cell_.timing, entrant.blocks));
    }
    for (Row& row : rows) {
      for (const std::string& base : options_.bases) {
        const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& other) {
          return other.backend == base && !other.what.registered;
        });
        if (found == rows.end() || &*found == &row) continue;
        row.times[base] = RatioOf(row.blocks, found->blocks);
      }
    }
    return rows;
  }

  const Cell cell_;
  const SweepOptions& options_;
  bool keeps_buffers_ = true;
  std::vector<Entrant> entrants_;
  absl::Duration last_round_;
};

}  // namespace

std::vector<Cell> CellsOf(std::span<const Op> ops, std::span<const int64_t> sizes,
                          std::span<const int64_t> loop_sizes) {
  std::vector<Cell> cells;
  for (const Op op : ops) {
    if (op == Op::kBarrier) {
      cells.push_back({op, 0});
      continue;
    }
    if (op == Op::kAllReduce) {
      for (const int64_t bytes : loop_sizes) cells.push_back({op, bytes, Timing::kLoop});
    }
    for (const int64_t bytes : sizes) cells.push_back({op, bytes});
  }
  return cells;
}

absl::StatusOr<std::vector<Row>> RunSweep(std::span<const Contender> contenders,
                                          std::span<const Cell> cells, const SweepOptions& options,
                                          const SweepObserver& observer) {
  const absl::Time end = options.now() + options.time_limit;
  double weight_left = 0;
  for (const Cell& cell : cells) weight_left += WeightOf(cell);
  std::vector<Row> rows;
  std::set<std::string> left_out;
  for (const Cell& cell : cells) {
    // The unused part of a cell's share goes to the next ones.
    const absl::Duration budget = (end - options.now()) * (WeightOf(cell) / weight_left);
    weight_left -= WeightOf(cell);
    const auto on_left_out = [&](const std::string& sentence) {
      if (left_out.insert(sentence).second) observer.on_left_out(sentence);
    };
    EK_ASSIGN_OR_RETURN(std::vector<Row> of_cell,
                        CellRun(cell, options).Run(contenders, budget, on_left_out));
    observer.on_cell(of_cell);
    rows.insert(rows.end(), of_cell.begin(), of_cell.end());
  }
  return rows;
}

}  // namespace evenkeel::bench
