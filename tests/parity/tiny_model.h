// A network of two layers that is small enough to be written twice: gradients of single samples, so
// that one process can add up those of all ranks' batches joined.
//
//   TinyWeights<double> weights = InitialWeights<double>();
//   AddGradient(weights, shift, SampleOf(rank, batch, i), 1.0 / (kTinyBatch * world), gradient);
//
// y = out * (gain . tanh(in * (x - shift) + bias)) + out_bias; the loss is half the squared
// distance from the target. `shift` is a running mean of inputs: a buffer.
//
// Threads: pure functions.

#ifndef EVENKEEL_TESTS_PARITY_TINY_MODEL_H_
#define EVENKEEL_TESTS_PARITY_TINY_MODEL_H_

#include <array>
#include <cmath>
#include <vector>

#include "evenkeel/bucket/testing/toy_model.h"

namespace evenkeel {

inline constexpr int kTinyIn = 3, kTinyHidden = 4, kTinyOut = 2;
inline constexpr int kTinyParams = 5;
inline constexpr int kTinySizes[kTinyParams] = {kTinyHidden * kTinyIn, kTinyHidden, kTinyHidden,
                                                kTinyOut* kTinyHidden, kTinyOut};
inline constexpr int kTinyBatch = 2;  // Samples.

template <typename T>
using TinyWeights = std::array<std::vector<T>, kTinyParams>;  // In, bias, gain, out, out_bias.

template <typename T>
using TinyShift = std::array<T, kTinyIn>;

struct TinySample {
  std::array<double, kTinyIn> x;
  std::array<double, kTinyOut> target;
};

inline TinySample SampleOf(int rank, int batch, int i) {
  TinySample sample;
  for (int k = 0; k < kTinyIn; ++k) sample.x[k] = ToyModel::Noise(rank, batch, i, k);
  for (int o = 0; o < kTinyOut; ++o) sample.target[o] = 2 * ToyModel::Noise(rank, batch, i, 10 + o);
  return sample;
}

template <typename T>
TinyWeights<T> ZeroWeights() {
  TinyWeights<T> weights;
  for (int p = 0; p < kTinyParams; ++p) weights[p].assign(kTinySizes[p], T{0});
  return weights;
}

template <typename T>
TinyWeights<T> InitialWeights() {
  TinyWeights<T> weights = ZeroWeights<T>();
  for (int p = 0; p < kTinyParams; ++p) {
    for (int j = 0; j < kTinySizes[p]; ++j)
      weights[p][j] = static_cast<T>(ToyModel::Noise(7, 77, p, j));
  }
  return weights;
}

// Updates the buffer as a forward pass over the rank's batch does.
template <typename T>
void MoveShift(int rank, int batch, TinyShift<T>& shift) {
  for (int k = 0; k < kTinyIn; ++k) {
    T mean = 0;
    for (int i = 0; i < kTinyBatch; ++i)
      mean += static_cast<T>(SampleOf(rank, batch, i).x[k]) / T{kTinyBatch};
    shift[k] = T(0.75) * shift[k] + T(0.25) * mean;
  }
}

// Adds `share` of the sample's gradient.
template <typename T>
void AddGradient(const TinyWeights<T>& weights, const TinyShift<T>& shift, const TinySample& sample,
                 T share, TinyWeights<T>& gradient) {
  const auto& [in, bias, gain, out, out_bias] = weights;
  std::array<T, kTinyIn> x;
  for (int k = 0; k < kTinyIn; ++k) x[k] = static_cast<T>(sample.x[k]) - shift[k];
  std::array<T, kTinyHidden> hidden, from_above = {};
  for (int h = 0; h < kTinyHidden; ++h) {
    T sum = bias[h];
    for (int k = 0; k < kTinyIn; ++k) sum += in[h * kTinyIn + k] * x[k];
    hidden[h] = std::tanh(sum);
  }
  for (int o = 0; o < kTinyOut; ++o) {
    T error = out_bias[o] - static_cast<T>(sample.target[o]);
    for (int h = 0; h < kTinyHidden; ++h) error += out[o * kTinyHidden + h] * gain[h] * hidden[h];
    error *= share;
    gradient[4][o] += error;
    for (int h = 0; h < kTinyHidden; ++h) {
      gradient[3][o * kTinyHidden + h] += error * gain[h] * hidden[h];
      from_above[h] += error * out[o * kTinyHidden + h];
    }
  }
  for (int h = 0; h < kTinyHidden; ++h) {
    gradient[2][h] += from_above[h] * hidden[h];
    const T inner = from_above[h] * gain[h] * (1 - hidden[h] * hidden[h]);
    gradient[1][h] += inner;
    for (int k = 0; k < kTinyIn; ++k) gradient[0][h * kTinyIn + k] += inner * x[k];
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_PARITY_TINY_MODEL_H_
