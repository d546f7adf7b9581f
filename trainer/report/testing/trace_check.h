// Whether a text is a trace in the Chrome trace event format (JSON object format) as viewers want
// it: the fields that each phase must have, processes and threads with names, slices of a thread
// that nest, arrows with both ends in slices.
//
//   EXPECT_EQ(CheckTrace(json), "");
//
// It knows the phases that a report's trace has; another one is an error.

#ifndef EVENKEEL_TRAINER_REPORT_TESTING_TRACE_CHECK_H_
#define EVENKEEL_TRAINER_REPORT_TESTING_TRACE_CHECK_H_

#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Returns the first error, with the event; empty: none.
std::string CheckTrace(absl::string_view json);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_TESTING_TRACE_CHECK_H_
