// For tests: reads the recorded training runs of tests/testdata, which are safetensors files.

#ifndef EVENKEEL_ZERO_OPTIM_TESTING_RECORDED_RUN_H_
#define EVENKEEL_ZERO_OPTIM_TESTING_RECORDED_RUN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

class RecordedRun {
 public:
  static absl::StatusOr<RecordedRun> Read(const std::string& path);

  // A tensor's elements; T must be its type. Empty if there is none of that name.
  template <typename T>
  std::vector<T> Get(absl::string_view tensor) const;
  // How far PyTorch's float32 run is from its float64 run in that parameter.
  double MaxDiffVsFloat64(absl::string_view param) const;

 private:
  std::string header_;
  std::string data_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_TESTING_RECORDED_RUN_H_
