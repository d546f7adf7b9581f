#include "evenkeel/comm/control/positions.h"

#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/ranks/parties.h"

namespace evenkeel::internal {

std::string Serialize(const Positions& positions) {
  std::string text;  // "name \t position \t hash \t last collective" per line.
  for (const auto& [name, at] : positions) {
    absl::StrAppend(&text, name, "\t", at.position, "\t", at.hash, "\t", at.last, "\n");
  }
  return text;
}

Positions ParsePositions(absl::string_view text) {
  Positions positions;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, '\t');
    ChannelPosition at;
    if (fields.size() != 4 || !absl::SimpleAtoi(fields[1], &at.position) ||
        !absl::SimpleAtoi(fields[2], &at.hash)) {
      continue;
    }
    at.last = std::string(fields[3]);
    positions.emplace(fields[0], std::move(at));
  }
  return positions;
}

absl::Status ComparePositions(absl::string_view caller, const std::vector<std::string>& parts) {
  std::map<std::string, std::vector<ChannelPosition>> by_channel;  // By channel name, then by rank.
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    for (auto& [name, at] : ParsePositions(parts[rank])) {
      by_channel[name].resize(parts.size());
      by_channel[name][rank] = std::move(at);
    }
  }
  for (const auto& [name, ranks] : by_channel) {
    std::set<int64_t> positions;
    std::set<std::pair<int64_t, uint64_t>> places;
    for (const ChannelPosition& at : ranks) {
      positions.insert(at.position);
      places.emplace(at.position, at.hash);
    }
    if (places.size() == 1) continue;
    Parties parties;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const ChannelPosition& at = ranks[rank];
      std::string& text = parties[static_cast<int>(rank)];
      text = absl::StrCat(at.position, at.last.empty() ? "" : absl::StrCat(" (", at.last, ")"));
      if (positions.size() == 1)
        absl::StrAppend(&text, ", which are not the same (hash ", absl::Hex(at.hash), ")");
    }
    return Disagreement(parties, {.one = "ended after",
                                  .several = "ended after",
                                  .before = absl::StrCat(caller, ": channel \"", name, "\": ")});
  }
  return absl::OkStatus();
}

absl::string_view OptimizerIn(absl::string_view collective, absl::string_view channel) {
  collective = collective.substr(0, collective.find(" on channel "));
  const bool is_in_step =
      absl::StrContains(collective, " shard ") || absl::StrContains(collective, " (shard)");
  return is_in_step ? channel.substr(0, channel.find('.')) : "";
}

std::string OmittedStep(const std::vector<int>& omitters, absl::string_view optimizer,
                        const std::vector<int>& waiting) {
  return absl::StrCat(RankList(omitters), omitters.size() == 1 ? " has" : " have",
                      " not taken the step of ", optimizer, " in which ", RankList(waiting),
                      waiting.size() == 1 ? " waits" : " wait",
                      ": every rank must take every step");
}

}  // namespace evenkeel::internal
