#include "evenkeel/zero_optim/internal/agree.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {
namespace {

// A line per setting: "AdamW", "learning_rate=0.001", ...
std::vector<std::string> SettingLines(const UpdateRule& rule) {
  return absl::StrSplit(ToString(rule), absl::ByAnyChar("(,) "), absl::SkipEmpty());
}

// Each rank has a device of its own.
std::string Text(const TensorView& value) {
  const std::string text = ToString(TensorView(nullptr, value.count, value.dtype));
  return value.device.is_cpu() ? text : absl::StrCat(text, " on a device");
}

// Returns the settings that must be equal, line by line.
std::vector<std::string> Lines(const ParameterSet& params, const ParameterGroups& groups,
                               SameIn same) {
  std::vector<std::string> lines = {absl::StrCat(params.size(), " parameters"),
                                    absl::StrCat(groups.size(), " groups")};
  for (const ParameterGroup& group : groups.groups()) {
    const std::string where = absl::StrCat("group \"", group.name, "\": ");
    const std::vector<std::string> settings = SettingLines(group.rule);
    if (same == SameIn::kShape) {
      lines.push_back(absl::StrCat(where, settings[0], " with {",
                                   absl::StrJoin(StateTensorNames(group.rule), ", "), "}"));
      continue;
    }
    for (const std::string& setting : settings) lines.push_back(where + setting);
  }
  for (int i = 0; i < params.size(); ++i) {
    if (params.is_ignored(i)) {
      lines.push_back(absl::StrCat("parameter ", i, " = ", params[i].name, ", ignored"));
      continue;
    }
    const int group = groups.group_of(i);
    lines.push_back(absl::StrCat("parameter ", i, " = ", params[i].name, " ", Text(params[i].value),
                                 same == SameIn::kShape || params.trainable(i) ? "" : ", frozen",
                                 group == kNoGroup    ? ", in no group"
                                 : groups.size() == 1 ? ""
                                                      : absl::StrCat(", in ", groups[group].name)));
  }
  return lines;
}

absl::Status FirstDifference(const std::string& name, const std::vector<std::string>& texts) {
  std::vector<std::vector<std::string>> lines;
  for (const std::string& text : texts) lines.push_back(absl::StrSplit(text, '\n'));
  for (size_t line = 0; line < lines[0].size(); ++line) {
    std::vector<int> same, other;
    for (int rank = 0; rank < static_cast<int>(lines.size()); ++rank) {
      const bool is_same = line < lines[rank].size() && lines[rank][line] == lines[0][line];
      (is_same ? same : other).push_back(rank);
    }
    if (other.empty()) continue;
    std::vector<std::string> values = {absl::StrCat(RankList(same), ": ", lines[0][line])};
    for (int rank : other) {
      values.push_back(absl::StrCat("rank ", rank, ": ",
                                    line < lines[rank].size() ? lines[rank][line] : "nothing"));
      if (values.size() > 8) break;  // Enough to see what is wrong.
    }
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": the ranks differ: ", absl::StrJoin(values, "; ")));
  }
  return absl::InternalError(absl::StrCat(
      name, ": the ranks' hashes differ but no compared setting does (internal error)"));
}

}  // namespace

absl::Status CheckSameOnAllRanks(Communicator& comm, const std::string& name,
                                 const absl::Status& own, const ParameterSet& params,
                                 const ParameterGroups& groups, SameIn same,
                                 const std::vector<std::string>& settings) {
  if (comm.world_size() == 1) return Annotate(own, name);
  std::vector<std::string> lines;
  if (own.ok()) lines = Lines(params, groups, same);
  lines.insert(lines.end(), settings.begin(), settings.end());
  const auto texts =
      AgreeOnEqual(comm, absl::StrCat(name, "/same"), own, absl::StrJoin(lines, "\n"));
  if (!texts.ok()) return Annotate(texts.status(), name);
  return texts->empty() ? absl::OkStatus() : FirstDifference(name, *texts);
}

absl::Status AddGroupOnAllRanks(Communicator& comm, const std::string& name,
                                const ParameterSet& params, ParameterGroup group,
                                ParameterUpdater& updater) {
  ParameterGroups more = updater.groups();
  absl::Status own = more.Add(std::move(group));
  if (own.ok()) own = ParameterUpdater(&params, more, comm.runtime()).Check();
  EK_RETURN_IF_ERROR(CheckSameOnAllRanks(comm, name, own, params, more));
  updater.groups() = std::move(more);
  return absl::OkStatus();
}

absl::Status AdoptFromLastJoiners(Communicator& comm, const std::string& name,
                                  ParameterGroups& groups, bool is_last_joiner) {
  const std::string mine = is_last_joiner ? StepMessage{.rules = groups.rules()}.Serialize() : "";
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      comm.control().Exchange(absl::StrCat("settings/", name), mine, comm.timeout()));
  int source = -1;
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    if (parts[rank].empty()) continue;
    if (source >= 0 && parts[rank] != parts[source]) {
      EK_ASSIGN_OR_RETURN(const StepMessage first, StepMessage::Parse(parts[source], 0));
      EK_ASSIGN_OR_RETURN(const StepMessage other, StepMessage::Parse(parts[rank], 0));
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": the ranks ended the loop with different settings: rank ", source,
                       " has ", SettingsText(groups, first.rules), "; rank ", rank, " has ",
                       SettingsText(groups, other.rules)));
    }
    source = rank;
  }
  if (source < 0) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const StepMessage last, StepMessage::Parse(parts[source], 0));
  return groups.Adopt(last.rules);
}

}  // namespace evenkeel::internal
