#include "evenkeel/trainer/report/sample_account.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/strict_json.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using GroupKey = std::pair<int, int>;  // Attempt and number.

constexpr int kMaxEpochs = 1'000'000;

// A line of a step.
struct Line {
  SampleUse use;
  int epoch = 0;
  std::vector<int32_t> samples;
};

GroupKey KeyOf(const SampleUse& use) { return {use.writer.attempt, use.group}; }

// The contents of all files.
struct Logs {
  std::map<GroupKey, SampleGroup> groups;
  std::vector<Line> lines;
  std::map<GroupKey, int64_t> ends;
};

// Reads the lines of one file.
class FileReader {
 public:
  explicit FileReader(Logs& logs) : logs_(logs) {}

  absl::Status Read(absl::string_view line) {
    EK_ASSIGN_OR_RETURN(const Json json,
                        internal::ParseStrictJson(line, /*max_depth=*/3, "a line"));
    try {
      if (json.contains("group")) return Enter(json);
      if (!has_group_) return absl::InvalidArgumentError("does not begin with the line of a group");
      if (json.contains("end")) {
        int64_t& end = logs_.ends[KeyOf(use_)];
        end = std::max(end, json.at("end").get<int64_t>());
        return absl::OkStatus();
      }
      use_.step = json.at("step").get<int64_t>();
      logs_.lines.push_back({.use = use_,
                             .epoch = json.at("epoch").get<int>(),
                             .samples = json.at("samples").get<std::vector<int32_t>>()});
      return absl::OkStatus();
    } catch (const Json::exception& error) {
      return absl::InvalidArgumentError(absl::StrCat("has a damaged line: ", error.what()));
    }
  }

 private:
  absl::Status Enter(const Json& json) {
    use_ = {.writer = {.attempt = json.at("attempt").get<int>(),
                       .rank = json.at("rank").get<int>(),
                       .incarnation = json.at("incarnation").get<int>()},
            .group = json.at("group").get<int>()};
    has_group_ = true;
    const SampleGroup group{.number = use_.group,
                            .from = json.at("from").get<int64_t>(),
                            .ranks = json.at("ranks").get<std::vector<int>>(),
                            .samples = json.at("samples").get<int64_t>(),
                            .epochs = json.at("epochs").get<int>()};
    if (group.samples < 0 || group.samples > std::numeric_limits<int32_t>::max() ||
        group.epochs < 0 || group.epochs > kMaxEpochs) {
      return absl::InvalidArgumentError(absl::StrCat("has a damaged line: ", group.samples,
                                                     " samples, ", group.epochs, " epochs"));
    }
    const auto [known, is_new] = logs_.groups.emplace(KeyOf(use_), group);
    if (is_new || known->second == group) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("says that group ", group.number, " goes on from step ", group.from, " with ",
                     group.ranks.size(), " ranks and ", group.samples,
                     " samples, but another file says from step ", known->second.from, " with ",
                     known->second.ranks.size(), " ranks and ", known->second.samples, " samples"));
  }

  Logs& logs_;
  SampleUse use_;
  bool has_group_ = false;
};

absl::StatusOr<Logs> Parse(const std::map<std::string, std::string>& files) {
  Logs logs;
  for (const auto& [name, text] : files) {
    FileReader reader(logs);
    const absl::string_view finished = absl::string_view(text).substr(0, text.rfind('\n') + 1);
    for (const absl::string_view line : absl::StrSplit(finished, '\n', absl::SkipEmpty()))
      EK_RETURN_IF_ERROR(Annotate(reader.Read(line), name));
  }
  if (!logs.groups.empty()) return logs;
  return absl::NotFoundError("no file has a log of samples (--sample_log)");
}

// Returns, for each group, the first step whose lines do not count in it.
std::map<GroupKey, int64_t> LimitsOf(const Logs& logs) {
  std::map<GroupKey, int64_t> limits;
  // The newest group's steps before the last line count, or all if the run has ended.
  const GroupKey newest = logs.groups.rbegin()->first;
  int64_t limit = logs.groups.rbegin()->second.from;
  for (const Line& line : logs.lines) {
    if (KeyOf(line.use) == newest) limit = std::max(limit, line.use.step);
  }
  const auto end = logs.ends.find(newest);
  if (end != logs.ends.end()) limit = std::max(limit, end->second);
  for (auto it = logs.groups.rbegin(); it != logs.groups.rend(); ++it) {
    limits[it->first] = limit;
    limit = std::min(limit, it->second.from);
  }
  return limits;
}

std::string TextOf(const SampleUse& use) {
  return absl::StrCat(
      "step ", use.step, " on rank ", use.writer.rank,
      use.writer.incarnation == 0 ? "" : absl::StrCat("+", use.writer.incarnation), " (group ",
      use.group, use.writer.attempt == 0 ? "" : absl::StrCat(" of attempt ", use.writer.attempt),
      ")");
}

void DescribeSome(const std::map<int32_t, std::vector<SampleUse>>& first, int64_t all,
                  absl::string_view what, absl::string_view before, std::string& text) {
  for (const auto& [sample, uses] : first) {
    absl::StrAppend(&text, "  sample ", sample, " is ", what, uses.empty() ? "" : before,
                    absl::StrJoin(uses, ", ",
                                  [](std::string* out, const SampleUse& use) {
                                    absl::StrAppend(out, TextOf(use));
                                  }),
                    "\n");
  }
  const int64_t more = all - std::ssize(first);
  if (more > 0)
    absl::StrAppend(&text, "  ", more, more == 1 ? " more is " : " more are ", what, "\n");
}

}  // namespace

bool SampleAccount::is_once(bool may_miss) const {
  return std::ranges::all_of(epochs, [may_miss](const auto& entry) {
    return entry.second.repeated == 0 && (may_miss || entry.second.missing == 0);
  });
}

absl::StatusOr<SampleAccount> ReadSampleLogs(const std::string& folder) {
  std::map<std::string, std::string> files;
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  for (const std::string& name : names) {
    if (!absl::EndsWith(name, kSampleLogSuffix)) continue;
    const std::string path = absl::StrCat(folder, "/", name);
    EK_ASSIGN_OR_RETURN(files[path], ReadFile(path));
  }
  absl::StatusOr<SampleAccount> account = AddUpSamples(files);
  return absl::IsNotFound(account.status()) ? Annotate(account.status(), folder) : account;
}

absl::StatusOr<SampleAccount> AddUpSamples(const std::map<std::string, std::string>& files) {
  EK_ASSIGN_OR_RETURN(Logs logs, Parse(files));
  const auto& [newest, last_group] = *logs.groups.rbegin();
  std::map<GroupKey, int64_t> limits = LimitsOf(logs);
  SampleAccount account{.samples = last_group.samples,
                        .steps = limits[newest],
                        .has_ended = logs.ends.contains(newest)};
  std::ranges::stable_sort(logs.lines, {}, [](const Line& line) { return line.use.step; });
  using Uses = std::map<int32_t, std::vector<SampleUse>>;
  std::map<int, Uses> counted, others;
  for (int epoch = 0; epoch < last_group.epochs; ++epoch) counted[epoch];
  for (const Line& line : logs.lines) {
    const bool counts = line.use.step < limits[KeyOf(line.use)];
    Uses& uses = (counts ? counted : others)[line.epoch];
    for (const int32_t sample : line.samples) uses[sample].push_back(line.use);
  }
  for (const auto& [epoch, uses] : counted) {
    EpochAccount& its = account.epochs[epoch];
    its.missing = account.samples - std::ssize(uses);
    for (const auto& [sample, of_sample] : uses) {
      if (sample < 0 || sample >= account.samples) {
        return absl::InvalidArgumentError(absl::StrCat("sample ", sample, " is logged in ",
                                                       TextOf(of_sample[0]), ", but the data has ",
                                                       account.samples, " samples"));
      }
      if (of_sample.size() == 1) continue;
      ++its.repeated;
      if (its.first_repeated.size() < EpochAccount::kListed) its.first_repeated[sample] = of_sample;
    }
    const size_t listed = std::min<size_t>(its.missing, EpochAccount::kListed);
    for (int32_t sample = 0; its.first_missing.size() < listed; ++sample) {
      if (!uses.contains(sample)) its.first_missing[sample] = others[epoch][sample];
    }
  }
  account.groups = std::move(logs.groups);
  return account;
}

std::string Describe(const SampleAccount& account) {
  std::string text;
  for (const auto& [epoch, its] : account.epochs) {
    absl::StrAppend(&text, "epoch ", epoch, ": ");
    if (its.missing == 0 && its.repeated == 0) {
      absl::StrAppend(&text, "each of ", account.samples, " samples once\n");
      continue;
    }
    absl::StrAppend(&text, account.samples - its.missing, " of ", account.samples, " samples, ",
                    its.repeated, " of them more than once\n");
    DescribeSome(its.first_missing, its.missing, "missing", "; not counted: ", text);
    DescribeSome(its.first_repeated, its.repeated, "repeated", ": ", text);
  }
  absl::StrAppend(&text, account.steps, " steps in ", account.groups.size(),
                  account.groups.size() == 1 ? " group" : " groups",
                  account.has_ended ? "" : "; the run has not ended", "\n");
  return text;
}

}  // namespace evenkeel
