#include "evenkeel/tools/measure/power_law.h"

#include <cmath>
#include <cstddef>

namespace evenkeel {

double ExponentOf(std::span<const double> sizes, std::span<const double> seconds) {
  const double n = static_cast<double>(sizes.size());
  double x_mean = 0, y_mean = 0, covariance = 0, variance = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    x_mean += std::log(sizes[i]) / n;
    y_mean += std::log(seconds[i]) / n;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const double x = std::log(sizes[i]) - x_mean;
    covariance += x * (std::log(seconds[i]) - y_mean);
    variance += x * x;
  }
  return covariance / variance;
}

}  // namespace evenkeel
