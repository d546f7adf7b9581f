// Throws broken bytes at a parser: good messages with bits flipped, numbers blown up, pieces cut,
// doubled and swapped, and plain noise.
//
//   TEST(HelloFuzzTest, NoBytesDoHarm) {
//     Fuzz({SomeHello().Serialize(), OtherHello().Serialize()}, Again<Hello>);
//   }
//
// Requirements for every input:
//   - the parser returns; it neither crashes nor reads past the end (the input lies in a block of
//     its own size, so that a sanitizer sees one byte too many);
//   - it returns InvalidArgument, or a value that serializes to the same bytes;
//   - it takes no more memory than the input's size allows: a length of four gigabytes in front of
//     nothing is no reason to take four gigabytes. All memory taken on the way counts, whether or
//     not it is freed.
// Good messages are accepted as they are.
//
// Only for tests: a program with this in it counts the memory that it takes.
//
// Threads: one at a time; memory is counted for the calling thread.

#ifndef EVENKEEL_COMM_TESTING_FUZZ_H_
#define EVENKEEL_COMM_TESTING_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

struct FuzzOptions {
  uint64_t seed = 20240607;  // Printed with a failure, which ends it.
  int rounds = 20000;
  size_t max_random_bytes = 300;
  // An input of n bytes may cost memory_per_byte * n + memory bytes.
  size_t memory_per_byte = 64;
  size_t memory = 16 << 10;
  // Whether a value has one form only. Else what it is written as must be a fixed point: it gives
  // itself again.
  bool is_canonical = true;
};

// Parses, and writes what was parsed.
using ParseAndWrite = std::function<absl::StatusOr<std::string>(absl::string_view)>;

void Fuzz(const std::vector<std::string>& good, const ParseAndWrite& parse,
          const FuzzOptions& options = {});

// For a T with T::Parse(bytes) and Serialize().
template <typename T>
absl::StatusOr<std::string> Again(absl::string_view bytes) {
  const absl::StatusOr<T> value = T::Parse(bytes);
  if (!value.ok()) return value.status();
  return value->Serialize();
}

// A broken version of one of the good messages, or noise.
std::string Broken(const std::vector<std::string>& good, std::mt19937_64& random,
                   size_t max_random_bytes = 300);

// The memory that `call` takes on this thread, in all.
size_t MemoryTakenBy(const std::function<void()>& call);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TESTING_FUZZ_H_
