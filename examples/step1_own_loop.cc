// Step 1 of docs/tutorial.md: a training loop of one's own, on one process and without evenkeel. It
// fits a sawtooth wave by sine waves.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

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

int main() {
  Model model;
  int steps = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (int begin = 0; begin < kSamples; begin += kBatch, ++steps) {
      model.Backward(begin, std::min(begin + kBatch, kSamples));
      Update(model.weight, model.weight_grad, model.weight_velocity);
      Update(model.bias, model.bias_grad, model.bias_velocity);
    }
  }
  std::printf("steps=%d loss=%.6f\n", steps, model.Loss());
}
