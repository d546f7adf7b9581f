// The memory that this process can still take before the kernel starts to kill processes: the
// host's, or less if one of the control groups (v1 or v2) around the process allows less.
//
//   const AvailableMemory left = ReadAvailableMemory();
//   if (bytes > left.bytes) ... "the host has only ... bytes left"
//
// Files in the page cache count as available, because the kernel drops them first. Another process
// may take the memory a moment later: this protects from wrong sizes, not from races.
//
// Threads: safe from any thread.

#ifndef EVENKEEL_COMM_BASE_AVAILABLE_MEMORY_H_
#define EVENKEEL_COMM_BASE_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <limits>
#include <string>

namespace evenkeel::internal {

struct AvailableMemory {
  int64_t bytes = std::numeric_limits<int64_t>::max();  // If nothing could be read.
  int64_t swap_bytes = 0;       // The host's free swap space, which is not part of `bytes`.
  std::string of = "the host";  // The origin of the limit: "the host", "the control group /job".
};

// `root` is the folder that contains /proc and /sys, for tests.
AvailableMemory ReadAvailableMemory(const std::string& root = "");

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_AVAILABLE_MEMORY_H_
