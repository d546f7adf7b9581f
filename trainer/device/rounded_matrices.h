// A model's matrices and filters on a device as its products take them: float32 as they lie, or
// rounded copies.
//
//   // when the parameters have their memory
//   EK_RETURN_IF_ERROR(matrices_.Init(*work_, model, DType::kBFloat16));
//   // at the beginning of each pass: one launch
//   EK_RETURN_IF_ERROR(matrices_.Round(work_->stream()));
//   ... matrices_[index] ...                                               // of work_->stream()
//
// Rounded are parameters of two dimensions or more; the parameters stay float32, and an optimizer
// steps on them.
//
// Ownership: the parameters' values stay where they are, and `work` outlives it.
// Threads:   thread-compatible.
// Errors:    those of DeviceBuffer and of SegmentCopy.

#ifndef EVENKEEL_TRAINER_DEVICE_ROUNDED_MATRICES_H_
#define EVENKEEL_TRAINER_DEVICE_ROUNDED_MATRICES_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

// Whether products take it: float32, bfloat16 or float16. `model` is for the message.
absl::Status CheckFactorType(absl::string_view model, DType dtype);

class RoundedMatrices {
 public:
  // `table`: a parameter that no product takes.
  absl::Status Init(DeviceWork& work, const Model& model, DType dtype, int table = -1);
  absl::Status Round(StreamRef stream) const;

  // Returns the rounded matrix of the parameter with that index.
  const void* operator[](int index) const { return matrices_[index]; }

 private:
  std::vector<const void*> matrices_;
  DeviceBuffer rounded_;
  std::optional<SegmentCopy> rounding_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_ROUNDED_MATRICES_H_
