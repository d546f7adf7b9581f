#include "evenkeel/comm/backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::StatusOr<Memory> Backend::Allocate(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Allocate: ", bytes, " bytes"));
  const int64_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  void* data = std::aligned_alloc(kAlignment, rounded);
  if (data == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat("Allocate: no memory for ", bytes, " bytes"));
  std::memset(data, 0, rounded);
  return Memory{std::shared_ptr<void>(data, std::free), bytes};
}

}  // namespace evenkeel
