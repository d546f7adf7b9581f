// Batch normalisation of [samples, channels, spatial] on a device, in the steps between which ranks
// talk to each other.
//
//   ek_batch_norm_moments     values -> of each channel the mean and the squared deviations from
//     it, of each part
//   ek_batch_norm_own         parts -> own: [1 + 2 * channels], the count, then each channel's mean
//     and squares
//   ek_batch_norm_statistics  own of all ranks -> each channel's mean and 1 / deviation; follows
//     the running ones
//   ek_batch_norm_normalize   values -> outputs
//   ek_batch_norm_products    gradients -> of each channel their sum and that of their products
//     with normal values, of
//                             each part
//   ek_batch_norm_sums        parts -> sums: [2 * channels], and the gradients of gamma and beta
//   ek_batch_norm_pass_back   gradients, and the sums of all ranks -> gradients of the values
//
// A part is a row of blocks, so that a few channels fill a device, too. All numbers between are
// doubles. Sums are in an order that depends on the shape alone: of each thread, of each block, of
// the parts, of the ranks.

#ifndef EVENKEEL_BUCKET_LAYERS_BATCH_NORM_CUH_
#define EVENKEEL_BUCKET_LAYERS_BATCH_NORM_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

#ifndef __CUDACC__
#include <cmath>
#endif

namespace evenkeel::batch_norm {

inline constexpr int kThreads = 256;
inline constexpr int kFewestValues = 2;  // A variance needs this many values per channel.

struct Sizes {
  int64_t samples, channels, spatial;
  int64_t parts;
};

struct Moments {
  double count, mean, squares;
};

// The source is named in sync_batch_norm.h.
EK_DEVICE void Add(Moments& sum, const Moments& other) {
  if (other.count == 0) return;
  const double both = sum.count + other.count;
  const double apart = other.mean - sum.mean;
  sum.mean += apart * other.count / both;
  sum.squares += other.squares + apart * apart * sum.count * other.count / both;
  sum.count = both;
}

// Where the part begins, among the values of a channel.
EK_DEVICE int64_t BeginOf(const Sizes& sizes, int64_t part) {
  return sizes.samples * sizes.spatial * part / sizes.parts;
}

// Calls visit(index) for this thread's values of the block's channel and part. No division for
// each: they are slow.
template <typename Visit>
EK_DEVICE void ForEachOfChannel(const Sizes& sizes, Visit visit) {
  const int64_t channel = kernel::BlockX(), end = BeginOf(sizes, kernel::BlockY() + 1),
                step = kernel::BlockThreads();
  int64_t k = BeginOf(sizes, kernel::BlockY()) + kernel::ThreadX();
  int64_t sample = k / sizes.spatial, place = k % sizes.spatial;
  const int64_t samples = step / sizes.spatial, places = step % sizes.spatial;
  for (; k < end; k += step) {
    visit((sample * sizes.channels + channel) * sizes.spatial + place);
    sample += samples;
    place += places;
    if (place >= sizes.spatial) {
      place -= sizes.spatial;
      ++sample;
    }
  }
}

// Calls visit(channel, index) for this thread's values.
template <typename Visit>
EK_DEVICE void ForEachValue(const Sizes& sizes, Visit visit) {
  const int64_t count = sizes.samples * sizes.channels * sizes.spatial,
                step = kernel::GlobalThreads();
  int64_t i = kernel::GlobalIndex();
  int64_t place = i % sizes.spatial, channel = i / sizes.spatial % sizes.channels;
  const int64_t places = step % sizes.spatial, channels = step / sizes.spatial % sizes.channels;
  for (; i < count; i += step) {
    visit(channel, i);
    place += places;
    channel += channels;
    if (place >= sizes.spatial) {
      place -= sizes.spatial;
      ++channel;
    }
    if (channel >= sizes.channels) channel -= sizes.channels;
  }
}

template <typename T>
EK_DEVICE void FindMoments(const T* input, const Sizes& sizes, double* parts) {
  EK_SHARED double scratch[kernel::kWarp];
  const double count =
      static_cast<double>(BeginOf(sizes, kernel::BlockY() + 1) - BeginOf(sizes, kernel::BlockY()));
  double sum = 0;
  ForEachOfChannel(sizes, [&](int64_t i) { sum += static_cast<double>(input[i]); });
  sum = kernel::BlockSum(sum, scratch);
  const double mean = count > 0 ? sum / count : 0;
  double squares = 0;
  ForEachOfChannel(sizes, [&](int64_t i) {
    const double deviation = static_cast<double>(input[i]) - mean;
    squares += deviation * deviation;
  });
  squares = kernel::BlockSum(squares, scratch);
  if (kernel::ThreadX() != 0) return;
  double* const mine = parts + 2 * (kernel::BlockY() * sizes.channels + kernel::BlockX());
  mine[0] = mean;
  mine[1] = squares;
}

template <typename T>
EK_DEVICE void Follow(T& running, double momentum, double now) {
  running = static_cast<T>(momentum * now + (1 - momentum) * static_cast<double>(running));
}

template <typename T>
EK_DEVICE void Normalize(const T* input, const T* gamma, const T* beta, const double* statistics,
                         const Sizes& sizes, T* output) {
  ForEachValue(sizes, [&](int64_t c, int64_t i) {
    const double normal =
        (static_cast<double>(input[i]) - statistics[2 * c]) * statistics[2 * c + 1];
    output[i] =
        static_cast<T>(static_cast<double>(gamma[c]) * normal + static_cast<double>(beta[c]));
  });
}

template <typename T>
EK_DEVICE void FindProducts(const T* input, const T* grad, const double* statistics,
                            const Sizes& sizes, double* parts) {
  EK_SHARED double scratch[kernel::kWarp];
  const double mean = statistics[2 * kernel::BlockX()],
               inverse = statistics[2 * kernel::BlockX() + 1];
  double sum = 0, products = 0;
  ForEachOfChannel(sizes, [&](int64_t i) {
    const double g = static_cast<double>(grad[i]);
    sum += g;
    products += g * ((static_cast<double>(input[i]) - mean) * inverse);
  });
  sum = kernel::BlockSum(sum, scratch);
  products = kernel::BlockSum(products, scratch);
  if (kernel::ThreadX() != 0) return;
  double* const mine = parts + 2 * (kernel::BlockY() * sizes.channels + kernel::BlockX());
  mine[0] = sum;
  mine[1] = products;
}

template <typename T>
EK_DEVICE void PassBack(const T* input, const T* grad, const T* gamma, const double* statistics,
                        const double* sums, const Sizes& sizes, T* output) {
  const double count = statistics[2 * sizes.channels];
  ForEachValue(sizes, [&](int64_t c, int64_t i) {
    const double normal =
        (static_cast<double>(input[i]) - statistics[2 * c]) * statistics[2 * c + 1];
    const double centred =
        static_cast<double>(grad[i]) - (sums[2 * c] + normal * sums[2 * c + 1]) / count;
    output[i] = static_cast<T>(static_cast<double>(gamma[c]) * statistics[2 * c + 1] * centred);
  });
}

}  // namespace evenkeel::batch_norm

namespace evenkeel {

// parts: [parts, channels, 2].
EK_KERNEL(256, ek_batch_norm_moments)
(const void* input, bool is_double, batch_norm::Sizes sizes, double* parts) {
  is_double ? batch_norm::FindMoments(static_cast<const double*>(input), sizes, parts)
            : batch_norm::FindMoments(static_cast<const float*>(input), sizes, parts);
}

EK_KERNEL(256, ek_batch_norm_own)(const double* parts, batch_norm::Sizes sizes, double* own) {
  for (int64_t c = kernel::GlobalIndex(); c < sizes.channels; c += kernel::GlobalThreads()) {
    batch_norm::Moments sum{0, 0, 0};
    for (int64_t part = 0; part < sizes.parts; ++part) {
      const double* const theirs = parts + 2 * (part * sizes.channels + c);
      batch_norm::Add(sum, {static_cast<double>(batch_norm::BeginOf(sizes, part + 1) -
                                                batch_norm::BeginOf(sizes, part)),
                            theirs[0], theirs[1]});
    }
    own[1 + 2 * c] = sum.mean;
    own[2 + 2 * c] = sum.squares;
    if (c == 0) own[0] = sum.count;
  }
}

// statistics: [2 * channels + 2], behind each channel's two the count, and the least one since
// `forgets`. Without a sample on any rank there is nothing to compute, so that is enough.
EK_KERNEL(256, ek_batch_norm_statistics)
(const double* all, int ranks, int64_t channels, double epsilon, double momentum, void* mean,
 void* variance, bool is_double, bool forgets, double* statistics) {
  for (int64_t c = kernel::GlobalIndex(); c < channels; c += kernel::GlobalThreads()) {
    batch_norm::Moments sum{0, 0, 0};
    for (int rank = 0; rank < ranks; ++rank) {
      const double* const theirs = all + rank * (1 + 2 * channels);
      batch_norm::Add(sum, {theirs[0], theirs[1 + 2 * c], theirs[2 + 2 * c]});
    }
    const bool is_enough = sum.count >= batch_norm::kFewestValues;
    statistics[2 * c] = sum.mean;
    statistics[2 * c + 1] = is_enough ? 1.0 / sqrt(sum.squares / sum.count + epsilon) : 0.0;
    if (c == 0) {
      double* const counts = statistics + 2 * channels;
      counts[0] = sum.count;
      const double count = sum.count == 0 ? batch_norm::kFewestValues : sum.count;
      counts[1] = forgets || count < counts[1] ? count : counts[1];
    }
    if (!is_enough) continue;
    if (is_double) {
      batch_norm::Follow(static_cast<double*>(mean)[c], momentum, sum.mean);
      batch_norm::Follow(static_cast<double*>(variance)[c], momentum,
                         sum.squares / (sum.count - 1));
    } else {
      batch_norm::Follow(static_cast<float*>(mean)[c], momentum, sum.mean);
      batch_norm::Follow(static_cast<float*>(variance)[c], momentum, sum.squares / (sum.count - 1));
    }
  }
}

EK_KERNEL(256, ek_batch_norm_normalize)
(const void* input, const void* gamma, const void* beta, bool is_double, const double* statistics,
 batch_norm::Sizes sizes, void* output) {
  is_double
      ? batch_norm::Normalize(static_cast<const double*>(input), static_cast<const double*>(gamma),
                              static_cast<const double*>(beta), statistics, sizes,
                              static_cast<double*>(output))
      : batch_norm::Normalize(static_cast<const float*>(input), static_cast<const float*>(gamma),
                              static_cast<const float*>(beta), statistics, sizes,
                              static_cast<float*>(output));
}

EK_KERNEL(256, ek_batch_norm_products)
(const void* input, const void* grad, bool is_double, const double* statistics,
 batch_norm::Sizes sizes, double* parts) {
  is_double ? batch_norm::FindProducts(static_cast<const double*>(input),
                                       static_cast<const double*>(grad), statistics, sizes, parts)
            : batch_norm::FindProducts(static_cast<const float*>(input),
                                       static_cast<const float*>(grad), statistics, sizes, parts);
}

EK_KERNEL(256, ek_batch_norm_sums)
(const double* parts, batch_norm::Sizes sizes, double* sums, void* grad_gamma, void* grad_beta,
 bool is_double) {
  for (int64_t c = kernel::GlobalIndex(); c < sizes.channels; c += kernel::GlobalThreads()) {
    double sum = 0, products = 0;
    for (int64_t part = 0; part < sizes.parts; ++part) {
      sum += parts[2 * (part * sizes.channels + c)];
      products += parts[2 * (part * sizes.channels + c) + 1];
    }
    sums[2 * c] = sum;
    sums[2 * c + 1] = products;
    if (is_double) {
      static_cast<double*>(grad_beta)[c] = sum;
      static_cast<double*>(grad_gamma)[c] = products;
    } else {
      static_cast<float*>(grad_beta)[c] = static_cast<float>(sum);
      static_cast<float*>(grad_gamma)[c] = static_cast<float>(products);
    }
  }
}

EK_KERNEL(256, ek_batch_norm_pass_back)
(const void* input, const void* grad, const void* gamma, bool is_double, const double* statistics,
 const double* sums, batch_norm::Sizes sizes, void* output) {
  is_double
      ? batch_norm::PassBack(static_cast<const double*>(input), static_cast<const double*>(grad),
                             static_cast<const double*>(gamma), statistics, sums, sizes,
                             static_cast<double*>(output))
      : batch_norm::PassBack(static_cast<const float*>(input), static_cast<const float*>(grad),
                             static_cast<const float*>(gamma), statistics, sums, sizes,
                             static_cast<float*>(output));
}

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_LAYERS_BATCH_NORM_CUH_
