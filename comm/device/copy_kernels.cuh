// The kernels behind comm/device/copy.h.
//
// One block moves a chunk: four elements at a time per thread where the addresses allow it, a
// thread's loads before its first store.

#ifndef EVENKEEL_COMM_DEVICE_COPY_KERNELS_CUH_
#define EVENKEEL_COMM_DEVICE_COPY_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

namespace evenkeel::kernel {

enum class CopyType : uint8_t {
  kFloat,
  kDouble,
  kHalf,
  kBFloat,
  kBytes
};  // kBytes: `count` of them, as they are.

struct CopyChunk {
  void* to;
  const void* from;  // Null: `fill`.
  int64_t count;
  double fill;
  CopyType to_type;
  CopyType from_type;
};

inline constexpr int kCopyThreads = 256;
inline constexpr int kCopyUnroll = 4;
inline constexpr int64_t kCopyChunk =
    int64_t{kCopyThreads} * 4 * kCopyUnroll;  // For elements of 4 bytes; smaller ones allow more.
inline constexpr int kInlineChunks = 64;

// Chunks that are launched with the kernel's arguments. A chunk may be of any size here.
struct InlineChunks {
  CopyChunk chunks[kInlineChunks];
};

// A value on its way: in double between doubles, else in float.
template <typename To, typename From>
struct Converter {
  float factor;
  EK_DEVICE explicit Converter(double scale) : factor(static_cast<float>(scale)) {}
  EK_DEVICE To operator()(From value) const { return FromFloat<To>(ToFloat(value) * factor); }
};
template <>
struct Converter<double, double> {
  double factor;
  EK_DEVICE explicit Converter(double scale) : factor(scale) {}
  EK_DEVICE double operator()(double value) const { return value * factor; }
};
// As it is, bit for bit.
template <typename T>
struct Mover {
  EK_DEVICE T operator()(T value) const { return value; }
};

// Elements [0, count), by the threads of the block.
template <typename To, typename From, typename Convert>
EK_DEVICE void MoveElements(To* to, const From* from, int64_t count, Convert convert) {
  int64_t done = 0;
  if (IsAlignedForFour<To>(to) && IsAlignedForFour<From>(from)) {
    const int64_t fours = count / 4;
    int64_t i = ThreadX();
    for (; i + int64_t{kCopyUnroll - 1} * BlockThreads() < fours;
         i += int64_t{kCopyUnroll} * BlockThreads()) {
      Four<From> loaded[kCopyUnroll];
      for (int u = 0; u < kCopyUnroll; ++u)
        loaded[u] = LoadFour(from + 4 * (i + int64_t{u} * BlockThreads()));
      for (int u = 0; u < kCopyUnroll; ++u) {
        Four<To> stored;
        for (int e = 0; e < 4; ++e) stored.at[e] = convert(loaded[u].at[e]);
        StoreFour(to + 4 * (i + int64_t{u} * BlockThreads()), stored);
      }
    }
    for (; i < fours; i += BlockThreads()) {
      const Four<From> loaded = LoadFour(from + 4 * i);
      Four<To> stored;
      for (int e = 0; e < 4; ++e) stored.at[e] = convert(loaded.at[e]);
      StoreFour(to + 4 * i, stored);
    }
    done = fours * 4;
  }
  int64_t i = done + ThreadX();
  constexpr int kScalars = 2 * kCopyUnroll;
  for (; i + int64_t{kScalars - 1} * BlockThreads() < count;
       i += int64_t{kScalars} * BlockThreads()) {
    From loaded[kScalars];
    for (int u = 0; u < kScalars; ++u) loaded[u] = from[i + int64_t{u} * BlockThreads()];
    for (int u = 0; u < kScalars; ++u) to[i + int64_t{u} * BlockThreads()] = convert(loaded[u]);
  }
  for (; i < count; i += BlockThreads()) to[i] = convert(from[i]);
}

template <typename To>
EK_DEVICE void FillElements(To* to, int64_t count, double fill) {
  const To value = FromFloat<To>(static_cast<float>(fill));
  for (int64_t i = ThreadX(); i < count; i += BlockThreads()) to[i] = value;
}

struct Word {
  uint32_t bits;
};
EK_DEVICE void MoveBytes(void* to, const void* from, int64_t bytes) {
  const uint64_t places = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  int64_t moved = 0;
  if (places % sizeof(Word) == 0) {
    const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
    MoveElements(static_cast<Word*>(to), static_cast<const Word*>(from), words, Mover<Word>());
    moved = words * static_cast<int64_t>(sizeof(Word));
  }
  auto* const to_bytes = static_cast<uint8_t*>(to);
  const auto* const from_bytes = static_cast<const uint8_t*>(from);
  for (int64_t i = moved + ThreadX(); i < bytes; i += BlockThreads()) to_bytes[i] = from_bytes[i];
}

EK_DEVICE int64_t BytesOf(CopyType type) {
  switch (type) {
    case CopyType::kFloat:
      return 4;
    case CopyType::kDouble:
      return 8;
    case CopyType::kHalf:
    case CopyType::kBFloat:
      return 2;
    case CopyType::kBytes:
      return 1;
  }
  return 1;
}

template <typename To, typename From>
EK_DEVICE void ConvertElements(const CopyChunk& chunk, double factor) {
  MoveElements(static_cast<To*>(chunk.to), static_cast<const From*>(chunk.from), chunk.count,
               Converter<To, From>(factor));
}

template <typename To>
EK_DEVICE void CopyTo(const CopyChunk& chunk, double factor) {
  if (chunk.from == nullptr)
    return FillElements(static_cast<To*>(chunk.to), chunk.count, chunk.fill);
  switch (chunk.from_type) {
    case CopyType::kFloat:
      return ConvertElements<To, float>(chunk, factor);
    case CopyType::kDouble:
      return ConvertElements<To, double>(chunk, factor);
    case CopyType::kHalf:
      return ConvertElements<To, Half>(chunk, factor);
    case CopyType::kBFloat:
      return ConvertElements<To, BFloat>(chunk, factor);
    case CopyType::kBytes:
      return;
  }
}

EK_DEVICE void CopyOneChunk(const CopyChunk& chunk, double factor) {
  if (chunk.from != nullptr && chunk.to_type == chunk.from_type &&
      (factor == 1 || chunk.to_type == CopyType::kBytes)) {
    return MoveBytes(chunk.to, chunk.from, chunk.count * BytesOf(chunk.to_type));
  }
  switch (chunk.to_type) {
    case CopyType::kFloat:
      return CopyTo<float>(chunk, factor);
    case CopyType::kDouble:
      return CopyTo<double>(chunk, factor);
    case CopyType::kHalf:
      return CopyTo<Half>(chunk, factor);
    case CopyType::kBFloat:
      return CopyTo<BFloat>(chunk, factor);
    case CopyType::kBytes:
      return FillElements(static_cast<uint8_t*>(chunk.to), chunk.count, chunk.fill);
  }
}

EK_DEVICE double FactorOf(double scale, const float* scale_at) {
  return scale_at == nullptr ? scale : scale * static_cast<double>(*scale_at);
}

}  // namespace evenkeel::kernel

namespace evenkeel {

// A block per chunk.
EK_KERNEL(256, ek_copy_chunks)
(const kernel::CopyChunk* chunks, int64_t count, double scale, const float* scale_at) {
  const double factor = kernel::FactorOf(scale, scale_at);
  for (int64_t i = kernel::BlockX(); i < count; i += kernel::GridBlocks())
    kernel::CopyOneChunk(chunks[i], factor);
}

// A row of blocks per chunk.
EK_KERNEL(256, ek_copy_inline)
(const EK_CONSTANT_ARGUMENT kernel::InlineChunks chunks, double scale, const float* scale_at) {
  const double factor = kernel::FactorOf(scale, scale_at);
  const kernel::CopyChunk& whole = chunks.chunks[kernel::BlockY()];
  const int64_t to_bytes = kernel::BytesOf(whole.to_type),
                from_bytes = kernel::BytesOf(whole.from_type);
  for (int64_t begin = kernel::BlockX() * kernel::kCopyChunk; begin < whole.count;
       begin += kernel::GridBlocks() * kernel::kCopyChunk) {
    kernel::CopyChunk part = whole;
    part.to = static_cast<uint8_t*>(whole.to) + begin * to_bytes;
    if (whole.from != nullptr)
      part.from = static_cast<const uint8_t*>(whole.from) + begin * from_bytes;
    part.count =
        whole.count - begin < kernel::kCopyChunk ? whole.count - begin : kernel::kCopyChunk;
    kernel::CopyOneChunk(part, factor);
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_COPY_KERNELS_CUH_
