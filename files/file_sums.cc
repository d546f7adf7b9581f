#include "evenkeel/files/file_sums.h"

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

uint32_t SumOf(absl::Span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32(crc32(0, nullptr, 0),
                                     reinterpret_cast<const Bytef*>(bytes.data()),
                                     static_cast<uInt>(bytes.size())));
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
  EK_ASSIGN_OR_RETURN(const RegularFile file, OpenRegularFile(path));
  FileSums sums{.bytes = file.bytes};
  std::vector<std::byte> block(std::min(file.bytes, kSumBlock));
  for (int64_t at = 0; at < file.bytes; at += kSumBlock) {
    const absl::Span<std::byte> part =
        absl::MakeSpan(block).first(std::min(kSumBlock, file.bytes - at));
    EK_RETURN_IF_ERROR(file.ReadAt(at, part));
    sums.blocks.push_back(SumOf(part));
  }
  return sums;
}

absl::StatusOr<CheckedFile> CheckedFile::Open(const std::string& path, FileSums sums) {
  EK_ASSIGN_OR_RETURN(RegularFile file, OpenRegularFile(path));
  if (file.bytes == sums.bytes) return CheckedFile(std::move(file), std::move(sums));
  return absl::DataLossError(absl::StrCat(path, " has ", file.bytes, " bytes, and ", sums.bytes,
                                          " were written: it is damaged"));
}

absl::Status CheckedFile::Fetch(int64_t block) {
  if (fetched_ == block) return absl::OkStatus();
  fetched_ = -1;
  const int64_t at = block * kSumBlock;
  block_.resize(std::min(kSumBlock, sums_.bytes - at));
  EK_RETURN_IF_ERROR(file_.ReadAt(at, absl::MakeSpan(block_)));
  if (SumOf(block_) != sums_.blocks[block]) {
    return absl::DataLossError(
        absl::StrCat(file_.path, " is damaged, or not the file that was written: bytes ", at,
                     " to ", at + static_cast<int64_t>(block_.size()), " have another checksum"));
  }
  fetched_ = block;
  return absl::OkStatus();
}

absl::Status CheckedFile::Read(int64_t offset, absl::Span<std::byte> into) {
  if (offset < 0 || offset > sums_.bytes ||
      static_cast<int64_t>(into.size()) > sums_.bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat(file_.path, " has ", sums_.bytes, " bytes, and ",
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
