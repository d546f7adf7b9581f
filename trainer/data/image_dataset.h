// Images of 10 classes: in the format of MNIST ("IDX"), 28x28 and grey, or CIFAR-10 in its binary
// version, 32x32 in three colours.
//
//   EK_ASSIGN_OR_RETURN(const ImageDataset data, LoadIdx(kFashionMnistFolder, Split::kTrain));
//   std::vector<int32_t> samples = {0, 17};
//   const Batch batch = data.Gather(samples, memory);     // 2 * 784 floats, 2 bytes
//
// A folder of IDX files has train-images-idx3-ubyte, train-labels-idx1-ubyte,
// t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each plain or as .gz;
// `train-images.idx3-ubyte` and the like are found as well. CIFAR-10's is that of
// cifar-10-binary.tar.gz, with data_batch_1.bin to data_batch_5.bin and test_batch.bin: any number
// of records of 3073 bytes, the label, then the red, the green and the blue plane, row by row.
//
// Shapes:    images [channels, side, side]; pixels 0 to 255 become value / 255.
// Threads:   immutable once loaded.
// Errors:    NotFound if a file is missing; InvalidArgument or DataLoss, with the path, for a file
//            that is damaged, of a different kind, too short, too long, not 28x28, not whole
//            records, or has labels of 10 or more; and for different numbers of images and labels.
// Source:    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009 (CIFAR-10)

#ifndef EVENKEEL_TRAINER_DATA_IMAGE_DATASET_H_
#define EVENKEEL_TRAINER_DATA_IMAGE_DATASET_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/image_shape.h"

namespace evenkeel {

// The folder in which Debian's package dataset-fashion-mnist installs its files.
inline constexpr char kFashionMnistFolder[] = "/usr/share/datasets/fashion-mnist";

class ImageDataset : public Dataset {
 public:
  // `file` has the pixels of sample i at byte `begin` + i * `stride`.
  ImageDataset(const ImageShape& shape, std::string labels, std::string file, int64_t begin,
               int64_t stride)
      : shape_(shape),
        labels_(std::move(labels)),
        file_(std::move(file)),
        begin_(begin),
        stride_(stride) {}

  const ImageShape& shape() const { return shape_; }
  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }
  int64_t held_bytes() const override { return begin_ + size() * (stride_ + 1); }
  uint8_t label(int64_t sample) const { return static_cast<uint8_t>(labels_[sample]); }
  std::span<const uint8_t> pixels(int64_t sample) const;
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override;

 private:
  ImageShape shape_;
  std::string labels_;
  std::string file_;
  int64_t begin_;
  int64_t stride_;
};

absl::StatusOr<ImageDataset> LoadIdx(const std::string& folder, Split split,
                                     Contents contents = Contents::kAll);
absl::StatusOr<ImageDataset> LoadCifar(const std::string& folder, Split split);

// Returns true if the folder has one of the IDX files.
bool HasIdx(const std::string& folder);
// Returns true if the folder has the first of the training files of CIFAR-10.
bool HasCifar(const std::string& folder);

// Parses the contents of two uncompressed IDX files.
absl::StatusOr<ImageDataset> ParseIdx(std::string images, std::string labels);
// Parses the contents of a file of CIFAR-10, or of several concatenated files.
absl::StatusOr<ImageDataset> ParseCifar(std::string records);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_IMAGE_DATASET_H_
