// Fits a line through points that are spread unevenly over two ranks, with AdamW whose state is
// split between them.

#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace {

using evenkeel::GradState;

// y = 2x - 1, seen at the points -1, 0 and 1.
constexpr float kSlope = 2.0f;
constexpr float kOffset = -1.0f;

// y = weight * x + bias, and the gradient of the squared error at one point.
struct Line {
  std::vector<float> weight = {0.0f}, bias = {0.0f}, weight_grad = {0.0f}, bias_grad = {0.0f};
  evenkeel::ParameterSet params;

  Line() {
    params.Add("weight", absl::MakeSpan(weight), absl::MakeSpan(weight_grad));
    params.Add("bias", absl::MakeSpan(bias), absl::MakeSpan(bias_grad));
  }

  void Backward(float x) {
    const float error = weight[0] * x + bias[0] - (kSlope * x + kOffset);
    weight_grad[0] = 2 * error * x;
    bias_grad[0] = 2 * error;
    params.SetGradState(0, GradState::kLocal);
    params.SetGradState(1, GradState::kLocal);
  }
};

absl::Status Fit(evenkeel::Communicator& comm) {
  Line line;
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<evenkeel::Optimizer> optimizer,
      evenkeel::Optimizer::Create(comm, line.params,
                                  evenkeel::AdamW{.learning_rate = 0.05, .weight_decay = 0},
                                  {.placement = evenkeel::WholeTensors{}}));

  const int points = comm.rank() == 0 ? 900 : 600;
  EK_RETURN_IF_ERROR(
      evenkeel::RunJoined({optimizer.get()}, {}, [&](evenkeel::JoinScope&) -> absl::Status {
        for (int i = 0; i < points; ++i) {
          line.params.ClearGradients();
          line.Backward(static_cast<float>((i + comm.rank()) % 3 - 1));
          EK_RETURN_IF_ERROR(optimizer->Step());
        }
        return absl::OkStatus();
      }));

  if (std::abs(line.weight[0] - kSlope) > 0.05f || std::abs(line.bias[0] - kOffset) > 0.05f) {
    return absl::InternalError(absl::StrCat("the line is ", line.weight[0], " x + ", line.bias[0]));
  }
  // Two moments of one float each, and a step count, for one of the two parameters.
  if (optimizer->owner(0) == optimizer->owner(1))
    return absl::InternalError("one rank owns all state");
  return absl::OkStatus();
}

}  // namespace

int main() {
  absl::Status status = evenkeel::RunRanks(2, Fit);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  std::printf("2 ranks fitted the line\n");
  return 0;
}
