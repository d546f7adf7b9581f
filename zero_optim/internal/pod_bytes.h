// Numbers and blobs as bytes, for what ranks of one run send each other.
//
//   std::string bytes;
//   AppendPod(bytes, uint64_t{7});  AppendBlob(bytes, mask.Serialize());
//   absl::string_view rest = bytes;
//   uint64_t number;  absl::string_view mask;
//   if (!TakePod(rest, number) || !TakeBlob(rest, mask) || !rest.empty()) return malformed;

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_POD_BYTES_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_POD_BYTES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace evenkeel::internal {

template <typename T>
void AppendPod(std::string& bytes, T value) {
  static_assert(std::is_arithmetic_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
bool TakePod(absl::string_view& bytes, T& value) {
  if (bytes.size() < sizeof(value)) return false;
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return true;
}

// A bool is 0 or 1, whatever came.
inline bool TakePod(absl::string_view& bytes, bool& value) {
  uint8_t byte = 0;
  if (!TakePod(bytes, byte) || byte > 1) return false;
  value = byte != 0;
  return true;
}

inline void AppendBlob(std::string& bytes, absl::string_view blob) {
  AppendPod<uint64_t>(bytes, blob.size());
  bytes.append(blob.data(), blob.size());
}

inline bool TakeBlob(absl::string_view& bytes, absl::string_view& blob) {
  uint64_t size = 0;
  if (!TakePod(bytes, size) || size > bytes.size()) return false;
  blob = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return true;
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_POD_BYTES_H_
