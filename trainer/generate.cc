// Generates text with a language model: see --help.

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/app/flag_table.h"
#include "evenkeel/trainer/gpt/find_weights.h"
#include "evenkeel/trainer/gpt/generate_tokens.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/layers/compute_threads.h"

namespace evenkeel {
namespace {

struct Flags {
  std::string weights;
  std::optional<int64_t> heads;
  std::string prompt;
  GenerateOptions how;
};

void AddFlags(FlagTable& table, Flags& flags) {
  table.Group("Model");
  table.Add("weights", flags.weights,
            "=PATH safetensors file, or a folder with model.safetensors or checkpoints, step-N");
  table.Add("heads", flags.heads, {},
            "attention heads (default: as noted in the file, else one per 64 of the width)");
  table.Group("Text");
  table.Add("prompt", flags.prompt,
            "the text to continue: text, or token numbers, 17,4,... (default: the beginning of a "
            "text)");
  table.Add("tokens", flags.how.count, "number of tokens to write");
  table.Add("temperature", flags.how.sample.temperature,
            "randomness; 0 always takes the most likely token");
  table.Add("top_k", flags.how.sample.top_k,
            "number of most likely tokens to choose from; 0 is all");
  table.Add("seed", flags.how.seed, "seed of the choices; equal seeds write equal texts");
}

constexpr char kSummary[] =
    R"(Continues a prompt with a language model, token by token, on the CPU.

  bazel run //trainer:generate -- --weights=model.safetensors --prompt="Once upon"
  bazel run //trainer:generate -- --weights=checkpoints --temperature=0.8 --top_k=40 --seed=7

Reads models that train saved, and GPT-2 files of other programs. With a model of bytes (a vocabulary of 256) the prompt
and the output are text; stdout gets the prompt first, then the model's bytes unchanged, which need not be valid UTF-8.
On a terminal a newline follows. With other models prompt and output are token numbers.

)";

constexpr int64_t kBytes = 256;  // The vocabulary of a model of bytes.

int Fail(absl::string_view sentence) {
  std::cerr << absl::StrCat("generate: ", sentence, "\n");
  return EXIT_FAILURE;
}

absl::StatusOr<std::vector<int32_t>> PromptTokens(const std::string& prompt, int64_t vocabulary) {
  std::vector<int32_t> tokens;
  if (vocabulary == kBytes) {
    for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  for (absl::string_view number : absl::StrSplit(prompt, ',', absl::SkipEmpty())) {
    int32_t token;
    if (!absl::SimpleAtoi(number, &token) || token < 0 || token >= vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--prompt: this model has ", vocabulary,
          " tokens and expects their numbers, like 17,4; \"", number, "\" is not one of them"));
    }
    tokens.push_back(token);
  }
  return tokens;
}

// Returns the token that precedes a text: a newline, or the last token, GPT-2's <|endoftext|>.
int32_t BeginOfText(int64_t vocabulary) {
  return vocabulary == kBytes ? '\n' : static_cast<int32_t>(vocabulary - 1);
}

// Writes without buffering, so that progress is visible. Each number gets a line.
absl::Status Print(int32_t token, int64_t vocabulary) {
  const bool is_written = vocabulary == kBytes ? std::fputc(token, stdout) != EOF
                                               : std::fprintf(stdout, "%d\n", token) >= 0;
  if (is_written && std::fflush(stdout) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "cannot write to stdout");
}

absl::StatusOr<std::unique_ptr<Gpt>> ReadModel(const Flags& flags) {
  if (flags.weights.empty()) {
    return absl::InvalidArgumentError(
        "--weights is missing; pass a safetensors file or a folder of checkpoints; see --help");
  }
  EK_ASSIGN_OR_RETURN(const std::string path, FindWeights(flags.weights));
  EK_ASSIGN_OR_RETURN(const GptFile file, GptFile::Read(path));
  GptOptions options = file.options();
  options.heads = flags.heads.value_or(options.heads);
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Gpt> model, MakeGpt(options));
  EK_RETURN_IF_ERROR(file.LoadInto(*model));
  return model;
}

absl::Status Write(const Flags& flags) {
  EK_RETURN_IF_ERROR(Validate(flags.how));  // Before a large file is read.
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Gpt> model, ReadModel(flags));
  const int64_t vocabulary = model->options().vocabulary;
  EK_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, PromptTokens(flags.prompt, vocabulary));
  for (int32_t token : prompt) EK_RETURN_IF_ERROR(Print(token, vocabulary));
  if (prompt.empty()) prompt.push_back(BeginOfText(vocabulary));
  EK_RETURN_IF_ERROR(GenerateTokens(*model, prompt, flags.how,
                                    [&](int32_t token) { return Print(token, vocabulary); }));
  // A program that reads the output gets the model's bytes alone.
  return vocabulary == kBytes && isatty(STDOUT_FILENO) ? Print('\n', vocabulary) : absl::OkStatus();
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  evenkeel::Flags flags;
  evenkeel::FlagTable table;
  AddFlags(table, flags);
  const absl::StatusOr<bool> runs = table.Parse(evenkeel::kSummary, argc, argv);
  if (!runs.ok()) return evenkeel::Fail(runs.status().message());
  if (!*runs) return EXIT_SUCCESS;
  // Products of one token are too small for several threads.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) evenkeel::SetComputeThreads(1);
  const absl::Status status = evenkeel::Write(flags);
  return status.ok() ? EXIT_SUCCESS : evenkeel::Fail(status.message());
}
