#include "evenkeel/tools/bench/sweep.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rounds.h"
#include "evenkeel/tools/measure/table.h"

namespace evenkeel::bench {
namespace {

constexpr int kMostRepetitions = 1000;
constexpr int kMostCallsOfALoop = 10'000;
// Calls that take longer are not repeated to warm up, or to find out how long they take.
constexpr absl::Duration kLong = absl::Milliseconds(50);

struct Entrant {
  Contender* contender = nullptr;
  Block block;
  std::vector<std::vector<double>> blocks;  // Seconds of repetitions.
};

class CellRun {
 public:
  CellRun(const Cell& cell, const SweepOptions& options)
      : what_{.op = cell.op, .bytes = cell.bytes, .world = options.world},
        timing_(cell.timing),
        options_(options) {
    what_.bytes = WholeBytes(what_);
  }

  absl::StatusOr<std::vector<Row>> Run(std::span<Contender* const> contenders,
                                       const std::function<void(const std::string&)>& on_left_out) {
    if (const int64_t needed = NeededMemory(contenders); needed > options_.memory) {
      on_left_out(absl::StrCat(NameOf(what_.op), " of ", SizeText(what_.bytes), ": the buffers of ",
                               what_.world, " ranks need ", needed >> 20, " MiB of ",
                               options_.memory >> 20, " MiB; choose smaller --sizes"));
      return std::vector<Row>();
    }
    for (Contender* contender : contenders) {
      absl::Status status = Enter(contender);
      if (absl::IsUnimplemented(status)) {
        on_left_out(std::string(status.message()));
        continue;
      }
      EK_RETURN_IF_ERROR(status);
    }
    EK_RETURN_IF_ERROR(
        RunRounds(entrants_.size(), options_.pairs, [&](size_t i, int) -> absl::Status {
          Entrant& entrant = entrants_[i];
          EK_ASSIGN_OR_RETURN(entrant.blocks.emplace_back(),
                              entrant.contender->Time(what_, entrant.block));
          return absl::OkStatus();
        }));
    for (const Entrant& entrant : entrants_) EK_RETURN_IF_ERROR(entrant.contender->Check(what_));
    for (const Entrant& entrant : entrants_) entrant.contender->Forget();
    return Rows();
  }

 private:
  // Ordinary memory is shared by the contenders of a rank; registered memory is each one's own.
  int64_t NeededMemory(std::span<Contender* const> contenders) const {
    const auto count = std::ranges::count_if(contenders, &Contender::registered) + 1;
    const auto elements = what_.in_count() + what_.out_count();
    return elements * static_cast<int64_t>(sizeof(float)) * what_.world * count;
  }

  // Warms it up, and finds out how many repetitions fill a block.
  absl::Status Enter(Contender* contender) {
    Entrant entrant{.contender = contender, .block = {.timing = timing_}};
    EK_ASSIGN_OR_RETURN(std::vector<double> seconds, contender->Time(what_, {}));
    if (absl::Seconds(seconds[0]) < kLong) {
      EK_ASSIGN_OR_RETURN(seconds, contender->Time(what_, {.warmups = 1, .repetitions = 3}));
    }
    const double each = std::max(MedianOf(seconds), 1e-9);
    const int most = timing_ == Timing::kLoop ? kMostCallsOfALoop : kMostRepetitions;
    const double fit = absl::ToDoubleSeconds(options_.block_time) / each;
    entrant.block.repetitions = static_cast<int>(std::clamp(fit, 1.0, static_cast<double>(most)));
    // After the others' blocks caches are cold.
    if (absl::Seconds(each) < kLong)
      entrant.block.warmups = std::clamp(entrant.block.repetitions / 10, 1, 20);
    entrants_.push_back(std::move(entrant));
    return absl::OkStatus();
  }

  std::vector<Row> Rows() const {
    std::vector<Row> rows;
    for (const Entrant& entrant : entrants_) {
      rows.push_back(MakeRow(entrant.contender->name(), entrant.contender->registered(), what_,
                             timing_, entrant.blocks));
    }
    for (Row& row : rows) {
      for (const std::string& base : options_.bases) {
        const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& other) {
          return other.backend == base && !other.registered;
        });
        if (found == rows.end() || &*found == &row) continue;
        row.times[base] = RatioOf(row.blocks, found->blocks);
      }
    }
    return rows;
  }

  Case what_;
  const Timing timing_;
  const SweepOptions& options_;
  std::vector<Entrant> entrants_;
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

absl::StatusOr<std::vector<Row>> RunSweep(std::span<Contender* const> contenders,
                                          std::span<const Cell> cells, const SweepOptions& options,
                                          const SweepObserver& observer) {
  std::vector<Row> rows;
  std::set<std::string> left_out;
  for (const Cell& cell : cells) {
    const auto on_left_out = [&](const std::string& sentence) {
      if (left_out.insert(sentence).second) observer.on_left_out(sentence);
    };
    EK_ASSIGN_OR_RETURN(std::vector<Row> of_cell,
                        CellRun(cell, options).Run(contenders, on_left_out));
    observer.on_cell(of_cell);
    rows.insert(rows.end(), of_cell.begin(), of_cell.end());
  }
  return rows;
}

}  // namespace evenkeel::bench
