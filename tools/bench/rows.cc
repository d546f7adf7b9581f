#include "evenkeel/tools/bench/rows.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/tools/measure/table.h"
#include "nlohmann/json.hpp"

namespace evenkeel::bench {
namespace {

const std::vector<Table::Column> kNames = {
    {"op", -17}, {"size", 9}, {"backend", -10}, {"registered", -10}};

Table TableWith(std::vector<Table::Column> more) {
  more.insert(more.begin(), kNames.begin(), kNames.end());
  return Table(std::move(more));
}

std::vector<std::string> CellsOf(const Row& row, std::vector<std::string> more) {
  const std::string names[] = {
      absl::StrCat(NameOf(row.what.op), row.timing == Timing::kLoop ? " (loop)" : ""),
      SizeText(row.what.bytes), row.backend, row.registered ? "yes" : "no"};
  more.insert(more.begin(), std::begin(names), std::end(names));
  return more;
}

Table TimesTable() {
  return TableWith(
      {{"median us", 12}, {"algbw GB/s", 12}, {"busbw GB/s", 12}, {"spread %", 9}, {"reps", 7}});
}

std::string Bandwidth(double bytes_per_second) {
  return bytes_per_second > 0 ? absl::StrFormat("%.3f", bytes_per_second / 1e9) : "-";
}

// Three digits that count.
std::string Digits(double value) {
  if (value >= 100) return absl::StrFormat("%.0f", value);
  return absl::StrFormat(value >= 10 ? "%.1f" : value >= 1 ? "%.2f" : "%.3g", value);
}

}  // namespace

const char* NameOf(Timing timing) { return timing == Timing::kLoop ? "loop" : "each"; }

double BusFactor(const Case& what) {
  const double n = what.world;
  if (what.op == Op::kAllReduce) return 2 * (n - 1) / n;
  return what.has_parts() ? (n - 1) / n : 1;
}

double Row::algorithm_bandwidth() const { return static_cast<double>(what.bytes) / seconds; }
double Row::bus_bandwidth() const { return algorithm_bandwidth() * BusFactor(what); }

Row MakeRow(const std::string& backend, bool registered, const Case& what, Timing timing,
            std::span<const std::vector<double>> seconds_of_blocks) {
  Row row{.backend = backend, .registered = registered, .what = what, .timing = timing};
  std::vector<double> all;
  for (const std::vector<double>& block : seconds_of_blocks) {
    row.blocks.push_back(MedianOf(block));
    all.insert(all.end(), block.begin(), block.end());
  }
  row.repetitions = static_cast<int64_t>(all.size());
  row.seconds = MedianOf(all);
  row.spread = (QuantileOf(all, 0.75) - QuantileOf(all, 0.25)) / row.seconds;
  return row;
}

std::string Headline() { return TimesTable().Titles(); }

std::string TextOf(const Row& row) {
  return TimesTable().Line(
      CellsOf(row, {absl::StrFormat("%.2f", 1e6 * row.seconds),
                    Bandwidth(row.algorithm_bandwidth()), Bandwidth(row.bus_bandwidth()),
                    absl::StrFormat("%.1f", 100 * row.spread), absl::StrCat(row.repetitions)}));
}

std::string RatioTable(std::span<const Row> rows, std::span<const std::string> bases) {
  std::vector<Table::Column> columns = {{"pairs", 5}};
  for (const std::string& base : bases)
    columns.push_back({absl::StrCat("time / ", base, "'s"), -23});
  const Table table = TableWith(columns);
  std::string text = table.Titles();
  for (const Row& row : rows) {
    if (row.times.empty()) continue;
    std::vector<std::string> cells = {absl::StrCat(row.blocks.size())};
    for (const std::string& base : bases) {
      const auto found = row.times.find(base);
      cells.push_back(found == row.times.end() ? "-"
                                               : absl::StrCat(Digits(found->second.median), " [",
                                                              Digits(found->second.low), ", ",
                                                              Digits(found->second.high), "]"));
    }
    text += table.Line(CellsOf(row, cells));
  }
  return text;
}

std::string JsonOf(const Row& row) {
  nlohmann::ordered_json ratios = nlohmann::ordered_json::object();
  for (const auto& [base, ratio] : row.times)
    ratios[base] = {{"median", ratio.median}, {"low", ratio.low}, {"high", ratio.high}};
  const nlohmann::ordered_json json = {{"mpi", row.mpi},
                                       {"backend", row.backend},
                                       {"op", NameOf(row.what.op)},
                                       {"world", row.what.world},
                                       {"dtype", "float32"},
                                       {"bytes", row.what.bytes},
                                       {"registered", row.registered},
                                       {"timing", NameOf(row.timing)},
                                       {"median_us", 1e6 * row.seconds},
                                       {"algbw_gbs", row.algorithm_bandwidth() / 1e9},
                                       {"busbw_gbs", row.bus_bandwidth() / 1e9},
                                       {"spread_pct", 100 * row.spread},
                                       {"repetitions", row.repetitions},
                                       {"pairs", row.blocks.size()},
                                       {"time_over", std::move(ratios)}};
  return json.dump();
}

}  // namespace evenkeel::bench
