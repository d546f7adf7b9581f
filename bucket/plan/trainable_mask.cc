#include "evenkeel/bucket/plan/trainable_mask.h"

#include <bit>
#include <limits>

#include "absl/base/macros.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/collective.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace evenkeel {
namespace {

constexpr int kWordBits = 64;
constexpr int kSizeBytes =
    8;  // A serialized mask: its size, then its bits, both with the lowest byte first.

int WordCount(int size) { return (size + kWordBits - 1) / kWordBits; }
int64_t BitBytes(int64_t size) { return (size + 7) / 8; }

// The bits of the last word that belong to a mask of that size.
uint64_t LastWordBits(int size) {
  const int used = size % kWordBits;
  return used == 0 ? ~uint64_t{0} : (uint64_t{1} << used) - 1;
}

// Bit i of the result: flags[i] is not zero. A million flags have to pass in less than 100
//                      microseconds.
uint64_t Pack64(const uint8_t* flags) {
  uint64_t word = 0;
#if defined(__SSE2__)
  for (int part = 0; part < 4; ++part) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + 16 * part));
    const int zeros = _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128()));
    word |= static_cast<uint64_t>(~zeros & 0xffff) << (16 * part);
  }
#else
  for (int i = 0; i < kWordBits; ++i) word |= static_cast<uint64_t>(flags[i] != 0) << i;
#endif
  return word;
}

uint64_t PackSome(std::span<const uint8_t> flags) {
  uint64_t word = 0;
  for (size_t i = 0; i < flags.size(); ++i) word |= static_cast<uint64_t>(flags[i] != 0) << i;
  return word;
}

}  // namespace

TrainableMask::TrainableMask(int size, bool trained)
    : size_(size), words_(WordCount(size), trained ? ~uint64_t{0} : 0) {
  if (!words_.empty()) words_.back() &= LastWordBits(size);
}

int TrainableMask::CountTrained() const {
  int count = 0;
  for (uint64_t word : words_) count += std::popcount(word);
  return count;
}

uint64_t TrainableMask::Hash() const {
  uint64_t hash = StableHash(0, static_cast<uint64_t>(size_));
  for (uint64_t word : words_) hash = StableHash(hash, word);
  return hash;
}

bool TrainableMask::Set(int index, bool trained) {
  if ((*this)[index] == trained) return false;
  words_[index / kWordBits] ^= uint64_t{1} << (index % kWordBits);
  return true;
}

bool TrainableMask::Set(std::span<const uint8_t> flags) {
  ABSL_HARDENING_ASSERT(flags.size() == static_cast<size_t>(size_));
  const int whole_words = size_ / kWordBits;
  uint64_t changed = 0;
  for (int i = 0; i < whole_words; ++i) {
    const uint64_t word = Pack64(flags.data() + int64_t{i} * kWordBits);
    changed |= words_[i] ^ word;
    words_[i] = word;
  }
  if (size_ % kWordBits != 0) {
    const uint64_t word =
        PackSome(flags.subspan(int64_t{whole_words} * kWordBits, size_ % kWordBits));
    changed |= words_.back() ^ word;
    words_.back() = word;
  }
  return changed != 0;
}

void TrainableMask::Append(bool trained) {
  if (size_ % kWordBits == 0) words_.push_back(0);
  ++size_;
  Set(size_ - 1, trained);
}

std::string TrainableMask::Serialize() const {
  internal::ByteWriter writer;
  writer.U64(static_cast<uint64_t>(size_));
  for (uint64_t word : words_) writer.U64(word);
  std::string bytes = writer.Take();
  bytes.resize(kSizeBytes + BitBytes(size_));
  return bytes;
}

absl::StatusOr<TrainableMask> TrainableMask::Parse(absl::string_view bytes) {
  if (bytes.size() < kSizeBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a trainable mask has at least ", kSizeBytes,
                                                   " bytes, this one ", bytes.size()));
  }
  const uint64_t size = internal::ByteReader(bytes).U64();
  const absl::string_view bits = bytes.substr(kSizeBytes);
  if (size > static_cast<uint64_t>(std::numeric_limits<int>::max()) ||
      bits.size() != static_cast<uint64_t>(BitBytes(static_cast<int64_t>(size)))) {
    return absl::InvalidArgumentError(absl::StrCat("a trainable mask with a declared size of ",
                                                   size, " entries has ", bits.size(),
                                                   " bytes of bits"));
  }
  TrainableMask mask(static_cast<int>(size), false);
  std::string whole(bits);
  whole.resize(mask.words_.size() * sizeof(uint64_t));
  internal::ByteReader reader(whole);
  for (uint64_t& word : mask.words_) word = reader.U64();
  if (!mask.words_.empty() && (mask.words_.back() & ~LastWordBits(mask.size_)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a trainable mask of ", size, " entries has bits set behind them"));
  }
  return mask;
}

}  // namespace evenkeel
