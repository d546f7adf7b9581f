#include "evenkeel/comm/nccl/plan.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

// Whether the factor, rounded to the type, is as precise as its numbers are: not below the normal
// ones, nor infinite.
bool IsPrecise(double scale, DType dtype) {
  double rounded = scale, largest_error = 0;
  if (dtype == DType::kFloat32) {
    rounded = static_cast<float>(scale);
    largest_error = 0x1p-24;
  } else if (dtype == DType::kFloat16) {
    rounded = static_cast<float>(Float16(static_cast<float>(scale)));
    largest_error = 0x1p-11;
  } else if (dtype == DType::kBFloat16) {
    rounded = static_cast<float>(BFloat16(static_cast<float>(scale)));
    largest_error = 0x1p-8;
  }
  return std::abs(rounded - scale) <= largest_error * std::abs(scale);
}

int OpOf(const Operation& operation) {
  switch (operation.what.op) {
    case ReduceOp::kMin:
      return kNcclMin;
    case ReduceOp::kMax:
      return kNcclMax;
    case ReduceOp::kProduct:
      return kNcclProduct;
    case ReduceOp::kAverage:  // Of floats: a sum with a scale.
    case ReduceOp::kSum:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitXor:
      break;
  }
  return kNcclSum;
}

void PlanScale(const Operation& operation, int world_size, NcclPlan& plan) {
  plan.op = OpOf(operation);
  const DType dtype = operation.what.dtype;
  if (!IsFloat(dtype) || operation.scale == 1.0) return;
  if (plan.op != kNcclSum) {
    plan.after = operation.scale;
  } else if (operation.what.op == ReduceOp::kAverage && operation.scale == 1.0 / world_size) {
    plan.op = kNcclAverage;
  } else if (IsPrecise(operation.scale, dtype)) {
    plan.inside = operation.scale;
  } else {
    plan.before = operation.scale;
  }
}

}  // namespace

NcclPlan PlanForNccl(const Operation& operation, int rank, int world_size, bool is_alike) {
  NcclPlan plan;
  const CollectiveKind kind = operation.what.kind;
  const bool reduces = Reduces(kind);
  if (reduces) PlanScale(operation, world_size, plan);
  plan.fills_identity = reduces && !operation.contributes;
  if (plan.fills_identity) plan.before = 1.0;
  switch (kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
    case CollectiveKind::kBroadcast:
      // In place, a call for each view.
      plan.stages_in = plan.stages_out = !is_alike;
      break;
    case CollectiveKind::kBarrier:
      break;
    default:
      plan.stages_in =
          !operation.in.empty() && (operation.in.size() != 1 || !is_alike || plan.fills_identity ||
                                    plan.before != 1.0 || OutputEndangersInput(operation, rank));
      plan.stages_out = !operation.out.empty() && (operation.out.size() != 1 || !is_alike);
  }
  return plan;
}

absl::Status SupportedByNccl(const Collective& what) {
  if (IsUneven(what.kind))
    return absl::UnimplementedError(absl::StrCat("nccl: no ", ToString(what.kind)));
  if (what.tag != 0) return absl::UnimplementedError("nccl: messages have no tags");
  if (!Reduces(what.kind)) return absl::OkStatus();
  if (IsBitwise(what.op))
    return absl::UnimplementedError(absl::StrCat("nccl: no ", ToString(what.op)));
  if (what.dtype == DType::kInt16) {
    return absl::UnimplementedError(absl::StrCat("nccl: no ", ToString(what.kind), " of int16"));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
