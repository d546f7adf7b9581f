#include "evenkeel/bucket/finite_check.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/finite.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel::internal {

absl::StatusOr<bool> ChecksFinite(bool option) {
  EK_ASSIGN_OR_RETURN(const int variable, ReadNumber("EVENKEEL_CHECK_FINITE", 0, 1, 0));
  return option || variable == 1;
}

absl::Status CheckFinite(Communicator& comm, const ParameterSet& params, int param,
                         std::optional<int> bucket) {
  TensorView gradient = params[param].grad;
  const bool is_sparse = params.row_size(param) > 0;
  if (is_sparse) {
    const std::vector<std::byte>& values = params.sparse_grad(param).values;
    gradient = params[param].value;  // For its type.
    gradient.data = const_cast<std::byte*>(values.data());
    gradient.count = static_cast<int64_t>(values.size()) / SizeOf(gradient.dtype);
  }
  const int64_t bad = FirstNonfinite(gradient);
  if (bad < 0) return absl::OkStatus();
  const int rank = comm.rank();
  const int64_t step = StepControl::Of(comm).steps_begun();
  const absl::Status error = WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, ": the gradient of parameter \"", params[param].name, "\" (", param,
          ") is not finite in step ", step, ": element ", bad, " of ", gradient.count,
          is_sparse            ? ", sparse"
          : bucket.has_value() ? absl::StrCat(", in bucket ", *bucket)
                               : "")),
      {.kind = FailureKind::kRankFailed, .ranks = {rank}, .step = step});
  comm.Abort(error);
  return error;
}

}  // namespace evenkeel::internal
