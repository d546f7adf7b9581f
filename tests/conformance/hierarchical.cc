#include "evenkeel/comm/hierarchical.h"

#include <string>
#include <vector>

#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {
namespace {

// Unequal hosts whose ranks are not contiguous; two ranks are on one.
std::vector<std::string> Hosts(int world_size) {
  switch (world_size) {
    case 3:
      return {"a", "b", "a"};
    case 5:
      return {"a", "b", "a", "a", "b"};
    case 8:
      return {"a", "b", "c", "c", "a", "c", "b", "c"};
    default:
      return std::vector<std::string>(world_size, "a");
  }
}

}  // namespace

const TestedBackend& Tested() {
  static constexpr TestedBackend kHierarchical = {
      .name = "hierarchical",
      .create =
          [](int world_size, const CommunicatorOptions& options) {
            return CreateHierarchicalGroupInProcess(Hosts(world_size), options);
          },
  };
  return kHierarchical;
}

}  // namespace evenkeel
