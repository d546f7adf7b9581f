#include "evenkeel/comm/shm.h"

#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

const TestedBackend& Tested() {
  static constexpr TestedBackend kShm = {
      .name = "shm",
      .adds_in_rank_order = true,
      .finds_disagreement_at_once = true,
      .create = [](int world_size,
                   const CommunicatorOptions& options) { return CreateShmGroupInProcess(world_size, options); },
  };
  return kShm;
}

}  // namespace evenkeel
