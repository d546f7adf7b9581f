// The forecasts for several numbers of ranks as a page, in the style of the trainer's report.
//
//   WriteFileAtomically("curve.html", RenderCurves({.title = run.title, .forecasts = all}));
//
// Threads: pure function.

#ifndef EVENKEEL_TOOLS_PREDICT_CURVE_PAGE_H_
#define EVENKEEL_TOOLS_PREDICT_CURVE_PAGE_H_

#include <string>
#include <vector>

#include "evenkeel/tools/predict/speed_model.h"

namespace evenkeel {

// The median step of a run.
struct CheckedRun {
  int ranks = 1;
  double seconds = 0;
  bool is_fitted = false;  // The model was fitted to it.
};

struct Curves {
  std::string title;
  std::string text;  // Lines below the charts.
  double alone = 0;  // The predicted step of one rank.
  std::vector<Forecast> forecasts;
  std::vector<CheckedRun> checked;
};

std::string RenderCurves(Curves curves);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_PREDICT_CURVE_PAGE_H_
