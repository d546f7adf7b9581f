// The code of README.md, with a model and a loader to run it: a line is fitted to points.
//
//   readme_loop [nan]         // with a point that is not a number, on the last rank

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

struct Point {
  float x, y;
};

class MyModel {
 public:
  MyModel() { params_.Add("line", absl::MakeSpan(line_), absl::MakeSpan(gradient_)); }
  evenkeel::ParameterSet& params() { return params_; }
  std::vector<evenkeel::TensorView> buffers() { return {}; }

  void Forward(Point point) {
    point_ = point;
    error_ = line_[0] * point.x + line_[1] - point.y;
  }
  absl::Status Backward(evenkeel::DataParallel& ddp) {
    gradient_ = {error_ * point_.x, error_};
    params_.SetGradState(0, evenkeel::GradState::kLocal);
    return ddp.GradientReady(0);
  }
  float slope() const { return line_[0]; }

 private:
  std::vector<float> line_ = {0, 0}, gradient_ = {0, 0};
  Point point_ = {0, 0};
  float error_ = 0;
  evenkeel::ParameterSet params_;
};

class MyLoader {
 public:
  MyLoader(int points, bool has_nan) : points_(points), has_nan_(has_nan) {}
  bool Next() { return next_++ < points_; }
  Point batch() const {
    const float x = static_cast<float>(next_ % 7) / 7;
    return {x, has_nan_ && next_ == 5 ? NAN : 2 * x + 1};
  }

 private:
  const int points_;
  const bool has_nan_;
  int next_ = 0;
};

// clang-format off
absl::Status Train(evenkeel::Communicator& comm, MyModel& model, MyLoader& loader) {
  evenkeel::ParameterSet& params = model.params();      // names, values, gradients: memory is yours
  EK_ASSIGN_OR_RETURN(auto ddp, evenkeel::DataParallel::Create(&comm, &params, model.buffers()));
  EK_ASSIGN_OR_RETURN(auto optimizer, evenkeel::Optimizer::Create(*ddp, evenkeel::AdamW{}, {.placement = evenkeel::WholeTensors{}}));

  return evenkeel::RunJoined({ddp.get(), optimizer.get()}, {}, [&](evenkeel::JoinScope&) -> absl::Status {
    while (loader.Next()) {                              // ranks may have different numbers of batches
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      model.Forward(loader.batch());
      // When backward has written the gradient of parameter i into params[i].grad:
      //   params.SetGradState(i, evenkeel::GradState::kLocal);  then  ddp->GradientReady(i)
      EK_RETURN_IF_ERROR(model.Backward(*ddp));
      EK_RETURN_IF_ERROR(ddp->FinishStep());             // gradients are the group's now
      EK_RETURN_IF_ERROR(optimizer->Step({.skip_nonfinite = true}));
      EK_RETURN_IF_ERROR(evenkeel::RefuseNonfinite(optimizer->last_check()));   // a NaN ends training on all ranks
    }
    return absl::OkStatus();
  });
}

absl::Status Run(MyModel& model, MyLoader& loader) {     // on each rank
  EK_ASSIGN_OR_RETURN(evenkeel::Environment environment, evenkeel::ReadEnvironment());
  EK_ASSIGN_OR_RETURN(auto comm, evenkeel::CreateCommunicator(environment));
  absl::Status status = Train(*comm, model, loader);
  if (!status.ok()) {
    comm->Abort(status);                                 // so that the others learn why
    return status;
  }
  return comm->Finalize();                               // a rank that ends without it counts as lost
}
// clang-format on

int main(int argc, char** argv) {
  const absl::StatusOr<evenkeel::Environment> environment = evenkeel::ReadEnvironment();
  const int rank = environment.ok() ? environment->rank : 0;
  const bool is_last = environment.ok() && rank == environment->world_size - 1;
  MyModel model;
  MyLoader loader(100 + rank, is_last && argc > 1 && std::string(argv[1]) == "nan");
  const absl::Status status = Run(model, loader);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  if (status.ok()) std::printf("rank=%d slope=%.3f\n", rank, model.slope());
  return status.ok() ? 0 : 1;
}
