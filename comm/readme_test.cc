// The first use in README.md, as it stands there.

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

absl::Status FirstUse() {
  EK_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment));
  std::vector<float> data(1000, comm->rank());
  EK_RETURN_IF_ERROR(comm->AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
  return comm->Finalize();
}

TEST(ReadmeTest, FirstUseWorksInAProcessAlone) { EXPECT_EQ(FirstUse(), absl::OkStatus()); }

}  // namespace
}  // namespace evenkeel
