// The trainer's program on small data, for tests.
//
//   const Ended ended = Train({"--model=mlp", BackendFlag(), "--data=" + WriteSmallData("data")});
//   const Weights weights = ReadWeights(path);                    // of --save
//
// Tests of what the program computes run over the backend that their target names
// (//comm/testing:tested_group).

#ifndef EVENKEEL_TESTS_TRAINING_TRAIN_PROGRAM_H_
#define EVENKEEL_TESTS_TRAINING_TRAIN_PROGRAM_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {

inline constexpr char kTrain[] = "trainer/train";

inline std::string BackendFlag() { return absl::StrCat("--backend=", TheTestBackend().name); }
// The same where ranks must be processes.
inline std::string BackendFlagOfProcesses() {
  return absl::StrCat("--backend=", BackendOfProcesses());
}

inline Ended Train(std::vector<std::string> flags, const ProgramOptions& options = {}) {
  flags.insert(flags.begin(), kTrain);
  return Run(flags, options);
}

using Weights = std::map<std::string, std::vector<double>>;

inline Weights ReadWeights(const std::string& path) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Read(path);
  EXPECT_TRUE(file.ok()) << file.status();
  Weights weights;
  if (!file.ok()) return weights;
  for (const SafetensorsFile::Tensor& tensor : file->tensors()) {
    std::vector<char> aligned(tensor.bytes.begin(),
                              tensor.bytes.end());  // In a file elements lie at any address.
    std::vector<double>& values = weights[tensor.name];
    values.resize(tensor.count());
    ConvertFloats(TensorView(aligned.data(), tensor.count(), tensor.dtype),
                  TensorView(absl::MakeSpan(values)));
  }
  return weights;
}

// max |a - b|; infinite if they have different tensors.
inline double MaxDifference(const Weights& a, const Weights& b) {
  if (a.size() != b.size()) return INFINITY;
  double most = 0;
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.size() != values.size()) return INFINITY;
    for (size_t i = 0; i < values.size(); ++i) {
      const double difference = std::abs(values[i] - other->second[i]);
      if (!(difference <= most)) most = difference;  // NaN stays.
    }
  }
  return most;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_TRAINING_TRAIN_PROGRAM_H_
