#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>
#include <ranges>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/checkpoint/folder_lock.h"
#include "evenkeel/trainer/models/model_file.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kPrefix = "step-";
constexpr absl::string_view kSaving = ".saving-";
constexpr absl::string_view kRemoving = ".removing-";

// Returns a random name, which no other job or process has.
std::string NewName() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

std::string NameOf(int64_t step) { return absl::StrFormat("%s%09d", kPrefix, step); }

std::string Below(const std::string& folder, absl::string_view prefix, int64_t step) {
  return absl::StrCat(folder, "/", prefix, NameOf(step));
}

absl::Status StatusOf(const std::error_code& error, absl::string_view action,
                      const std::string& path) {
  if (!error) return absl::OkStatus();
  return absl::ErrnoToStatus(error.value(), absl::StrCat(action, " ", path));
}

// Makes the folder, and those above it. A crash of the host loses none of them; on a disk that
// cannot promise that, what is published reports it.
absl::Status MakeFolder(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return absl::OkStatus();
  const fs::path above = path.has_parent_path() ? path.parent_path() : ".";
  if (above != path) EK_RETURN_IF_ERROR(MakeFolder(above));
  fs::create_directory(path, error);
  EK_RETURN_IF_ERROR(StatusOf(error, "cannot make the folder", path));
  FlushFolder(above).IgnoreError();
  return absl::OkStatus();
}

absl::Status Remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return StatusOf(error, "cannot remove", path);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  return rename(from.c_str(), to.c_str()) == 0
             ? absl::OkStatus()
             : ErrnoStatus(absl::StrCat("cannot rename ", from, " to"), to);
}

// A process that still writes the folder `path` can neither add a file nor publish it after the
// rename. Another process may have removed it first.
absl::Status RenameAndRemove(const std::string& path, const std::string& removing) {
  const absl::Status renamed = Rename(path, removing);
  if (absl::IsNotFound(renamed)) return absl::OkStatus();
  EK_RETURN_IF_ERROR(renamed);
  return Remove(removing);
}

}  // namespace

absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(const std::string& folder) {
  std::vector<FoundCheckpoint> found;
  std::error_code error;
  if (!fs::exists(folder, error) && !error) return found;
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  for (const std::string& name : names) {
    absl::string_view digits = name;
    int64_t step = 0;
    if (!absl::ConsumePrefix(&digits, kPrefix) || !absl::SimpleAtoi(digits, &step) || step < 0 ||
        name != NameOf(step)) {
      continue;
    }
    found.push_back({.step = step, .path = absl::StrCat(folder, "/", name)});
  }
  std::ranges::sort(found, {}, &FoundCheckpoint::step);
  return found;
}

absl::StatusOr<std::string> FindWeights(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return absl::ErrnoToStatus(error.value(), path);
  if (!fs::is_directory(status)) return path;
  const fs::path folder = path;
  if (fs::exists(folder / kModelFile, error)) return (folder / kModelFile).string();
  EK_ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, FindCheckpoints(path));
  for (const FoundCheckpoint& checkpoint : found | std::views::reverse) {
    const fs::path file = folder / fs::path(checkpoint.path).filename() / kModelFile;
    if (fs::is_regular_file(file, error)) return file.string();
  }
  absl::string_view hint;
  if (fs::exists(folder / "model.safetensors.index.json", error)) {
    hint =
        "; it has a model in several safetensors files: save it as one, in transformers with "
        "save_pretrained(FOLDER, max_shard_size=\"100GB\")";
  } else if (fs::exists(folder / "pytorch_model.bin", error)) {
    hint =
        "; pytorch_model.bin is not read: save the model as safetensors, in transformers with "
        "from_pretrained(FOLDER).save_pretrained(FOLDER)";
  }
  return absl::NotFoundError(absl::StrCat(path, ": contains neither ", kModelFile,
                                          " nor a checkpoint, step-N/", kModelFile, hint));
}

std::string CheckpointPath(const std::string& folder, int64_t step) {
  return Below(folder, "", step);
}

absl::StatusOr<std::unique_ptr<CheckpointFolder>> CheckpointFolder::Open(
    const std::string& path, const CheckpointFolderOptions& options) {
  EK_RETURN_IF_ERROR(MakeFolder(path));
  std::string job = options.job.empty() ? NewName() : options.job;
  EK_ASSIGN_OR_RETURN(auto lock, LockFolder(path, job, options.patience));
  std::unique_ptr<CheckpointFolder> folder(
      new CheckpointFolder(path, std::move(job), std::move(lock)));
  EK_RETURN_IF_ERROR(folder->RemoveLeftovers());
  return folder;
}

CheckpointFolder::CheckpointFolder(std::string path, std::string job, internal::UniqueFd lock)
    : path_(std::move(path)), job_(std::move(job)), own_(NewName()), lock_(std::move(lock)) {}

absl::Status CheckpointFolder::RemoveLeftovers() {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(path_));
  for (const std::string& name : names) {
    const bool is_leftover = absl::StartsWith(name, kSaving) || absl::StartsWith(name, kRemoving) ||
                             absl::StartsWith(name, kTemporaryLock);
    if (!is_leftover) continue;
    EK_RETURN_IF_ERROR(RenameAndRemove(absl::StrCat(path_, "/", name),
                                       absl::StrCat(path_, "/", kRemoving, own_, "-", removed_++)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointFolder::Begin(int64_t step) {
  Discard();
  step_ = step;
  saving_ = absl::StrCat(Below(path_, kSaving, step), ".", own_, ".", ++attempts_);
  std::error_code error;
  fs::create_directory(saving_, error);
  EK_RETURN_IF_ERROR(StatusOf(error, "cannot make the folder", saving_));
  return saving_;
}

absl::StatusOr<std::string> CheckpointFolder::Publish(int keep) {
  const std::string path = CheckpointPath(path_, step_);
  EK_RETURN_IF_ERROR(FlushFolder(saving_));
  const absl::Status renamed = Rename(saving_, path);
  std::error_code error;
  if (!renamed.ok() && fs::is_directory(path, error) && fs::is_directory(saving_, error)) {
    Discard();
    return path;
  }
  EK_RETURN_IF_ERROR(renamed);
  // From here on the checkpoint is complete: another error does not change that, and what Prune()
  // leaves is tried again next time. While the new one may not be on the disk, older ones stay.
  if (FlushFolder(path_).ok()) Prune(keep).IgnoreError();
  return path;
}

absl::Status CheckpointFolder::Prune(int keep) {
  EK_ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, FindCheckpoints(path_));
  const size_t surplus =
      keep == 0 || found.size() <= static_cast<size_t>(keep) ? 0 : found.size() - keep;
  for (size_t i = 0; i < surplus; ++i) {
    EK_RETURN_IF_ERROR(RenameAndRemove(found[i].path, Below(path_, kRemoving, found[i].step)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointFolder::SetAside(int64_t step) {
  const std::string path = Below(path_, "damaged-", step);
  EK_RETURN_IF_ERROR(Remove(path));
  EK_RETURN_IF_ERROR(Rename(CheckpointPath(path_, step), path));
  return path;
}

void CheckpointFolder::Discard() {
  if (saving_.empty()) return;
  RenameAndRemove(saving_, absl::StrCat(path_, "/", kRemoving, own_, "-", removed_++))
      .IgnoreError();
}

}  // namespace evenkeel
