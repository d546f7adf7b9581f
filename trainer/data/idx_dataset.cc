#include "evenkeel/trainer/data/idx_dataset.h"

#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

// An IDX file is: 0, 0, element type (8 = unsigned byte), number of dimensions, each dimension's
// size (4 bytes, big-endian), the elements.

namespace evenkeel {
namespace {

constexpr size_t kImagesHeader = 16;
constexpr size_t kLabelsHeader = 8;
// Samples beyond the range of a 32-bit index would not be used.
constexpr int64_t kMaxSamples = INT32_MAX;

uint8_t ByteAt(absl::string_view bytes, size_t position) {
  return static_cast<uint8_t>(bytes[position]);
}

uint32_t BigEndian(absl::string_view bytes, size_t position) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | ByteAt(bytes, position + i);
  return value;
}

// Returns the sizes of the dimensions of an IDX file of bytes, whose length must match them.
absl::StatusOr<std::vector<uint32_t>> ParseHeader(absl::string_view file, int dimensions) {
  const size_t header = 4 + 4 * dimensions;
  const std::string magic = {'\0', '\0', '\x08', static_cast<char>(dimensions)};
  if (file.size() < header) {
    return absl::InvalidArgumentError(
        absl::StrCat("an IDX file's header has ", header, " bytes, this file has ", file.size()));
  }
  if (file.substr(0, 4) != magic) {
    return absl::InvalidArgumentError(
        absl::StrCat("is not an IDX file of bytes in ", dimensions,
                     dimensions == 1 ? " dimension" : " dimensions", ": it begins with ",
                     absl::Hex(BigEndian(file, 0), absl::kZeroPad8), ", not ",
                     absl::Hex(BigEndian(magic, 0), absl::kZeroPad8)));
  }
  std::vector<uint32_t> sizes;
  unsigned __int128 expected = 1;  // Three sizes of 32 bits: less than 2^96.
  for (int i = 0; i < dimensions; ++i) {
    sizes.push_back(BigEndian(file, 4 + 4 * i));
    expected *= sizes.back();
  }
  const size_t found = file.size() - header;
  if (expected == found) return sizes;
  return absl::InvalidArgumentError(
      absl::StrCat("is too ", found < expected ? "short" : "long", ": ", absl::StrJoin(sizes, "x"),
                   " bytes should follow the header, ", found, " do"));
}

absl::Status CheckImages(absl::string_view file) {
  EK_ASSIGN_OR_RETURN(const std::vector<uint32_t> sizes, ParseHeader(file, 3));
  if (sizes[1] == kImageSide && sizes[2] == kImageSide && sizes[0] <= kMaxSamples)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("holds ", sizes[0], " images of ", sizes[1], "x",
                                                 sizes[2], ", expected are images of 28x28"));
}

absl::Status CheckLabels(absl::string_view file) {
  EK_ASSIGN_OR_RETURN(const std::vector<uint32_t> sizes, ParseHeader(file, 1));
  for (size_t i = 0; i < sizes[0]; ++i) {
    const int label = ByteAt(file, kLabelsHeader + i);
    if (label < kClasses) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("label ", label, " of sample ", i, " is not below ", kClasses));
  }
  return absl::OkStatus();
}

// Returns the path of `stem`-idx`dimensions`-ubyte, under one of its names.
absl::StatusOr<std::string> FindFile(const std::string& folder, absl::string_view stem,
                                     int dimensions) {
  const std::string usual = absl::StrCat(stem, "-idx", dimensions, "-ubyte");
  const std::string dotted = absl::StrCat(stem, ".idx", dimensions, "-ubyte");
  for (const std::string& name : {usual, usual + ".gz", dotted, dotted + ".gz"}) {
    std::string path = absl::StrCat(folder, "/", name);
    if (access(path.c_str(), F_OK) == 0) return path;
  }
  return absl::NotFoundError(absl::StrCat(
      "no file ", usual, ", plain or .gz, in ", folder,
      folder == kFashionMnistFolder ? "; Debian's package dataset-fashion-mnist installs it" : ""));
}

}  // namespace

struct IdxDataset::NamedFile {
  std::string name;  // For errors.
  std::string contents;
};

absl::StatusOr<IdxDataset::NamedFile> IdxDataset::LoadFile(const std::string& folder,
                                                           absl::string_view stem, int dimensions) {
  EK_ASSIGN_OR_RETURN(std::string path, FindFile(folder, stem, dimensions));
  const int64_t max_bytes = kImagesHeader + kMaxSamples * (dimensions == 3 ? kImagePixels : 1);
  EK_ASSIGN_OR_RETURN(std::string contents,
                      ReadFile(path, {.gunzip = true, .max_bytes = max_bytes}));
  return NamedFile{std::move(path), std::move(contents)};
}

bool IdxDataset::IsIn(const std::string& folder) {
  for (const char* split : {"train", "t10k"}) {
    if (FindFile(folder, absl::StrCat(split, "-images"), 3).ok()) return true;
    if (FindFile(folder, absl::StrCat(split, "-labels"), 1).ok()) return true;
  }
  return false;
}

absl::StatusOr<IdxDataset> IdxDataset::Load(const std::string& folder, Split split) {
  const std::string name = split == Split::kTrain ? "train" : "t10k";
  EK_ASSIGN_OR_RETURN(NamedFile images, LoadFile(folder, name + "-images", 3));
  EK_ASSIGN_OR_RETURN(NamedFile labels, LoadFile(folder, name + "-labels", 1));
  return Make(std::move(images), std::move(labels));
}

absl::StatusOr<IdxDataset> IdxDataset::Parse(std::string images, std::string labels) {
  return Make({"images", std::move(images)}, {"labels", std::move(labels)});
}

absl::StatusOr<IdxDataset> IdxDataset::Make(NamedFile images, NamedFile labels) {
  EK_RETURN_IF_ERROR(Annotate(CheckImages(images.contents), images.name));
  EK_RETURN_IF_ERROR(Annotate(CheckLabels(labels.contents), labels.name));
  const size_t image_count = (images.contents.size() - kImagesHeader) / kImagePixels;
  const size_t label_count = labels.contents.size() - kLabelsHeader;
  if (image_count != label_count) {
    return absl::InvalidArgumentError(absl::StrCat(images.name, " has ", image_count,
                                                   " images, but ", labels.name, " has ",
                                                   label_count, " labels"));
  }
  IdxDataset dataset;
  dataset.images_file_ = std::move(images.contents);
  dataset.labels_file_ = std::move(labels.contents);
  return dataset;
}

std::span<const uint8_t> IdxDataset::labels() const {
  return {reinterpret_cast<const uint8_t*>(labels_file_.data()) + kLabelsHeader,
          labels_file_.size() - kLabelsHeader};
}

std::span<const uint8_t> IdxDataset::pixels(int64_t sample) const {
  const auto* first = reinterpret_cast<const uint8_t*>(images_file_.data()) + kImagesHeader;
  return {first + sample * kImagePixels, kImagePixels};
}

Batch IdxDataset::Gather(std::span<const int32_t> samples, BatchMemory& memory) const {
  return GatherImages(*this, kImagePixels, samples, memory);
}

}  // namespace evenkeel
