// The kinds of data that the trainer reads, and their detection from a path.
//
//   // DataKind::kTokens
//   EK_ASSIGN_OR_RETURN(const DataKind kind, GuessDataKind("data/fineweb_train_*.bin"));
//
// A folder with one of MNIST's four files is kIdx (idx_dataset.h); one with data_batch_1.bin is
// kCifar (cifar_dataset.h); a file, a folder or a pattern with a file that begins as a token shard
// is kTokens (token_shards.h); any other file, folder with files, or pattern that files match is
// kText (text_dataset.h).
//
// Threads: pure functions, safe from any thread.
// Errors:  NotFound, which lists the kinds of data, for a path that does not exist; InvalidArgument
//          with the path for other files of llm.c than token shards; else the system's own, with
//          the path.

#ifndef EVENKEEL_TRAINER_DATA_DATA_KIND_H_
#define EVENKEEL_TRAINER_DATA_DATA_KIND_H_

#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

enum class DataKind { kIdx, kCifar, kText, kTokens };

absl::StatusOr<DataKind> GuessDataKind(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_DATA_KIND_H_
