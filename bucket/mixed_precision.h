// Forward and backward in 16 bits, weights and updates in 32 bits: the parameter set has the master
// values, which the optimizer updates, and the model computes with copies of them.
//
//   // params: float32
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {},
//                                        std::make_unique<CompressedReduction>(DType::kBFloat16)));
//   EK_ASSIGN_OR_RETURN(auto mixed,
//                       MixedPrecision::Create(&params, ddp.get(), {.compute = DType::kBFloat16}));
//   for (...) {
//     params.ClearGradients();
//     EK_RETURN_IF_ERROR(ddp->BeginStep());
//     ... forward computes with mixed->Compute(i); backward writes the gradient of parameter i, in
//         16 bits, to mixed->Gradient(i), then calls mixed->GradientReady(i) in place of ddp's ...
//     EK_RETURN_IF_ERROR(ddp->FinishStep());
//     EK_RETURN_IF_ERROR(optimizer->Step());
//   }
//
// Copies:    made at their first use, and again only if the master may have changed: once per
//            synchronising step for a trained parameter, never for a frozen one. Shadowed steps
//            count. After any other write to values call ValuesChanged(): after loading a
//            checkpoint, or after an optimizer's Step() that reduced the gradients itself, behind
//            steps that only accumulate.
// Gradients: GradientReady() widens, multiplies by the scale of SetGradScale() (one over a loss
//            scale, unless that is the step's grad_scale: not both) and writes to params[i].grad,
//            or adds to it if a gradient is present: accumulation is in the masters' type.
//            Overflows remain infinite.
// The reduction chooses the type of reduced gradients (bucket/hooks/compressed_reduction.h; without
// one, the masters' type), and buffers are broadcast in their own type.
//
// Devices:   all casts are enqueued on ParameterSet::stream(), and all outdated copies are made in
//            one launch at the first use of one of them. A gradient is widened in a launch of its
//            own. All memory is allocated at once.
//
// Ownership: parameters and DataParallel must outlive it. Views are valid while it lives. It takes
//            4 bytes per element of the parameters that are used.
// Threads:   thread-compatible.
// Errors:    InvalidArgument: `compute` is not a 16-bit float, or an ignored name is unknown.
//            Errors of a device; Unimplemented for memory on another device than the group's.
// Source:    Micikevicius et al., "Mixed Precision Training", ICLR 2018.

#ifndef EVENKEEL_BUCKET_MIXED_PRECISION_H_
#define EVENKEEL_BUCKET_MIXED_PRECISION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class RepeatedCopy;

struct MixedPrecisionOptions {
  DType compute = DType::kBFloat16;
  // Full names of parameters without copies (normalisation layers). Parameters of 16 bits have none
  // either.
  std::vector<std::string> ignored;
};

class MixedPrecision {
 public:
  static absl::StatusOr<std::unique_ptr<MixedPrecision>> Create(ParameterSet* params,
                                                                DataParallel* ddp,
                                                                MixedPrecisionOptions options = {});
  ~MixedPrecision();
  MixedPrecision(const MixedPrecision&) = delete;
  MixedPrecision& operator=(const MixedPrecision&) = delete;

  // Returns the value for the computation, read-only.
  TensorView Compute(int param);
  // Returns the memory for the gradient from backward, which overwrites it. For an ignored
  // parameter this is the parameter's own gradient, to which backward adds unless its state is
  // kNone.
  TensorView Gradient(int param);
  absl::Status GradientReady(int param);
  absl::Status NoGradient(int param) { return ddp_->NoGradient(param); }

  // Sets the factor for gradients, from the next one on.
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

  MixedPrecision(ParameterSet* params, DataParallel* ddp, DType compute);

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
  std::unique_ptr<RepeatedCopy> cast_;
  absl::Status failed_;  // An error of the device in a call that returns no status.
  double grad_scale_ = 1.0;
  int64_t casts_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_MIXED_PRECISION_H_
