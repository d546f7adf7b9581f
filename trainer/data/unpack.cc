#include "evenkeel/trainer/data/unpack.h"

#include <libdeflate.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"
#include "evenkeel/zero_optim/checkpoint/mapped_file.h"

namespace evenkeel {
namespace {

struct DecompressorDeleter {
  void operator()(libdeflate_decompressor* it) const { libdeflate_free_decompressor(it); }
};

// Returns the contents of a gzip file of one member; nothing for any other file.
std::optional<std::string> UnpackMember(absl::string_view file, int64_t max_bytes) {
  // A member has a header of 10 bytes and a trailer of 8, the last 4 of which are the size of its
  // contents modulo 2^32.
  if (file.size() < 18) return std::nullopt;
  uint64_t size = 0;
  for (size_t i = 1; i <= 4; ++i) size = size << 8 | static_cast<uint8_t>(file[file.size() - i]);
  // Deflate packs at most 1032 bytes into one, so a damaged size cannot claim memory without limit.
  if (size > static_cast<uint64_t>(max_bytes) || size > 1032 * file.size()) return std::nullopt;
  const std::unique_ptr<libdeflate_decompressor, DecompressorDeleter> decompressor(
      libdeflate_alloc_decompressor());
  if (decompressor == nullptr) return std::nullopt;
  std::string contents(size, '\0');
  size_t used = 0, made = 0;
  const libdeflate_result result = libdeflate_gzip_decompress_ex(
      decompressor.get(), file.data(), file.size(), contents.data(), contents.size(), &used, &made);
  if (result != LIBDEFLATE_SUCCESS || used != file.size() || made != size) return std::nullopt;
  return contents;
}

}  // namespace

absl::StatusOr<std::string> ReadUnpacked(const std::string& path, int64_t max_bytes) {
  EK_ASSIGN_OR_RETURN(const MappedFile file, MapFile(path));
  if (absl::StartsWith(*file, "\x1f\x8b")) {
    if (auto contents = UnpackMember(*file, max_bytes); contents.has_value())
      return *std::move(contents);
  }
  return ReadFile(path, {.gunzip = true, .max_bytes = max_bytes});
}

}  // namespace evenkeel
