#include "evenkeel/trainer/report/html_text.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "evenkeel/comm/base/json.h"

namespace evenkeel {
namespace {

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";

// Returns the length of the first character of `text` in bytes; 0 if HTML may not contain it.
size_t CharacterLength(absl::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const bool is_control = first < 0x20 ? first != '\n' && first != '\t'
                                       : first == 0x7F || (first == 0xC2 && text < "\xC2\xA0");
  return is_control ? 0 : internal::Utf8Size(text);
}

}  // namespace

std::string EscapeHtml(absl::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const size_t length = CharacterLength(text);
    absl::StrAppend(&valid, length == 0 ? kReplacement : text.substr(0, length));
    text.remove_prefix(std::max<size_t>(1, length));
  }
  return absl::StrReplaceAll(
      valid, {{"<", "&lt;"}, {">", "&gt;"}, {"&", "&amp;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string FormatBytes(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; value >= 1023.95 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return absl::StrFormat(value >= 99.95 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

std::string FormatCount(int64_t count) {
  std::string digits = absl::StrCat(count);
  const size_t first = count < 0 ? 1 : 0;
  for (size_t end = digits.size(); end > first + 3; end -= 3) digits.insert(end - 3, ",");
  return digits;
}

std::string FormatSeconds(double seconds) {
  if (std::isnan(seconds)) return "-";
  if (seconds < 1e-3) return absl::StrFormat("%.0f µs", seconds * 1e6);
  if (seconds < 1)
    return absl::StrFormat("%.*f ms", seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0, seconds * 1e3);
  if (seconds < 99.95) return absl::StrFormat("%.1f s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return absl::StrCat(whole / 60, " min ", whole % 60, " s");
  return absl::StrCat(whole / 3600, " h ", whole / 60 % 60, " min");
}

std::string FormatNumber(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::fabs(value);
  if (size >= 1e15) return absl::StrFormat("%.2g", value);
  if (size >= 1000) return FormatCount(std::llround(value));
  if (size != 0 && size < 1e-4) return absl::StrFormat("%.2g", value);
  const int decimals = size >= 100                 ? 0
                       : size >= 10                ? 1
                       : size >= 1                 ? 2
                       : size >= 0.01 || size == 0 ? 3
                                                   : 5;
  return absl::StrFormat("%.*f", decimals, value);
}

std::string FormatPercent(double share, int decimals) {
  return std::isfinite(share) ? absl::StrFormat("%.*f %%", decimals, 100 * share) : "-";
}

std::string Coordinate(double value) {
  std::string text = absl::StrFormat("%.2f", value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

}  // namespace evenkeel
