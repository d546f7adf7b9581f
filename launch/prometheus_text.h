// Numbers and label values in Prometheus's text format.

#ifndef EVENKEEL_LAUNCH_PROMETHEUS_TEXT_H_
#define EVENKEEL_LAUNCH_PROMETHEUS_TEXT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Returns the shortest text that is read as this number; "NaN", "+Inf" and "-Inf" are numbers, too.
std::string PrometheusNumber(double value);

// Returns the value of a label, in quotes.
std::string PrometheusQuoted(absl::string_view value);

}  // namespace evenkeel

#endif  // EVENKEEL_LAUNCH_PROMETHEUS_TEXT_H_
