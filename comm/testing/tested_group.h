// Groups for tests, over the backend that the test target names: one program is the test of several
// backends.
//
//   absl::Status status = RunTestRanks(3, [](Communicator& comm) { return comm.Barrier(); });
//
// The targets are those of backend_tests() (tools/build_defs/backend_tests.bzl). A test without
// them, and its target of its own name, runs over "local", in full; over other backends a test that
// takes long may do less, see `is_in_full`.
//
// Backends: local ranks are threads, operations are in memory shm shared memory, mapped twice tcp
//           TCP over the loopback device hierarchical two or three hosts, of unequal sizes from
//           three ranks on: shm inside, tcp between hierarchical_local the same with `local`
//           inside and between simulated_nccl NCCL, on simulated devices
//
// Threads: as RunRanks() of comm/local/local.h.

#ifndef EVENKEEL_COMM_TESTING_TESTED_GROUP_H_
#define EVENKEEL_COMM_TESTING_TESTED_GROUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

using TestGroup = std::vector<std::unique_ptr<Communicator>>;  // One per rank.

struct TestBackend {
  absl::string_view name;
  // Adds each element in rank order and rounds once: results are those of a plain loop, bit for
  // bit.
  bool adds_in_rank_order = false;
  // Ranks that issue different collectives learn it at once, with who is where; else over the
  // control plane.
  bool finds_disagreement_at_once = false;
  // A minimum or maximum of floats is NaN if one of them is.
  bool min_and_max_pass_nan_on = true;
  // Full: tests that take long run all their cases.
  bool is_in_full = false;
  absl::StatusOr<TestGroup> (*create)(int world_size, const CommunicatorOptions& options) = nullptr;
};

// Null if there is none of this name.
const TestBackend* FindTestBackend(absl::string_view name);
// That of EVENKEEL_TEST_BACKEND, or "local". An unknown name ends the program.
const TestBackend& TheTestBackend();
// The program's backend, as comm/factory.h calls it: where ranks can only be processes, "local" is
// tcp.
std::string BackendOfProcesses();

absl::StatusOr<TestGroup> CreateTestGroup(int world_size, const CommunicatorOptions& options = {});

// As RunRanks().
absl::Status RunTestRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                          const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TESTING_TESTED_GROUP_H_
