// Writes messages of the Protocol Buffers wire format, field by field, for TensorBoard.
//
//   ProtoWriter value;
//   value.Text(1, "train/loss").Float(2, 0.61f);
//   ProtoWriter summary;
//   summary.Text(1, value.bytes());            // a nested message is its bytes
//
// Fields are written even if they have their default value; numbers are from 1 to 2^29 - 1.
//
// Threads: thread-compatible.
// Source:  protobuf.dev/programming-guides/encoding.

#ifndef EVENKEEL_TRAINER_REPORT_PROTO_WRITER_H_
#define EVENKEEL_TRAINER_REPORT_PROTO_WRITER_H_

#include <bit>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

class ProtoWriter {
 public:
  const std::string& bytes() const { return bytes_; }

  // Writes an int64, enumeration or boolean. Negative numbers take ten bytes.
  ProtoWriter& Int(uint32_t field, int64_t value) {
    Key(field, kVarint);
    Varint(static_cast<uint64_t>(value));
    return *this;
  }
  ProtoWriter& Float(uint32_t field, float value) {
    Key(field, kFixed32);
    LittleEndian(std::bit_cast<uint32_t>(value), 4);
    return *this;
  }
  ProtoWriter& Double(uint32_t field, double value) {
    Key(field, kFixed64);
    LittleEndian(std::bit_cast<uint64_t>(value), 8);
    return *this;
  }
  // Writes a text, bytes or a message.
  ProtoWriter& Text(uint32_t field, absl::string_view value) {
    Key(field, kLength);
    Varint(value.size());
    bytes_.append(value.data(), value.size());
    return *this;
  }

 private:
  enum WireType { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

  void Key(uint32_t field, WireType type) { Varint(uint64_t{field} << 3 | type); }
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  void LittleEndian(uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }

  std::string bytes_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_PROTO_WRITER_H_
