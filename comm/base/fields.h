// Structs as bytes (comm/base/bytes.h): a struct lists its fields once, and is written and read by
// that list.
//
//   struct Reply {
//     Kind kind = Kind::kValue;
//     std::vector<Item> items;  // Item has such a list, too.
//
//     static void VisitFields(auto& self, auto& visit) {
//       visit(visit.UpTo(self.kind, Kind::kLast), self.items);
//     }
//   };
//   const std::string bytes = ToBytes(reply);
//   EK_ASSIGN_OR_RETURN(const Reply reply, FromBytes<Reply>(bytes, "reply"));
//
// Fields: bool, 32-bit and 64-bit integers, double, std::string, absl::Status, structs (no list of
//         fields if there are none), lists (vectors and InlinedVectors, of items with fields),
//         optional values, variants of up to 256 structs; and those that FieldVisitor makes.
// Errors: FromBytes() returns InvalidArgument for anything that ToBytes() does not return, whatever
//         the bytes. It takes no memory for items that were announced and have not arrived.

#ifndef EVENKEEL_COMM_BASE_FIELDS_H_
#define EVENKEEL_COMM_BASE_FIELDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

// An enumerator in one byte; values above `last` are refused.
template <typename Enum>
struct BoundedEnum {
  Enum& value;
  const Enum last;
};

// A list of such enumerators: four in a byte, the first in its lowest bits, if `last` is below 4.
template <typename List, typename Enum>
struct BoundedEnums {
  int bits() const { return static_cast<uint8_t>(last) < 4 ? 2 : 8; }  // Of one.

  List& values;
  const Enum last;
};

template <typename T>
concept FieldList = requires(T& list) {
  list.emplace_back();
};

// An item without bytes would cost a sender nothing, and a reader memory.
template <FieldList List>
constexpr bool kHasBytes = !std::is_empty_v<typename List::value_type>;

// A number from 0 to `most` in as few bytes as it needs (ByteWriter::Varint()).
template <typename Integer>
struct SmallNumber {
  Integer& value;
  const uint64_t most;
};

// A text of at most `most` bytes: a writer drops the rest, a reader refuses longer ones.
template <typename Text>
struct ShortText {
  Text& value;
  const size_t most;
};

struct FieldVisitor {
  template <typename Enum>
  static BoundedEnum<Enum> UpTo(Enum& value, std::remove_const_t<Enum> last) {
    return {value, last};
  }
  template <typename List>
  static auto EachUpTo(List& values, typename List::value_type last) {
    return BoundedEnums<List, typename List::value_type>{values, last};
  }
  template <typename Integer>
  static SmallNumber<Integer> Small(Integer& value, uint64_t most) {
    return {value, most};
  }
  template <typename Text>
  static ShortText<Text> Short(Text& value, size_t most) {
    return {value, most};
  }
};

class FieldWriter : public FieldVisitor {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Write(fields), ...);
  }
  std::string Take() { return bytes_.Take(); }

 private:
  void Write(bool value) { bytes_.Bool(value); }
  void Write(int32_t value) { bytes_.I32(value); }
  void Write(uint32_t value) { bytes_.U32(value); }
  void Write(int64_t value) { bytes_.I64(value); }
  void Write(uint64_t value) { bytes_.U64(value); }
  void Write(double value) { bytes_.F64(value); }
  void Write(const std::string& value) { bytes_.Bytes(value); }
  void Write(const absl::Status& value) { bytes_.Status(value); }
  template <typename Enum>
  void Write(const BoundedEnum<Enum>& field) {
    bytes_.U8(static_cast<uint8_t>(field.value));
  }
  template <typename List, typename Enum>
  void Write(const BoundedEnums<List, Enum>& field) {
    bytes_.U32(static_cast<uint32_t>(field.values.size()));
    uint32_t byte = 0;
    int used = 0;  // Of its bits.
    for (const Enum value : field.values) {
      byte |= uint32_t{static_cast<uint8_t>(value)} << used;
      used += field.bits();
      if (used < 8) continue;
      bytes_.U8(static_cast<uint8_t>(byte));
      byte = 0;
      used = 0;
    }
    if (used > 0) bytes_.U8(static_cast<uint8_t>(byte));
  }
  template <typename Integer>
  void Write(const SmallNumber<Integer>& field) {
    bytes_.Varint(static_cast<uint64_t>(field.value));
  }
  template <typename Text>
  void Write(const ShortText<Text>& field) {
    bytes_.Bytes(absl::string_view(field.value).substr(0, field.most));
  }
  template <typename T>
  void Write(const std::optional<T>& value) {
    bytes_.Bool(value.has_value());
    if (value.has_value()) Write(*value);
  }
  template <FieldList List>
  void Write(const List& list) {
    static_assert(kHasBytes<List>);
    bytes_.U32(static_cast<uint32_t>(list.size()));
    for (const auto& item : list) Write(item);
  }
  template <typename... Ts>
  void Write(const std::variant<Ts...>& value) {  // The index in one byte, then that struct.
    static_assert(sizeof...(Ts) <= 256);
    bytes_.U8(static_cast<uint8_t>(value.index()));
    std::visit([this](const auto& it) { this->Write(it); }, value);
  }
  template <typename T>
  void Write(const T& value) {
    if constexpr (!std::is_empty_v<T>) T::VisitFields(value, *this);
  }

  ByteWriter bytes_;
};

class FieldReader : public FieldVisitor {
 public:
  explicit FieldReader(absl::string_view bytes) : bytes_(bytes) {}
  template <typename... Fields>
  void operator()(Fields&&... fields) {
    (Read(fields), ...);
  }
  absl::Status Finish(absl::string_view what) const { return bytes_.Finish(what); }

 private:
  void Read(bool& value) { value = bytes_.Bool(); }
  void Read(int32_t& value) { value = bytes_.I32(); }
  void Read(uint32_t& value) { value = bytes_.U32(); }
  void Read(int64_t& value) { value = bytes_.I64(); }
  void Read(uint64_t& value) { value = bytes_.U64(); }
  void Read(double& value) { value = bytes_.F64(); }
  void Read(std::string& value) { value = std::string(bytes_.Bytes()); }
  void Read(absl::Status& value) { value = bytes_.Status(); }
  template <typename Enum>
  void Read(BoundedEnum<Enum>& field) {
    const uint8_t value = bytes_.U8();
    if (value > static_cast<uint8_t>(field.last)) bytes_.Refuse();
    field.value = static_cast<Enum>(value);
  }
  template <typename List, typename Enum>
  void Read(BoundedEnums<List, Enum>& field) {
    const uint32_t size = bytes_.U32();
    uint32_t byte = 0;
    int left = 0;  // Of its bits.
    for (uint32_t i = 0; i < size && bytes_.ok(); ++i) {
      if (left == 0) {
        byte = bytes_.U8();
        left = 8;
      }
      const uint32_t value = byte & ((1u << field.bits()) - 1);
      byte >>= field.bits();
      left -= field.bits();
      if (value > static_cast<uint8_t>(field.last)) bytes_.Refuse();
      field.values.push_back(static_cast<Enum>(value));
    }
    if (byte != 0) bytes_.Refuse();  // A writer leaves the bits behind the last one empty.
  }
  template <typename Integer>
  void Read(SmallNumber<Integer>& field) {
    const uint64_t value = bytes_.Varint();
    if (value > field.most) bytes_.Refuse();
    field.value = static_cast<Integer>(value);
  }
  template <typename Text>
  void Read(ShortText<Text>& field) {
    Read(field.value);
    if (field.value.size() > field.most) bytes_.Refuse();
  }
  template <typename T>
  void Read(std::optional<T>& value) {
    value.reset();
    if (bytes_.Bool()) Read(value.emplace());
  }
  template <FieldList List>
  void Read(List& list) {
    static_assert(kHasBytes<List>);
    const uint32_t size = bytes_.U32();
    for (uint32_t i = 0; i < size && bytes_.ok(); ++i) Read(list.emplace_back());
  }
  template <typename... Ts>
  void Read(std::variant<Ts...>& value) {
    const uint8_t index = bytes_.U8();
    if (index >= sizeof...(Ts)) return bytes_.Refuse();
    [&]<size_t... I>(std::index_sequence<I...>) {
      (void)((index == I && (Read(value.template emplace<I>()), true)) || ...);
    }
    (std::index_sequence_for<Ts...>());
  }
  template <typename T>
  void Read(T& value) {
    if constexpr (!std::is_empty_v<T>) T::VisitFields(value, *this);
  }

  ByteReader bytes_;
};

template <typename T>
std::string ToBytes(const T& value) {
  FieldWriter writer;
  writer(value);
  return writer.Take();
}

// `what` is the name of the struct in errors.
template <typename T>
absl::StatusOr<T> FromBytes(absl::string_view bytes, absl::string_view what) {
  FieldReader reader(bytes);
  T value;
  reader(value);
  EK_RETURN_IF_ERROR(reader.Finish(what));
  return value;
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_FIELDS_H_
