#include "evenkeel/trainer/data/unpack.h"

#include <libdeflate.h>
#include <sys/mman.h>
#include <zlib.h>

#include <algorithm>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/mapped_file.h"

// libdeflate takes half of zlib's time, but unpacks only into memory that has room for a whole
// member of the file. zlib unpacks the beginning of one.

namespace evenkeel {
namespace {

struct DecompressorDeleter {
  void operator()(libdeflate_decompressor* it) const { libdeflate_free_decompressor(it); }
};

bool BeginsAsGzip(absl::string_view bytes) { return absl::StartsWith(bytes, "\x1f\x8b"); }

// Returns the size of the contents that the end of a gzip file claims: that of its last member,
// modulo 2^32. 0 if it exceeds `max_bytes` or the file could not have it: deflate packs at most
// 1032 bytes into one, so that a damaged size takes no memory without limit.
size_t ClaimedSize(absl::string_view packed, size_t max_bytes) {
  size_t size = 0;
  for (size_t i = 1; i <= std::min<size_t>(4, packed.size()); ++i)
    size = size << 8 | static_cast<uint8_t>(packed[packed.size() - i]);
  return size <= max_bytes && size <= 1032 * packed.size() ? size : 0;
}

// Returns zeros, in huge pages where the system has them: the first use of the memory for
// Fashion-MNIST's images would cause 12,000 page faults.
std::string Zeros(size_t bytes) {
  std::string zeros;
  zeros.reserve(bytes);
  void* begin = zeros.data();
  size_t room = bytes;
  constexpr size_t kHugePage = 2 << 20;
  if (std::align(kHugePage, kHugePage, begin, room) != nullptr)
    madvise(begin, room, MADV_HUGEPAGE);  // An error changes nothing but the speed.
  zeros.resize(bytes);
  return zeros;
}

// Returns the contents of a gzip file of one or more members.
absl::StatusOr<std::string> Unpack(absl::string_view packed, size_t max_bytes) {
  const std::unique_ptr<libdeflate_decompressor, DecompressorDeleter> decompressor(
      libdeflate_alloc_decompressor());
  if (decompressor == nullptr) return absl::ResourceExhaustedError("no memory to unpack it");
  std::string contents = Zeros(ClaimedSize(packed, max_bytes));
  size_t done = 0;
  while (!packed.empty()) {
    if (!BeginsAsGzip(packed)) {
      return absl::DataLossError(
          absl::StrCat(packed.size(), " bytes follow the end of the gzip data"));
    }
    size_t used = 0, made = 0;
    const libdeflate_result result =
        libdeflate_gzip_decompress_ex(decompressor.get(), packed.data(), packed.size(),
                                      contents.data() + done, contents.size() - done, &used, &made);
    if (result == LIBDEFLATE_SUCCESS) {
      packed.remove_prefix(used);
      done += made;
    } else if (result != LIBDEFLATE_INSUFFICIENT_SPACE) {
      return absl::DataLossError("the gzip data ends too early or is damaged");
    } else if (contents.size() == max_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("unpacks to more than the ", max_bytes, " bytes expected"));
    } else {
      contents.resize(std::min(max_bytes, std::max<size_t>(2 * contents.size(), 1 << 16)));
    }
  }
  contents.resize(done);
  if (contents.capacity() / 2 > done) contents.shrink_to_fit();
  return contents;
}

}  // namespace

absl::StatusOr<std::string> ReadUnpacked(const std::string& path, int64_t max_bytes) {
  EK_ASSIGN_OR_RETURN(const MappedFile file, MapFile(path));
  if (!BeginsAsGzip(*file)) return ReadFile(path, {.max_bytes = max_bytes});
  return Annotate(Unpack(*file, static_cast<size_t>(max_bytes)), path);
}

absl::StatusOr<std::string> ReadUnpackedBegin(const std::string& path, uint32_t bytes) {
  EK_RETURN_IF_ERROR(MapFile(path).status());  // For a pipe, gzopen() waits.
  std::string begin(bytes, '\0');
  const gzFile file = gzopen(path.c_str(), "rb");
  const int count = gzread(file, begin.data(), bytes);  // -1 as well if `file` is null.
  int error = Z_OK;
  if (file != nullptr) gzerror(file, &error);  // Data that end too early return fewer bytes.
  gzclose(file);
  if (count < 0 || (error != Z_OK && error != Z_STREAM_END))
    return absl::DataLossError(absl::StrCat(path, ": cannot be unpacked"));
  begin.resize(count);
  return begin;
}

}  // namespace evenkeel
