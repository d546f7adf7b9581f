// The cost of one rank by the size of its share: a table that measured windows fill.
//
//   CostMeter meter;
//   meter.Add(batch, us);                        // for each interval of a window
//   CostCurve curve(limits.SizesOf(rank), /*is_proportional=*/true);
//   curve.Add(i, meter.Take(intervals), window, noise);
//   curve.Costs();                               // of all sizes, also of those without a measure
//
// A window is five batches of intervals. The means of the batches show how certain the window's
// mean is, and after some windows their means show it better: stalls are too rare and too regular
// for the deviation of single intervals.
//
// Threads: thread-compatible. Equal input gives equal costs.

#ifndef EVENKEEL_JOIN_STEPS_INTERNAL_SHARE_COST_H_
#define EVENKEEL_JOIN_STEPS_INTERNAL_SHARE_COST_H_

#include <array>
#include <cstdint>
#include <vector>

#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel {

struct MeasuredCost {
  double mean = 0;
  double error2 = 0;  // The square of the mean's standard error.
};

// Measures one window after another.
class CostMeter {
 public:
  static constexpr int kBatches = 5;
  using Counts = std::array<int64_t, kBatches>;  // Intervals of each batch.

  void Add(int batch, double us);
  // Returns the mean of the window, at least three intervals, and begins the next one. A single
  // stall counts as a usual interval, unless two of the last three windows had one, too.
  MeasuredCost Take(const Counts& counts);

 private:
  std::array<double, kBatches> sums_ = {};
  double longest_ = 0;
  double second_ = 0;
  int batch_of_longest_ = 0;
  uint32_t stalls_ = 0;  // A bit for each window before, the last one in bit 0.
};

// The mean of several windows.
struct CostEstimate {
  int windows = 0;  // Up to a limit, from which on old windows fade; 0: there is no estimate.
  int64_t last_window = 0;
  double mean = 0;
  double within = 0;   // The mean of the windows' error2.
  double between = 0;  // The sum of squared deviations of the windows.

  void Add(const MeasuredCost& measured, int64_t window);
  void Scale(double ratio);
  double error2() const;
};

class CostCurve {
 public:
  enum class News { kNone, kDoubt, kChanged };
  // The largest differences that are not a change of speed: `least`, in the unit of costs, or
  // `sigmas` standard errors.
  struct Noise {
    double least = 0;
    double sigmas = 0;
  };

  // `is_proportional`: otherwise the cost is constant, until measured sizes show a slope.
  CostCurve(std::vector<int64_t> sizes, bool is_proportional);

  // Adds a window at size `i`. If it differs from the known costs by more than the noise, the first
  // such window is dropped as doubtful, since it may have a part of two speeds (kDoubt). After the
  // second one in a row the speed has changed, and the whole table is scaled (kChanged).
  News Add(int i, const MeasuredCost& measured, int64_t window, const Noise& noise);
  // Forgets the costs that were last measured before `window`, except that of size `i`.
  void Forget(int64_t window, int i);

  // Returns the costs of all sizes; none falls with the size.
  std::vector<double> Costs() const;
  // Returns the square of the standard error of a measured size; 0 for other sizes.
  double error2(int i) const { return at_[i].windows == 0 ? 0 : at_[i].error2(); }

 private:
  int size() const { return static_cast<int>(sizes_.size()); }
  int Known(int i, int by) const;
  bool Differs(int i, const MeasuredCost& measured, const Noise& noise) const;
  double CostAt(int i) const;
  double SlopeOf(int a, int b) const;
  double SlopeBetween(int lower, int upper) const;
  double SlopeBeyond(int end) const;

  std::vector<int64_t> sizes_;
  bool is_proportional_;
  std::vector<CostEstimate> at_;  // By size.
  bool is_in_doubt_ = false;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_INTERNAL_SHARE_COST_H_
