#include "evenkeel/tests/parity/reference.h"

#include <algorithm>
#include <cmath>
#include <variant>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

// Whose buffers count in a step: those of the highest active rank under join, else rank 0's.
int BufferRoot(const Combination& combination, int step) {
  int root = 0;
  for (int rank = 0; combination.joins() && rank < combination.world; ++rank) {
    if (step < combination.StepsOf(rank)) root = rank;
  }
  return root;
}

int ActiveRanks(const Combination& combination, int step) {
  int active = 0;
  for (int rank = 0; rank < combination.world; ++rank) active += step < combination.StepsOf(rank);
  return active;
}

template <typename T>
void RoundToFloat16(TinyWeights<T>& weights) {
  for (std::vector<T>& part : weights) {
    for (T& element : part)
      element = static_cast<T>(static_cast<float>(Float16(static_cast<float>(element))));
  }
}

// The joined batch's gradient: of all active ranks, and of all passes of the step.
template <typename T>
TinyWeights<T> JoinedGradient(const Combination& combination, int step, TinyWeights<T> weights,
                              std::vector<TinyShift<T>>& shifts) {
  if (combination.mixed) RoundToFloat16(weights);
  if (combination.buffers) {
    const TinyShift<T> shift = shifts[BufferRoot(combination, step)];
    for (TinyShift<T>& each : shifts) each = shift;
  }
  const bool is_effective = combination.inputs == InputsKind::kUnevenEffective;
  const int divisor = is_effective ? ActiveRanks(combination, step) : combination.world;
  TinyWeights<T> gradient = ZeroWeights<T>();
  for (int pass = 0; pass < combination.passes(); ++pass) {
    const int batch = step * combination.passes() + pass;
    for (int rank = 0; rank < combination.world; ++rank) {
      if (step >= combination.StepsOf(rank)) continue;
      if (combination.buffers) MoveShift(rank, batch, shifts[rank]);
      TinyWeights<T> own = ZeroWeights<T>();
      for (int i = 0; i < kTinyBatch; ++i) {
        AddGradient(weights, shifts[rank], SampleOf(rank, batch, i), T(1) / T(kTinyBatch), own);
      }
      if (combination.mixed) RoundToFloat16(own);
      for (int p = 0; p < kTinyParams; ++p) {
        for (int j = 0; j < kTinySizes[p]; ++j) gradient[p][j] += own[p][j] / T(divisor);
      }
    }
  }
  return gradient;
}

// Scales what is trained down to the largest norm that is allowed.
template <typename T>
void Clip(const Combination& combination, int step, TinyWeights<T>& gradient) {
  if (combination.clip_norm == 0) return;
  double norm = 0;
  for (int p = 0; p < kTinyParams; ++p) {
    for (const T element : gradient[p]) {
      if (!combination.Trains(p, step)) continue;
      const double size = std::abs(double{element});
      norm = std::isinf(combination.clip_norm) ? std::max(norm, size)
                                               : norm + std::pow(size, combination.clip_norm);
    }
  }
  if (!std::isinf(combination.clip_norm)) norm = std::pow(norm, 1 / combination.clip_norm);
  const double scale = std::min(1.0, Combination::kMaxNorm / (norm + 1e-6));
  for (std::vector<T>& part : gradient) {
    for (T& element : part) element *= static_cast<T>(scale);
  }
}

template <typename T>
void Update(const Sgd& rule, T& value, T gradient, T& momentum) {
  gradient += static_cast<T>(rule.weight_decay) * value;
  momentum = static_cast<T>(rule.momentum) * momentum + gradient;
  value -= static_cast<T>(rule.learning_rate) * momentum;
}

template <typename T>
void Update(const AdamW& rule, int64_t updates, T& value, T gradient, T& first, T& second) {
  value *= static_cast<T>(1 - rule.learning_rate * rule.weight_decay);
  first = static_cast<T>(rule.beta1) * first + static_cast<T>(1 - rule.beta1) * gradient;
  second =
      static_cast<T>(rule.beta2) * second + static_cast<T>(1 - rule.beta2) * gradient * gradient;
  const double count = static_cast<double>(updates);
  const T unbiased_first = first / static_cast<T>(1 - std::pow(rule.beta1, count));
  const T unbiased_second = second / static_cast<T>(1 - std::pow(rule.beta2, count));
  value -= static_cast<T>(rule.learning_rate) * unbiased_first /
           (std::sqrt(unbiased_second) + static_cast<T>(rule.epsilon));
}

}  // namespace

template <typename T>
Trained<T> TrainAlone(const Combination& combination) {
  Trained<T> trained{.first = ZeroWeights<T>(), .second = ZeroWeights<T>()};
  TinyWeights<T> weights = InitialWeights<T>();
  trained.weights.push_back(weights);
  std::vector<TinyShift<T>> shifts(combination.world, TinyShift<T>{});
  for (int step = 0; step < combination.steps(); ++step) {
    TinyWeights<T> gradient = JoinedGradient(combination, step, weights, shifts);
    Clip(combination, step, gradient);
    const UpdateRule rule = combination.RuleAt(step);
    for (int p = 0; p < kTinyParams; ++p) {
      if (!combination.Trains(p, step) || combination.Overflows(step)) continue;
      ++trained.updates[p];
      for (int j = 0; j < kTinySizes[p]; ++j) {
        if (const Sgd* sgd = std::get_if<Sgd>(&rule)) {
          Update(*sgd, weights[p][j], gradient[p][j], trained.first[p][j]);
        } else {
          Update(std::get<AdamW>(rule), trained.updates[p], weights[p][j], gradient[p][j],
                 trained.first[p][j], trained.second[p][j]);
        }
      }
    }
    trained.weights.push_back(weights);
  }
  return trained;
}

template Trained<float> TrainAlone(const Combination&);
template Trained<double> TrainAlone(const Combination&);

}  // namespace evenkeel
