#include "evenkeel/zero_optim/optimizer.h"

#include <utility>

#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"
#include "evenkeel/zero_optim/internal/placement/replicated.h"
#include "evenkeel/zero_optim/internal/placement/slices.h"
#include "evenkeel/zero_optim/internal/placement/whole_tensors.h"

namespace evenkeel {
namespace {

std::unique_ptr<internal::PlacedOptimizer> Make(Communicator& comm, ParameterSet& params,
                                                ParameterGroups groups, OptimizerOptions options) {
  const Placement placement = options.placement;
  if (std::holds_alternative<Slices>(placement)) {
    return std::make_unique<internal::SlicesOptimizer>(comm, params, std::move(groups),
                                                       std::move(options));
  }
  if (std::holds_alternative<WholeTensors>(placement)) {
    return std::make_unique<internal::WholeTensorsOptimizer>(comm, params, std::move(groups),
                                                             std::move(options));
  }
  return std::make_unique<internal::ReplicatedOptimizer>(comm, params, std::move(groups),
                                                         std::move(options));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(
    Communicator& comm, ParameterSet& params, const std::vector<ParameterGroup>& groups,
    OptimizerOptions options) {
  auto made = ParameterGroups::Create(params.size(), groups);
  const absl::Status own = made.status();
  std::unique_ptr<internal::PlacedOptimizer> optimizer =
      Make(comm, params, own.ok() ? *std::move(made) : ParameterGroups(params.size()),
           std::move(options));
  EK_RETURN_IF_ERROR(optimizer->Start(own));
  return optimizer;
}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(Communicator& comm,
                                                             ParameterSet& params,
                                                             const UpdateRule& rule,
                                                             OptimizerOptions options) {
  return Create(comm, params, AllInOneGroup(params, rule), std::move(options));
}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(
    GradientReducer& reducer, const std::vector<ParameterGroup>& groups, OptimizerOptions options) {
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<Optimizer> optimizer,
      Create(reducer.communicator(), reducer.parameters(), groups, std::move(options)));
  const auto* const replicated = std::get_if<Replicated>(&optimizer->placement());
  const bool uses_all_reduce = std::holds_alternative<WholeTensors>(optimizer->placement()) ||
                               (replicated != nullptr && !replicated->update_in_backward);
  if (uses_all_reduce) return optimizer;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<BucketReduction> reduction, optimizer->TakeReduction());
  EK_RETURN_IF_ERROR(reducer.InstallReduction(std::move(reduction)));
  return optimizer;
}

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Create(GradientReducer& reducer,
                                                             const UpdateRule& rule,
                                                             OptimizerOptions options) {
  return Create(reducer, AllInOneGroup(reducer.parameters(), rule), std::move(options));
}

}  // namespace evenkeel
