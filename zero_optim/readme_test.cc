// The code in README.md, so that it stays true.

#include <cmath>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(ReadmeTest, ShrinksWeights) {
  const absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    std::vector<float> weight = {1, 2, 3}, gradient(3);
    ParameterSet params;
    const int index = params.Add("weight", absl::MakeSpan(weight), absl::MakeSpan(gradient));
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, params, AdamW{.learning_rate = 0.1},
                                                          {.placement = WholeTensors{}}));
    for (int step = 0; step < 50; ++step) {
      gradient = weight;  // The gradient of half the squared weights.
      params.SetGradState(
          index, GradState::kLocal);  // Step() averages it, unless a DataParallel has done so.
      EK_RETURN_IF_ERROR(optimizer->Step());
    }
    EK_ASSIGN_OR_RETURN(OptimizerState everything, optimizer->Consolidate());
    EXPECT_EQ(everything.params.at(index).step, 50);
    for (float element : weight) EXPECT_LT(std::abs(element), 0.5);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
