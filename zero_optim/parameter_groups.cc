#include "evenkeel/zero_optim/parameter_groups.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

std::string Quoted(absl::string_view group) { return absl::StrCat("group \"", group, "\""); }

// Another learning rate, if it is one.
absl::StatusOr<UpdateRule> WithLearningRate(const ParameterGroup& group, double learning_rate) {
  UpdateRule rule = group.rule;
  evenkeel::SetLearningRate(rule, learning_rate);
  EK_RETURN_IF_ERROR(Annotate(Validate(rule), Quoted(group.name)));
  return rule;
}

}  // namespace

std::vector<int> SelectParams(const ParameterSet& params,
                              absl::FunctionRef<bool(const Parameter&)> chooses) {
  std::vector<int> chosen;
  for (int i = 0; i < params.size(); ++i) {
    if (chooses(params[i])) chosen.push_back(i);
  }
  return chosen;
}

std::vector<ParameterGroup> AllInOneGroup(const ParameterSet& params, const UpdateRule& rule) {
  return {{.name = "all",
           .params = SelectParams(params, [](const Parameter&) { return true; }),
           .rule = rule}};
}

absl::StatusOr<ParameterGroups> ParameterGroups::Create(int param_count,
                                                        absl::Span<const ParameterGroup> groups) {
  ParameterGroups made(param_count);
  for (const ParameterGroup& group : groups) EK_RETURN_IF_ERROR(made.Add(group));
  if (std::ranges::all_of(groups,
                          [](const ParameterGroup& group) { return group.params.empty(); })) {
    return absl::InvalidArgumentError("an optimizer without parameters");
  }
  return made;
}

absl::Status ParameterGroups::Add(ParameterGroup group) {
  if (group.name.empty()) group.name = absl::StrCat("group", groups_.size());
  const std::string where = Quoted(group.name);
  EK_RETURN_IF_ERROR(Annotate(Validate(group.rule), where));
  if (Find(group.name) >= 0)
    return absl::InvalidArgumentError(absl::StrCat("two groups are named \"", group.name, "\""));
  std::set<int> seen;
  for (const int param : group.params) {
    const std::string which = absl::StrCat(where, ": parameter ", param);
    if (param < 0 || param >= param_count()) {
      return absl::InvalidArgumentError(absl::StrCat(which, " is not one of the ", param_count()));
    }
    if (contains(param)) {
      return absl::InvalidArgumentError(
          absl::StrCat(which, " is in ", Quoted(groups_[group_of(param)].name), ", too"));
    }
    if (!seen.insert(param).second)
      return absl::InvalidArgumentError(absl::StrCat(which, " is named twice"));
  }
  for (const int param : group.params) group_of_[param] = size();
  groups_.push_back(std::move(group));
  return absl::OkStatus();
}

int ParameterGroups::Find(absl::string_view name) const {
  const auto found = std::ranges::find_if(
      groups_, [&](const ParameterGroup& group) { return group.name == name; });
  return found == groups_.end() ? -1 : static_cast<int>(found - groups_.begin());
}

absl::Status ParameterGroups::SetLearningRate(double learning_rate) {
  std::vector<UpdateRule> rules;
  for (const ParameterGroup& group : groups_) {
    EK_ASSIGN_OR_RETURN(rules.emplace_back(), WithLearningRate(group, learning_rate));
  }
  return Adopt(rules);
}

absl::Status ParameterGroups::SetLearningRate(absl::string_view group, double learning_rate) {
  const int found = Find(group);
  if (found < 0) {
    const auto name_of = [](std::string* out, const ParameterGroup& other) {
      out->append(other.name);
    };
    return absl::InvalidArgumentError(absl::StrCat(
        "there is no ", Quoted(group), "; there are: ", absl::StrJoin(groups_, ", ", name_of)));
  }
  EK_ASSIGN_OR_RETURN(groups_[found].rule, WithLearningRate(groups_[found], learning_rate));
  return absl::OkStatus();
}

std::vector<UpdateRule> ParameterGroups::rules() const {
  std::vector<UpdateRule> rules;
  for (const ParameterGroup& group : groups_) rules.push_back(group.rule);
  return rules;
}

absl::Status ParameterGroups::Adopt(absl::Span<const UpdateRule> rules) {
  if (static_cast<int>(rules.size()) != size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("this rank has ", size(), " groups, the others ", rules.size()));
  }
  for (int g = 0; g < size(); ++g) {
    const UpdateRule& own = groups_[g].rule;
    if (rules[g].index() != own.index() ||
        !std::ranges::equal(StateTensorNames(rules[g]), StateTensorNames(own))) {
      return absl::InvalidArgumentError(absl::StrCat(Quoted(groups_[g].name),
                                                     ": this rank updates by ", ToString(own),
                                                     ", the others by ", ToString(rules[g])));
    }
  }
  for (int g = 0; g < size(); ++g) groups_[g].rule = rules[g];
  return absl::OkStatus();
}

}  // namespace evenkeel
