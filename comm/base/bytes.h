// Numbers and strings as bytes, equal on every machine: little endian, strings after their length.
// All messages between ranks are written with it.
//
//   std::string message = ByteWriter().U8(kSet).Bytes(key).Bytes(value).Take();
//   ByteReader reader(message);
//   uint8_t kind = reader.U8();  absl::string_view key = reader.Bytes(), value = reader.Bytes();
//   EK_RETURN_IF_ERROR(reader.Finish("store request"));     // nothing missing, nothing left over
//
// A reader never reads past the end: missing bytes read as zero or empty, and Finish() reports
// them. The reader of a list whose length was announced checks ok() after each item, and takes no
// memory for items that have not arrived. comm/base/fields.h reads and writes structs by a list of
// their fields.
//
// Ownership: a reader, and the views that it returns, point into the bytes that it reads.
// Threads:   thread-compatible.

#ifndef EVENKEEL_COMM_BASE_BYTES_H_
#define EVENKEEL_COMM_BASE_BYTES_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel::internal {

// The type of a status payload that is written with the status: a FailureInfo
// (comm/failure_info.h).
inline constexpr absl::string_view kFailureInfoType = "evenkeel/FailureInfo";

// Write and read an integer of `size` bytes, little endian on every machine.
inline void PutInteger(uint64_t value, size_t size, char* to) {
  for (size_t i = 0; i < size; ++i) to[i] = static_cast<char>(value >> (8 * i));
}
inline uint64_t GetInteger(const char* from, size_t size) {
  uint64_t value = 0;
  for (size_t i = 0; i < size; ++i) value |= uint64_t{static_cast<uint8_t>(from[i])} << (8 * i);
  return value;
}

class ByteWriter {
 public:
  ByteWriter& U8(uint8_t value) { return Integer(value, 1); }
  ByteWriter& U32(uint32_t value) { return Integer(value, 4); }
  ByteWriter& U64(uint64_t value) { return Integer(value, 8); }
  ByteWriter& I32(int32_t value) { return U32(static_cast<uint32_t>(value)); }
  ByteWriter& I64(int64_t value) { return U64(static_cast<uint64_t>(value)); }
  ByteWriter& F64(double value) { return U64(std::bit_cast<uint64_t>(value)); }
  ByteWriter& Bool(bool value) { return U8(value ? 1 : 0); }
  // Writes seven bits per byte, the lowest ones first: one byte for values below 128.
  ByteWriter& Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) U8(static_cast<uint8_t>(value | 0x80));
    return U8(static_cast<uint8_t>(value));
  }
  ByteWriter& Bytes(absl::string_view value) {
    U32(static_cast<uint32_t>(value.size()));
    bytes_.append(value.data(), value.size());
    return *this;
  }
  // Writes one zero byte for OK, else the code, the message and the FailureInfo.
  ByteWriter& Status(const absl::Status& value) {
    if (value.ok()) return U8(0);
    return U8(static_cast<uint8_t>(value.code()))
        .Bytes(value.message())
        .Bytes(std::string(value.GetPayload(kFailureInfoType).value_or(absl::Cord())));
  }
  std::string Take() { return std::move(bytes_); }

 private:
  ByteWriter& Integer(uint64_t value, size_t size) {
    bytes_.resize(bytes_.size() + size);
    PutInteger(value, size, bytes_.data() + bytes_.size() - size);
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
  double F64() { return std::bit_cast<double>(U64()); }
  bool Bool() {  // Refuses bytes other than 0 and 1.
    const uint8_t value = U8();
    if (value > 1) Refuse();
    return value == 1;
  }
  uint64_t Varint() {  // Refuses more than 64 bits, and bytes that Varint() does not write.
    uint64_t value = 0;
    for (int shift = 0; ok(); shift += 7) {
      const uint8_t byte = U8();
      if (shift > 63 || (shift == 63 && byte > 1) || (shift > 0 && byte == 0)) break;
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    Refuse();
    return 0;
  }
  absl::string_view Bytes() { return Take(U32()); }
  absl::Status Status() {  // Refuses an unknown code.
    const uint8_t code = U8();
    if (code == 0) return absl::OkStatus();
    const absl::string_view message = Bytes(), info = Bytes();
    if (code > static_cast<uint8_t>(absl::StatusCode::kUnauthenticated)) Refuse();
    absl::Status value(static_cast<absl::StatusCode>(code), message);
    if (!info.empty()) value.SetPayload(kFailureInfoType, absl::Cord(info));
    return value;
  }

  // Marks the bytes as invalid for the caller; Finish() reports it.
  void Refuse() { is_refused_ = true; }

  bool ok() const { return ok_ && !is_refused_; }
  // Returns OK if nothing was missing and everything was read.
  absl::Status Finish(absl::string_view what) const {
    if (is_refused_) return absl::InvalidArgumentError(absl::StrCat(what, ": value out of range"));
    if (!ok_) return absl::InvalidArgumentError(absl::StrCat(what, ": bytes are missing"));
    if (!rest_.empty())
      return absl::InvalidArgumentError(absl::StrCat(what, ": ", rest_.size(), " bytes too many"));
    return absl::OkStatus();
  }

 private:
  uint64_t Integer(size_t size) {
    const absl::string_view bytes = Take(size);
    return GetInteger(bytes.data(), bytes.size());
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
  bool ok_ = true;  // False: bytes were missing.
  bool is_refused_ = false;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_BYTES_H_
