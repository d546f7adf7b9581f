// The device features that kernel sources may use (kernel.h says how kernels are made). Compiled by
// nvcc, and by the C++ compiler for the host, where a block's threads run one after the other and
// yield to each other where they wait.
//
// Numbers: Half and BFloat are storage; ToFloat() and FromFloat<T>() convert, to the nearest, ties
//          to even.
// Fours:   LoadFour() and StoreFour() move four elements at once, where IsAlignedForFour() says
//          they may.
// Sums:    WarpSum() and BlockSum() add in one fixed order, the same on the host.

#ifndef EVENKEEL_COMM_DEVICE_KERNEL_LANGUAGE_H_
#define EVENKEEL_COMM_DEVICE_KERNEL_LANGUAGE_H_

#include <cstdint>

#ifdef __CUDACC__
#include <cuda_fp16.h>

#define EK_DEVICE __device__ __forceinline__
#define EK_SHARED __shared__
#define EK_KERNEL(most_threads, name) \
  extern "C" __global__ void __launch_bounds__(most_threads) name
// For an argument that is indexed: it is read in place, without a copy per thread. The argument is
// const.
#define EK_CONSTANT_ARGUMENT __grid_constant__

#else

#include <cmath>
#include <cstring>

#include "evenkeel/comm/device/kernel_on_host.h"

#define EK_DEVICE inline
// One per block at a time: a simulated device runs the blocks of a launch on one thread, one after
//                          the other.
#define EK_SHARED static thread_local
#define EK_KERNEL(most_threads, name) static void name
#define EK_CONSTANT_ARGUMENT

#endif

namespace evenkeel::kernel {

inline constexpr int kWarp = 32;

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

#ifdef __CUDACC__

EK_DEVICE int ThreadX() { return static_cast<int>(threadIdx.x); }
EK_DEVICE int BlockThreads() { return static_cast<int>(blockDim.x); }
EK_DEVICE int64_t BlockX() { return blockIdx.x; }
EK_DEVICE int64_t BlockY() { return blockIdx.y; }
EK_DEVICE int64_t GridBlocks() { return gridDim.x; }
EK_DEVICE void SyncThreads() { __syncthreads(); }
template <typename T>
EK_DEVICE T ShuffleXor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
EK_DEVICE void AtomicAdd(float* to, float value) { atomicAdd(to, value); }
EK_DEVICE void AtomicAdd(double* to, double value) { atomicAdd(to, value); }
EK_DEVICE void AtomicAdd(int* to, int value) { atomicAdd(to, value); }
EK_DEVICE float BitsToFloat(uint32_t bits) { return __uint_as_float(bits); }
EK_DEVICE uint32_t FloatToBits(float value) { return __float_as_uint(value); }
EK_DEVICE float ToFloat(Half value) { return __half2float(__ushort_as_half(value.bits)); }
EK_DEVICE Half HalfOf(float value) { return Half{__half_as_ushort(__float2half_rn(value))}; }
EK_DEVICE float ReciprocalSqrt(float value) { return rsqrtf(value); }
EK_DEVICE float Exp(float value) { return expf(value); }
EK_DEVICE double Log(double value) { return log(value); }

#else

inline int ThreadX() { return internal::HostThread().thread; }
inline int BlockThreads() { return internal::HostThread().threads; }
inline int64_t BlockX() { return internal::HostThread().block; }
inline int64_t BlockY() { return internal::HostThread().row; }
inline int64_t GridBlocks() { return internal::HostThread().blocks; }
inline void SyncThreads() { internal::WaitForBlock(); }
template <typename T>
T ShuffleXor(T value, int mask) {
  static_assert(sizeof(T) <= sizeof(double));
  double& own = internal::Mailbox(ThreadX());
  std::memcpy(&own, &value, sizeof(T));
  SyncThreads();
  T other;
  std::memcpy(&other, &internal::Mailbox(ThreadX() ^ mask), sizeof(T));
  SyncThreads();
  return other;
}
inline void AtomicAdd(float* to, float value) { *to += value; }
inline void AtomicAdd(double* to, double value) { *to += value; }
inline void AtomicAdd(int* to, int value) { *to += value; }
inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float ToFloat(Half value) { return internal::HalfToFloat(value.bits); }
inline Half HalfOf(float value) { return Half{internal::FloatToHalf(value)}; }
inline float ReciprocalSqrt(float value) { return 1.0f / std::sqrt(value); }
inline float Exp(float value) { return std::exp(value); }
inline double Log(double value) { return std::log(value); }

#endif

EK_DEVICE int64_t GlobalIndex() { return BlockX() * BlockThreads() + ThreadX(); }
EK_DEVICE int64_t GlobalThreads() { return GridBlocks() * BlockThreads(); }

EK_DEVICE float ToFloat(float value) { return value; }
EK_DEVICE float ToFloat(double value) { return static_cast<float>(value); }
EK_DEVICE float ToFloat(BFloat value) {
  return BitsToFloat(static_cast<uint32_t>(value.bits) << 16);
}
EK_DEVICE BFloat BFloatOf(float value) {
  const uint32_t bits = FloatToBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return BFloat{static_cast<uint16_t>((bits >> 16) | 0x40u)};  // Stays a NaN.
  return BFloat{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <typename T>
EK_DEVICE T FromFloat(float value) {
  return static_cast<T>(value);
}
template <>
EK_DEVICE Half FromFloat<Half>(float value) {
  return HalfOf(value);
}
template <>
EK_DEVICE BFloat FromFloat<BFloat>(float value) {
  return BFloatOf(value);
}

// Four elements, moved at once: at most 16 bytes in one access.
template <typename T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Four {
  T at[4];
};

template <typename T>
EK_DEVICE bool IsAlignedForFour(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(Four<T>) == 0;
}

#ifdef __CUDACC__

// In the device's memory, both. Of an address that was itself read from memory nvcc does not know
// that, and would look each time in which memory it lies.
template <typename T>
EK_DEVICE Four<T> LoadFour(const T* data) {
  __builtin_assume(__isGlobal(data));
  return *reinterpret_cast<const Four<T>*>(data);
}
// Said so that it stays one store: of an assignment beside a branch that stores the elements
// one by one, nvcc makes one code for both.
template <typename T>
EK_DEVICE void StoreFour(T* data, const Four<T>& four) {
  if constexpr (sizeof(four) == sizeof(uint4)) {
    uint4 words;
    memcpy(&words, &four, sizeof(words));
    __stwb(reinterpret_cast<uint4*>(data), words);
  } else if constexpr (sizeof(four) == sizeof(uint2)) {
    uint2 words;
    memcpy(&words, &four, sizeof(words));
    __stwb(reinterpret_cast<uint2*>(data), words);
  } else {
    *reinterpret_cast<Four<T>*>(data) = four;
  }
}

#else

template <typename T>
Four<T> LoadFour(const T* data) {
  Four<T> four;
  std::memcpy(&four, data, sizeof(four));
  return four;
}
template <typename T>
void StoreFour(T* data, const Four<T>& four) {
  std::memcpy(data, &four, sizeof(four));
}

#endif

// Returns the result over all threads of the warp, on all of them.
template <typename T>
EK_DEVICE T WarpSum(T value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += ShuffleXor(value, mask);
  return value;
}
template <typename T>
EK_DEVICE T WarpMax(T value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const T other = ShuffleXor(value, mask);
    value = value < other ? other : value;
  }
  return value;
}

// Returns the result over all threads of the block, on all of them. `scratch`: EK_SHARED T[32],
// free again when it returns.
template <typename T>
EK_DEVICE T BlockSum(T value, T* scratch) {
  value = WarpSum(value);
  if (ThreadX() % kWarp == 0) scratch[ThreadX() / kWarp] = value;
  SyncThreads();
  T sum = ThreadX() % kWarp < BlockThreads() / kWarp ? scratch[ThreadX() % kWarp] : T{0};
  sum = WarpSum(sum);
  SyncThreads();
  return sum;
}
template <typename T>
EK_DEVICE T BlockMax(T value, T* scratch) {
  value = WarpMax(value);
  if (ThreadX() % kWarp == 0) scratch[ThreadX() / kWarp] = value;
  SyncThreads();
  T largest = scratch[ThreadX() % kWarp < BlockThreads() / kWarp ? ThreadX() % kWarp : 0];
  largest = WarpMax(largest);
  SyncThreads();
  return largest;
}

}  // namespace evenkeel::kernel

#endif  // EVENKEEL_COMM_DEVICE_KERNEL_LANGUAGE_H_
