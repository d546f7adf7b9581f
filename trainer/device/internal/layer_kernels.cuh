// Kernels of layers that are no products: rectifier, column sums, softmax loss, batch norm, average
// pool. What goes from layer to layer is float32, bfloat16 or float16; everything is computed in
// float32, with sums in an order of their own that is the same in each run.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_LAYER_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_LAYER_KERNELS_CUH_

#include <cstdint>

#ifndef __CUDACC__
#include <cmath>
#endif

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/trainer/device/loss.h"

namespace evenkeel::kernel {

// A channel's images in [batch, channels, area].
struct NormShape {
  int64_t batch;
  int channels;
  int area;
};

// For a part of a channel: mean and sum of squares around it; or for the gradient, the two sums.
struct NormPart {
  double first;
  double second;
  int64_t count;
};

// The memory of a layer's batch norm.
struct NormState {
  const float* weight;
  const float* bias;
  float* running_mean;
  float* running_variance;
  float* mean;       // The batch's, and 1 / sqrt(variance + epsilon), for backward.
  float* deviation;  // The latter.
};

constexpr float kNormEpsilon = 1e-5f;
constexpr float kNormMomentum = 0.1f;  // Weight of the new batch in the running statistics.

// Devices divide 32 bits several times faster than 64.
EK_DEVICE int64_t Quotient(int64_t i, int by) {
  return i <= 0xffffffff ? static_cast<uint32_t>(i) / static_cast<uint32_t>(by) : i / by;
}
EK_DEVICE int ChannelOf(const NormShape& shape, int64_t i) {
  const int64_t image = Quotient(i, shape.area);
  return static_cast<int>(image - Quotient(image, shape.channels) * shape.channels);
}

// Where element `i` of a channel, counted over the batch, lies.
EK_DEVICE int64_t NormAt(const NormShape& shape, int channel, int64_t i) {
  const int64_t sample = Quotient(i, shape.area);
  return (sample * shape.channels + channel) * shape.area + (i - sample * shape.area);
}

// Where the part of a block begins in each channel.
EK_DEVICE int64_t PartBegin(const NormShape& shape, int64_t block) {
  return shape.batch * shape.area * block / GridBlocks();
}

// Two parts as one (Chan et al.).
EK_DEVICE NormPart MergeMoments(const NormPart& a, const NormPart& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const double count = static_cast<double>(a.count + b.count);
  const double apart = b.first - a.first;
  return {a.first + apart * (static_cast<double>(b.count) / count),
          a.second + b.second +
              apart * apart * (static_cast<double>(a.count) * static_cast<double>(b.count) / count),
          a.count + b.count};
}

// to = combine(to, from), four elements at a time where they are aligned.
template <typename T, typename Combine>
EK_DEVICE void CombineInto(const T* from, T* to, int64_t count, Combine combine) {
  const int64_t fours = IsAlignedForFour<T>(from) && IsAlignedForFour<T>(to) ? count / 4 : 0;
  for (int64_t i = GlobalIndex(); i < fours; i += GlobalThreads()) {
    const Four<T> other = LoadFour(from + 4 * i);
    Four<T> own = LoadFour(to + 4 * i);
    for (int e = 0; e < 4; ++e) own.at[e] = combine(own.at[e], other.at[e]);
    StoreFour(to + 4 * i, own);
  }
  for (int64_t i = 4 * fours + GlobalIndex(); i < count; i += GlobalThreads())
    to[i] = combine(to[i], from[i]);
}

template <typename T>
EK_DEVICE void Relu(T* data, int64_t count) {
  CombineInto(data, data, count,
              [](T own, T) { return ToFloat(own) > 0.0f ? own : FromFloat<T>(0.0f); });
}

// diff = where the rectifier let something through.
template <typename T>
EK_DEVICE void ReluBackward(const T* output, T* diff, int64_t count) {
  CombineInto(output, diff, count,
              [](T own, T passed) { return ToFloat(passed) > 0.0f ? own : FromFloat<T>(0.0f); });
}

template <typename T>
EK_DEVICE void AddTo(const T* from, T* to, int64_t count) {
  CombineInto(from, to, count,
              [](T own, T other) { return FromFloat<T>(ToFloat(own) + ToFloat(other)); });
}

// Each block has 32 columns, one for each lane, and each of its warps every 8th row.
template <typename T>
EK_DEVICE void ColumnSums(const T* data, int64_t rows, int64_t columns, float* sums, int add) {
  EK_SHARED float parts[256];
  const int64_t column = BlockX() * kWarp + ThreadX() % kWarp;
  float sum = 0;
  if (column < columns) {
    for (int64_t row = ThreadX() / kWarp; row < rows; row += BlockThreads() / kWarp)
      sum += ToFloat(data[row * columns + column]);
  }
  parts[ThreadX()] = sum;
  SyncThreads();
  if (ThreadX() < kWarp && column < columns) {
    for (int other = ThreadX() + kWarp; other < BlockThreads(); other += kWarp) sum += parts[other];
    sums[column] = add != 0 ? sums[column] + sum : sum;
  }
}

// Row: a channel. Block: a part of it, whose moments go to parts[channel * blocks + block].
template <typename T>
EK_DEVICE void NormMoments(const T* source, NormShape shape, NormPart* parts) {
  EK_SHARED float scratch[32];
  const int channel = static_cast<int>(BlockY());
  const int64_t begin = PartBegin(shape, BlockX()), end = PartBegin(shape, BlockX() + 1);
  float sum = 0;
  for (int64_t i = begin + ThreadX(); i < end; i += BlockThreads())
    sum += ToFloat(source[NormAt(shape, channel, i)]);
  const float mean = BlockSum(sum, scratch) / static_cast<float>(end - begin > 0 ? end - begin : 1);
  float around = 0;
  for (int64_t i = begin + ThreadX(); i < end; i += BlockThreads()) {
    const float apart = ToFloat(source[NormAt(shape, channel, i)]) - mean;
    around += apart * apart;
  }
  around = BlockSum(around, scratch);
  if (ThreadX() == 0) parts[channel * GridBlocks() + BlockX()] = {mean, around, end - begin};
}

// Normalised and rectified.
template <typename T>
EK_DEVICE void NormApply(const T* source, T* output, NormShape shape, NormState state) {
  const int64_t count = shape.batch * shape.channels * shape.area;
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) {
    const int channel = ChannelOf(shape, i);
    const float value = (ToFloat(source[i]) - state.mean[channel]) * state.deviation[channel] *
                            state.weight[channel] +
                        state.bias[channel];
    output[i] = FromFloat<T>(value > 0.0f ? value : 0.0f);
  }
}

// The two sums that the gradient of a channel needs: of what came through the rectifier, and of
// that times the normalised source.
template <typename T>
EK_DEVICE void NormBackwardSums(const T* source, const T* output, const T* diff, NormShape shape,
                                NormState state, NormPart* parts) {
  EK_SHARED float scratch[32];
  const int channel = static_cast<int>(BlockY());
  const int64_t begin = PartBegin(shape, BlockX()), end = PartBegin(shape, BlockX() + 1);
  const float mean = state.mean[channel];
  const float deviation = state.deviation[channel];
  float plain = 0, times_source = 0;
  for (int64_t i = begin + ThreadX(); i < end; i += BlockThreads()) {
    const int64_t at = NormAt(shape, channel, i);
    const float through = ToFloat(output[at]) > 0.0f ? ToFloat(diff[at]) : 0.0f;
    plain += through;
    times_source += through * ((ToFloat(source[at]) - mean) * deviation);
  }
  plain = BlockSum(plain, scratch);
  times_source = BlockSum(times_source, scratch);
  if (ThreadX() == 0) parts[channel * GridBlocks() + BlockX()] = {plain, times_source, end - begin};
}

// In place: the output's gradient becomes the source's.
template <typename T>
EK_DEVICE void NormBackwardApply(const T* source, const T* output, T* diff, NormShape shape,
                                 NormState state, const NormPart* parts, int blocks) {
  const int64_t count = shape.batch * shape.channels * shape.area;
  for (int64_t i = GlobalIndex(); i < count; i += GlobalThreads()) {
    const int channel = ChannelOf(shape, i);
    const NormPart sums = parts[static_cast<int64_t>(channel) * blocks];
    const float share = 1.0f / static_cast<float>(sums.count);
    const float deviation = state.deviation[channel];
    const float normalised = (ToFloat(source[i]) - state.mean[channel]) * deviation;
    const float through = ToFloat(output[i]) > 0.0f ? ToFloat(diff[i]) : 0.0f;
    const float value = state.weight[channel] * deviation *
                        (through - static_cast<float>(sums.first) * share -
                         normalised * static_cast<float>(sums.second) * share);
    diff[i] = FromFloat<T>(value);
  }
}

// A warp for each image's channel.
template <typename T>
EK_DEVICE void AveragePool(const T* source, T* means, int64_t count, int area) {
  const int64_t warps = GlobalThreads() / kWarp;
  for (int64_t first = 0; first < count;
       first += warps) {  // As often for all threads: they wait for each other.
    const int64_t i = first + GlobalIndex() / kWarp;
    float sum = 0;
    if (i < count) {
      for (int pixel = ThreadX() % kWarp; pixel < area; pixel += kWarp)
        sum += ToFloat(source[i * area + pixel]);
    }
    sum = WarpSum(sum);
    if (i < count && ThreadX() % kWarp == 0)
      means[i] = FromFloat<T>(sum / static_cast<float>(area));
  }
}

template <typename T>
EK_DEVICE void AveragePoolBackward(const T* diff_means, T* diff_source, int64_t count, int area) {
  for (int64_t i = GlobalIndex(); i < count * area; i += GlobalThreads()) {
    diff_source[i] =
        FromFloat<T>(ToFloat(diff_means[Quotient(i, area)]) / static_cast<float>(area));
  }
}

// One block. If they are to, scores become their gradient: that of the mean loss, times `weight`.
EK_KERNEL(256, ek_class_loss)
(float* scores, const uint8_t* labels, int64_t samples, int classes, int wants_gradient,
 double weight, DeviceLoss* loss) {
  EK_SHARED double sums[32];
  EK_SHARED int counts[32];
  double sum = 0;
  int correct = 0;
  for (int64_t sample = ThreadX(); sample < samples; sample += BlockThreads()) {
    float* const row = scores + sample * classes;
    const int label = labels[sample];
    int best = 0;
    for (int i = 1; i < classes; ++i) best = row[i] > row[best] ? i : best;
    const double highest = row[best];
    double total = 0;
    for (int i = 0; i < classes; ++i) total += exp(row[i] - highest);
    sum += highest + log(total) - row[label];
    correct += best == label ? 1 : 0;
    if (wants_gradient == 0) continue;
    for (int i = 0; i < classes; ++i) {
      const double probability = exp(row[i] - highest) / total;
      row[i] = static_cast<float>(weight * (probability - (i == label ? 1 : 0)) /
                                  static_cast<double>(samples));
    }
  }
  sum = BlockSum(sum, sums);
  correct = BlockSum(correct, counts);
  if (ThreadX() == 0) {
    loss->sum = sum;
    loss->correct = correct;
  }
}

// A thread for each channel. In evaluation (parts is null) the running statistics are the batch's.
EK_KERNEL(256, ek_norm_finish)
(const NormPart* parts, int blocks, int channels, NormState state) {
  const int64_t channel = GlobalIndex();
  if (channel >= channels) return;
  double mean = state.running_mean[channel];
  double variance = state.running_variance[channel];
  if (parts != nullptr) {
    NormPart whole = parts[channel * blocks];
    for (int i = 1; i < blocks; ++i) whole = MergeMoments(whole, parts[channel * blocks + i]);
    mean = whole.first;
    variance = whole.second / static_cast<double>(whole.count);
    // One sample per channel has no unbiased variance; the biased one, zero, stands in.
    const double unbiased =
        whole.second / static_cast<double>(whole.count > 1 ? whole.count - 1 : 1);
    state.running_mean[channel] +=
        kNormMomentum * (static_cast<float>(mean) - state.running_mean[channel]);
    state.running_variance[channel] +=
        kNormMomentum * (static_cast<float>(unbiased) - state.running_variance[channel]);
  }
  state.mean[channel] = static_cast<float>(mean);
  state.deviation[channel] = static_cast<float>(1.0 / sqrt(variance + kNormEpsilon));
}

// A thread for each channel: its sums in parts[channel * blocks], and the gradients of weight and
//                            bias, if wanted.
EK_KERNEL(256, ek_norm_backward_finish)
(NormPart* parts, int blocks, int channels, float* diff_weight, int add_weight, float* diff_bias,
 int add_bias) {
  const int64_t channel = GlobalIndex();
  if (channel >= channels) return;
  NormPart whole = parts[channel * blocks];
  for (int i = 1; i < blocks; ++i) {
    whole.first += parts[channel * blocks + i].first;
    whole.second += parts[channel * blocks + i].second;
    whole.count += parts[channel * blocks + i].count;
  }
  parts[channel * blocks] = whole;
  const float for_weight = static_cast<float>(whole.second);
  const float for_bias = static_cast<float>(whole.first);
  if (diff_weight != nullptr)
    diff_weight[channel] = add_weight != 0 ? diff_weight[channel] + for_weight : for_weight;
  if (diff_bias != nullptr)
    diff_bias[channel] = add_bias != 0 ? diff_bias[channel] + for_bias : for_bias;
}

// Pointers are void, so that the same call fits all types.
#define EK_LAYER_KERNELS(T, type)                                                               \
  EK_KERNEL(256, ek_relu_##type)(void* data, int64_t count) {                                   \
    Relu(static_cast<T*>(data), count);                                                         \
  }                                                                                             \
  EK_KERNEL(256, ek_relu_backward_##type)(const void* output, void* diff, int64_t count) {      \
    ReluBackward(static_cast<const T*>(output), static_cast<T*>(diff), count);                  \
  }                                                                                             \
  EK_KERNEL(256, ek_add_to_##type)(const void* from, void* to, int64_t count) {                 \
    AddTo(static_cast<const T*>(from), static_cast<T*>(to), count);                             \
  }                                                                                             \
  EK_KERNEL(256, ek_column_sums_##type)                                                         \
  (const void* data, int64_t rows, int64_t columns, float* sums, int add) {                     \
    ColumnSums(static_cast<const T*>(data), rows, columns, sums, add);                          \
  }                                                                                             \
  EK_KERNEL(256, ek_norm_moments_##type)                                                        \
  (const void* source, NormShape shape, NormPart* parts) {                                      \
    NormMoments(static_cast<const T*>(source), shape, parts);                                   \
  }                                                                                             \
  EK_KERNEL(256, ek_norm_apply_##type)                                                          \
  (const void* source, void* output, NormShape shape, NormState state) {                        \
    NormApply(static_cast<const T*>(source), static_cast<T*>(output), shape, state);            \
  }                                                                                             \
  EK_KERNEL(256, ek_norm_backward_sums_##type)                                                  \
  (const void* source, const void* output, const void* diff, NormShape shape, NormState state,  \
   NormPart* parts) {                                                                           \
    NormBackwardSums(static_cast<const T*>(source), static_cast<const T*>(output),              \
                     static_cast<const T*>(diff), shape, state, parts);                         \
  }                                                                                             \
  EK_KERNEL(256, ek_norm_backward_apply_##type)                                                 \
  (const void* source, const void* output, void* diff, NormShape shape, NormState state,        \
   const NormPart* parts, int blocks) {                                                         \
    NormBackwardApply(static_cast<const T*>(source), static_cast<const T*>(output),             \
                      static_cast<T*>(diff), shape, state, parts, blocks);                      \
  }                                                                                             \
  EK_KERNEL(256, ek_average_pool_##type)                                                        \
  (const void* source, void* means, int64_t count, int area) {                                  \
    AveragePool(static_cast<const T*>(source), static_cast<T*>(means), count, area);            \
  }                                                                                             \
  EK_KERNEL(256, ek_average_pool_backward_##type)                                               \
  (const void* diff_means, void* diff_source, int64_t count, int area) {                        \
    AveragePoolBackward(static_cast<const T*>(diff_means), static_cast<T*>(diff_source), count, \
                        area);                                                                  \
  }
EK_LAYER_KERNELS(float, float)
EK_LAYER_KERNELS(BFloat, bfloat)
EK_LAYER_KERNELS(Half, half)
#undef EK_LAYER_KERNELS

}  // namespace evenkeel::kernel

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_LAYER_KERNELS_CUH_
