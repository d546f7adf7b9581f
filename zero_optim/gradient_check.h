// The check of a step's gradients: their norm, whether all are finite, and clipping.
//
//   EK_RETURN_IF_ERROR(optimizer->Step({.clip = ClipOptions{.max_norm = 1.0}}));
//   Log(optimizer->last_check()->norm);
//
// A loop that ends on all ranks if a gradient is infinite or not a number, with the weights of the
// previous step:
//
//   EK_RETURN_IF_ERROR(optimizer->Step({.skip_nonfinite = true}));
//   EK_RETURN_IF_ERROR(RefuseNonfinite(optimizer->last_check()));
//
// Joint clipping for several optimizers:
//
//   EK_ASSIGN_OR_RETURN(GradientCheck dense, dense_optimizer->CheckGradients());
//   EK_ASSIGN_OR_RETURN(GradientCheck embeddings, embedding_optimizer->CheckGradients());
//   const double scale = ClipCoefficient(1.0, JoinedNorm({dense.norm, embeddings.norm}));
//   EK_RETURN_IF_ERROR(dense_optimizer->Step({.grad_scale = scale}));
//   EK_RETURN_IF_ERROR(embedding_optimizer->Step({.grad_scale = scale}));
//
// The placement Slices has no CheckGradients(): its Step() clips by its own gradients only.
//
// Order:   sums are in double, over a parameter's elements in one order, then over parameters by
//          index: the same bits on every rank, at any world size, sharded or not.
// Threads: pure functions.
// Source:  torch.nn.utils.clip_grad_norm_; over shards as FairScale's OSS, but in the optimizer's
//          own group.

#ifndef EVENKEEL_ZERO_OPTIM_GRADIENT_CHECK_H_
#define EVENKEEL_ZERO_OPTIM_GRADIENT_CHECK_H_

#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel {

inline constexpr double kInfinityNorm = std::numeric_limits<double>::infinity();

struct ClipOptions {
  double max_norm = 1.0;  // Above zero; infinite: the norm is measured without clipping.
  double norm = 2.0;      // The p of the p-norm, at least 1; kInfinityNorm: the largest magnitude.

  static void VisitFields(auto& self, auto& visit) { visit(self.max_norm, self.norm); }
  friend bool operator==(const ClipOptions&, const ClipOptions&) = default;
};

struct GradientCheck {
  double norm = 0;          // Of all gradients times the step's grad_scale; infinite if not finite.
  bool is_finite = true;    // No gradient on any rank is infinite or not a number.
  bool is_skipped = false;  // The step was skipped because of this (StepOptions::skip_nonfinite).
  friend bool operator==(const GradientCheck&, const GradientCheck&) = default;
};

// Returns OK if the step has checked its gradients and all were finite, else FailedPrecondition,
// equal on all ranks with inputs; returned from their loops, it ends the group. On a device
// last_check() waits for the step: use check_before() from the second step on, and last_check()
// after the last one.
absl::Status RefuseNonfinite(const std::optional<GradientCheck>& check);

// Returns the factor for the gradients: max_norm / (norm + 1e-6), at most 1.
double ClipCoefficient(double max_norm, double norm);

// Returns the norm of a whole from the norms of its parts.
double JoinedNorm(absl::Span<const double> norms, double norm = 2.0);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_GRADIENT_CHECK_H_
