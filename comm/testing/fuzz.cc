#include "evenkeel/comm/testing/fuzz.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

thread_local size_t taken = 0;

void* Take(size_t size) {
  taken += size;
  void* block = std::malloc(std::max<size_t>(size, 1));
  if (block == nullptr) std::abort();
  return block;
}

void* TakeAligned(size_t size, std::align_val_t alignment) {
  taken += size;
  const size_t align = static_cast<size_t>(alignment);
  void* block = std::aligned_alloc(align, (std::max<size_t>(size, 1) + align - 1) / align * align);
  if (block == nullptr) std::abort();
  return block;
}

}  // namespace
}  // namespace evenkeel

// All forms: a sanitizer has its own of those that are left out, and finds that they do not match.
void* operator new(size_t size, const std::nothrow_t&) noexcept { return evenkeel::Take(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return evenkeel::Take(size); }
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return evenkeel::TakeAligned(size, alignment);
}
void* operator new[](size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return evenkeel::TakeAligned(size, alignment);
}
void operator delete(void* block, const std::nothrow_t&) noexcept { std::free(block); }
void operator delete[](void* block, const std::nothrow_t&) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(block);
}
void operator delete[](void* block, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(block);
}
void* operator new(size_t size) { return evenkeel::Take(size); }
void* operator new(size_t size, std::align_val_t alignment) {
  return evenkeel::TakeAligned(size, alignment);
}
void* operator new[](size_t size) { return evenkeel::Take(size); }
void* operator new[](size_t size, std::align_val_t alignment) {
  return evenkeel::TakeAligned(size, alignment);
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete[](void* block, size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete[](void* block, size_t, std::align_val_t) noexcept { std::free(block); }

namespace evenkeel {
namespace {

size_t Below(std::mt19937_64& random, size_t bound) { return bound == 0 ? 0 : random() % bound; }

std::string Noise(std::mt19937_64& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Numbers at which arithmetic goes wrong, and such as a length could be.
uint64_t OddNumber(std::mt19937_64& random, size_t size) {
  const uint64_t kNumbers[] = {0,
                               1,
                               0x7f,
                               0x80,
                               0xff,
                               0x7fff,
                               0xffff,
                               0x7fffffff,
                               0x80000000,
                               0xffffffff,
                               0xfffffffc,
                               uint64_t{1} << 32,
                               uint64_t{1} << 62,
                               ~uint64_t{0} >> 1,
                               uint64_t{1} << 63,
                               ~uint64_t{0},
                               size,
                               size + 1,
                               size - 1};
  return kNumbers[Below(random, std::size(kNumbers))];
}

void Overwrite(std::string& bytes, std::mt19937_64& random) {
  const size_t width = size_t{1} << Below(random, 4);
  if (bytes.size() < width) return;
  const uint64_t number = OddNumber(random, bytes.size());
  std::memcpy(bytes.data() + Below(random, bytes.size() - width + 1), &number,
              width);  // Little-endian, as formats are.
}

// Returns a piece of `bytes`; short ones are more likely than long ones.
std::string Piece(const std::string& bytes, std::mt19937_64& random) {
  const size_t begin = Below(random, bytes.size() + 1);
  return bytes.substr(begin, Below(random, Below(random, 64) + 1));
}

void Mutate(std::string& bytes, const std::string& other, std::mt19937_64& random) {
  const size_t at = Below(random, bytes.size() + 1);
  switch (random() % 9) {
    case 0:
    case 1:
      if (!bytes.empty())
        bytes[Below(random, bytes.size())] ^= static_cast<char>(1 << (random() % 8));
      return;
    case 2:
    case 3:
      return Overwrite(bytes, random);
    case 4:
      return bytes.resize(at);
    case 5:
      bytes.erase(at, 1 + Below(random, 8));
      return;
    case 6:
      bytes.insert(at, Noise(random, 1 + Below(random, 8)));
      return;
    case 7:
      bytes.insert(at, Piece(bytes, random));
      return;
    default:
      bytes = bytes.substr(0, at) +
              other.substr(std::min(other.size(), Below(random, other.size() + 1)));
      return;
  }
}

// Returns the parser's result for bytes that end where their memory ends.
absl::StatusOr<std::string> Parse(const ParseAndWrite& parse, absl::string_view bytes) {
  const std::unique_ptr<char[]> block(new char[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), block.get());
  return parse(absl::string_view(block.get(), bytes.size()));
}

// Whether all went well.
bool CheckOne(const std::string& bytes, const ParseAndWrite& parse, const FuzzOptions& options,
              bool& is_taken) {
  const std::string shown = absl::CHexEscape(bytes.substr(0, 400));
  absl::StatusOr<std::string> written = absl::UnknownError("not parsed");
  const size_t memory = MemoryTakenBy([&] { written = Parse(parse, bytes); });
  const size_t allowed = options.memory_per_byte * bytes.size() + options.memory;
  if (memory > allowed) {
    ADD_FAILURE() << bytes.size() << " bytes cost " << memory << " bytes of memory, more than "
                  << allowed << ": " << shown;
    return false;
  }
  is_taken = written.ok();
  if (!written.ok()) {
    if (absl::IsInvalidArgument(written.status())) return true;
    ADD_FAILURE() << "refused, but not as InvalidArgument: " << written.status() << ": " << shown;
    return false;
  }
  const absl::StatusOr<std::string> again = options.is_canonical ? bytes : Parse(parse, *written);
  if (again.ok() && *again == *written) return true;
  ADD_FAILURE() << "taken, but written as " << absl::CHexEscape(written->substr(0, 400)) << ": "
                << shown;
  return false;
}

}  // namespace

size_t MemoryTakenBy(const std::function<void()>& call) {
  const size_t before = taken;
  call();
  return taken - before;
}

std::string Broken(const std::vector<std::string>& good, std::mt19937_64& random,
                   size_t max_random_bytes) {
  if (good.empty() || random() % 8 == 0) return Noise(random, Below(random, max_random_bytes + 1));
  std::string bytes = good[Below(random, good.size())];
  const std::string& other = good[Below(random, good.size())];
  for (int changes = 1 + static_cast<int>(Below(random, 4)); changes > 0; --changes)
    Mutate(bytes, other, random);
  return bytes;
}

void Fuzz(const std::vector<std::string>& good, const ParseAndWrite& parse,
          const FuzzOptions& options) {
  SCOPED_TRACE(absl::StrCat("seed ", options.seed));
  bool is_taken = false;
  for (const std::string& bytes : good) {
    if (CheckOne(bytes, parse, options, is_taken) && is_taken) continue;
    ADD_FAILURE() << "a good message is refused: " << Parse(parse, bytes).status() << ": "
                  << absl::CHexEscape(bytes);
  }
  std::mt19937_64 random(options.seed);
  int refused = 0;
  for (int round = 0; round < options.rounds; ++round) {
    if (!CheckOne(Broken(good, random, options.max_random_bytes), parse, options, is_taken))
      return;  // One says enough.
    if (!is_taken) ++refused;
  }
  EXPECT_GT(refused, 0) << "a parser that takes everything is none";
}

}  // namespace evenkeel
