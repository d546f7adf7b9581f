// Agreement of the ranks' optimizers: when they are made, when a group is added, at the end of a
// loop, and in another group.

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/bucket/replica_transfer.h"
#include "evenkeel/bucket/state_sync.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"
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

absl::Status PlacedOptimizer::CheckSameGroups(const absl::Status& own,
                                              const ParameterGroups& groups,
                                              std::vector<Fact> facts, SameIn same) const {
  if (communicator().world_size() == 1) return Annotate(own, join_name());
  if (own.ok()) {
    const std::vector<Fact> more = FactsOf(*params_, groups, same);
    facts.insert(facts.end(), more.begin(), more.end());
  }
  return Annotate(VerifySame(communicator(), absl::StrCat(join_name(), "/same"), own, facts),
                  join_name());
}

absl::Status PlacedOptimizer::CheckSame(const absl::Status& own, std::vector<Fact> facts,
                                        SameIn same) const {
  facts.insert(facts.begin(), {"the placement", std::string(placement_name())});
  return CheckSameGroups(own, groups(), std::move(facts), same);
}

absl::Status PlacedOptimizer::AddGroup(ParameterGroup group) {
  if (join_config().enable) return InsideJoinError(join_name(), "AddGroup");
  ParameterGroups more = settings();
  absl::Status own = more.Add(std::move(group));
  if (own.ok()) own = ParameterUpdater(params_, more, communicator().runtime()).Check();
  EK_RETURN_IF_ERROR(CheckSameGroups(own, more, {}, SameIn::kEverything));
  return TakeGroups(std::move(more));
}

// The end of a loop -------------------------------------------------------------------------------

absl::StatusOr<bool> PlacedOptimizer::AdoptFromLastJoiners(bool is_last_joiner) {
  ParameterGroups& groups = settings();
  std::string mine = is_last_joiner ? StepMessage{.rules = groups.rules()}.Serialize() : "";
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("settings", std::move(mine)));
  int source = -1;
  bool is_even = true;
  for (int rank = 0; rank < communicator().world_size(); ++rank) {
    is_even = is_even && !parts[rank].empty();
    if (parts[rank].empty()) continue;
    if (source >= 0 && parts[rank] != parts[source]) {
      EK_ASSIGN_OR_RETURN(const StepMessage first, StepMessage::Parse(parts[source], 0));
      EK_ASSIGN_OR_RETURN(const StepMessage other, StepMessage::Parse(parts[rank], 0));
      return Refusal(": the ranks ended the loop with different settings: rank ", source, " has ",
                     SettingsText(groups, first.rules), "; rank ", rank, " has ",
                     SettingsText(groups, other.rules));
    }
    source = rank;
  }
  if (source < 0) return is_even;
  EK_ASSIGN_OR_RETURN(const StepMessage last, StepMessage::Parse(parts[source], 0));
  EK_RETURN_IF_ERROR(groups.Adopt(last.rules));
  return is_even;
}

absl::Status PlacedOptimizer::EndLoop(bool is_last_joiner) {
  EK_ASSIGN_OR_RETURN(const bool is_even, AdoptFromLastJoiners(is_last_joiner));
  if (is_even || !params_->CheckDetached().ok())
    return absl::OkStatus();  // If a reducer has the set, it compares the values.
  EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found, CompareValues());
  if (!found.has_value()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("after the loop the replicas differ: ", ToString(*found),
                   ": exhausted ranks do not run code that changes parameters in the loop, unless "
                   "it is passed to AfterUpdate()"));
}

// Recovery ----------------------------------------------------------------------------------------

absl::Status PlacedOptimizer::TakeOver(StateTransfer& transfer) {
  EK_ASSIGN_OR_RETURN(Channel* const channel, communicator().OpenChannel(join_name()));
  if (transfer.done.insert(params_).second) {
    EK_RETURN_IF_ERROR(TransferReplicas(communicator(), transfer,
                                        {.tensors = [&] { return NamedValuesOf(*params_); },
                                         .move =
                                             [&](int source) {
                                               return BroadcastState(*channel, ValuesOf(*params_),
                                                                     source, Role::kState,
                                                                     params_->stream());
                                             },
                                         .stream = params_->stream()}));
  }
  return TakeOverState(*channel, transfer);
}

// A split state changes its place with the group, and is not received from another rank.
absl::StatusOr<Restore> PlacedOptimizer::KeepState(std::set<const void*>& kept) {
  if (is_split() || communicator().runtime() != nullptr || !CheckState().why.empty())
    return nullptr;
  const bool keeps_values = kept.insert(params_).second;
  std::vector<std::string> values;
  for (int i = 0; keeps_values && i < params_->size(); ++i) {
    const TensorView value = (*params_)[i].value;
    values.emplace_back(static_cast<const char*>(value.data), value.bytes());
  }
  EK_ASSIGN_OR_RETURN(OptimizerState state, updater_.Export());
  return [this, values = std::move(values), state = std::move(state),
          rules = updater_.groups().rules()]() -> absl::Status {
    for (size_t i = 0; i < values.size(); ++i)
      std::memcpy((*params_)[static_cast<int>(i)].value.data, values[i].data(), values[i].size());
    EK_RETURN_IF_ERROR(updater_.groups().Adopt(rules));
    EK_RETURN_IF_ERROR(updater_.Refresh());
    return TakeState(state, {}, WholeRanges(), nullptr);
  };
}

absl::Status PlacedOptimizer::AdoptSettingsOf(int source) {
  std::string mine = communicator().rank() == source
                         ? StepMessage{.rules = updater_.groups().rules()}.Serialize()
                         : "";
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("settings_of", std::move(mine)));
  EK_ASSIGN_OR_RETURN(const StepMessage message, StepMessage::Parse(parts[source], 0));
  return updater_.groups().Adopt(message.rules);
}

}  // namespace evenkeel::internal
