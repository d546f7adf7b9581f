// Whether a page is well-formed and needs nothing else: every element closed in order, attributes
// quoted, nothing loaded from anywhere, data in scripts that parses.
//
//   EXPECT_EQ(CheckPage(html), "");
//
// It knows what a report is made of and no more; what it does not know is an error.

#ifndef EVENKEEL_TRAINER_REPORT_TESTING_PAGE_CHECK_H_
#define EVENKEEL_TRAINER_REPORT_TESTING_PAGE_CHECK_H_

#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Returns the first error, with the text around it; empty: none.
std::string CheckPage(absl::string_view html);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_TESTING_PAGE_CHECK_H_
