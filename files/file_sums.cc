#include "evenkeel/files/file_sums.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr size_t kDigits = 8;  // Digits of a block's sum.

int64_t BlocksOf(int64_t bytes) { return (bytes + kSumBlock - 1) / kSumBlock; }

absl::Status ErrnoStatus(absl::string_view action, const std::string& path) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(action, " ", path));
}

uint32_t SumOf(absl::Span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32(crc32(0, nullptr, 0),
                                     reinterpret_cast<const Bytef*>(bytes.data()),
                                     static_cast<uInt>(bytes.size())));
}

absl::Status ReadAt(int descriptor, const std::string& path, int64_t offset,
                    absl::Span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t count = pread(descriptor, into.data(), into.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus("cannot read", path);
    if (count == 0)
      return absl::DataLossError(absl::StrCat(path, " became shorter while it was read"));
    into.remove_prefix(count);
    offset += count;
  }
  return absl::OkStatus();
}

// An open regular file and its size.
absl::StatusOr<std::pair<int, int64_t>> OpenRegular(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return ErrnoStatus("cannot open", path);
  struct stat info;
  absl::Status status;
  if (fstat(descriptor, &info) != 0) {
    status = ErrnoStatus("cannot look at", path);
  } else if (!S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  if (status.ok()) return std::pair(descriptor, static_cast<int64_t>(info.st_size));
  close(descriptor);
  return status;
}

}  // namespace

std::string FileSums::Hex() const {
  std::string text;
  for (uint32_t sum : blocks) absl::StrAppend(&text, absl::Hex(sum, absl::kZeroPad8));
  return text;
}

absl::StatusOr<FileSums> FileSums::FromHex(int64_t bytes, absl::string_view hex) {
  const auto wrong = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("these are not the checksums of ", bytes, " bytes"));
  };
  if (bytes < 0 || hex.size() % kDigits != 0 ||
      static_cast<int64_t>(hex.size() / kDigits) != BlocksOf(bytes)) {
    return wrong();
  }
  FileSums sums{.bytes = bytes};
  for (; !hex.empty(); hex.remove_prefix(kDigits)) {
    uint32_t sum = 0;
    const absl::string_view digits = hex.substr(0, kDigits);
    if (!std::all_of(digits.begin(), digits.end(),
                     [](char c) { return absl::ascii_isxdigit(c) != 0; }) ||
        !absl::SimpleHexAtoi(digits, &sum)) {
      return wrong();
    }
    sums.blocks.push_back(sum);
  }
  return sums;
}

absl::StatusOr<FileSums> SumsOf(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const auto opened, OpenRegular(path));
  const auto& [descriptor, bytes] = opened;
  FileSums sums{.bytes = bytes};
  std::vector<std::byte> block(std::min(bytes, kSumBlock));
  absl::Status status;
  for (int64_t at = 0; at < bytes && status.ok(); at += kSumBlock) {
    const absl::Span<std::byte> part = absl::MakeSpan(block).first(std::min(kSumBlock, bytes - at));
    status = ReadAt(descriptor, path, at, part);
    sums.blocks.push_back(SumOf(part));
  }
  close(descriptor);
  if (!status.ok()) return status;
  return sums;
}

CheckedFile::CheckedFile(std::string path, int descriptor, FileSums sums)
    : path_(std::move(path)), descriptor_(descriptor), sums_(std::move(sums)) {}

CheckedFile::CheckedFile(CheckedFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      sums_(std::move(other.sums_)),
      fetched_(other.fetched_),
      block_(std::move(other.block_)) {}

CheckedFile& CheckedFile::operator=(CheckedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(sums_, other.sums_);
  std::swap(fetched_, other.fetched_);
  std::swap(block_, other.block_);
  return *this;
}

CheckedFile::~CheckedFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<CheckedFile> CheckedFile::Open(const std::string& path, FileSums sums) {
  EK_ASSIGN_OR_RETURN(const auto opened, OpenRegular(path));
  CheckedFile file(path, opened.first, std::move(sums));
  if (opened.second == file.sums_.bytes) return file;
  return absl::DataLossError(absl::StrCat(path, " has ", opened.second, " bytes, and ",
                                          file.sums_.bytes, " were written: it is damaged"));
}

absl::Status CheckedFile::Fetch(int64_t block) {
  if (fetched_ == block) return absl::OkStatus();
  fetched_ = -1;
  const int64_t at = block * kSumBlock;
  block_.resize(std::min(kSumBlock, sums_.bytes - at));
  EK_RETURN_IF_ERROR(ReadAt(descriptor_, path_, at, absl::MakeSpan(block_)));
  if (SumOf(block_) != sums_.blocks[block]) {
    return absl::DataLossError(
        absl::StrCat(path_, " is damaged, or not the file that was written: bytes ", at, " to ",
                     at + static_cast<int64_t>(block_.size()), " have another checksum"));
  }
  fetched_ = block;
  return absl::OkStatus();
}

absl::Status CheckedFile::Read(int64_t offset, absl::Span<std::byte> into) {
  if (offset < 0 || offset > sums_.bytes ||
      static_cast<int64_t>(into.size()) > sums_.bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat(path_, " has ", sums_.bytes, " bytes, and ",
                                                   into.size(), " from ", offset,
                                                   " on are wanted"));
  }
  while (!into.empty()) {
    EK_RETURN_IF_ERROR(Fetch(offset / kSumBlock));
    const int64_t within = offset % kSumBlock;
    const size_t count = std::min<size_t>(into.size(), block_.size() - within);
    std::memcpy(into.data(), block_.data() + within, count);
    into.remove_prefix(count);
    offset += static_cast<int64_t>(count);
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
