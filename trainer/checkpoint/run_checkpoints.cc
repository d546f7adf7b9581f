#include "evenkeel/trainer/checkpoint/run_checkpoints.h"

#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

using internal::ByteReader;
using internal::ByteWriter;

constexpr char kState[] = "state.json";
constexpr char kHistory[] = "history";

std::string In(const std::string& folder, absl::string_view file) {
  return absl::StrCat(folder, "/", file);
}

std::string BuffersFile(int rank, int world_size) {
  return absl::StrCat("buffers-", rank, "-of-", world_size, ".safetensors");
}

// AgreeOn() with the topic in front of an error.
absl::StatusOr<std::vector<std::string>> Agree(Communicator& comm, absl::string_view topic,
                                               const absl::Status& own, absl::string_view value) {
  return Annotate(AgreeOn(comm, topic, own, value), topic);
}

std::string Serialize(const std::map<std::string, FileSums>& files, const Evaluation& trained) {
  ByteWriter writer;
  uint64_t loss = 0;
  static_assert(sizeof(loss) == sizeof(trained.loss_sum));
  std::memcpy(&loss, &trained.loss_sum, sizeof(loss));
  writer.I64(trained.predictions)
      .I64(trained.correct)
      .U64(loss)
      .U32(static_cast<uint32_t>(files.size()));
  for (const auto& [name, sums] : files) writer.Bytes(name).I64(sums.bytes).Bytes(sums.Hex());
  return writer.Take();
}

absl::Status AddPart(absl::string_view bytes, RunState& state) {
  ByteReader reader(bytes);
  Evaluation trained{.predictions = reader.I64(), .correct = reader.I64()};
  const uint64_t loss = reader.U64();
  std::memcpy(&trained.loss_sum, &loss, sizeof(loss));
  state.trained.push_back(trained);
  for (uint32_t left = reader.U32(); left > 0 && reader.ok(); --left) {
    const std::string name(reader.Bytes());
    const int64_t size = reader.I64();
    EK_ASSIGN_OR_RETURN(state.files[name], FileSums::FromHex(size, reader.Bytes()));
  }
  return reader.Finish("a rank's part of a checkpoint");
}

// Checks that the file is the one that the checkpoint recorded.
absl::Status CheckFile(const std::string& folder, const std::string& name, const RunState& state) {
  const auto written = state.files.find(name);
  if (written == state.files.end())
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint lists no file ", name, ": ", folder));
  EK_ASSIGN_OR_RETURN(const FileSums sums, SumsOf(In(folder, name)));
  if (sums == written->second) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("a file of the checkpoint is damaged or was replaced (its checksum differs): ",
                   In(folder, name)));
}

}  // namespace

// ---- The beginning ----

absl::StatusOr<std::unique_ptr<RunCheckpoints>> RunCheckpoints::Open(
    Communicator& comm, const CheckpointOptions& options, const RunSettings& settings,
    Model& model) {
  std::unique_ptr<RunCheckpoints> opened(new RunCheckpoints(options, settings));
  std::string path, text;
  const auto find = [&]() -> absl::Status {
    EK_RETURN_IF_ERROR(opened->OpenFolder());
    EK_ASSIGN_OR_RETURN(path, opened->ChooseResume());
    if (path.empty()) return absl::OkStatus();
    opened->advice_ = opened->AdviceFor(path);
    EK_ASSIGN_OR_RETURN(text, opened->ReadResumed(path, model));
    return absl::OkStatus();
  };
  const absl::Status own = comm.rank() == 0 ? find() : absl::OkStatus();
  const bool is_named = options.resume != kResumeAuto && options.resume != kResumeNever;
  const std::string flag = is_named ? absl::StrCat("--resume=", options.resume)
                                    : absl::StrCat("--checkpoint_dir=", options.folder);
  EK_ASSIGN_OR_RETURN(
      const std::vector<std::string> parts,
      Agree(
          comm, flag, own,
          ByteWriter().Bytes(path).Bytes(text).Bytes(opened->advice_).Bytes(opened->job_).Take()));
  ByteReader reader(parts[0]);
  opened->resumed_from_ = std::string(reader.Bytes());
  const absl::string_view state = reader.Bytes();
  opened->advice_ = std::string(reader.Bytes());
  opened->job_ = std::string(reader.Bytes());
  if (opened->resumed_from_.empty()) return opened;
  // Rank 0 has done the same.
  EK_ASSIGN_OR_RETURN(RunState parsed, RunState::Parse(state));
  opened->resumed_ = std::make_unique<RunState>(std::move(parsed));
  EK_ASSIGN_OR_RETURN(opened->terms_, CompareSettings(opened->resumed_->settings, settings));
  // Rank 0 has checked it; a rank that cannot read it may become rank 0, and would report without
  // it.
  opened->history_ = ReadFile(In(opened->resumed_from_, kHistory)).value_or("");
  return opened;
}

absl::Status RunCheckpoints::OpenFolder() {
  if (options_.folder.empty() || folder_ != nullptr) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(folder_, CheckpointFolder::Open(options_.folder, {.job = job_}));
  job_ = folder_->job();
  return absl::OkStatus();
}

absl::StatusOr<std::string> RunCheckpoints::ChooseResume() const {
  std::vector<FoundCheckpoint> found;
  if (!options_.folder.empty()) {
    EK_ASSIGN_OR_RETURN(found, FindCheckpoints(options_.folder));
  }
  if (options_.resume == kResumeAuto) return found.empty() ? "" : found.back().path;
  if (options_.resume == kResumeNever) {
    if (found.empty()) return "";
    return absl::FailedPreconditionError(absl::StrCat(
        found.back().path,
        " exists: with --resume=never, --checkpoint_dir must contain no checkpoint, since the "
        "checkpoints of the two runs would be mixed up; pass --resume=auto to continue from it"));
  }
  // Newer ones, and those of another run, would be mistaken for the new ones.
  std::error_code error;
  if (found.empty() || std::filesystem::equivalent(found.back().path, options_.resume, error))
    return options_.resume;
  return absl::FailedPreconditionError(
      absl::StrCat("--resume=", options_.resume, ": ", found.back().path,
                   " exists as well, and the next --resume=auto would use it; remove or rename it "
                   "first, or pass another --checkpoint_dir"));
}

std::string RunCheckpoints::AdviceFor(const std::string& path) const {
  const auto found = FindCheckpoints(options_.folder);
  if (!found.ok() || found->empty() || found->back().path != path) return "";
  const std::string remove = absl::StrCat("; remove or rename ", path, "; then --resume=auto ");
  if (found->size() == 1) return absl::StrCat(remove, "starts a new run");
  return absl::StrCat(remove, "continues from ", (*found)[found->size() - 2].path);
}

absl::Status RunCheckpoints::Explain(const absl::Status& status) const {
  if (status.ok() || absl::StrContains(status.message(), advice_)) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), advice_));
}

absl::StatusOr<std::string> RunCheckpoints::ReadResumed(const std::string& path,
                                                        Model& model) const {
  const absl::StatusOr<std::string> text = ReadFile(In(path, kState));
  if (!text.ok()) return Explain(text.status());
  const absl::StatusOr<RunState> state = RunState::Parse(*text);
  if (!state.ok()) return Explain(Annotate(state.status(), In(path, kState)));
  const absl::StatusOr<ResumeTerms> terms = CompareSettings(state->settings, settings_);
  if (!terms.ok()) return Annotate(terms.status(), path);
  EK_RETURN_IF_ERROR(Explain(CheckFile(path, kModelFile, *state)));
  if (state->files.contains(kHistory))
    EK_RETURN_IF_ERROR(Explain(CheckFile(path, kHistory, *state)));
  EK_RETURN_IF_ERROR(Explain(LoadModel(In(path, kModelFile), model)));
  return text;
}

absl::Status RunCheckpoints::LoadBuffers(int rank, Model& model) const {
  if (model.buffers().empty() || resumed_->world_size == 1) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const HostTensors host, model.ToHost());
  const std::vector<NamedTensor> buffers = BuffersOf(model, host);
  const std::string name = BuffersFile(rank, resumed_->world_size);
  EK_RETURN_IF_ERROR(CheckFile(resumed_from_, name, *resumed_));
  EK_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Read(In(resumed_from_, name)));
  for (const NamedTensor& buffer : buffers) {
    const SafetensorsFile::Tensor* const stored = file.Find(buffer.name);
    if (stored == nullptr || stored->dtype != buffer.value.dtype || stored->shape != buffer.shape) {
      return absl::InvalidArgumentError(
          absl::StrCat(In(resumed_from_, name), " has no buffer ", buffer.name));
    }
    if (buffer.value.count > 0)
      std::memcpy(buffer.value.data, stored->bytes.data(), stored->bytes.size());
  }
  return model.FromHost(host);
}

// ---- Saving ----

bool RunCheckpoints::IsDue(int64_t steps, int64_t total_steps, uint32_t requests) const {
  if (options_.folder.empty()) return false;
  if ((requests & (StepRequests::kSave | StepRequests::kStop)) != 0 || steps == total_steps)
    return true;
  return options_.every > 0 && steps % options_.every == 0;
}

absl::StatusOr<std::string> RunCheckpoints::Begin(int64_t step) {
  EK_RETURN_IF_ERROR(OpenFolder());  // Another rank was rank 0 when the run began.
  return folder_->Begin(step);
}

absl::StatusOr<std::string> RunCheckpoints::Save(Communicator& comm, RunToSave run) {
  run.state.settings = settings_;
  run.state.settings.dealing[kRanksSetting] =
      absl::StrCat(comm.world_size());  // Some may have been lost.
  const bool leads = comm.rank() == 0;
  absl::StatusOr<std::string> begun = leads ? Begin(run.state.steps) : "";
  absl::StatusOr<std::vector<std::string>> said =
      Agree(comm, "checkpoint", begun.status(), begun.ok() ? *begun : "");
  absl::Status status = said.status();
  if (status.ok()) status = WriteParts(comm, (*said)[0], run);
  if (status.ok()) {
    const absl::StatusOr<std::string> path = leads ? Finish((*said)[0], run) : "";
    said = Agree(comm, "checkpoint", path.status(), path.ok() ? *path : "");
    if (said.ok()) return (*said)[0];
    status = said.status();
  }
  if (leads && folder_ != nullptr) folder_->Discard();
  return status;
}

absl::Status RunCheckpoints::WriteParts(Communicator& comm, const std::string& path,
                                        RunToSave& run) const {
  EK_RETURN_IF_ERROR(WriteCheckpoint(In(path, "optimizer"), run.optimizer_name, comm,
                                     run.model->parameters(), run.optimizer, run.optimizer_steps));
  std::map<std::string, FileSums> files;
  const absl::Status own = WriteOwn(comm, path, run, files);
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                      Agree(comm, "checkpoint", own, Serialize(files, run.trained)));
  run.state.trained.clear();
  run.state.files.clear();
  for (const std::string& part : parts) EK_RETURN_IF_ERROR(AddPart(part, run.state));
  return absl::OkStatus();
}

absl::Status RunCheckpoints::WriteOwn(Communicator& comm, const std::string& path,
                                      const RunToSave& run,
                                      std::map<std::string, FileSums>& files) const {
  if (comm.rank() == run.model_rank) {
    EK_RETURN_IF_ERROR(
        SaveModelFolder(*run.model, path, {{"steps", absl::StrCat(run.state.steps)}}));
    EK_ASSIGN_OR_RETURN(files[kModelFile], SumsOf(In(path, kModelFile)));
    for (const auto& [name, text] : run.model->companions()) {
      EK_ASSIGN_OR_RETURN(files[name], SumsOf(In(path, name)));
    }
  }
  if (run.model->buffers().empty() || comm.world_size() == 1) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const HostTensors host, run.model->ToHost());
  const std::string name = BuffersFile(comm.rank(), comm.world_size());
  EK_RETURN_IF_ERROR(WriteSafetensors(In(path, name), BuffersOf(*run.model, host)));
  EK_ASSIGN_OR_RETURN(files[name], SumsOf(In(path, name)));
  return absl::OkStatus();
}

absl::StatusOr<std::string> RunCheckpoints::Finish(const std::string& path, RunToSave& run) {
  if (make_history_ != nullptr) {
    const std::string history = make_history_(std::move(run.ranks));
    const absl::string_view pieces[] = {history};
    EK_RETURN_IF_ERROR(WriteFileAtomically(In(path, kHistory), pieces));
    EK_ASSIGN_OR_RETURN(run.state.files[kHistory], SumsOf(In(path, kHistory)));
  }
  const std::string text = run.state.Serialize();
  const absl::string_view pieces[] = {text};
  EK_RETURN_IF_ERROR(WriteFileAtomically(In(path, kState), pieces));
  return folder_->Publish(options_.keep);
}

}  // namespace evenkeel
