#include "evenkeel/zero_optim/internal/gradients.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

absl::Status GradientError(const ParameterSet& params, int param, int rank,
                           absl::string_view problem) {
  return absl::FailedPreconditionError(absl::StrCat("rank ", rank, ": parameter ", param, " \"",
                                                    params[param].name, "\" ", problem));
}

absl::Status CheckMemory(const ParameterSet& params, int param, int rank) {
  const TensorView& grad = params[param].grad;
  if (grad.data != nullptr || grad.count == 0 || params.row_size(param) > 0)
    return absl::OkStatus();
  return GradientError(params, param, rank, "has a gradient without memory");
}

GradientSource SourceOfLocal(LocalGradients local) {
  return local == LocalGradients::kReduced ? GradientSource::kToReduce : GradientSource::kHere;
}

}  // namespace

absl::StatusOr<std::vector<GradientSource>> ChooseSources(const ParameterSet& params,
                                                          const ParameterGroups& groups,
                                                          const TrainableMask& mask,
                                                          LocalGradients local, int rank) {
  const auto is_trained = [&](int i) {
    return mask[i] && params.trainable(i) && groups.contains(i);
  };
  std::vector<GradientSource> sources(params.size(), GradientSource::kNone);
  for (int i = 0; i < params.size(); ++i) {
    const GradState state = params.grad_state(i);
    if (!is_trained(i) || state == GradState::kNone) continue;
    if (state == GradState::kLocal && local == LocalGradients::kRefused) {
      return GradientError(params, i, rank,
                           "holds this rank's own gradient, not reduced: the replicas would "
                           "diverge; the last backward before the optimizer's step must reduce, "
                           "not accumulate (kAccumulate, no_sync())");
    }
    EK_RETURN_IF_ERROR(CheckMemory(params, i, rank));
    sources[i] = state == GradState::kLocal ? SourceOfLocal(local) : GradientSource::kHere;
  }
  const auto is_among = [&](GradientSource source) {
    return std::ranges::find(sources, source) != sources.end();
  };
  if (local != LocalGradients::kReduced) return sources;
  if (is_among(GradientSource::kHere) && !is_among(GradientSource::kToReduce)) return sources;
  for (int i = 0; i < params.size(); ++i) {
    const bool has_none = params.is_reduced() && params.was_cleared(i);  // It had the group's.
    if (is_trained(i) && sources[i] == GradientSource::kNone && !has_none)
      sources[i] = GradientSource::kToReduce;
  }
  return sources;
}

TensorView ElementsOf(const ParameterSet& params, int param) {
  if (params.row_size(param) == 0) return params[param].grad;
  const SparseRows& rows = params.sparse_grad(param);
  return TensorView(const_cast<std::byte*>(rows.values.data()),
                    static_cast<int64_t>(rows.rows.size()) * params.row_size(param),
                    params[param].value.dtype);
}

bool IsSet(const TensorView& flag) {
  uint64_t bits = 0;
  std::memcpy(&bits, flag.data, flag.bytes());
  return bits != 0;
}

absl::Status CheckArrived(const ParameterSet& params, std::span<const GradientSource> sources,
                          int rank) {
  for (int i = 0; i < params.size(); ++i) {
    if (sources[i] == GradientSource::kNone) continue;
    if (sources[i] == GradientSource::kHere && params.grad_state(i) != GradState::kReduced) {
      return GradientError(params, i, rank,
                           "has no reduced gradient on this rank, which has no more input: its "
                           "DataParallel must join the loop, too");
    }
    if (params.grad_state(i) != GradState::kNone) EK_RETURN_IF_ERROR(CheckMemory(params, i, rank));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
