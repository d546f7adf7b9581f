// Text and numbers as a report shows them to people.
//
//   EscapeHtml("<b>")            // "&lt;b&gt;", also good within quoted attributes
//   FormatBytes(3 << 20)         // "3.0 MiB"
//   FormatCount(60000)           // "60,000"
//   FormatSeconds(194)           // "3 min 14 s"
//   FormatNumber(0.43218)        // "0.432": three digits that count
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_HTML_TEXT_H_
#define EVENKEEL_TRAINER_REPORT_HTML_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

// What no HTML may contain (control characters, bytes that are no UTF-8) becomes U+FFFD.
std::string EscapeHtml(absl::string_view text);

std::string FormatBytes(int64_t bytes);
std::string FormatCount(int64_t count);
std::string FormatSeconds(double seconds);
std::string FormatNumber(double value);  // "-" if it is not known.
std::string FormatPercent(double share, int decimals = 1);

// A place in a drawing, with one or two decimals where they count: "12.5".
std::string Coordinate(double value);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_HTML_TEXT_H_
