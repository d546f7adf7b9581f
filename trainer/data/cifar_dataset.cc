#include "evenkeel/trainer/data/cifar_dataset.h"

#include <unistd.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

namespace evenkeel {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 30;  // Per file; those of CIFAR-10 have 31 MB.

std::vector<std::string> FileNames(Split split) {
  if (split == Split::kTest) return {"test_batch.bin"};
  return {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
          "data_batch_5.bin"};
}

bool HasFile(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

}  // namespace

bool CifarDataset::IsIn(const std::string& folder) {
  return HasFile(absl::StrCat(folder, "/", FileNames(Split::kTrain).front()));
}

absl::Status CifarDataset::Check(absl::string_view records) {
  if (records.size() % kRecord != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", records.size(), " bytes, which is not a multiple of the record size, ",
                     kRecord, ": a label and 32x32 pixels in 3 colours"));
  }
  for (size_t begin = 0; begin < records.size(); begin += kRecord) {
    const int label = static_cast<uint8_t>(records[begin]);
    if (label < kClasses) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("label ", label, " of sample ", begin / kRecord, " is not below ", kClasses));
  }
  return absl::OkStatus();
}

absl::StatusOr<CifarDataset> CifarDataset::Load(const std::string& folder, Split split) {
  std::string records;
  for (const std::string& name : FileNames(split)) {
    const std::string path = absl::StrCat(folder, "/", name);
    if (!HasFile(path)) {
      return absl::NotFoundError(absl::StrCat(
          "no file ", name, " in the folder ", folder, "; CIFAR-10's binary version has ",
          "data_batch_1.bin to data_batch_5.bin and test_batch.bin"));
    }
    EK_ASSIGN_OR_RETURN(const std::string file, ReadFile(path, {.max_bytes = kMaxBytes}));
    EK_RETURN_IF_ERROR(Annotate(Check(file), path));
    records += file;
  }
  return CifarDataset(std::move(records));
}

absl::StatusOr<CifarDataset> CifarDataset::Parse(std::string records) {
  EK_RETURN_IF_ERROR(Annotate(Check(records), "records"));
  return CifarDataset(std::move(records));
}

std::span<const uint8_t> CifarDataset::pixels(int64_t sample) const {
  return {reinterpret_cast<const uint8_t*>(records_.data()) + sample * kRecord + 1,
          size_t{kShape.pixels()}};
}

Batch CifarDataset::Gather(std::span<const int32_t> samples, BatchMemory& memory) const {
  return GatherImages(*this, kShape.pixels(), samples, memory);
}

}  // namespace evenkeel
