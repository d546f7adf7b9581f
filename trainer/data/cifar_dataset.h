// CIFAR-10 in its binary version: 32x32 colour images of 10 classes.
//
//   EK_ASSIGN_OR_RETURN(const CifarDataset data,
//                       CifarDataset::Load("cifar-10-batches-bin", Split::kTrain));
//   std::vector<int32_t> samples = {0, 17};
//   const Batch batch = data.Gather(samples, memory);     // 2 * 3072 floats, 2 bytes
//
// The folder is that of cifar-10-binary.tar.gz, with data_batch_1.bin to data_batch_5.bin and
// test_batch.bin. A file is any number of records of 3073 bytes: the label, then the red, the green
// and the blue plane, row by row.
//
// Shapes:    images [3, 32, 32]; values 0 to 255 become value / 255.
// Threads:   immutable once loaded.
// Errors:    NotFound if a file is missing; InvalidArgument, with the path, for a file that is not
//            whole records or has labels of 10 or more.
// Source:    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

#ifndef EVENKEEL_TRAINER_DATA_CIFAR_DATASET_H_
#define EVENKEEL_TRAINER_DATA_CIFAR_DATASET_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/image_shape.h"

namespace evenkeel {

class CifarDataset : public Dataset {
 public:
  static constexpr ImageShape kShape{.channels = 3, .side = 32};

  static absl::StatusOr<CifarDataset> Load(const std::string& folder, Split split);
  // Parses the contents of a file, or of several concatenated files.
  static absl::StatusOr<CifarDataset> Parse(std::string records);
  // Returns true if the folder has the first of the files.
  static bool IsIn(const std::string& folder);

  int64_t size() const override { return static_cast<int64_t>(records_.size()) / kRecord; }
  int64_t held_bytes() const override { return static_cast<int64_t>(records_.size()); }
  uint8_t label(int64_t sample) const { return static_cast<uint8_t>(records_[sample * kRecord]); }
  std::span<const uint8_t> pixels(int64_t sample) const;  // [3, 32, 32]

  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  static constexpr int64_t kRecord = 1 + kShape.pixels();  // Bytes.

  explicit CifarDataset(std::string records) : records_(std::move(records)) {}
  static absl::Status Check(absl::string_view records);

  std::string records_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_CIFAR_DATASET_H_
