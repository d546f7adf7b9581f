// Integers and strings as bytes, the same on every machine: little endian, strings with their length in front.
//
//   std::string message = ByteWriter().U8(kSet).Bytes(key).Bytes(value).Take();
//   ByteReader reader(message);
//   uint8_t kind = reader.U8();  absl::string_view key = reader.Bytes(), value = reader.Bytes();
//   EK_RETURN_IF_ERROR(reader.Finish("store request"));     // nothing missing, nothing left over
//
// A reader never reads past the end: what is missing reads as zero or empty, and Finish() says so.

#ifndef EVENKEEL_COMM_INTERNAL_BYTES_H_
#define EVENKEEL_COMM_INTERNAL_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

class ByteWriter {
 public:
  ByteWriter& U8(uint8_t value) { return Integer(value, 1); }
  ByteWriter& U32(uint32_t value) { return Integer(value, 4); }
  ByteWriter& U64(uint64_t value) { return Integer(value, 8); }
  ByteWriter& I32(int32_t value) { return U32(static_cast<uint32_t>(value)); }
  ByteWriter& I64(int64_t value) { return U64(static_cast<uint64_t>(value)); }
  ByteWriter& Bytes(absl::string_view value) {
    U32(static_cast<uint32_t>(value.size()));
    bytes_.append(value.data(), value.size());
    return *this;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  ByteWriter& Integer(uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
    return *this;
  }

  std::string bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(absl::string_view bytes) : rest_(bytes) {}

  uint8_t U8() { return static_cast<uint8_t>(Integer(1)); }
  uint32_t U32() { return static_cast<uint32_t>(Integer(4)); }
  uint64_t U64() { return Integer(8); }
  int32_t I32() { return static_cast<int32_t>(U32()); }
  int64_t I64() { return static_cast<int64_t>(U64()); }
  absl::string_view Bytes() { return Take(U32()); }

  bool ok() const { return ok_; }
  size_t remaining() const { return rest_.size(); }
  // OK if everything was there and everything was read.
  absl::Status Finish(absl::string_view what) const {
    if (!ok_) return absl::InvalidArgumentError(absl::StrCat(what, ": bytes are missing"));
    if (!rest_.empty()) return absl::InvalidArgumentError(absl::StrCat(what, ": ", rest_.size(), " bytes too many"));
    return absl::OkStatus();
  }

 private:
  uint64_t Integer(size_t size) {
    uint64_t value = 0;
    const absl::string_view bytes = Take(size);
    for (size_t i = 0; i < bytes.size(); ++i) value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
    return value;
  }
  absl::string_view Take(size_t size) {
    if (!ok_ || size > rest_.size()) {
      ok_ = false;
      return {};
    }
    const absl::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_BYTES_H_
