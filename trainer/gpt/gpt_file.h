// GPT-2 weights in a safetensors file, as this trainer or Hugging Face's software wrote it.
//
//   EK_ASSIGN_OR_RETURN(const GptFile file, GptFile::Read("gpt2/model.safetensors"));
//   EK_ASSIGN_OR_RETURN(const std::unique_ptr<Gpt> model, MakeGpt(file.options()));
//   EK_RETURN_IF_ERROR(file.LoadInto(*model));
//
// Accepted are float16, bfloat16 and float32, in any order and at any alignment; names that begin
// with "transformer."; causal masks (h.N.attn.bias, h.N.attn.masked_bias), which are ignored;
// lm_head.weight, which must equal wte.weight or replaces it. All other tensors must be those of a
// GPT-2 of that size. Read() has checked them, so a model never becomes larger than its file.
//
// Heads:   not visible in the shapes. Read from config.json beside the file and from the metadata
//          ("heads", written by SaveModel()), which must agree; else one for each 64 elements of
//          the width, as in all GPT-2s that were published, and at least one. To use another
//          number, set it in a copy of options(). The sizes in config.json must be those of the
//          tensors.
// Threads: immutable.
// Errors:  InvalidArgument with file and tensor; the file system's own.

#ifndef EVENKEEL_TRAINER_GPT_GPT_FILE_H_
#define EVENKEEL_TRAINER_GPT_GPT_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {

class GptFile {
 public:
  static absl::StatusOr<GptFile> Read(const std::string& path);

  // Sizes, and the text tokens of config.json; the rest is default.
  const GptOptions& options() const { return options_; }
  // Returns true if the metadata or config.json has the number of heads, false if it is the
  // default.
  bool has_heads() const { return has_heads_; }

  // Into a model of these sizes. Nothing is changed unless all fits.
  absl::Status LoadInto(Model& model) const;

 private:
  GptFile(std::string path, SafetensorsFile file)
      : path_(std::move(path)), file_(std::move(file)) {}
  absl::Status Init();

  std::string path_;
  SafetensorsFile file_;                          // Has the bytes
  std::vector<SafetensorsFile::Tensor> tensors_;  // of these, which have a GPT-2's names.
  GptOptions options_;
  bool has_heads_ = false;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_FILE_H_
