#include "evenkeel/comm/internal/testing_hosts.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

const TestedBackend& Tested() {
  static constexpr TestedBackend kHierarchical = {
      .name = "hierarchical",
      .create = [](int world_size, const CommunicatorOptions& options) -> absl::StatusOr<Group> {
        return internal::CreateGroupOnHosts(internal::SomeHosts(world_size), options);
      },
  };
  return kHierarchical;
}

}  // namespace evenkeel
