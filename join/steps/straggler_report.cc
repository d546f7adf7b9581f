#include "evenkeel/join/steps/straggler_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/ranks/parties.h"

namespace evenkeel {

std::string StragglerReport::Stragglers(const std::function<std::string(int rank)>& name_of) const {
  std::map<StepPhase, std::pair<double, std::vector<int>>> by_phase;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].is_straggler) continue;
    by_phase[ranks[rank].phase].first += ranks[rank].cost;
    by_phase[ranks[rank].phase].second.push_back(ranks[rank].rank);
  }
  std::vector<std::string> parts;
  for (const auto& [phase, found] : by_phase) {
    std::string names = internal::RankList(found.second);
    if (name_of != nullptr) {
      std::vector<std::string> hosts;
      for (const int rank : found.second) hosts.push_back(name_of(rank));
      hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
      absl::StrAppend(&names, " (", absl::StrJoin(hosts, ", "), ")");
    }
    parts.push_back(absl::StrFormat("%s cost the group %.0f %% of the last %d steps: %s", names,
                                    100 * found.first, steps, NameOf(phase)));
  }
  return absl::StrJoin(parts, "; ");
}

std::string StragglerReport::Table() const {
  std::string table = absl::StrFormat("%5s %6s", "rank", "cost");
  for (int phase = 0; phase < kStepPhases; ++phase) {
    const auto name = static_cast<StepPhase>(phase);
    absl::StrAppendFormat(&table, " %9s", name == StepPhase::kOutside ? "outside" : NameOf(name));
  }
  absl::StrAppendFormat(&table, " %9s", "waiting");
  const bool has_buckets =
      std::ranges::any_of(ranks, [](const Rank& rank) { return rank.mean.ready.last_us > 0; });
  if (has_buckets) absl::StrAppendFormat(&table, " %9s %9s", "1st ready", "all ready");
  const bool has_samples =
      std::ranges::any_of(ranks, [](const Rank& rank) { return rank.samples > 0; });
  if (has_samples) absl::StrAppendFormat(&table, " %9s", "samples");
  table += "\n";
  for (const Rank& rank : ranks) {
    absl::StrAppendFormat(&table, "%5d %4.1f %%", rank.rank, 100 * rank.cost);
    const auto add = [&table](int64_t us) {
      absl::StrAppendFormat(&table, " %9.2f", static_cast<double>(us) / 1e3);
    };
    std::ranges::for_each(rank.mean.busy_us, add);
    add(rank.mean.waited_us);
    const BucketsReady& ready = rank.mean.ready;
    if (ready.last_us > 0) {
      add(ready.first_us);
      add(ready.last_us);
    } else if (has_buckets) {
      absl::StrAppendFormat(&table, " %9s %9s", "-", "-");
    }
    if (has_samples) absl::StrAppendFormat(&table, " %9.1f", rank.samples);
    table += "\n";
  }
  return table;
}

std::string StragglerReport::RanksWithoutInput() const {
  // Loops begin with a step without times, so a few others may be all without input.
  constexpr int64_t kFewestSteps = 10;
  if (steps < kFewestSteps) return "";
  std::vector<int> idle;
  double most = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].without_input < 0.005) continue;
    idle.push_back(ranks[rank].rank);
    most = std::max(most, ranks[rank].without_input);
  }
  if (idle.empty()) return "";
  return absl::StrFormat("%s had no input for%s %.0f %% of the time of %d measured steps",
                         internal::RankList(idle), idle.size() > 1 ? " up to" : "", 100 * most,
                         steps);
}

}  // namespace evenkeel
