// Step 4 of docs/tutorial.md: each rank keeps only its slice of the optimizer's state.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/join/step_divisor.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

constexpr int kWaves = 255;
constexpr int kSamples = 970;
constexpr int kBatch = 48;
constexpr int kEpochs = 3;
constexpr evenkeel::Sgd kRule = {.learning_rate = 0.01, .momentum = 0.9};

// Where sample i lies on the wave, and how high that is there. A program of yours reads them.
float Position(int i) { return 6.2831853f * std::fmod(0.6180340f * i, 1.0f); }
// sin(t) + sin(2 t) / 2 + sin(3 t) / 3 + ...
float Height(float t) { return (3.1415927f - t) / 2; }

struct Model {
  std::vector<float> weight = std::vector<float>(kWaves), bias = {0};
  std::vector<float> weight_grad = weight, bias_grad = bias;
  // Where each value and its gradient lie: all that evenkeel sees of a model.
  evenkeel::ParameterSet params;

  Model() {
    params.Add("weight", absl::MakeSpan(weight), absl::MakeSpan(weight_grad));
    params.Add("bias", absl::MakeSpan(bias), absl::MakeSpan(bias_grad));
  }

  float ErrorAt(float t) const {
    float height = bias[0];
    for (int k = 0; k < kWaves; ++k) height += weight[k] * std::sin((k + 1) * t);
    return height - Height(t);
  }

  // The gradients of half the squared error, its sum over samples [begin, end).
  void Backward(int begin, int end) {
    std::fill(weight_grad.begin(), weight_grad.end(), 0);
    bias_grad[0] = 0;
    for (int i = begin; i < end; ++i) {
      const float t = Position(i), error = ErrorAt(t);
      for (int k = 0; k < kWaves; ++k) weight_grad[k] += error * std::sin((k + 1) * t);
      bias_grad[0] += error;
    }
  }

  double Loss() const {
    double sum = 0;
    for (int i = 0; i < kSamples; ++i) sum += std::pow(ErrorAt(Position(i)), 2) / 2;
    return sum / kSamples;
  }
};

absl::Status Train(evenkeel::Communicator& comm) {
  Model model;
  EK_ASSIGN_OR_RETURN(const auto ddp,
                      evenkeel::DataParallel::Create(&comm, &model.params, /*buffers=*/{}));
  EK_ASSIGN_OR_RETURN(const auto optimizer,
                      evenkeel::Optimizer::Create(*ddp, kRule, {.placement = evenkeel::Slices{}}));
  const int share = (kBatch + comm.world_size() - 1) / comm.world_size();
  int steps = 0;
  const auto train_epoch = [&](evenkeel::JoinScope& scope) -> absl::Status {
    for (int batch = 0; batch < kSamples; batch += kBatch, ++steps) {
      const int begin = batch + comm.rank() * share;
      const int end = std::min({begin + share, batch + kBatch, kSamples});
      if (begin >= end) break;  // This rank has no more input; others may.
      model.params.ClearGradients();
      EK_RETURN_IF_ERROR(scope.AddSamples(end - begin));
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      model.Backward(begin, end);
      for (int i = 0; i < model.params.size(); ++i) {
        model.params.SetGradState(i, evenkeel::GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(i));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());  // As in step 3, but each rank gets its slice only.
      // Updates it, and brings the others' slices of the parameters.
      EK_RETURN_IF_ERROR(optimizer->Step({.skip_nonfinite = true}));
      EK_RETURN_IF_ERROR(
          evenkeel::RefuseNonfinite(optimizer->last_check()));  // A NaN ends training on all ranks.
      const std::string news = evenkeel::StragglerNews(comm);   // Empty if there is nothing new.
      if (comm.rank() == 0 && !news.empty()) std::fprintf(stderr, "%s\n", news.c_str());
    }
    return absl::OkStatus();
  };
  evenkeel::JoinOptions options;
  options.divide_by = evenkeel::DivideBy::kSamples;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    EK_RETURN_IF_ERROR(evenkeel::RunJoined({ddp.get(), optimizer.get()}, options, train_epoch));
  }
  std::printf("rank=%d steps=%d loss=%.6f state_bytes=%d\n", comm.rank(), steps, model.Loss(),
              static_cast<int>(optimizer->state_bytes()));
  return absl::OkStatus();
}

absl::Status Run() {
  EK_ASSIGN_OR_RETURN(const evenkeel::Environment environment, evenkeel::ReadEnvironment());
  EK_ASSIGN_OR_RETURN(const auto comm, evenkeel::CreateCommunicator(environment));
  const absl::Status status = Train(*comm);
  if (status.ok()) return comm->Finalize();
  comm->Abort(status);  // So that the other ranks learn why.
  return status;
}

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
