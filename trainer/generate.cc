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
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/app/flag_table.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/gpt/generate_tokens.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/hf_files.h"
#include "evenkeel/trainer/layers/compute_threads.h"
#include "evenkeel/trainer/tokenizer/tokenizer.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"

namespace evenkeel {
namespace {

struct Flags {
  std::string weights;
  std::string tokenizer;
  std::optional<int64_t> heads;
  std::string prompt;
  GenerateOptions how;
};

void AddFlags(FlagTable& table, Flags& flags) {
  table.Group("Model");
  table.Add("weights", flags.weights,
            "=PATH safetensors file, or a folder with model.safetensors or checkpoints, step-N");
  table.Add("heads", flags.heads, {},
            "attention heads (default: as noted in the file or in config.json, else one per 64 of "
            "the width)");
  table.Add("tokenizer", flags.tokenizer,
            "=PATH tokenizer.json, or vocab.json beside merges.txt, or a folder with these "
            "(default: the one beside the weights; bytes for a vocabulary of 256)");
  table.Group("Text");
  table.Add("prompt", flags.prompt,
            "the text to continue, or - to read it from stdin; without a tokenizer token numbers, "
            "17,4,... (default: none, the model starts a new text)");
  table.Add("tokens", flags.how.count, "number of tokens to write");
  table.Add("temperature", flags.how.sample.temperature,
            "randomness; 0 always takes the most likely token");
  table.Add("top_k", flags.how.sample.top_k,
            "number of most likely tokens to choose from; 0 is all");
  table.Add("seed", flags.how.seed, "seed of the choices; equal seeds write equal texts");
}

constexpr char kSummary[] =
    R"(Continues a prompt with a language model, token by token, on the CPU.

  $0 --weights=model.safetensors --prompt="Once upon"
  $0 --weights=checkpoints --temperature=0.8 --top_k=40 --seed=7

Reads models that train saved, and GPT-2 files of other programs. Prints the prompt, then the
bytes of each token as soon as it is generated, which need not be valid UTF-8. Ends after --tokens
tokens or at the end of the text. On a terminal a newline follows. Without a tokenizer prompt and
output are token numbers.

)";

int Fail(absl::string_view sentence) {
  std::cerr << absl::StrCat(program_invocation_short_name, ": ", sentence, "\n");
  return EXIT_FAILURE;
}

absl::StatusOr<std::vector<int32_t>> ParseNumbers(absl::string_view text, int64_t vocabulary) {
  std::vector<int32_t> tokens;
  for (const absl::string_view number : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    int32_t token;
    if (!absl::SimpleAtoi(number, &token) || token < 0 || token >= vocabulary) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--prompt: this model has ", vocabulary, " tokens and no tokenizer beside it; pass ",
          "--tokenizer, or token numbers, like 17,4; \"", number, "\" is not one of them"));
    }
    tokens.push_back(token);
  }
  return tokens;
}

absl::StatusOr<std::string> ReadPrompt(const std::string& flag) {
  if (flag != "-") return flag;
  std::string text;
  char buffer[4096];
  while (const size_t size = std::fread(buffer, 1, sizeof(buffer), stdin))
    text.append(buffer, size);
  if (std::ferror(stdin) == 0) return text;
  return absl::ErrnoToStatus(errno, "cannot read the prompt from stdin");
}

// Returns null if there is none.
absl::StatusOr<std::shared_ptr<const Tokenizer>> TokenizerOf(const Flags& flags,
                                                             const std::string& weights,
                                                             int64_t vocabulary) {
  const std::string path = flags.tokenizer.empty() ? TokenizerBeside(weights) : flags.tokenizer;
  if (path.empty() && vocabulary != 256) return nullptr;
  absl::StatusOr<Tokenizer> tokenizer = path.empty() ? Tokenizer::OfBytes() : ReadTokenizer(path);
  EK_RETURN_IF_ERROR(tokenizer.status());
  if (tokenizer->size() <= vocabulary)
    return std::make_shared<const Tokenizer>(*std::move(tokenizer));
  return absl::InvalidArgumentError(absl::StrCat("the tokenizer ", path, " has ", tokenizer->size(),
                                                 " tokens, the model only ", vocabulary,
                                                 "; pass the model's tokenizer with --tokenizer"));
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
  EK_ASSIGN_OR_RETURN(options.tokenizer, TokenizerOf(flags, path, options.vocabulary));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Gpt> model, MakeGpt(options));
  EK_RETURN_IF_ERROR(file.LoadInto(*model));
  return model;
}

// Writes without buffering, so that progress is visible.
absl::Status Print(absl::string_view text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (is_written && std::fflush(stdout) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "cannot write to stdout");
}

// Continues `prompt` with numbers, each in a line.
absl::Status WriteNumbers(Gpt& model, const std::string& prompt, const GenerateOptions& how) {
  const auto print = [](int32_t token) { return Print(absl::StrCat(token, "\n")); };
  const int64_t vocabulary = model.options().vocabulary;
  EK_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, ParseNumbers(prompt, vocabulary));
  for (const int32_t token : tokens) EK_RETURN_IF_ERROR(print(token));
  // GPT-2's <|endoftext|>, which precedes a text, is the last token.
  if (tokens.empty()) {
    const auto begin = TextTokensOf(model.options()).begin;
    tokens.push_back(static_cast<int32_t>(begin.value_or(vocabulary - 1)));
  }
  return GenerateTokens(model, tokens, how, print);
}

absl::Status WriteText(Gpt& model, const std::string& prompt, const GenerateOptions& how) {
  EK_RETURN_IF_ERROR(Print(prompt));
  EK_RETURN_IF_ERROR(GenerateText(model, prompt, how, Print));
  // A program that reads the output gets the model's bytes alone.
  return isatty(STDOUT_FILENO) ? Print("\n") : absl::OkStatus();
}

absl::Status Write(const Flags& flags) {
  EK_RETURN_IF_ERROR(Validate(flags.how));  // Before a large file is read.
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Gpt> model, ReadModel(flags));
  EK_ASSIGN_OR_RETURN(const std::string prompt, ReadPrompt(flags.prompt));
  return (model->options().tokenizer == nullptr ? WriteNumbers : WriteText)(*model, prompt,
                                                                            flags.how);
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
