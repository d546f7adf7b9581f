#include "evenkeel/tools/step/step_report.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

struct Bar {
  const char* plan;   // Beginning of its name.
  const char* row;    // Its whole name.
  const char* ratio;  // A ratio in the row.
  const char* value;  // A value of the ratio: it may not be above
  double bar;
  const char* what;
};

constexpr Bar kBars[] = {
    {"mlp:sgd", "reducer", "step_to_local", "median", 1.10, "step with reducer / local"},
    {"gpt:", "reducer", "step_to_local", "median", 1.04, "step with reducer / local"},
    {"", "reducer, join on", "step_to_reducer", "high", 1.03,
     "step with join / without, upper end"},
    {"mlp:sgd", "reducer, check_finite", "step_to_reducer", "median", 1.03,
     "step with check_finite / without"},
    {"gpt:", "reducer, check_finite", "step_to_reducer", "median", 1.01,
     "step with check_finite / without"},
    {"mlp:adamw", "sharded", "update_to_reducer", "median", 1.0, "update, sharded / unsharded"},
    {"mlp:adamw", "sliced", "update_to_reducer", "median", 1.0, "update, sliced / unsharded"},
};
constexpr double kStartupBar = 1.0;  // Seconds.

std::string FormatRatio(const Json& ratio) {
  if (ratio.is_null()) return "";
  return absl::StrFormat("%.3f [%.3f, %.3f]", ratio["median"].get<double>(),
                         ratio["low"].get<double>(), ratio["high"].get<double>());
}

std::string FormatTimes(const Json& rows) {
  std::string text = absl::StrFormat("%-27s %9s %9s %9s %9s  %-22s %-22s %-22s %s\n", "", "step",
                                     "backward", "update", "samples/s", "step / local",
                                     "backward / local", "step / reducer", "update / reducer");
  for (const Json& row : rows) {
    absl::StrAppendFormat(&text, "%-27s %6.2f ms %6.2f ms %6.2f ms %9.0f  %-22s %-22s %-22s %s\n",
                          row["name"].get<std::string>(), row["step_ms"].get<double>(),
                          row["backward_ms"].get<double>(), row["update_ms"].get<double>(),
                          row["samples_per_second"].get<double>(),
                          FormatRatio(row["step_to_local"]), FormatRatio(row["backward_to_local"]),
                          FormatRatio(row["step_to_reducer"]),
                          FormatRatio(row["update_to_reducer"]));
  }
  return text;
}

std::string FormatCounts(const Json& rows) {
  std::string text =
      absl::StrFormat("%-27s %11s %9s %11s %8s %13s %11s %9s %7s  %s\n", "per step and rank",
                      "collectives", "copied", "allocations", "control", "control bytes",
                      "control CPU", "CPU", "waits", "exposed, by bucket");
  for (const Json& row : rows) {
    const Json& counts = row["per_step"];
    absl::StrAppendFormat(
        &text, "%-27s %11.2f %6.2f MB %11.0f %8.2f %13.0f %8.1f us %6.2f ms %7.1f ",
        row["name"].get<std::string>(), counts["collectives"].get<double>(),
        counts["copied_bytes"].get<double>() / 1e6, counts["allocations"].get<double>(),
        counts["control_messages"].get<double>(), counts["control_bytes"].get<double>(),
        counts["control_cpu_us"].get<double>(), counts["cpu_us"].get<double>() / 1e3,
        counts["waits"].get<double>());
    for (size_t b = 0; b < row["exposed_us"].size(); ++b) {
      absl::StrAppendFormat(&text, " %.0f us of %.2f MB", row["exposed_us"][b].get<double>(),
                            row["bucket_bytes"][b].get<double>() / 1e6);
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

}  // namespace

Json JudgeReport(const Json& report) {
  Json bars = Json::array();
  if (report["world"] != 2) return bars;
  for (const Json& result : report["results"]) {
    const std::string plan = result["plan"];
    for (const Bar& bar : kBars) {
      if (!absl::StartsWith(plan, bar.plan)) continue;
      for (const Json& row : result["rows"]) {
        if (row["name"] != bar.row) continue;
        Json judged = row[bar.ratio];
        judged["what"] =
            absl::StrCat(result["backend"].get<std::string>(), " ", plan, ": ", bar.what);
        judged["bar"] = bar.bar;
        judged["is_met"] = judged[bar.value].get<double>() <= bar.bar;
        bars.push_back(std::move(judged));
      }
    }
  }
  if (report.contains("startup")) {
    Json judged = report["startup"]["first_step_seconds"];
    judged["what"] = "seconds from the start of the trainer to its first finished step";
    judged["bar"] = kStartupBar;
    judged["is_met"] = judged["median"].get<double>() <= kStartupBar;
    bars.push_back(std::move(judged));
  }
  return bars;
}

std::string FormatReport(const Json& report) {
  std::string text;
  for (const Json& result : report["results"]) {
    absl::StrAppendFormat(&text, "%s, %d ranks on %d cores, %s: %d parameters, gradients are %s\n",
                          result["backend"].get<std::string>(), result["world"].get<int>(),
                          report["cores"].get<int>(), result["plan"].get<std::string>(),
                          result["parameters"].get<int64_t>(),
                          report["views"].get<bool>() ? "views" : "copied");
    absl::StrAppend(&text, FormatTimes(result["rows"]), "\n", FormatCounts(result["rows"]), "\n");
  }
  if (report.contains("startup")) {
    const Json& startup = report["startup"];
    absl::StrAppendFormat(&text, "start of the trainer, %d ranks, seconds from its exec:\n",
                          startup["ranks"].get<int>());
    for (const char* what : {"group_seconds", "first_step_seconds"}) {
      absl::StrAppendFormat(&text, "  %-20s %.3f [%.3f, %.3f] of %d\n", what,
                            startup[what]["median"].get<double>(),
                            startup[what]["low"].get<double>(), startup[what]["high"].get<double>(),
                            startup["times"].get<int>());
    }
    absl::StrAppend(&text, "\n");
  }
  for (const Json& bar : report["bars"]) {
    absl::StrAppendFormat(&text, "%-4s %-62s %-22s bar %.2f\n",
                          bar["is_met"].get<bool>() ? "ok" : "MISS", bar["what"].get<std::string>(),
                          FormatRatio(bar), bar["bar"].get<double>());
  }
  return text;
}

}  // namespace evenkeel
