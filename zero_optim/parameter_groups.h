// Groups of parameters, each with an update rule and settings of its own.
//
//   ParameterGroup decay{.name = "decay",
//                        .params = SelectParams(params, is_matrix),
//                        .rule = AdamW{.weight_decay = 0.1}};
//   ParameterGroup no_decay{.name = "no_decay",
//                           .params = SelectParams(params, is_bias),
//                           .rule = AdamW{.weight_decay = 0}};
//   EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, {decay, no_decay}));
//   EK_RETURN_IF_ERROR(optimizer->SetLearningRate("decay", 1e-4));  // without a name: all groups
//
// An optimizer neither reads nor updates a parameter that is in none of its groups, so several
// optimizers may share a parameter set. Each parameter must be in at most one of them. This is not
// checked: a second one would update it again. Groups may have rules of different kinds.
//
// Threads: thread-compatible value.
// Errors:  InvalidArgument names the group, and the parameter or setting that is wrong; nothing has
//          changed then.
// Source:  the param_groups of torch.optim.

#ifndef EVENKEEL_ZERO_OPTIM_PARAMETER_GROUPS_H_
#define EVENKEEL_ZERO_OPTIM_PARAMETER_GROUPS_H_

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

inline constexpr int kNoGroup = -1;

struct ParameterGroup {
  std::string name;         // Unique within the optimizer. Empty: "group<number>".
  std::vector<int> params;  // Indices of the parameter set; may be empty.
  UpdateRule rule;
};

// Returns the indices of the parameters for which `chooses` returns true, ascending.
std::vector<int> SelectParams(const ParameterSet& params,
                              absl::FunctionRef<bool(const Parameter&)> chooses);

// Returns one group, "all", with every parameter.
std::vector<ParameterGroup> AllInOneGroup(const ParameterSet& params, const UpdateRule& rule);

class ParameterGroups {
 public:
  // No groups, over a set of `param_count` parameters.
  explicit ParameterGroups(int param_count) : group_of_(param_count, kNoGroup) {}
  // Errors: those of Add(); InvalidArgument without a group, or without any parameter in them.
  static absl::StatusOr<ParameterGroups> Create(int param_count,
                                                absl::Span<const ParameterGroup> groups);

  // InvalidArgument: a setting out of its range, a name that another group has, or a parameter that
  // is unknown, named twice, or in another group.
  absl::Status Add(ParameterGroup group);

  int size() const { return static_cast<int>(groups_.size()); }
  const ParameterGroup& operator[](int group) const { return groups_[group]; }
  const std::vector<ParameterGroup>& groups() const { return groups_; }
  // Returns -1 if no group has that name.
  int Find(absl::string_view name) const;

  int param_count() const { return static_cast<int>(group_of_.size()); }
  // Returns kNoGroup for a parameter in no group.
  int group_of(int param) const { return group_of_[param]; }
  bool contains(int param) const { return group_of_[param] != kNoGroup; }
  // The parameter must be in a group.
  const UpdateRule& rule_of(int param) const { return groups_[group_of_[param]].rule; }

  absl::Status SetLearningRate(double learning_rate);
  absl::Status SetLearningRate(absl::string_view group, double learning_rate);

  std::vector<UpdateRule> rules() const;  // By group.
  // Replaces the settings of the same groups. InvalidArgument if the number of groups, a kind of
  // rule, or the state tensors of a rule differ.
  absl::Status Adopt(absl::Span<const UpdateRule> rules);

 private:
  std::vector<ParameterGroup> groups_;
  std::vector<int> group_of_;  // By parameter.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_PARAMETER_GROUPS_H_
