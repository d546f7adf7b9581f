#include "evenkeel/zero_optim/internal/agree.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {
namespace {

// "AdamW", "learning_rate=0.001", ...
std::vector<std::string> SettingsOf(const UpdateRule& rule) {
  return absl::StrSplit(ToString(rule), absl::ByAnyChar("(,) "), absl::SkipEmpty());
}

std::string GroupOf(int param, const ParameterSet& params, const ParameterGroups& groups,
                    SameIn same) {
  const int group = groups.group_of(param);
  return absl::StrCat(group == kNoGroup ? "none" : absl::StrCat("\"", groups[group].name, "\""),
                      same == SameIn::kShape || params.trainable(param) ? "" : " (frozen)");
}

std::vector<Fact> FactsOf(const ParameterSet& params, const ParameterGroups& groups, SameIn same) {
  std::vector<Fact> facts = evenkeel::FactsOf(params);
  facts.push_back({"the number of groups", absl::StrCat(groups.size())});
  for (int g = 0; g < groups.size(); ++g)
    facts.push_back(
        {absl::StrCat("the name of group ", g), absl::StrCat("\"", groups[g].name, "\"")});
  for (const ParameterGroup& group : groups.groups()) {
    std::vector<std::string> settings = SettingsOf(group.rule);
    if (same == SameIn::kShape)
      settings = {
          settings[0],
          absl::StrCat("the state {", absl::StrJoin(StateTensorNames(group.rule), ", "), "}")};
    for (const std::string& setting : settings)
      facts.push_back({absl::StrCat("group \"", group.name, "\""), setting});
  }
  for (int i = 0; i < params.size(); ++i) {
    if (!params.is_ignored(i))
      facts.push_back({absl::StrCat("the group of \"", params[i].name, "\""),
                       GroupOf(i, params, groups, same)});
  }
  return facts;
}

}  // namespace

absl::Status CheckSameOnAllRanks(Communicator& comm, const std::string& name,
                                 const absl::Status& own, const ParameterSet& params,
                                 const ParameterGroups& groups, SameIn same,
                                 std::vector<Fact> facts) {
  if (comm.world_size() == 1) return Annotate(own, name);
  if (own.ok()) {
    const std::vector<Fact> more = FactsOf(params, groups, same);
    facts.insert(facts.end(), more.begin(), more.end());
  }
  return Annotate(VerifySame(comm, absl::StrCat(name, "/same"), own, facts), name);
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

absl::StatusOr<bool> AdoptFromLastJoiners(Communicator& comm, const std::string& name,
                                          ParameterGroups& groups, bool is_last_joiner) {
  const std::string mine = is_last_joiner ? StepMessage{.rules = groups.rules()}.Serialize() : "";
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      comm.control().Exchange(absl::StrCat("settings/", name), mine, comm.timeout()));
  int source = -1;
  bool is_even = true;
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    is_even = is_even && !parts[rank].empty();
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
  if (source < 0) return is_even;
  EK_ASSIGN_OR_RETURN(const StepMessage last, StepMessage::Parse(parts[source], 0));
  EK_RETURN_IF_ERROR(groups.Adopt(last.rules));
  return is_even;
}

}  // namespace evenkeel::internal
