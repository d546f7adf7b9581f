// The Castagnoli checksum of bytes, CRC-32C, and the form of it that TFRecord files have.
//
//   Crc32c("123456789");                     // 0xe3069283
//   MaskedCrc32c(payload);  // as stored in a TFRecord, whose payload may itself contain checksums
//
// A table of 256 entries, for records of some hundred bytes; faster methods exist for large data.
//
// Threads: pure functions.
// Source:  RFC 3720, appendix B.4; the mask is that of TensorFlow's record_writer.

#ifndef EVENKEEL_TRAINER_REPORT_CRC32C_H_
#define EVENKEEL_TRAINER_REPORT_CRC32C_H_

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace evenkeel {

inline constexpr std::array<uint32_t, 256> kCrc32cTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc % 2 == 1 ? 0x82f63b78u : 0u);
    table[byte] = crc;
  }
  return table;
}();

constexpr uint32_t Crc32c(absl::string_view bytes) {
  uint32_t crc = ~0u;
  for (char byte : bytes) crc = (crc >> 8) ^ kCrc32cTable[(crc ^ static_cast<uint8_t>(byte)) % 256];
  return ~crc;
}

constexpr uint32_t MaskedCrc32c(absl::string_view bytes) {
  const uint32_t crc = Crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_CRC32C_H_
