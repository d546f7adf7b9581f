#include "evenkeel/comm/local.h"

#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

const TestedBackend& Tested() {
  static constexpr TestedBackend kLocal = {
      .name = "local",
      .adds_in_rank_order = true,
      .finds_disagreement_at_once = true,
      .create = [](int world_size,
                   const CommunicatorOptions& options) { return CreateLocalGroup(world_size, options); },
  };
  return kLocal;
}

}  // namespace evenkeel
