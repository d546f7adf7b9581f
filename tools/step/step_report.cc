#include "evenkeel/tools/step/step_report.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/tools/measure/table.h"

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

std::string FormatRows(const Json& rows) {
  const Table table({{"", -22},
                     {"step", 9},
                     {"update", 9},
                     {"step / local", -20},
                     {"step / reducer", -20},
                     {"update / reducer", -20},
                     {"collectives", 11},
                     {"exposed, by bucket", -20}});
  std::string text = table.Titles();
  for (const Json& row : rows) {
    const auto ms = [&](const char* key) {
      return absl::StrFormat("%.2f ms", row[key].get<double>());
    };
    std::string exposed;
    for (size_t b = 0; b < row["exposed_us"].size(); ++b) {
      absl::StrAppendFormat(&exposed, "%s%.0f us of %.2f MB", b == 0 ? "" : ", ",
                            row["exposed_us"][b].get<double>(),
                            row["bucket_bytes"][b].get<double>() / 1e6);
    }
    text +=
        table.Line({row["name"], ms("step_ms"), ms("update_ms"), FormatRatio(row["step_to_local"]),
                    FormatRatio(row["step_to_reducer"]), FormatRatio(row["update_to_reducer"]),
                    absl::StrFormat("%.2f", row["collectives"].get<double>()), exposed});
  }
  return text;
}

Json Judged(Json values, std::string what, const char* value, double bar) {
  values["what"] = std::move(what);
  values["bar"] = bar;
  values["is_met"] = values[value].get<double>() <= bar;
  return values;
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
        if (row["name"] != bar.row || row[bar.ratio].is_null()) continue;
        bars.push_back(
            Judged(row[bar.ratio],
                   absl::StrCat(result["backend"].get<std::string>(), " ", plan, ": ", bar.what),
                   bar.value, bar.bar));
      }
    }
  }
  if (report.contains("startup")) {
    bars.push_back(Judged(report["startup"]["first_step_seconds"],
                          "seconds from the start of the trainer to its first finished step",
                          "median", kStartupBar));
  }
  return bars;
}

std::string FormatReport(const Json& report) {
  std::string text;
  for (const Json& result : report["results"]) {
    absl::StrAppendFormat(&text, "%s, %d ranks on %d cores, %s: %d parameters\n",
                          result["backend"].get<std::string>(), report["world"].get<int>(),
                          report["cores"].get<int>(), result["plan"].get<std::string>(),
                          result["parameters"].get<int64_t>());
    absl::StrAppend(&text, FormatRows(result["rows"]), "\n");
  }
  if (report.contains("startup")) {
    const Json& startup = report["startup"];
    absl::StrAppendFormat(&text, "start of the trainer, %d ranks, seconds from its exec:\n",
                          startup["ranks"].get<int>());
    for (const char* what : {"group_seconds", "first_step_seconds"}) {
      absl::StrAppendFormat(&text, "  %-20s %s of %d\n", what, FormatRatio(startup[what]),
                            startup["times"].get<int>());
    }
    absl::StrAppend(&text, "\n");
  }
  const Table table({{"", -4}, {"", -62}, {"", -22}, {"", -8}});
  for (const Json& bar : report["bars"]) {
    text += table.Line({bar["is_met"].get<bool>() ? "ok" : "MISS", bar["what"], FormatRatio(bar),
                        absl::StrFormat("bar %.2f", bar["bar"].get<double>())});
  }
  return text;
}

}  // namespace evenkeel
