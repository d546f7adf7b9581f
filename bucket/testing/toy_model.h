// A model small enough to compute by hand, for tests: its gradient is a known function of weights,
// buffers, rank and batch, so a single process can say what any group of ranks must end with.
//
//   ToyModel model({3, 5, 2});
//   model.Forward(rank, batch);                                              // moves the buffers
//   // last parameter first
//   model.Backward(rank, batch, [&](int i) { return ddp->GradientReady(i); });
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_TESTING_TOY_MODEL_H_
#define EVENKEEL_BUCKET_TESTING_TOY_MODEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class ToyModel {
 public:
  // Parameters "p0", "p1", ... of these sizes; initial weights depend on `seed`. `device`: a
  // simulated one, whose memory is the host's.
  explicit ToyModel(const std::vector<int>& sizes, int seed = 0, Device device = Device::Cpu())
      : values_(sizes.size()), grads_(sizes.size()) {
    for (size_t p = 0; p < sizes.size(); ++p) {
      values_[p].resize(sizes[p]);
      grads_[p].assign(sizes[p],
                       -77.0f);  // Garbage that a gradient which is none must not leak from.
      for (int j = 0; j < sizes[p]; ++j) values_[p][j] = Noise(seed, 1000, static_cast<int>(p), j);
      const auto on_device = [device](std::vector<float>& data) {
        return TensorView(data.data(), static_cast<int64_t>(data.size()), DType::kFloat32, device);
      };
      params_.Add(absl::StrCat("p", p), on_device(values_[p]), on_device(grads_[p]));
    }
  }

  ParameterSet& params() { return params_; }
  // From now on gradients depend on rank and batch alone, and are multiples of 1/256: sums over
  // ranks have the same bits in any order.
  void RoundGradients() { rounds_ = true; }
  void CopyValuesFrom(const ToyModel& other) {
    for (size_t p = 0; p < values_.size(); ++p)
      std::copy(other.values_[p].begin(), other.values_[p].end(), values_[p].begin());
  }
  const std::vector<std::vector<float>>& values() const { return values_; }
  std::vector<float>& buffer() { return buffer_; }
  std::vector<TensorView> buffers() { return {TensorView(absl::MakeSpan(buffer_))}; }

  void Forward(int rank, int batch) {
    for (size_t j = 0; j < buffer_.size(); ++j)
      buffer_[j] = 0.9f * buffer_[j] + Noise(rank, batch, 99, j);
  }

  float GradientAt(int param, int j, int rank, int batch) const {
    const float noise = Noise(rank, batch, param, j);
    if (rounds_) return std::round(noise * 256) / 256;
    return 0.25f * values_[param][j] + noise + 0.125f * buffer_[j % buffer_.size()];
  }

  // Adds to gradients that are there, as a real backward does, and announces each trained
  // parameter.
  absl::Status Backward(int rank, int batch, absl::FunctionRef<absl::Status(int)> announce) {
    for (int p = params_.size() - 1; p >= 0; --p)
      EK_RETURN_IF_ERROR(BackwardOf(p, rank, batch, announce));
    return absl::OkStatus();
  }

  absl::Status BackwardOf(int param, int rank, int batch,
                          absl::FunctionRef<absl::Status(int)> announce) {
    if (!params_.trainable(param)) return absl::OkStatus();
    float* grad = static_cast<float*>(params_[param].grad.data);
    const bool add = params_.grad_state(param) != GradState::kNone;
    for (size_t j = 0; j < values_[param].size(); ++j) {
      const float gradient = GradientAt(param, static_cast<int>(j), rank, batch);
      grad[j] = add ? grad[j] + gradient : gradient;
    }
    params_.SetGradState(param, GradState::kLocal);
    return announce(param);
  }

  std::vector<float> Gradient(int param) const {
    const TensorView& grad = params_[param].grad;
    const float* data = static_cast<const float*>(grad.data);
    return std::vector<float>(data, data + grad.count);
  }

  // In [-1, 1), the same everywhere.
  static float Noise(int a, int b, int c, int d) {
    uint64_t x = (static_cast<uint64_t>(a) << 48) ^ (static_cast<uint64_t>(b) << 32) ^
                 (static_cast<uint64_t>(c) << 16) ^ static_cast<uint64_t>(d);
    x = (x + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 29)) * 0x94d049bb133111eb;
    return static_cast<float>(static_cast<int32_t>(x >> 32)) / 2147483648.0f;
  }

 private:
  std::vector<std::vector<float>> values_;
  std::vector<std::vector<float>> grads_;
  std::vector<float> buffer_ = {0.5f, -0.25f, 0.125f};
  bool rounds_ = false;
  ParameterSet params_;
};

// The error of VerifySame() where the last rank differs from all others.
inline std::string LastRankDiffers(int world, absl::string_view what, absl::string_view usual,
                                   absl::string_view last) {
  if (world == 2) return absl::StrCat(what, ": rank 0 has ", usual, "; rank 1 has ", last);
  std::string others = "0";
  for (int rank = 1; rank < world - 1; ++rank) absl::StrAppend(&others, ",", rank);
  return absl::StrCat(what, ": rank ", world - 1, " has ", last, "; ranks ", others, " have ",
                      usual);
}

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_TESTING_TOY_MODEL_H_
