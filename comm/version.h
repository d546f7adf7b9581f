// Which evenkeel this is. The parts of one job must be one build: ranks and launcher say it to each other when they
// meet, and refuse a different one with both names.
//
//   bazel build --copt=-DEVENKEEL_BUILD='"0.3.0+$(git rev-parse --short HEAD)"' ...     // for builds of your own

#ifndef EVENKEEL_COMM_VERSION_H_
#define EVENKEEL_COMM_VERSION_H_

#include "absl/strings/string_view.h"

#ifndef EVENKEEL_BUILD
#define EVENKEEL_BUILD "0.3.0"
#endif

namespace evenkeel {

inline constexpr absl::string_view kBuild = EVENKEEL_BUILD;

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_VERSION_H_
