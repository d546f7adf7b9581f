// Gradients go through a DataParallel, the optimizer's state is split over the ranks, and rank 0
// has more points than the others: comm, bucket, zero_optim and join in one loop.

#include "fit_line.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
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

  absl::Status Backward(float x, evenkeel::DataParallel& ddp) {
    const float error = weight[0] * x + bias[0] - (kSlope * x + kOffset);
    weight_grad[0] = 2 * error * x;
    bias_grad[0] = 2 * error;
    for (const int param : {1, 0}) {
      params.SetGradState(param, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp.GradientReady(param));
    }
    return absl::OkStatus();
  }
};

absl::StatusOr<std::string> Fit(evenkeel::Communicator& comm) {
  Line line;
  EK_ASSIGN_OR_RETURN(auto ddp, evenkeel::DataParallel::Create(&comm, &line.params, {}));
  EK_ASSIGN_OR_RETURN(auto optimizer, evenkeel::Optimizer::Create(
                                          comm, line.params,
                                          evenkeel::AdamW{.learning_rate = 0.05, .weight_decay = 0},
                                          {.placement = evenkeel::WholeTensors{}}));

  const int points = comm.rank() == 0 ? 900 : 600;
  EK_RETURN_IF_ERROR(evenkeel::RunJoined(
      {ddp.get(), optimizer.get()}, {}, [&](evenkeel::JoinScope&) -> absl::Status {
        for (int i = 0; i < points; ++i) {
          line.params.ClearGradients();
          EK_RETURN_IF_ERROR(ddp->BeginStep());
          EK_RETURN_IF_ERROR(line.Backward(static_cast<float>((i + comm.rank()) % 3 - 1), *ddp));
          EK_RETURN_IF_ERROR(ddp->FinishStep());
          EK_RETURN_IF_ERROR(optimizer->Step());
        }
        return absl::OkStatus();
      }));
  return absl::StrFormat("%d ranks: y = %.2f x %+.2f", comm.world_size(), line.weight[0],
                         line.bias[0]);
}

absl::StatusOr<std::string> Run(const std::string& backend) {
  EK_ASSIGN_OR_RETURN(const evenkeel::Environment environment, evenkeel::ReadEnvironment());
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<evenkeel::Communicator> comm,
                      evenkeel::CreateCommunicator(environment, {.backend = backend}));
  absl::StatusOr<std::string> found = Fit(*comm);
  if (!found.ok()) {
    comm->Abort(found.status());
    return found;
  }
  EK_RETURN_IF_ERROR(comm->Finalize());
  return found;
}

}  // namespace

std::string FitLine(const std::string& backend) {
  const absl::StatusOr<std::string> found = Run(backend);
  return found.ok() ? *found : absl::StrCat("error: ", found.status().ToString());
}
