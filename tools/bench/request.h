// The words of the command line, read.
//
//   EK_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, ParseSizes("sizes", "1K,4K,1M"));
//
// Threads: pure functions.
// Errors:  InvalidArgument with a sentence that names the flag, the word, and what it may be.

#ifndef EVENKEEL_TOOLS_BENCH_REQUEST_H_
#define EVENKEEL_TOOLS_BENCH_REQUEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tools/bench/case.h"

namespace evenkeel::bench {

// "1K,64K,4M" in bytes, K, M, G being powers of 1024; each at least 1 byte and at most 64 GiB.
// Empty text: none.
absl::StatusOr<std::vector<int64_t>> ParseSizes(absl::string_view flag, absl::string_view text);

// "all_reduce,barrier", or "all".
absl::StatusOr<std::vector<Op>> ParseOps(absl::string_view text);

// Names of backends, without repetition; "auto" stands for `what_is_there`, and may stand among
// others.
absl::StatusOr<std::vector<std::string>> ParseBackends(
    absl::string_view flag, absl::string_view text, const std::vector<std::string>& what_is_there);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_REQUEST_H_
