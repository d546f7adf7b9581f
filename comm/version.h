// The version of evenkeel. All parts of one job must be the same build: ranks and launcher exchange
// this name when they connect, and refuse a different one in a message with both names.
//
//   // in the shell, to name a build of your own
//   bazel build --copt=-DEVENKEEL_BUILD="\"0.4.0+$(git rev-parse --short HEAD)\"" ...

#ifndef EVENKEEL_COMM_VERSION_H_
#define EVENKEEL_COMM_VERSION_H_

#include "absl/strings/string_view.h"

#ifndef EVENKEEL_BUILD
#define EVENKEEL_BUILD "0.4.0"
#endif

namespace evenkeel {

inline constexpr absl::string_view kBuild = EVENKEEL_BUILD;

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_VERSION_H_
