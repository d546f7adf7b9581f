// A model's parameters in a safetensors file, as PyTorch and Hugging Face's software read and write
// them.
//
//   EK_RETURN_IF_ERROR(SaveParameters(params, "model.safetensors", {.metadata = {{"step", "7"}}}));
//   EK_RETURN_IF_ERROR(LoadParameters("model.safetensors", params));
//
// Tensors have the names and shapes given to ParameterSet::Add(), without a shape [count]; a shared
// parameter has its first name. Loading requires each of them and no others, in the set's type or
// in a narrower float, which loses nothing; it checks all before it changes any.
//
// Order:   no collectives. Rank 0 loads before DataParallel::Create(), which sends its values to
//          the others; any one rank saves.
// Threads: as ParameterSet; gradients are not touched.
// Errors:  InvalidArgument for a file that is malformed or of another model, naming the tensor, and
//          for values on a device, which must be copied to the host first; the file system's own.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_PARAMETER_FILE_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_PARAMETER_FILE_H_

#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {

struct ParameterFileOptions {
  std::span<const NamedTensor> buffers = {};  // Further tensors: running statistics, ...
  std::map<std::string, std::string> metadata = {};
  // On the host, by index, in place of values on a device. Empty: the set's own.
  std::span<const TensorView> values = {};
};

// Write and read a set's parameters. A written file is complete or absent; its metadata also has
// {"format", "pt"}, without which some Python software refuses a file.
absl::Status SaveParameters(const ParameterSet& params, const std::string& path,
                            const ParameterFileOptions& options = {});
absl::Status LoadParameters(const std::string& path, ParameterSet& params,
                            const ParameterFileOptions& options = {});

// Return the tensors of such a file, and copy `stored` ones to them. Tensors without memory are
// only compared.
std::vector<NamedTensor> TensorsOf(const ParameterSet& params,
                                   const ParameterFileOptions& options = {});
absl::Status CopyTensors(std::span<const SafetensorsFile::Tensor> stored,
                         std::span<const NamedTensor> tensors);

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_PARAMETER_FILE_H_
