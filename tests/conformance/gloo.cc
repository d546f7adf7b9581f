#include "evenkeel/comm/gloo.h"

#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

const TestedBackend& Tested() {
  static constexpr TestedBackend kGloo = {
      .name = "gloo",
      .create = [](int world_size,
                   const CommunicatorOptions& options) { return CreateGlooGroupInProcess(world_size, options); },
  };
  return kGloo;
}

}  // namespace evenkeel
