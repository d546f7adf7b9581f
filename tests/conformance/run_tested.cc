#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

absl::Status RunTested(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                       const CommunicatorOptions& options) {
  if (Tested().run != nullptr) return Tested().run(world_size, body, options);
  EK_ASSIGN_OR_RETURN(Group group, Tested().create(world_size, options));
  return internal::RunGroup(group, body);
}

}  // namespace evenkeel
