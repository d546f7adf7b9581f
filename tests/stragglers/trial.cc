#include "evenkeel/tests/stragglers/trial.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace evenkeel {
namespace {

template <typename Value>
const Value& Draw(std::mt19937_64& random, const std::vector<Value>& values) {
  return values[random() % values.size()];
}

bool ParseRanks(absl::string_view text, std::set<int>& ranks) {
  for (const absl::string_view one : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    int rank = 0;
    if (!absl::SimpleAtoi(one, &rank)) return false;
    ranks.insert(rank);
  }
  return true;
}

std::string RowOf(absl::string_view name, const Scores::Score& score) {
  const std::string phases =
      score.known_phases == 0 ? "-" : absl::StrFormat("%d of %d", score.phases, score.known_phases);
  return absl::StrFormat("| %s | %d | %d | %s | %d |\n", name, score.runs, score.ranks, phases,
                         score.false_accusations);
}

}  // namespace

std::string Trial::Description() const {
  return absl::StrFormat("%s, %.0f %% of a step, on rank %d of %d over %s", NameOf(delay),
                         100 * fraction, rank, world_size, backend);
}

Trial DrawTrial(const TrialRange& range, int index) {
  std::seed_seq seeds{static_cast<uint32_t>(range.seed), static_cast<uint32_t>(range.seed >> 32),
                      static_cast<uint32_t>(index)};
  std::mt19937_64 random(seeds);
  Trial trial{.world_size = Draw(random, range.worlds),
              .backend = Draw(random, range.backends),
              .delay = Draw(random, range.delays)};
  if (Computes(trial.delay)) trial.world_size = std::min(trial.world_size, range.cores);
  trial.rank = static_cast<int>(random() % trial.world_size);
  trial.fraction = std::uniform_real_distribution(0.05, 0.5)(random);
  trial.save_every = std::uniform_int_distribution(10, 30)(random);
  return trial;
}

std::string Found::Text() const {
  return absl::StrCat(absl::StrJoin(stragglers, ","), "|", static_cast<int>(phase), "|",
                      absl::StrJoin(ever, ","));
}

absl::StatusOr<Found> Found::Parse(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '|');
  Found found;
  int phase = 0;
  if (parts.size() != 3 || !ParseRanks(parts[0], found.stragglers) ||
      !absl::SimpleAtoi(parts[1], &phase) || phase < 0 || phase >= kStepPhases ||
      !ParseRanks(parts[2], found.ever)) {
    return absl::InternalError(absl::StrCat("no findings: \"", text, "\""));
  }
  found.phase = static_cast<StepPhase>(phase);
  return found;
}

Verdict Judge(const Trial& trial, const Found& found) {
  Verdict verdict{.is_rank = found.stragglers == std::set<int>{trial.rank}};
  if (const std::optional<StepPhase> phase = PhaseOf(trial.delay))
    verdict.is_phase = verdict.is_rank && found.phase == *phase;
  std::set<int> accused = found.ever;
  accused.insert(found.stragglers.begin(), found.stragglers.end());
  if (trial.delay != Delay::kNone) accused.erase(trial.rank);
  verdict.is_false = !accused.empty();
  return verdict;
}

void Scores::Add(const Trial& trial, const Verdict& verdict) {
  for (Score* score : {&all_, &by_row_[NameOf(trial.delay)],
                       &by_row_[absl::StrCat("(", trial.world_size, " ranks)")],
                       &by_row_[absl::StrCat("(over ", trial.backend, ")")]}) {
    ++score->runs;
    score->ranks += verdict.is_rank;
    score->known_phases += verdict.is_phase.has_value();
    score->phases += verdict.is_phase.value_or(false);
    score->false_accusations += verdict.is_false;
  }
}

std::string Scores::Table() const {
  std::string table =
      "| runs with | runs | rank found | phase found | other ranks accused |\n"
      "|---|---|---|---|---|\n";
  for (const auto& [name, score] : by_row_) absl::StrAppend(&table, RowOf(name, score));
  return table + RowOf("all", all_);
}

}  // namespace evenkeel
