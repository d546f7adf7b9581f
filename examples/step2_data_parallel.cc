// Step 2 of docs/tutorial.md: the loop of step 1 on several ranks, each with its share of every
// batch.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"

constexpr int kWaves = 255;
constexpr int kSamples = 970;
constexpr int kBatch = 48;
constexpr int kEpochs = 3;
constexpr float kLearningRate = 0.01f, kMomentum = 0.9f;

// Where sample i lies on the wave, and how high that is there. A program of yours reads them.
float Position(int i) { return 6.2831853f * std::fmod(0.6180340f * i, 1.0f); }
// sin(t) + sin(2 t) / 2 + sin(3 t) / 3 + ...
float Height(float t) { return (3.1415927f - t) / 2; }

struct Model {
  std::vector<float> weight = std::vector<float>(kWaves), bias = {0};
  std::vector<float> weight_grad = weight, bias_grad = bias;
  std::vector<float> weight_velocity = weight, bias_velocity = bias;
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

  // The gradients of half the squared error, its mean over samples [begin, end).
  void Backward(int begin, int end) {
    std::fill(weight_grad.begin(), weight_grad.end(), 0);
    bias_grad[0] = 0;
    for (int i = begin; i < end; ++i) {
      const float t = Position(i), error = ErrorAt(t) / (end - begin);
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

void Update(std::vector<float>& value, const std::vector<float>& grad,
            std::vector<float>& velocity) {
  for (size_t k = 0; k < value.size(); ++k) {
    velocity[k] = kMomentum * velocity[k] + grad[k];
    value[k] -= kLearningRate * velocity[k];
  }
}

absl::Status Train(evenkeel::Communicator& comm) {
  if (kBatch % comm.world_size() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(comm.world_size(), " ranks cannot share ", kBatch, " samples evenly"));
  }
  Model model;
  EK_ASSIGN_OR_RETURN(const auto ddp,
                      evenkeel::DataParallel::Create(&comm, &model.params, /*buffers=*/{}));
  const int share = kBatch / comm.world_size();
  int steps = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    // Remaining samples are not used.
    for (int batch = 0; batch + kBatch <= kSamples; batch += kBatch, ++steps) {
      const int begin = batch + comm.rank() * share;
      model.params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      model.Backward(begin, begin + share);
      for (int i = 0; i < model.params.size(); ++i) {
        model.params.SetGradState(i, evenkeel::GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(i));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());  // The gradients are the ranks' averages now.
      Update(model.weight, model.weight_grad, model.weight_velocity);
      Update(model.bias, model.bias_grad, model.bias_velocity);
    }
  }
  std::printf("rank=%d steps=%d loss=%.6f\n", comm.rank(), steps, model.Loss());
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
