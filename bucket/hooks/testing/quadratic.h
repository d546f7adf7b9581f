// A problem whose answer is known: each rank pulls the weights to a target of its own, so training
// ends at the targets' mean. Each batch adds noise that has no mean over the ranks and batches, but
// not none.
//
//   Quadratic problem({48, 5, 30}, comm.rank());
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &problem.params(), {}, options,
//                                                      std::move(hook)));
//   EK_RETURN_IF_ERROR(problem.Step(*ddp, /*batch=*/0, /*learning_rate=*/0.1f));
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_HOOKS_TESTING_QUADRATIC_H_
#define EVENKEEL_BUCKET_HOOKS_TESTING_QUADRATIC_H_

#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

class Quadratic {
 public:
  Quadratic(const std::vector<int>& sizes, int rank, float noise = 0.0f)
      : rank_(rank), noise_(noise), values_(sizes.size()), grads_(sizes.size()) {
    for (size_t p = 0; p < sizes.size(); ++p) {
      values_[p].assign(sizes[p], 0.0f);
      grads_[p].assign(sizes[p], -77.0f);
      params_.Add(absl::StrCat("p", p), absl::MakeSpan(values_[p]), absl::MakeSpan(grads_[p]));
    }
  }
  ParameterSet& params() { return params_; }
  std::vector<std::vector<float>>& values() { return values_; }
  static float Target(int rank, int param, size_t j) {
    return ToyModel::Noise(rank, 7, param, static_cast<int>(j));
  }
  static float MeanTarget(int world_size, int param, size_t j) {
    float sum = 0;
    for (int rank = 0; rank < world_size; ++rank) sum += Target(rank, param, j);
    return sum / static_cast<float>(world_size);
  }
  float GradientAt(int rank, int batch, int param, size_t j) const {
    return values_[param][j] - Target(rank, param, j) +
           noise_ * ToyModel::Noise(rank, batch, param, static_cast<int>(j));
  }

  // The parameters for which this rank has no gradient in each step.
  void SetUnused(std::vector<int> params) { unused_ = std::move(params); }

  // This batch's gradient of that parameter has an element that is infinite.
  void SetPoison(int batch, int param) {
    poisoned_batch_ = batch;
    poisoned_param_ = param;
  }

  absl::Status Backward(DataParallel& ddp, int batch) {
    for (int p = params_.size() - 1; p >= 0; --p) {
      if (!params_.trainable(p)) continue;
      if (absl::c_linear_search(unused_, p)) {
        EK_RETURN_IF_ERROR(ddp.NoGradient(p));
        continue;
      }
      const bool add = params_.grad_state(p) != GradState::kNone;
      float* const grad = static_cast<float*>(params_[p].grad.data);
      for (size_t j = 0; j < values_[p].size(); ++j) {
        grad[j] = (add ? grad[j] : 0.0f) + GradientAt(rank_, batch, p, j);
      }
      if (batch == poisoned_batch_ && p == poisoned_param_)
        grad[3] = std::numeric_limits<float>::infinity();
      params_.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp.GradientReady(p));
    }
    return absl::OkStatus();
  }

  std::vector<float> Gradient(int param) const {
    const float* data = static_cast<const float*>(params_[param].grad.data);
    return std::vector<float>(data, data + values_[param].size());
  }

  void Update(float learning_rate) {
    if (learning_rate == 0) return;  // Gradients may be NaN.
    for (int p = 0; p < params_.size(); ++p) {
      if (params_.grad_state(p) == GradState::kNone) continue;
      const float* const grad = static_cast<const float*>(params_[p].grad.data);
      for (size_t j = 0; j < values_[p].size(); ++j) values_[p][j] -= learning_rate * grad[j];
    }
  }

  absl::Status Step(DataParallel& ddp, int batch, float learning_rate) {
    params_.ClearGradients();
    EK_RETURN_IF_ERROR(ddp.BeginStep());
    EK_RETURN_IF_ERROR(Backward(ddp, batch));
    EK_RETURN_IF_ERROR(ddp.FinishStep());
    Update(learning_rate);
    return absl::OkStatus();
  }

 private:
  const int rank_;
  const float noise_;
  std::vector<int> unused_;
  int poisoned_batch_ = -1, poisoned_param_ = -1;
  std::vector<std::vector<float>> values_, grads_;
  ParameterSet params_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_HOOKS_TESTING_QUADRATIC_H_
