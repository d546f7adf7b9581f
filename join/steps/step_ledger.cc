#include "evenkeel/join/steps/step_ledger.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

std::set<std::string> Parts(absl::string_view settings) {
  return absl::StrSplit(settings, ", ", absl::SkipEmpty());
}

}  // namespace

void StepLedger::Finish(absl::string_view part, int64_t number, absl::string_view settings) {
  Plan(part, settings);
  Line& line = lines_.find(part)->second;
  ++line.count;
  line.number = number;
  line.is_planned = false;
}

void StepLedger::Plan(absl::string_view part, absl::string_view settings) {
  auto found = lines_.find(part);
  if (found == lines_.end()) found = lines_.emplace(part, Line()).first;
  Line& line = found->second;
  line.is_planned = true;
  line.settings.assign(settings.data(), settings.size());
  for (char& c : line.settings) {
    if (c == '\t' || c == '\n') c = ' ';  // A parameter group may have any name.
  }
}

// "part \t count \t number \t = or > \t settings" per line.
std::string StepLedger::Serialize(Plans plans) const {
  std::string text;
  for (const auto& [part, line] : lines_) {
    if (line.count == 0 && plans == Plans::kWithout) continue;
    absl::StrAppend(&text, part, "\t", line.count, "\t", line.number);
    if (line.is_planned && plans == Plans::kWithout) {
      text += "\t=\t\n";
    } else {
      absl::StrAppend(&text, line.is_planned ? "\t>\t" : "\t=\t", line.settings, "\n");
    }
  }
  return text;
}

absl::Status StepLedger::ParseInto(absl::string_view text, size_t rank, size_t ranks,
                                   std::map<std::string, std::vector<Line>>& by_part) {
  for (absl::string_view row : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> fields = absl::StrSplit(row, '\t');
    Line line;
    if (fields.size() != 5 || !absl::SimpleAtoi(fields[1], &line.count) ||
        !absl::SimpleAtoi(fields[2], &line.number) || (fields[3] != "=" && fields[3] != ">")) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " sent a malformed ledger of steps"));
    }
    line.is_planned = fields[3] == ">";
    line.settings = std::string(fields[4]);
    std::vector<Line>& lines = by_part[std::string(fields[0])];
    lines.resize(ranks);
    lines[rank] = std::move(line);
  }
  return absl::OkStatus();
}

absl::Status StepLedger::Compare(absl::Span<const std::string> texts) {
  if (std::ranges::all_of(texts, [&](const std::string& text) { return text == texts[0]; }))
    return absl::OkStatus();
  std::map<std::string, std::vector<Line>> by_part;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    EK_RETURN_IF_ERROR(ParseInto(texts[rank], rank, texts.size(), by_part));
  }
  for (const auto& [part, lines] : by_part) {
    EK_RETURN_IF_ERROR(CompareCounts(part, lines));
    EK_RETURN_IF_ERROR(CompareSettings(part, lines, /*is_planned=*/false));
    EK_RETURN_IF_ERROR(CompareSettings(part, lines, /*is_planned=*/true));
  }
  return absl::OkStatus();
}

absl::Status StepLedger::CompareCounts(const std::string& part, absl::Span<const Line> lines) {
  internal::Parties parties;
  bool differ = false;
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    const Line& line = lines[rank];
    differ = differ || line.count != lines[0].count;
    parties[static_cast<int>(rank)] = absl::StrCat(
        line.number, line.number == 1 ? " step" : " steps",
        line.number == line.count ? "" : absl::StrCat(" (", line.count, " in this group)"));
  }
  if (!differ) return absl::OkStatus();
  return internal::Disagreement(parties, {.one = "has finished",
                                          .several = "have finished",
                                          .before = absl::StrCat(part, ": "),
                                          .after = "; every rank must take every step"});
}

absl::Status StepLedger::CompareSettings(const std::string& part, absl::Span<const Line> lines,
                                         bool is_planned) {
  std::set<std::string> common;
  std::map<int, std::set<std::string>> by_rank;
  int64_t number = 0;
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    const Line& line = lines[rank];
    if (line.is_planned != is_planned || line.settings.empty()) continue;
    std::set<std::string>& mine = by_rank[static_cast<int>(rank)] = Parts(line.settings);
    if (by_rank.size() == 1) {
      common = mine;
      number = line.number + (is_planned ? 1 : 0);
    }
    std::erase_if(common, [&](const std::string& setting) { return !mine.contains(setting); });
  }
  internal::Parties parties;
  bool differ = false;
  for (auto& [rank, settings] : by_rank) {
    for (const std::string& setting : common) settings.erase(setting);
    differ = differ || settings != by_rank.begin()->second;
    parties[rank] = settings.empty() ? "none of these" : absl::StrJoin(settings, ", ");
  }
  if (!differ) return absl::OkStatus();
  return internal::Disagreement(
      parties,
      {.one = "has",
       .several = "have",
       .before = absl::StrCat(part, ": step ", number, is_planned ? " begins" : " was taken",
                              " with different settings: "),
       .after = "; every rank must pass the same settings to a step"});
}

}  // namespace evenkeel
