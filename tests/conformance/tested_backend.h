// Which backend this build of the conformance suite runs over. Each backend has a source file that
// answers Tested(), and a line in BUILD.
//
//   absl::Status status = RunTested(3, [](Communicator& comm) { return comm.Barrier(); });

#ifndef EVENKEEL_TESTS_CONFORMANCE_TESTED_BACKEND_H_
#define EVENKEEL_TESTS_CONFORMANCE_TESTED_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

using Group = std::vector<std::unique_ptr<Communicator>>;  // One per rank.

// Why a test can't run here: it is skipped, or fails.
struct Missing {
  std::string sentence;  // Empty: it can.
  bool is_failure = false;
};

struct TestedBackend {
  absl::string_view name;
  // Combines each element in rank order and rounds once, so the results are those of a plain loop,
  // bit for bit.
  bool adds_in_rank_order = false;
  // Ranks that issue different collectives learn it at once, with who is where; else at their
  // deadline.
  bool finds_disagreement_at_once = false;
  // A minimum or maximum of floats is NaN if one of them is.
  bool min_and_max_pass_nan_on = true;
  // A group in this process.
  absl::StatusOr<Group> (*create)(int world_size, const CommunicatorOptions& options) = nullptr;
  // Backends may leave out the rest. Instead of `create`, for ranks that are processes: this one's
  // part of RunTested().
  absl::Status (*run)(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                      const CommunicatorOptions& options) = nullptr;
  // Returns what a group of that size lacks on this machine. Null: nothing.
  Missing (*missing)(int world_size) = nullptr;
  std::vector<int> (*world_sizes)() = nullptr;  // Null: 1, 2, 3, 5, 8.
  void (*end_test)() = nullptr;                 // At each test's end.
};
const TestedBackend& Tested();

// The suite's limit against hangs; a loaded machine takes a while for the largest cases.
inline constexpr absl::Duration kPatience = absl::Seconds(60);
// "At once": the longest that ranks may take to learn of a failure.
inline constexpr absl::Duration kAtOnce = absl::Seconds(5);

// A thread per rank; as RunRanks().
absl::Status RunTested(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                       const CommunicatorOptions& options = {.timeout = kPatience});

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CONFORMANCE_TESTED_BACKEND_H_
