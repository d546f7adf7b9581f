// Formats text and numbers for a report.
//
//   EscapeHtml("<b>")            // "&lt;b&gt;", also valid in quoted attributes
//   FormatBytes(3 << 20)         // "3.0 MiB"
//   FormatCount(60000)           // "60,000"
//   FormatSeconds(194)           // "3 min 14 s"
//   FormatNumber(0.43218)        // "0.432": three significant digits
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_HTML_TEXT_H_
#define EVENKEEL_TRAINER_REPORT_HTML_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Escapes `text`. Bytes that HTML may not contain (control characters, malformed UTF-8) become
// U+FFFD.
std::string EscapeHtml(absl::string_view text);

std::string FormatBytes(int64_t bytes);
std::string FormatCount(int64_t count);
std::string FormatSeconds(double seconds);
std::string FormatNumber(double value);  // "-" if it is unknown.
std::string FormatPercent(double share, int decimals = 1);

// Returns a coordinate of a drawing, with one or two decimals where they matter: "12.5".
std::string Coordinate(double value);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_HTML_TEXT_H_
