#include "evenkeel/trainer/data/image_dataset.h"

#include <unistd.h>

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/data/unpack.h"

// An IDX file is: 0, 0, element type (8 = unsigned byte), number of dimensions, each dimension's
// size (4 bytes, big-endian), the elements.

namespace evenkeel {
namespace {

constexpr size_t kImagesHeader = 16, kLabelsHeader = 8;
// Samples beyond the range of a 32-bit index would not be used.
constexpr int64_t kMaxSamples = INT32_MAX;

constexpr ImageShape kCifarShape{.channels = 3, .side = 32};
constexpr int64_t kCifarRecord = 1 + kCifarShape.pixels();  // Bytes.
constexpr int64_t kMaxCifarBytes = int64_t{1} << 30;        // Per file; usual ones have 31 MB.

bool HasFile(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

absl::Status CheckLabels(absl::string_view labels) {
  for (size_t i = 0; i < labels.size(); ++i) {
    const int label = static_cast<uint8_t>(labels[i]);
    if (label < kClasses) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("label ", label, " of sample ", i, " is not below ", kClasses));
  }
  return absl::OkStatus();
}

uint32_t BigEndian(absl::string_view bytes, size_t position) {
  uint32_t value = 0;
  for (const char byte : bytes.substr(position, 4)) value = value << 8 | static_cast<uint8_t>(byte);
  return value;
}

// Returns the sizes of the dimensions of an IDX file of bytes, whose length must match them if all
// of it is there.
absl::StatusOr<std::vector<uint32_t>> ParseHeader(absl::string_view file, int dimensions,
                                                  Contents contents = Contents::kAll) {
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
  if (expected == found || contents == Contents::kSizes) return sizes;
  return absl::InvalidArgumentError(
      absl::StrCat("is too ", found < expected ? "short" : "long", ": ", absl::StrJoin(sizes, "x"),
                   " bytes should follow the header, ", found, " do"));
}

// Returns the number of images.
absl::StatusOr<size_t> CheckIdxImages(absl::string_view file, Contents contents) {
  EK_ASSIGN_OR_RETURN(const std::vector<uint32_t> sizes, ParseHeader(file, 3, contents));
  if (sizes[1] == kImageSide && sizes[2] == kImageSide && sizes[0] <= kMaxSamples) return sizes[0];
  return absl::InvalidArgumentError(absl::StrCat("holds ", sizes[0], " images of ", sizes[1], "x",
                                                 sizes[2], ", but images of 28x28 are expected"));
}

absl::Status CheckIdxLabels(absl::string_view file) {
  EK_RETURN_IF_ERROR(ParseHeader(file, 1).status());
  return CheckLabels(file.substr(kLabelsHeader));
}

// Returns the path of `stem`-idx`dimensions`-ubyte, under one of its names.
absl::StatusOr<std::string> FindFile(const std::string& folder, absl::string_view stem,
                                     int dimensions) {
  const std::string usual = absl::StrCat(stem, "-idx", dimensions, "-ubyte");
  const std::string dotted = absl::StrCat(stem, ".idx", dimensions, "-ubyte");
  for (const std::string& name : {usual, usual + ".gz", dotted, dotted + ".gz"}) {
    std::string path = absl::StrCat(folder, "/", name);
    if (HasFile(path)) return path;
  }
  return absl::NotFoundError(absl::StrCat(
      "no file ", usual, ", plain or .gz, in ", folder,
      folder == kFashionMnistFolder ? "; Debian's package dataset-fashion-mnist installs it" : ""));
}

struct NamedFile {
  std::string name;  // For errors.
  std::string contents;
};

absl::StatusOr<NamedFile> LoadFile(const std::string& folder, absl::string_view stem,
                                   int dimensions, Contents wanted = Contents::kAll) {
  EK_ASSIGN_OR_RETURN(std::string path, FindFile(folder, stem, dimensions));
  const int64_t max_bytes = kImagesHeader + kMaxSamples * (dimensions == 3 ? kImagePixels : 1);
  EK_ASSIGN_OR_RETURN(std::string contents, wanted == Contents::kAll
                                                ? ReadUnpacked(path, max_bytes)
                                                : ReadUnpackedBegin(path, kImagesHeader));
  return NamedFile{std::move(path), std::move(contents)};
}

absl::StatusOr<ImageDataset> MakeIdx(NamedFile images, const NamedFile& labels,
                                     Contents contents = Contents::kAll) {
  EK_ASSIGN_OR_RETURN(const size_t image_count,
                      Annotate(CheckIdxImages(images.contents, contents), images.name));
  EK_RETURN_IF_ERROR(Annotate(CheckIdxLabels(labels.contents), labels.name));
  const size_t label_count = labels.contents.size() - kLabelsHeader;
  if (image_count != label_count) {
    return absl::InvalidArgumentError(absl::StrCat(images.name, " has ", image_count,
                                                   " images, but ", labels.name, " has ",
                                                   label_count, " labels"));
  }
  return ImageDataset(ImageShape{}, labels.contents.substr(kLabelsHeader),
                      std::move(images.contents), kImagesHeader, kImagePixels);
}

std::vector<std::string> CifarFiles(Split split) {
  if (split == Split::kTest) return {"test_batch.bin"};
  return {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
          "data_batch_5.bin"};
}

absl::StatusOr<std::string> CifarLabels(absl::string_view records) {
  if (records.empty()) return absl::InvalidArgumentError("is empty");
  if (records.size() % kCifarRecord != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", records.size(), " bytes, which is not a multiple of the record size, ",
                     kCifarRecord, ": a label and 32x32 pixels in 3 colours"));
  }
  std::string labels;
  for (size_t i = 0; i < records.size(); i += kCifarRecord) labels += records[i];
  EK_RETURN_IF_ERROR(CheckLabels(labels));
  return labels;
}

ImageDataset MakeCifar(std::string labels, std::string records) {
  return ImageDataset(kCifarShape, std::move(labels), std::move(records), 1, kCifarRecord);
}

}  // namespace

std::span<const uint8_t> ImageDataset::pixels(int64_t sample) const {
  return {reinterpret_cast<const uint8_t*>(file_.data()) + begin_ + sample * stride_,
          static_cast<size_t>(shape_.pixels())};
}

Batch ImageDataset::Gather(std::span<const int32_t> samples, BatchMemory& memory) const {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values;
    for (int i = 0; i < 256; ++i) values[i] = static_cast<float>(i) / 255.0f;
    return values;
  }();
  memory.images.resize(samples.size() * shape_.pixels());
  memory.labels.resize(samples.size());
  float* to = memory.images.data();
  for (size_t i = 0; i < samples.size(); ++i) {
    for (const uint8_t pixel : pixels(samples[i])) *to++ = kValues[pixel];
    memory.labels[i] = label(samples[i]);
  }
  return ImageBatch{memory.images, memory.labels};
}

absl::StatusOr<ImageDataset> LoadIdx(const std::string& folder, Split split, Contents contents) {
  const std::string name = split == Split::kTrain ? "train" : "t10k";
  EK_ASSIGN_OR_RETURN(NamedFile images, LoadFile(folder, name + "-images", 3, contents));
  EK_ASSIGN_OR_RETURN(const NamedFile labels, LoadFile(folder, name + "-labels", 1));
  return MakeIdx(std::move(images), labels, contents);
}

absl::StatusOr<ImageDataset> LoadCifar(const std::string& folder, Split split) {
  std::string labels, records;
  for (const std::string& name : CifarFiles(split)) {
    const std::string path = absl::StrCat(folder, "/", name);
    if (!HasFile(path)) {
      return absl::NotFoundError(absl::StrCat(
          "no file ", name, " in the folder ", folder, "; CIFAR-10's binary version has ",
          "data_batch_1.bin to data_batch_5.bin and test_batch.bin"));
    }
    EK_ASSIGN_OR_RETURN(const std::string file, ReadFile(path, {.max_bytes = kMaxCifarBytes}));
    EK_ASSIGN_OR_RETURN(const std::string own, Annotate(CifarLabels(file), path));
    labels += own;
    records += file;
  }
  return MakeCifar(std::move(labels), std::move(records));
}

bool HasIdx(const std::string& folder) {
  for (const char* split : {"train", "t10k"}) {
    if (FindFile(folder, absl::StrCat(split, "-images"), 3).ok()) return true;
    if (FindFile(folder, absl::StrCat(split, "-labels"), 1).ok()) return true;
  }
  return false;
}

bool HasCifar(const std::string& folder) {
  return HasFile(absl::StrCat(folder, "/", CifarFiles(Split::kTrain).front()));
}

absl::StatusOr<ImageDataset> ParseIdx(std::string images, std::string labels) {
  return MakeIdx({"images", std::move(images)}, {"labels", std::move(labels)});
}

absl::StatusOr<ImageDataset> ParseCifar(std::string records) {
  EK_ASSIGN_OR_RETURN(std::string labels, Annotate(CifarLabels(records), "records"));
  return MakeCifar(std::move(labels), std::move(records));
}

}  // namespace evenkeel
