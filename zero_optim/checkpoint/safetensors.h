// Reads and writes safetensors files: named tensors, and text metadata.
//
//   std::vector<NamedTensor> tensors = {{"fc1.weight", {64, 784}, weight_view}};
//   EK_RETURN_IF_ERROR(WriteSafetensors("model.safetensors", tensors, {{"step", "7"}}));
//
//   EK_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Read("model.safetensors"));
//   const SafetensorsFile::Tensor* weight = file.Find("fc1.weight");      // null if there is none
//   weight->dtype, weight->shape, weight->bytes
//
// A file is complete or absent (see WriteFileAtomically). A malformed one is an
// error: everything in it is checked before it is used. Read() maps the file: the system reads the
// header and those tensors that are used, and the ranks of a host share them. The file must not
// become shorter meanwhile (mapped_file.h), but may be replaced by another one. As the format
// requires, the tensors must cover the data without gaps and overlaps.
//
// Booleans, a byte each, are read as uint8.
//
// Units:     `bytes` are little-endian as in the file, at any alignment: copy them out.
// Ownership: a tensor's `bytes` live as long as the SafetensorsFile, also when that is moved.
// Threads:   immutable once read.
// Errors:    InvalidArgument for a malformed file or tensors that do not fit; the file system's
//            own.
// Source:    https://huggingface.co/docs/safetensors, format version 0.4.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_SAFETENSORS_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class SafetensorsFile {
 public:
  struct Tensor {
    std::string name;
    DType dtype = DType::kFloat32;
    std::vector<int64_t> shape;
    absl::string_view bytes;

    int64_t count() const { return static_cast<int64_t>(bytes.size()) / SizeOf(dtype); }
  };

  static absl::StatusOr<SafetensorsFile> Read(const std::string& path);
  static absl::StatusOr<SafetensorsFile> Parse(std::string contents);

  // In the order of their bytes.
  std::span<const Tensor> tensors() const { return tensors_; }
  const Tensor* Find(absl::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafetensorsFile() = default;
  static absl::StatusOr<SafetensorsFile> Parse(absl::string_view all,
                                               std::shared_ptr<const void> owner);

  std::shared_ptr<const void> contents_;
  std::vector<Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  TensorView value;  // On the CPU, as many elements as the shape says.
};

// `offsets`: gets, for each of the tensors, where in the file its bytes begin.
absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata = {},
                              std::vector<int64_t>* offsets = nullptr);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_SAFETENSORS_H_
