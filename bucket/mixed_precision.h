// Forward and backward in 16 bits, weights and updates in 32: the parameter set's values stay the masters that the
// optimizer updates, and the model computes with copies of them.
//
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {},       // params: float32
//                                                      std::make_unique<CompressedReduction>(DType::kBFloat16)));
//   EK_ASSIGN_OR_RETURN(auto mixed, MixedPrecision::Create(&params, ddp.get(), {.compute = DType::kBFloat16}));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());
//     ... forward computes with mixed->Compute(i); backward writes the gradient of parameter i, in 16 bits, to
//         mixed->Gradient(i), then calls mixed->GradientReady(i) in place of ddp's ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());
//     EK_RETURN_IF_ERROR(optimizer->Step());
//   }
//
// Copies:    made when they are first asked for, and anew only if the master may have changed: once per synchronising
//            step for a trained parameter, never again for a frozen one. A rank that ran dry notices the others' steps.
//            After writing to values in another way call ValuesChanged(): a checkpoint; a ShardedOptimizer's Step()
//            that reduced the gradients itself, behind steps that only accumulate.
// Gradients: GradientReady() widens, multiplies by the scale of SetGradScale() (one over a loss scale, unless that is
//            the step's grad_scale: not both) and writes to params[i].grad, or adds to it if a gradient is there:
//            accumulation is in the masters' type. What overflowed stays infinite.
// Which type travels is the reduction's to say (bucket/hooks/compressed_reduction.h; without one, the masters' type),
// and buffers are broadcast in whatever type they are given to DataParallel.
//
// Devices:   all casts are put on ParameterSet::stream(), and all copies that may be stale are made anew in one launch when
//            the first of them is asked for. A gradient is widened in a launch of its own. All memory is made at once.
//
// Ownership: parameters and DataParallel outlive it. Views are valid as long as it lives; 4 bytes per element in all,
//            for parameters that are used.
// Threads:   thread-compatible.
// Errors:    InvalidArgument: `compute` is no 16-bit float, or an ignored name is unknown. What fails on a device, or
//            Unimplemented for memory on one that is not the group's.
// Source:    Micikevicius et al., "Mixed Precision Training", ICLR 2018.

#ifndef EVENKEEL_BUCKET_MIXED_PRECISION_H_
#define EVENKEEL_BUCKET_MIXED_PRECISION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/internal/repeated_copy.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct MixedPrecisionOptions {
  DType compute = DType::kBFloat16;
  // By full name: these are computed with as they are (normalisation layers). So are those that have 16 bits already.
  std::vector<std::string> ignored;
};

class MixedPrecision {
 public:
  static absl::StatusOr<std::unique_ptr<MixedPrecision>> Create(ParameterSet* params, DataParallel* ddp,
                                                                MixedPrecisionOptions options = {});
  ~MixedPrecision();
  MixedPrecision(const MixedPrecision&) = delete;
  MixedPrecision& operator=(const MixedPrecision&) = delete;

  // The parameter's value to compute with; only to be read.
  TensorView Compute(int param);
  // Where backward writes its gradient: it overwrites, whatever is accumulated. For an ignored parameter this is the
  // parameter's own gradient, which backward adds to unless its state is kNone.
  TensorView Gradient(int param);
  absl::Status GradientReady(int param);
  absl::Status NoGradient(int param) { return ddp_->NoGradient(param); }

  // What gradients are multiplied by, from the next one on.
  void SetGradScale(double scale) { grad_scale_ = scale; }
  void ValuesChanged();

  bool is_ignored(int param) const { return copies_[param].is_ignored; }
  int64_t casts() const { return casts_; }  // Copies made so far.

 private:
  struct Copy {
    bool is_ignored = false;
    std::vector<std::byte> value, gradient;    // On the CPU,
    TensorView device_value, device_gradient;  // or on a device.
    // As it was when the copy was made.
    bool is_made = false;
    bool was_trained = false;
    int64_t reductions = 0;
    uint64_t mask_version = 0;
  };

  MixedPrecision(ParameterSet* params, DataParallel* ddp, DType compute)
      : params_(params), ddp_(ddp), compute_(compute), copies_(params->size()) {}

  absl::Status PrepareDevice();
  bool IsOnDevice() const { return runtime_ != nullptr; }
  void NoteMade(int param);
  void CastOnDevice();
  absl::Status WidenOnDevice(int param, bool add);
  bool IsFresh(int param) const;
  TensorView ViewOf(int param, std::vector<std::byte>& memory) const;

  ParameterSet* const params_;
  DataParallel* const ddp_;
  const DType compute_;
  std::vector<Copy> copies_;          // By parameter.
  DeviceRuntime* runtime_ = nullptr;  // Null on the CPU.
  Memory memory_;
  std::optional<RepeatedCopy> cast_;
  absl::Status failed_;  // On the device, where a call could not say so.
  double grad_scale_ = 1.0;
  int64_t casts_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_MIXED_PRECISION_H_
