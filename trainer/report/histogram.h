// Counts values in buckets whose limits grow by a tenth from one to the next.
//
//   const Histogram histogram = MakeHistogram(microseconds);
//   histogram.limits[i];  // counts[i] values are at most this, and above limits[i - 1]
//
// Only buckets with values are listed, and one empty bucket for each gap between them. Zero and
// negative values have buckets of their own; values that are not finite are left out.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_REPORT_HISTOGRAM_H_
#define EVENKEEL_TRAINER_REPORT_HISTOGRAM_H_

#include <span>
#include <vector>

namespace evenkeel {

struct Histogram {
  double min = 0;  // Without values all members are 0.
  double max = 0;
  double count = 0;
  double sum = 0;
  double sum_squares = 0;
  std::vector<double> limits;  // Ascending.
  std::vector<double> counts;
};

Histogram MakeHistogram(std::span<const double> values);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_HISTOGRAM_H_
