#include "evenkeel/trainer/gpt/sample_token.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

absl::Status CheckScores(std::span<const float> scores) {
  for (size_t i = 0; i < scores.size(); ++i) {
    if (std::isfinite(scores[i]) || scores[i] == kNever) continue;
    return absl::InvalidArgumentError(absl::StrCat("the score of token ", i, " is ", scores[i]));
  }
  if (std::ranges::any_of(scores, [](float score) { return score > kNever; }))
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("none of the ", scores.size(), " tokens has a finite score"));
}

// The indices of the best scores, ascending.
std::vector<int32_t> Best(std::span<const float> scores, int64_t count) {
  std::vector<int32_t> tokens(scores.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  if (count == 0 || count >= static_cast<int64_t>(tokens.size())) return tokens;
  const auto is_better = [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  std::ranges::nth_element(tokens, tokens.begin() + count, is_better);
  tokens.resize(count);
  std::ranges::sort(tokens);
  return tokens;
}

}  // namespace

absl::Status Validate(const SampleOptions& options) {
  if (!(options.temperature >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature ", options.temperature, " must not be negative"));
  }
  if (options.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k ", options.top_k, " must not be negative; 0 is all tokens"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int32_t> SampleToken(std::span<const float> scores, const SampleOptions& options,
                                    double uniform) {
  EK_RETURN_IF_ERROR(Validate(options));
  EK_RETURN_IF_ERROR(CheckScores(scores));
  const auto best = std::ranges::max_element(scores);  // The first of them.
  if (options.temperature == 0) return static_cast<int32_t>(best - scores.begin());

  // Relative to the best one's, which is 1: nothing overflows, and the sum is not zero.
  const std::vector<int32_t> tokens = Best(scores, options.top_k);
  std::vector<double> sums;
  double sum = 0;
  for (int32_t token : tokens) {
    const double below = static_cast<double>(scores[token]) - *best;
    sum += scores[token] == kNever ? 0 : std::exp(below / options.temperature);
    sums.push_back(sum);
  }
  // The first whose sum is beyond: its own weight is not zero. Rounding must not lead past the last
  // such.
  const double point = std::min(uniform * sum, std::nextafter(sum, 0));
  return tokens[std::ranges::upper_bound(sums, point) - sums.begin()];
}

}  // namespace evenkeel
