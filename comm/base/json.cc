#include "evenkeel/comm/base/json.h"

#include <cstdint>

namespace evenkeel::internal {
size_t Utf8Size(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  const size_t size = first < 0x80   ? 1
                      : first < 0xc2 ? 0
                      : first < 0xe0 ? 2
                      : first < 0xf0 ? 3
                      : first < 0xf5 ? 4
                                     : 0;
  if (size == 0 || size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // An overlong form, half of a UTF-16 pair, or past the last character.
  if (first == 0xe0 && byte(1) < 0xa0) return 0;
  if (first == 0xed && byte(1) >= 0xa0) return 0;
  if (first == 0xf0 && byte(1) < 0x90) return 0;
  if (first == 0xf4 && byte(1) >= 0x90) return 0;
  return size;
}

std::string JsonQuoted(absl::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t size = Utf8Size(text);
    const char c = text[0];
    if (size == 0) {
      absl::StrAppend(&out, "\\ufffd");
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) {
      absl::StrAppend(&out, "\\u", absl::Hex(static_cast<uint8_t>(c), absl::kZeroPad4));
    } else {
      out.append(text.data(), size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  out += '"';
  return out;
}

}  // namespace evenkeel::internal
