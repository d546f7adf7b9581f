// Images and labels in the format of MNIST ("IDX"), in the files of a folder.
//
//   EK_ASSIGN_OR_RETURN(IdxDataset data, IdxDataset::Load(kFashionMnistFolder, Split::kTrain));
//   std::vector<int32_t> samples = {0, 17};
//   const Batch batch = data.Gather(samples, memory);     // 2 * 784 floats, 2 bytes
//
// The folder has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
// t10k-labels-idx1-ubyte, each plain or as .gz; `train-images.idx3-ubyte` and the like are found
// as well.
//
// Shapes:    images 28x28, row by row; pixels 0 to 255 become value / 255.
// Threads:   immutable once loaded.
// Errors:    NotFound if a file is missing; InvalidArgument or DataLoss, with the path, for a file
//            that is damaged, of a different kind, too short, too long, not 28x28, or has labels
//            of 10 or more; and for different numbers of images and labels.

#ifndef EVENKEEL_TRAINER_DATA_IDX_DATASET_H_
#define EVENKEEL_TRAINER_DATA_IDX_DATASET_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"

namespace evenkeel {

// The folder in which Debian's package dataset-fashion-mnist installs its files.
inline constexpr char kFashionMnistFolder[] = "/usr/share/datasets/fashion-mnist";

class IdxDataset : public Dataset {
 public:
  static absl::StatusOr<IdxDataset> Load(const std::string& folder, Split split);
  // Returns true if the folder has one of the files.
  static bool IsIn(const std::string& folder);
  // Parses the contents of two uncompressed files.
  static absl::StatusOr<IdxDataset> Parse(std::string images, std::string labels);

  int64_t size() const override { return static_cast<int64_t>(labels().size()); }
  int64_t held_bytes() const override {
    return static_cast<int64_t>(images_file_.size() + labels_file_.size());
  }
  std::span<const uint8_t> pixels(int64_t sample) const;  // [784]
  uint8_t label(int64_t sample) const { return labels()[sample]; }

  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  struct NamedFile;

  IdxDataset() = default;
  static absl::StatusOr<NamedFile> LoadFile(const std::string& folder, absl::string_view stem,
                                            int dimensions);
  static absl::StatusOr<IdxDataset> Make(NamedFile images, NamedFile labels);
  std::span<const uint8_t> labels() const;

  std::string images_file_;  // With their headers: the pixels are not copied once more.
  std::string labels_file_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_IDX_DATASET_H_
