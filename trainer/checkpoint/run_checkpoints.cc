#include "evenkeel/trainer/checkpoint/run_checkpoints.h"

#include <cmath>
#include <filesystem>
#include <span>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/arith/finite.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint.h"
#include "evenkeel/zero_optim/checkpoint/parameter_file.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

constexpr char kState[] = "state.json";
constexpr char kHistory[] = "history";
constexpr char kOptimizer[] = "optimizer";

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

// A rank's part of a checkpoint: what rank 0 needs to publish it.
struct OwnPart {
  struct File {
    std::string name;
    int64_t bytes = 0;
    std::string sums;  // FileSums::Hex().

    static void VisitFields(auto& self, auto& visit) { visit(self.name, self.bytes, self.sums); }
  };
  Evaluation trained;
  std::vector<File> files;
  RankRecord record;

  static void VisitFields(auto& self, auto& visit) { visit(self.trained, self.files, self.record); }

  // Adds a file that this rank has written.
  absl::Status Add(const std::string& folder, absl::string_view name) {
    EK_ASSIGN_OR_RETURN(const FileSums sums, SumsOf(In(folder, name)));
    files.push_back({std::string(name), sums.bytes, sums.Hex()});
    return absl::OkStatus();
  }
};

absl::Status CheckFinite(absl::string_view kind, std::span<const NamedTensor> tensors) {
  for (const NamedTensor& tensor : tensors) {
    const int64_t bad = internal::FirstNonfinite(tensor.value);
    if (bad < 0) continue;
    return absl::OutOfRangeError(absl::StrCat(kind, " \"", tensor.name,
                                              "\" is not finite: its element ", bad, " of ",
                                              tensor.value.count, " is infinite or not a number"));
  }
  return absl::OkStatus();
}

// Returns true if the content is at fault. Another error may be gone when the job is restarted.
bool IsDamage(const absl::Status& status) {
  return absl::IsDataLoss(status) || absl::IsInvalidArgument(status) || absl::IsNotFound(status);
}

absl::Status CheckSums(const std::string& path, const FileSums& written) {
  EK_ASSIGN_OR_RETURN(const FileSums sums, SumsOf(path));
  if (sums == written) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "a file of the checkpoint is damaged or was replaced (its checksum differs): ", path));
}

// Returns the step of the newest checkpoint; -1: none.
absl::StatusOr<int64_t> NewestIn(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> found, FindCheckpoints(folder));
  return found.empty() ? -1 : found.back().step;
}

// Checks that the file is the one that the checkpoint recorded.
absl::Status CheckFile(const std::string& folder, const std::string& name, const RunState& state) {
  const auto written = state.files.find(name);
  if (written == state.files.end())
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint lists no file ", name, ": ", folder));
  return CheckSums(In(folder, name), written->second);
}

absl::StatusOr<RunState> ReadState(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const std::string text,
                      ReadFile(path, {.max_bytes = internal::kMaxJsonBytes}));
  return Annotate(RunState::Parse(text), path);
}

}  // namespace

// Everything that the thread needs. Its views refer to the writer's copies.
struct RunCheckpoints::Writing {
  RunToSave run;  // Its optimizer's state is the writer's copy.
  ModelTensors model;
  bool has_model = false;        // This rank writes the model's file,
  bool has_buffers = false;      // or its own buffers.
  FinishHistory finish_history;  // Null: no history.
  EndedCheckpoint ended;

  absl::StatusOr<std::string> WriteOwn(const std::string& folder, int rank, int world_size,
                                       const std::map<std::string, std::string>& companions);
};

// ---- The beginning ----

absl::StatusOr<std::unique_ptr<RunCheckpoints>> RunCheckpoints::Open(
    Communicator& comm, const CheckpointOptions& options, const RunSettings& settings,
    Model& model) {
  std::unique_ptr<RunCheckpoints> opened(new RunCheckpoints(options, settings));
  opened->companions_ = model.companions();
  if (comm.waiting()) return opened;
  const std::string flag = options.resumes_from_path()
                               ? absl::StrCat("--resume=", options.resume)
                               : absl::StrCat("--checkpoint_dir=", options.folder);
  const bool leads = comm.rank() == 0;
  absl::Status damage;  // The error of the checkpoint that was chosen last.
  do {
    const absl::Status status = leads ? opened->Choose(damage, model) : absl::OkStatus();
    EK_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                        Agree(comm, flag, status, leads ? internal::ToBytes(opened->chosen_) : ""));
    EK_ASSIGN_OR_RETURN(opened->chosen_,
                        internal::FromBytes<Chosen>(parts[0], "the choice of a checkpoint"));
    if (opened->resumed_from().empty()) return opened;
    // Rank 0 has parsed it, too.
    EK_ASSIGN_OR_RETURN(RunState parsed, RunState::Parse(opened->chosen_.state));
    opened->resumed_ = std::make_unique<RunState>(std::move(parsed));
    if (!opened->passes_over()) break;
    EK_ASSIGN_OR_RETURN(damage, opened->DamageOfShares(comm, flag));
  } while (!damage.ok());
  if (opened->passes_over()) {
    const absl::Status aside = leads ? opened->SetDamagedAside() : absl::OkStatus();
    EK_RETURN_IF_ERROR(Agree(comm, flag, aside, "").status());
  }
  EK_ASSIGN_OR_RETURN(opened->terms_, CompareSettings(opened->resumed_->settings, settings));
  // Rank 0 has checked it; a rank that cannot read it may become rank 0, and would report without
  // it.
  opened->history_ =
      ReadFile(In(opened->resumed_from(), kHistory), {.max_bytes = internal::kMaxJsonBytes});
  if (absl::IsNotFound(opened->history_.status())) opened->history_ = "";
  return opened;
}

absl::Status RunCheckpoints::OpenFolder() {
  if (options_.folder.empty() || folder_ != nullptr) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(folder_, CheckpointFolder::Open(options_.folder, {.job = chosen_.job}));
  if (chosen_.job.empty()) chosen_.job = folder_->job();
  return absl::OkStatus();
}

absl::StatusOr<std::string> RunCheckpoints::ChooseResume() const {
  std::vector<FoundCheckpoint> found;
  if (!options_.folder.empty()) {
    EK_ASSIGN_OR_RETURN(found, FindCheckpoints(options_.folder));
  }
  if (options_.resume == kResumeAuto) {
    if (found.size() > damaged_.size()) return found[found.size() - 1 - damaged_.size()].path;
    if (damaged_.empty()) return "";
    return absl::DataLossError(absl::StrCat(
        "no checkpoint in ", options_.folder, " can be loaded; the newest: ",
        damaged_[0].why.message(), "; remove or rename all of them to start a new run"));
  }
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
  if (status.ok() || absl::StrContains(status.message(), chosen_.advice)) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), chosen_.advice));
}

absl::Status RunCheckpoints::Choose(const absl::Status& damage, Model& model) {
  EK_RETURN_IF_ERROR(OpenFolder());
  absl::Status why = damage;
  while (true) {
    if (!why.ok()) EK_RETURN_IF_ERROR(NoteDamaged(why));
    EK_ASSIGN_OR_RETURN(chosen_.from, ChooseResume());
    if (chosen_.from.empty()) return absl::OkStatus();
    chosen_.advice = passes_over() ? "" : AdviceFor(chosen_.from);
    const std::string path = In(chosen_.from, kState);
    absl::StatusOr<RunState> state = ReadState(path);
    if (state.ok()) {
      const absl::StatusOr<ResumeTerms> terms = CompareSettings(state->settings, settings_);
      if (!terms.ok()) return Annotate(terms.status(), chosen_.from);
      why = LoadWeights(chosen_.from, *state, model);
      if (why.ok()) {
        chosen_.state = state->Serialize();
        return absl::OkStatus();
      }
    } else {
      why = state.status();
    }
    if (!passes_over() || !IsDamage(why)) return Explain(why);
  }
}

absl::Status RunCheckpoints::NoteDamaged(const absl::Status& why) {
  EK_ASSIGN_OR_RETURN(const auto found, FindCheckpoints(options_.folder));
  if (found.size() > damaged_.size())
    damaged_.push_back({.step = found[found.size() - 1 - damaged_.size()].step, .why = why});
  return absl::OkStatus();
}

absl::Status RunCheckpoints::SetDamagedAside() {
  for (const auto& [step, why] : damaged_) {
    EK_ASSIGN_OR_RETURN(const std::string path, folder_->SetAside(step));
    passed_over_.push_back(absl::StrCat("the checkpoint of step ", step, " is passed over (",
                                        why.message(), ") and was renamed to ", path));
  }
  return absl::OkStatus();
}

absl::Status RunCheckpoints::LoadWeights(const std::string& path, const RunState& state,
                                         Model& model) const {
  EK_RETURN_IF_ERROR(CheckFile(path, kModelFile, state));
  if (state.files.contains(kHistory)) EK_RETURN_IF_ERROR(CheckFile(path, kHistory, state));
  return LoadModel(In(path, kModelFile), model);
}

absl::StatusOr<absl::Status> RunCheckpoints::DamageOfShares(Communicator& comm,
                                                            absl::string_view flag) const {
  const absl::Status own = CheckShare(comm);
  EK_ASSIGN_OR_RETURN(
      const std::vector<std::string> shares,
      Agree(comm, flag, IsDamage(own) ? absl::OkStatus() : own, internal::ToBytes(own)));
  for (const std::string& share : shares) {
    EK_ASSIGN_OR_RETURN(const absl::Status status,
                        internal::FromBytes<absl::Status>(share, "a rank's share of a checkpoint"));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RunCheckpoints::CheckShare(const Communicator& comm) const {
  EK_ASSIGN_OR_RETURN(const std::string json,
                      ReadFile(In(OptimizerFolder(), CheckpointManifest::kFile),
                               {.max_bytes = internal::kMaxJsonBytes}));
  const auto manifest = CheckpointManifest::Parse(json);
  if (!manifest.ok()) return Annotate(manifest.status(), OptimizerFolder());
  std::vector<std::pair<std::string, FileSums>> files;
  for (const auto& [name, sums] : resumed_->files) files.emplace_back(In(chosen_.from, name), sums);
  for (const CheckpointManifest::File& file : manifest->files)
    files.emplace_back(In(OptimizerFolder(), file.name), file.sums);
  for (size_t i = comm.rank(); i < files.size(); i += comm.world_size())
    EK_RETURN_IF_ERROR(CheckSums(files[i].first, files[i].second));
  return absl::OkStatus();
}

absl::Status RunCheckpoints::LoadBuffers(int rank, Model& model) const {
  if (model.buffers().empty() || resumed_->world_size == 1) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(ModelTensors own, TensorsOf(model));
  const std::string name = BuffersFile(rank, resumed_->world_size);
  EK_RETURN_IF_ERROR(CheckFile(chosen_.from, name, *resumed_));
  EK_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Read(In(chosen_.from, name)));
  EK_RETURN_IF_ERROR(Annotate(CopyTensors(file.tensors(), own.buffers()), In(chosen_.from, name)));
  return model.FromHost(own.host);
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
  EK_ASSIGN_OR_RETURN(const std::string path, folder_->Begin(step));
  return In(path, kOptimizer);
}

void RunCheckpoints::Reserve(const Model& model, bool has_model,
                             const absl::StatusOr<StatePieces>& optimizer) {
  if (!optimizer.ok()) return;  // The save has the error, too.
  std::vector<TensorView> tensors;
  for (const StatePiece& piece : optimizer->pieces) tensors.push_back(piece.data);
  if (has_model) {
    for (int i = 0; i < model.parameters().size(); ++i)
      tensors.push_back(model.parameters()[i].value);
  }
  for (const NamedBuffer& buffer : model.buffers()) tensors.push_back(buffer.value);
  writer_.Reserve(tensors);
}

void RunCheckpoints::Start(Communicator& comm, RunToSave to_save) {
  const int rank = comm.rank(), world_size = comm.world_size();
  auto writing = std::make_shared<Writing>(Writing{.run = std::move(to_save)});
  RunToSave& run = writing->run;
  writing->has_model = rank == run.model_rank;
  writing->has_buffers = !run.model->buffers().empty() && world_size > 1;
  run.state.settings = settings_;
  run.state.settings.dealing[kRanksSetting] = absl::StrCat(world_size);  // Some may be lost.
  writing->ended.step = run.state.steps;
  writing->ended.path = CheckpointPath(options_.folder, run.state.steps);
  if (rank == 0 && make_history_ != nullptr) writing->finish_history = make_history_();
  std::vector<TensorView*> copied;
  if (writing->has_model || writing->has_buffers) {
    absl::StatusOr<ModelTensors> tensors = TensorsOf(*run.model);
    if (tensors.ok()) {
      writing->model = *std::move(tensors);
    } else if (run.optimizer.ok()) {
      run.optimizer = tensors.status();  // Fails the save on all ranks.
    }
    const bool is_copy = writing->model.host.copies.data != nullptr;
    for (NamedTensor& tensor :
         writing->has_model ? std::span(writing->model.all) : writing->model.buffers()) {
      if (!is_copy) copied.push_back(&tensor.value);
    }
  }
  SaveHooks hooks;
  hooks.begin = [this, step = run.state.steps] { return Begin(step); };
  hooks.write = [this, writing, rank, world_size](const std::string& folder) {
    return writing->WriteOwn(std::filesystem::path(folder).parent_path(), rank, world_size,
                             companions_);
  };
  hooks.finish = [this, writing](const std::vector<std::string>& parts) {
    return Publish(*writing, parts);
  };
  hooks.end = [this, writing, rank](const absl::Status& result) {
    EndedCheckpoint& ended = writing->ended;
    ended.took = SteadyNow() - writing->run.begin;
    ended.status = result;
    if (result.ok()) return;
    if (rank == 0 && folder_ != nullptr) folder_->Discard();
    ended.newest = NewestIn(options_.folder);
    // Rank 0 has published it, and was lost before the other ranks got its result.
    if (rank != 0 && ended.newest.value_or(-1) == ended.step) ended.status = absl::OkStatus();
  };
  writer_.Start(comm, run.model->parameters(),
                {.name = std::move(run.optimizer_name),
                 .state = std::move(run.optimizer),
                 .steps_finished = run.optimizer_steps,
                 .hooks = std::move(hooks)},
                copied);
  writing->ended.copied_bytes = writer_.copy_bytes();
  writing->ended.stall = SteadyNow() - run.begin;
  writing_ = std::move(writing);
}

std::optional<EndedCheckpoint> RunCheckpoints::Poll() {
  if (writing_ == nullptr || !writer_.last().IsDone()) return std::nullopt;
  return Wait(absl::ZeroDuration());
}

std::optional<EndedCheckpoint> RunCheckpoints::Wait(absl::Duration timeout) {
  if (writing_ == nullptr) return std::nullopt;
  const absl::Status status = writer_.last().Wait(timeout);
  if (!writer_.last().IsDone()) {
    EndedCheckpoint still{.step = writing_->run.state.steps, .status = status};
    still.newest = NewestIn(options_.folder);
    return still;
  }
  return std::exchange(writing_, nullptr)->ended;
}

absl::StatusOr<std::string> RunCheckpoints::Writing::WriteOwn(
    const std::string& folder, int rank, int world_size,
    const std::map<std::string, std::string>& companions) {
  OwnPart part{.trained = run.trained, .record = run.record};
  if (!std::isfinite(part.trained.loss_sum))
    return absl::OutOfRangeError(absl::StrCat("the training loss is ", part.trained.loss_sum));
  if (has_model) {
    const size_t values = model.host.values.size();
    EK_RETURN_IF_ERROR(CheckFinite("parameter", std::span(model.all).first(values)));
    for (const auto& [name, text] : companions) {
      EK_RETURN_IF_ERROR(WriteFileAtomically(In(folder, name), text));
      EK_RETURN_IF_ERROR(part.Add(folder, name));
    }
    EK_RETURN_IF_ERROR(
        SaveTensors(model, In(folder, kModelFile), {{"steps", absl::StrCat(run.state.steps)}}));
    EK_RETURN_IF_ERROR(part.Add(folder, kModelFile));
  }
  if (has_model || has_buffers) EK_RETURN_IF_ERROR(CheckFinite("buffer", model.buffers()));
  if (has_buffers) {
    const std::string name = BuffersFile(rank, world_size);
    EK_RETURN_IF_ERROR(WriteSafetensors(In(folder, name), model.buffers()));
    EK_RETURN_IF_ERROR(part.Add(folder, name));
  }
  return internal::ToBytes(part);
}

absl::Status RunCheckpoints::Publish(Writing& writing, const std::vector<std::string>& parts) {
  RunState& state = writing.run.state;
  std::vector<RankRecord> records;
  for (const std::string& bytes : parts) {
    EK_ASSIGN_OR_RETURN(OwnPart part,
                        internal::FromBytes<OwnPart>(bytes, "a rank's part of a checkpoint"));
    state.trained.push_back(part.trained);
    for (const auto& [name, size, sums] : part.files) {
      EK_ASSIGN_OR_RETURN(state.files[name], FileSums::FromHex(size, sums));
    }
    records.push_back(std::move(part.record));
  }
  const std::string folder = folder_->saving();
  if (writing.finish_history != nullptr) {
    const std::string path = In(folder, kHistory);
    EK_RETURN_IF_ERROR(WriteFileAtomically(path, writing.finish_history(std::move(records))));
    EK_ASSIGN_OR_RETURN(state.files[kHistory], SumsOf(path));
  }
  EK_RETURN_IF_ERROR(WriteFileAtomically(In(folder, kState), state.Serialize()));
  return folder_->Publish(options_.keep).status();
}

}  // namespace evenkeel
