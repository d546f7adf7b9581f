#include "evenkeel/tools/bench/rows.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace evenkeel::bench {
namespace {

// Returns a quantile of a sorted sample; between two values it interpolates.
double Quantile(std::span<const double> sorted, double part) {
  const double at = part * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(at), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

std::string Bandwidth(double bytes_per_second) {
  return bytes_per_second > 0 ? absl::StrFormat("%.3f", bytes_per_second / 1e9) : "-";
}

// Three digits that count.
std::string Digits(double value) {
  if (value >= 100) return absl::StrFormat("%.0f", value);
  return absl::StrFormat(value >= 10 ? "%.1f" : value >= 1 ? "%.2f" : "%.3g", value);
}

std::string Title(const Row& row) {
  return absl::StrCat(NameOf(row.what.op), row.timing == Timing::kLoop ? " (loop)" : "");
}

const char* Registered(const Row& row) { return row.what.registered ? "yes" : "no"; }

}  // namespace

const char* NameOf(Timing timing) { return timing == Timing::kLoop ? "loop" : "each"; }

double BusFactor(const std::string& backend, Op op, int world) {
  if (backend == "memcpy") return 1;
  const double n = world;
  if (op == Op::kAllReduce) return 2 * (n - 1) / n;
  return Case{.op = op}.has_parts() ? (n - 1) / n : 1;
}

double Row::algorithm_bandwidth() const { return static_cast<double>(what.bytes) / seconds; }
double Row::bus_bandwidth() const {
  return algorithm_bandwidth() * BusFactor(backend, what.op, what.world);
}

Row MakeRow(const std::string& backend, const Case& what, Timing timing,
            std::span<const std::vector<double>> seconds_of_blocks) {
  Row row{.backend = backend, .what = what, .timing = timing};
  std::vector<double> all;
  for (const std::vector<double>& block : seconds_of_blocks) {
    row.blocks.push_back(MedianOf(block));
    all.insert(all.end(), block.begin(), block.end());
  }
  std::sort(all.begin(), all.end());
  row.repetitions = static_cast<int64_t>(all.size());
  row.seconds = MedianOf(all);
  row.spread = (Quantile(all, 0.75) - Quantile(all, 0.25)) / row.seconds;
  return row;
}

std::string Headline() {
  return absl::StrFormat("%-17s %9s  %-10s %-10s %12s %12s %12s %9s %7s\n", "op", "size", "backend",
                         "registered", "median us", "algbw GB/s", "busbw GB/s", "spread %", "reps");
}

std::string TextOf(const Row& row) {
  return absl::StrFormat("%-17s %9s  %-10s %-10s %12.2f %12s %12s %9.1f %7d\n", Title(row),
                         SizeText(row.what.bytes), row.backend, Registered(row), 1e6 * row.seconds,
                         Bandwidth(row.algorithm_bandwidth()), Bandwidth(row.bus_bandwidth()),
                         100 * row.spread, row.repetitions);
}

std::string RatioTable(std::span<const Row> rows, std::span<const std::string> bases) {
  std::string text =
      absl::StrFormat("%-17s %9s  %-10s %-10s %5s", "op", "size", "backend", "registered", "pairs");
  for (const std::string& base : bases)
    absl::StrAppendFormat(&text, "  %-23s", absl::StrCat("time / ", base, "'s"));
  text += "\n";
  for (const Row& row : rows) {
    if (row.times.empty()) continue;
    absl::StrAppendFormat(&text, "%-17s %9s  %-10s %-10s %5d", Title(row), SizeText(row.what.bytes),
                          row.backend, Registered(row), row.blocks.size());
    for (const std::string& base : bases) {
      const auto found = row.times.find(base);
      const std::string ratio =
          found == row.times.end()
              ? "-"
              : absl::StrCat(Digits(found->second.median), " [", Digits(found->second.low), ", ",
                             Digits(found->second.high), "]");
      absl::StrAppendFormat(&text, "  %-23s", ratio);
    }
    text += "\n";
  }
  return text;
}

std::string JsonOf(std::span<const Row> rows) {
  std::string text = "[";
  for (const Row& row : rows) {
    nlohmann::ordered_json json = {{"backend", row.backend},
                                   {"op", NameOf(row.what.op)},
                                   {"world", row.what.world},
                                   {"dtype", NameOf(row.what.scalar)},
                                   {"bytes", row.what.bytes},
                                   {"registered", row.what.registered},
                                   {"timing", NameOf(row.timing)},
                                   {"median_us", 1e6 * row.seconds},
                                   {"algbw_gbs", row.algorithm_bandwidth() / 1e9},
                                   {"busbw_gbs", row.bus_bandwidth() / 1e9},
                                   {"spread_pct", 100 * row.spread},
                                   {"repetitions", row.repetitions},
                                   {"pairs", row.blocks.size()}};
    nlohmann::ordered_json ratios = nlohmann::ordered_json::object();
    for (const auto& [base, ratio] : row.times) {
      ratios[base] = {{"median", ratio.median}, {"low", ratio.low}, {"high", ratio.high}};
    }
    json["time_over"] = std::move(ratios);
    absl::StrAppend(&text, text.size() == 1 ? "\n" : ",\n", json.dump());
  }
  return text + "\n]\n";
}

std::string SizeText(int64_t bytes) {
  if (bytes > 0 && bytes % (1 << 20) == 0) return absl::StrCat(bytes >> 20, " MiB");
  if (bytes > 0 && bytes % (1 << 10) == 0) return absl::StrCat(bytes >> 10, " KiB");
  return absl::StrCat(bytes, " B");
}

}  // namespace evenkeel::bench
