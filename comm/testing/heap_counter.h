// For tests and benchmarks: counts what a program takes from the heap and what it copies. Linking
// it in is enough; it stands before the C library's malloc and memcpy in this program.
//
//   const HeapCounts before = HeapCountsOfThread();
//   Step();
//   EXPECT_EQ(HeapCountsOfThread().allocations - before.allocations, 0);
//
//   ResetPeakBytes();
//   Train();
//   PeakBytes();      // the most that the whole process held at once since then
//
// Units:   bytes as asked for by callers, rounded up to what the allocator gave.
// Threads: thread-safe.
// Nothing is counted under sanitizers, which have a heap of their own: HeapIsCounted() returns
// false there.

#ifndef EVENKEEL_COMM_TESTING_HEAP_COUNTER_H_
#define EVENKEEL_COMM_TESTING_HEAP_COUNTER_H_

#include <cstdint>

namespace evenkeel {

struct HeapCounts {
  int64_t allocations = 0;
  int64_t copied_bytes = 0;  // By memcpy and memmove, where it was at least kSmallCopy at once.
};
inline constexpr int64_t kSmallCopy = 1024;

bool HeapIsCounted();
HeapCounts HeapCountsOfThread();   // The calling thread's.
HeapCounts HeapCountsOfProcess();  // All threads'.
int64_t LiveBytes();               // Held now by the whole process.
int64_t PeakBytes();
void ResetPeakBytes();

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TESTING_HEAP_COUNTER_H_
