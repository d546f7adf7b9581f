#include "evenkeel/comm/testing/tested_group.h"

#include <cstdio>
#include <cstdlib>

#include "evenkeel/comm/hierarchical/hierarchical.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"
#include "evenkeel/comm/testing/hosts.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"

namespace evenkeel {
namespace {

constexpr char kVariable[] = "EVENKEEL_TEST_BACKEND";

// Two ranks share a host: on two hosts they would be a group of tcp's.
absl::StatusOr<TestGroup> CreateHierarchical(int world_size, const CommunicatorOptions& options) {
  const internal::Hosts hosts =
      world_size == 2 ? internal::Hosts{"a", "a"} : internal::SomeHosts(world_size);
  return CreateHierarchicalGroupInProcess(hosts, options);
}

constexpr TestBackend kBackends[] = {
    {.name = "local",
     .adds_in_rank_order = true,
     .finds_disagreement_at_once = true,
     .is_in_full = true,
     .create =
         [](int world_size, const CommunicatorOptions& options) {
           return CreateLocalGroup(world_size, options);
         }},
    {.name = "shm",
     .adds_in_rank_order = true,
     .finds_disagreement_at_once = true,
     .create = CreateShmGroupInProcess},
    {.name = "tcp", .create = CreateTcpGroupInProcess},
    {.name = "hierarchical", .create = CreateHierarchical},
    {.name = "hierarchical_local",
     .create = [](int world_size, const CommunicatorOptions& options) -> absl::StatusOr<TestGroup> {
       return internal::CreateGroupOnHosts(internal::SomeHosts(world_size), options);
     }},
    {.name = "simulated_nccl",
     .finds_disagreement_at_once = true,
     .min_and_max_pass_nan_on = false,
     .create = [](int world_size, const CommunicatorOptions& options) -> absl::StatusOr<TestGroup> {
       return internal::CreateSimulatedNcclGroup(world_size, {.communicator = options});
     }},
};

}  // namespace

const TestBackend* FindTestBackend(absl::string_view name) {
  for (const TestBackend& backend : kBackends) {
    if (backend.name == name) return &backend;
  }
  return nullptr;
}

const TestBackend& TheTestBackend() {
  static const TestBackend* const backend = [] {
    const char* const value = std::getenv(kVariable);
    const TestBackend* const found = FindTestBackend(value == nullptr ? "local" : value);
    if (found == nullptr) {
      std::fprintf(stderr, "%s=%s: there is no such backend\n", kVariable, value);
      std::abort();
    }
    return found;
  }();
  return *backend;
}

std::string BackendOfProcesses() {
  const absl::string_view name = TheTestBackend().name;
  return std::string(name == "local" ? "tcp" : name);
}

absl::StatusOr<TestGroup> CreateTestGroup(int world_size, const CommunicatorOptions& options) {
  return TheTestBackend().create(world_size, options);
}

absl::Status RunTestRanks(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                          const CommunicatorOptions& options) {
  EK_ASSIGN_OR_RETURN(const TestGroup group, CreateTestGroup(world_size, options));
  return internal::RunGroup(group, body);
}

}  // namespace evenkeel
