// The loss of a classifier: minus the logarithm of the label's softmax probability.
//
//   LossResult loss = SoftmaxCrossEntropy<float>(scores, labels, diff_scores);
//   loss.sum / labels.size()  // the mean, whose gradient is in diff_scores
//
// Shapes:    scores and diff_scores [n, classes], labels [n], each below classes. Empty
//            diff_scores: no gradient is computed.
// Units:     the gradient is that of the *mean* over the n samples, times `weight`.
// Precision: exponentials and sums are float64 whatever T is; any finite scores are safe.
// Threads:   pure function. `diff_scores` may be the memory of `scores`.

#ifndef EVENKEEL_TRAINER_LAYERS_SOFTMAX_CROSS_ENTROPY_H_
#define EVENKEEL_TRAINER_LAYERS_SOFTMAX_CROSS_ENTROPY_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace evenkeel {

struct LossResult {
  double sum = 0;   // Sum over the samples.
  int correct = 0;  // Samples whose first highest score is the label's.
};

template <typename T>
LossResult SoftmaxCrossEntropy(std::span<const T> scores, std::span<const uint8_t> labels,
                               std::span<T> diff_scores, double weight = 1) {
  LossResult result;
  if (labels.empty()) return result;
  const size_t classes = scores.size() / labels.size();
  std::vector<double> exponentials(classes);
  for (size_t sample = 0; sample < labels.size(); ++sample) {
    const std::span<const T> row = scores.subspan(sample * classes, classes);
    const size_t label = labels[sample];
    const size_t best = std::max_element(row.begin(), row.end()) - row.begin();
    const double highest = row[best];
    double total = 0;
    for (size_t i = 0; i < classes; ++i) total += exponentials[i] = std::exp(row[i] - highest);
    result.sum += highest + std::log(total) - row[label];
    result.correct += best == label;
    if (diff_scores.empty()) continue;
    for (size_t i = 0; i < classes; ++i) {
      const double probability = exponentials[i] / total;
      diff_scores[sample * classes + i] =
          static_cast<T>(weight * (probability - (i == label)) / labels.size());
    }
  }
  return result;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_SOFTMAX_CROSS_ENTROPY_H_
