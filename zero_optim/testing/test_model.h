// For tests: a made-up model whose gradients are computed, ranks and steps included, and the plain
// single-process training that distributed runs are compared with.

#ifndef EVENKEEL_ZERO_OPTIM_TESTING_TEST_MODEL_H_
#define EVENKEEL_ZERO_OPTIM_TESTING_TEST_MODEL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "evenkeel/zero_optim/parameter_groups.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {

// Parameters "p0", "p1", ... with equal values on every rank.
class TestModel {
 public:
  explicit TestModel(std::vector<int64_t> sizes, DType dtype = DType::kFloat32)
      : TestModel(std::move(sizes), dtype, nullptr, {}) {}
  // On a simulated device, where values are used and gradients computed on `stream`.
  TestModel(std::vector<int64_t> sizes, DType dtype, SimulatedDevices* devices, StreamRef stream);

  ParameterSet& params() { return params_; }
  int size() const { return params_.size(); }

  // The gradient that rank `rank` has of parameter `param` in step `step`; depends on the values
  // that it has now.
  void ComputeGradient(int rank, int step, int param, TensorView into) const;
  // All trained parameters' gradients into their memory, as this rank's own; with `accumulate`
  // added to what is there.
  void Backward(int rank, int step, bool accumulate = false);

  // One parameter's, written or added; its state stays.
  void PutGradient(int rank, int step, int param, bool adds);

  // All values, for comparison bit for bit. On a device: when what is on the stream has run.
  // All values, one after the other.
  std::string Bytes() const;
  void SetBytes(absl::string_view bytes);
  friend bool IsSame(const TestModel& model, const TestModel& plain);

 private:
  std::vector<StateTensor> values_;
  std::vector<StateTensor> gradients_;
  SimulatedDevices* const devices_;
  ParameterSet params_;
};

// One step of training in one process, on the sum over `active` ranks' gradients times `scale`.
class PlainTraining {
 public:
  PlainTraining(TestModel* model, const UpdateRule& rule)
      : PlainTraining(model, AllInOneGroup(model->params(), rule)) {}
  PlainTraining(TestModel* model, const std::vector<ParameterGroup>& groups)
      : model_(model), groups_(*ParameterGroups::Create(model->size(), groups)) {}

  ParameterGroups& groups() { return groups_; }
  void Step(const std::vector<int>& active, int step, double scale,
            const StepOptions& options = {});
  // The same with gradients that have been summed and scaled already; a parameter without one is
  // left alone.
  void Update(const std::vector<std::optional<TensorView>>& gradients,
              const StepOptions& options = {});
  const OptimizerState& state() const { return state_; }
  double norm() const { return norm_; }  // That the last step clipped by.

 private:
  TestModel* const model_;
  ParameterGroups groups_;
  OptimizerState state_;
  double norm_ = 0;
};

// True if a training has ended as the plain one: bit for bit where the tested backend adds in rank
// order, else nearly.
bool IsSame(const TestModel& model, const TestModel& plain);
bool IsSame(const OptimizerState& state, const OptimizerState& plain);

// The world sizes of what takes long.
std::vector<int> TestedWorldSizes();

// Announces what Backward() has left, the last parameter first, and finishes the step that has
// begun.
absl::Status Reduce(DataParallel& ddp, const ParameterSet& params);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_TESTING_TEST_MODEL_H_
