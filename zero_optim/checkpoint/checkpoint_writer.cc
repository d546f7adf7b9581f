#include "evenkeel/zero_optim/checkpoint/checkpoint_writer.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/worker_thread.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/file_sums.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/steps/step_ledger.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

using internal::ByteReader;
using internal::ByteWriter;

std::string PathOf(const std::string& folder, absl::string_view file) {
  return absl::StrCat(folder, "/", file);
}

// Returns the key of a piece in its file.
std::string KeyOf(absl::string_view param, absl::string_view tensor, int64_t begin) {
  return absl::StrCat(param, "/", tensor, "@", begin);
}

// The facts of a parameter that a save needs. The parameter may change meanwhile.
struct ParamInfo {
  std::string name;
  DType dtype = DType::kFloat32;  // The type of the state.
  int64_t count = 0;
};

// The message of rank 0 with which a save begins.
struct Opening {
  absl::Status status;
  std::string folder, id;

  static void VisitFields(auto& self, auto& visit) { visit(self.status, self.folder, self.id); }
};

// A rank's message to rank 0 when its files are on the disk.
struct Part {
  absl::Status status;
  std::string ledger;       // At the start of the save.
  std::string description;  // The pieces of the state, by Describe().
  std::string text;         // The result of SaveHooks::write.

  static void VisitFields(auto& self, auto& visit) {
    visit(self.status, self.ledger, self.description, self.text);
  }
};

absl::Status MakeFolder(const std::string& folder) {
  for (size_t slash = folder.find('/', 1);; slash = folder.find('/', slash + 1)) {
    const std::string part = folder.substr(0, slash);
    if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot make the folder ", part));
    }
    if (slash == std::string::npos) return absl::OkStatus();
  }
}

// The written data, for the manifest.
struct Written {
  std::vector<int64_t> offsets;  // By piece.
  FileSums sums;
};

absl::StatusOr<Written> WritePieces(const std::string& path, const std::vector<ParamInfo>& params,
                                    const StatePieces& mine) {
  std::vector<NamedTensor> tensors;
  for (const StatePiece& piece : mine.pieces) {
    tensors.push_back({KeyOf(params[piece.param].name, piece.tensor, piece.begin),
                       {piece.data.count},
                       piece.data});
  }
  Written written;
  EK_RETURN_IF_ERROR(WriteSafetensors(path, tensors, {}, &written.offsets));
  EK_ASSIGN_OR_RETURN(written.sums, SumsOf(path));
  return written;
}

std::string Describe(const StatePieces& mine, const Written& written) {
  ByteWriter writer;
  writer.I64(written.sums.bytes).Bytes(written.sums.Hex());
  writer.U32(static_cast<uint32_t>(mine.steps.size()));
  for (const auto& [param, step] : mine.steps) writer.I32(param).I64(step);
  writer.U32(static_cast<uint32_t>(mine.pieces.size()));
  for (size_t i = 0; i < mine.pieces.size(); ++i) {
    const StatePiece& piece = mine.pieces[i];
    writer.I32(piece.param)
        .Bytes(piece.tensor)
        .I64(piece.begin)
        .I64(piece.data.count)
        .I64(written.offsets[i]);
  }
  return writer.Take();
}

absl::Status AddDescribed(absl::string_view description, int file,
                          const std::vector<ParamInfo>& params, CheckpointManifest& manifest) {
  ByteReader reader(description);
  const int64_t bytes = reader.I64();
  EK_ASSIGN_OR_RETURN(manifest.files[file].sums, FileSums::FromHex(bytes, reader.Bytes()));
  const auto param_of = [&](int index) -> CheckpointManifest::Param* {
    if (index < 0 || index >= std::ssize(params)) return nullptr;
    CheckpointManifest::Param& param = manifest.params[params[index].name];
    param.dtype = params[index].dtype;
    param.count = params[index].count;
    return &param;
  };
  for (uint32_t left = reader.U32(); left > 0 && reader.ok(); --left) {
    CheckpointManifest::Param* const param = param_of(reader.I32());
    const int64_t step = reader.I64();
    if (param == nullptr)
      return absl::InternalError("a rank's part of a save refers to an unknown parameter");
    param->step = std::max(param->step, step);
  }
  for (uint32_t left = reader.U32(); left > 0 && reader.ok(); --left) {
    CheckpointManifest::Param* const param = param_of(reader.I32());
    const std::string tensor(reader.Bytes());
    const int64_t begin = reader.I64(), count = reader.I64(), offset = reader.I64();
    if (param == nullptr)
      return absl::InternalError("a rank's part of a save refers to an unknown parameter");
    param->tensors[tensor].push_back({begin, count, file, offset});
  }
  return reader.Finish("a rank's pieces");
}

absl::StatusOr<CheckpointManifest> ManifestOf(const std::vector<std::string>& files,
                                              const std::vector<Part>& parts,
                                              const std::vector<ParamInfo>& params,
                                              int64_t steps_finished) {
  CheckpointManifest manifest{.steps_finished = steps_finished};
  for (const std::string& file : files) manifest.files.push_back({.name = file});
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    EK_RETURN_IF_ERROR(
        AddDescribed(parts[rank].description, static_cast<int>(rank), params, manifest));
  }
  for (auto& [name, param] : manifest.params) {
    for (auto& [tensor, pieces] : param.tensors) {
      std::ranges::sort(pieces, {}, [](const CheckpointManifest::Piece& piece) {
        return std::pair(piece.begin, piece.count);
      });
    }
  }
  // Parse() makes the checks that a reader makes.
  return CheckpointManifest::Parse(manifest.Serialize());
}

// Returns the files of the checkpoint in this folder.
std::vector<std::string> FilesOf(const std::string& folder) {
  const absl::StatusOr<std::string> json =
      ReadFile(PathOf(folder, CheckpointManifest::kFile), {.max_bytes = internal::kMaxJsonBytes});
  if (!json.ok()) return {};
  const absl::StatusOr<CheckpointManifest> manifest = CheckpointManifest::Parse(*json);
  if (!manifest.ok()) return {};
  std::vector<std::string> names;
  for (const CheckpointManifest::File& file : manifest->files) names.push_back(file.name);
  return names;
}

absl::Status WriteManifest(const std::string& folder, const CheckpointManifest& manifest) {
  const std::vector<std::string> old = FilesOf(folder);
  const absl::Status written =
      WriteFileAtomically(PathOf(folder, CheckpointManifest::kFile), manifest.Serialize());
  // From the renaming on the checkpoint is complete: an error of the flush does not change that.
  if (!written.ok() && FilesOf(folder) == old) return written;
  for (const std::string& file : old) unlink(PathOf(folder, file).c_str());
  return absl::OkStatus();
}

// Each copy begins at a multiple of 64 bytes.
int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Returns null if there is no memory. Huge pages, where the host allows them, make the first copy
// much faster.
std::byte* AllocateForCopies(int64_t bytes) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  if (bytes < kHugePage) return static_cast<std::byte*>(std::aligned_alloc(64, Aligned(bytes)));
  const int64_t room = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const data = std::aligned_alloc(kHugePage, room);
  if (data != nullptr) madvise(data, room, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

// Lowers the priority of this thread: when it wakes it preempts no other thread, and it gets a
// small part of a core that it shares.
void YieldToSteps() {
  const sched_param none = {};
  sched_setscheduler(0, SCHED_BATCH, &none);
  setpriority(PRIO_PROCESS, gettid(), 10);
}

// Returns the error of the lowest failing rank, with its number unless all ranks have the same.
absl::Status LowestError(const Communicator& comm, const std::vector<Part>& parts) {
  const auto failed =
      std::ranges::find_if(parts, [](const Part& part) { return !part.status.ok(); });
  if (failed == parts.end()) return absl::OkStatus();
  const bool is_everywhere =
      std::ranges::all_of(parts, [&](const Part& part) { return part.status == failed->status; });
  if (is_everywhere) return failed->status;
  return Annotate(failed->status, absl::StrCat("rank ", comm.members()[failed - parts.begin()]));
}

// The part of one rank in a save. Nothing that it uses changes while it runs.
class Save {
 public:
  Save(Communicator& comm, const ParameterSet& params, CheckpointToWrite checkpoint)
      : comm_(comm),
        checkpoint_(std::move(checkpoint)),
        name_(absl::StrCat("save/", checkpoint_.name)),
        topic_(comm.UniqueName(name_)),
        ledger_(StepControl::Of(comm).ledger().Serialize(StepLedger::Plans::kWithout)) {
    for (int i = 0; i < params.size(); ++i) {
      const TensorView& value = params[i].value;
      params_.push_back({params[i].name, StateDType(value.dtype), value.count});
    }
  }

  absl::Status Run() {
    absl::Status status = comm_.rank() == 0 ? Lead() : Follow();
    if (checkpoint_.hooks.begin == nullptr) status = Annotate(status, name_);
    if (!status.ok() && !may_be_complete_ && !own_path_.empty()) unlink(own_path_.c_str());
    if (checkpoint_.hooks.end != nullptr) checkpoint_.hooks.end(status);
    return status;
  }
  // In place of Run(), with a state that could not be made: all ranks get the error.
  absl::Status Refuse(const absl::Status& why) {
    checkpoint_.state = why;
    return Run();
  }

 private:
  absl::Status Lead() {
    const Opening opening = Begin();
    SendToAll("begin", internal::ToBytes(opening));
    if (!opening.status.ok()) return opening.status;
    std::vector<Part> parts(comm_.world_size());
    parts[0] = WriteOwn(opening);
    absl::Status status = Receive(parts);
    if (status.ok()) status = LowestError(comm_, parts);
    if (status.ok()) status = Guarded([&] { return Finish(opening, parts); });
    // Without this result, a rank that has handed in its part keeps its file: the checkpoint may be
    // complete.
    for (int rank = 1; !status.ok() && rank < comm_.world_size(); ++rank)
      unlink(PathOf(opening.folder, FileOf(opening, rank)).c_str());
    SendToAll("end", ByteWriter().Status(status).Take());
    return status;
  }

  absl::Status Follow() {
    EK_ASSIGN_OR_RETURN(const std::string begin, Receive("begin", 0, comm_.timeout()));
    EK_ASSIGN_OR_RETURN(const Opening opening,
                        internal::FromBytes<Opening>(begin, "the opening of a save"));
    EK_RETURN_IF_ERROR(opening.status);
    const Part mine = WriteOwn(opening);
    // Rank 0 may have removed the file, or the folder, because the group has failed.
    const bool is_removed = absl::IsNotFound(mine.status);
    const absl::Status group = comm_.status();
    if (!group.ok()) return mine.status.ok() || is_removed ? group : mine.status;
    comm_.control().Send(0, Topic(absl::StrCat("part/", comm_.rank())), internal::ToBytes(mine));
    may_be_complete_ = mine.status.ok();
    // Rank 0 waits for the slowest rank first.
    const absl::StatusOr<std::string> end = Receive("end", 0, 2 * comm_.timeout());
    if (!end.ok()) return mine.status.ok() || is_removed ? end.status() : mine.status;
    may_be_complete_ = false;
    ByteReader reader(*end);
    const absl::Status status = reader.Status();
    EK_RETURN_IF_ERROR(reader.Finish("the end of a save"));
    return status;
  }

  Opening Begin() const {
    Opening opening{.folder = checkpoint_.folder};
    if (checkpoint_.hooks.begin != nullptr) {
      opening.status = Guarded([&]() -> absl::Status {
        EK_ASSIGN_OR_RETURN(opening.folder, checkpoint_.hooks.begin());
        return MakeFolder(opening.folder);
      });
    }
    // Files have names of their own each time: those of the checkpoint before are needed until this
    // one is complete.
    opening.id = absl::StrCat(checkpoint_.steps_finished, "-", absl::ToUnixNanos(absl::Now()));
    return opening;
  }

  std::string FileOf(const Opening& opening, int rank) const {
    return absl::StrCat("state-", opening.id, ".", rank, "-of-", comm_.world_size(),
                        ".safetensors");
  }

  Part WriteOwn(const Opening& opening) {
    Part part{.ledger = ledger_};
    part.status = Guarded([&] { return TryWriteOwn(opening, part); });
    return part;
  }

  // No exception may leave the thread: the other ranks wait for its messages.
  template <typename Call>
  static absl::Status Guarded(const Call& call) {
    try {
      return call();
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("not enough memory to write a checkpoint");
    }
  }

  absl::Status TryWriteOwn(const Opening& opening, Part& part) {
    EK_RETURN_IF_ERROR(checkpoint_.state.status());
    const bool is_given = checkpoint_.hooks.begin == nullptr;
    const std::string& folder = is_given ? checkpoint_.folder : opening.folder;
    // Else rank 0 has made it, and may have removed it meanwhile.
    if (is_given) EK_RETURN_IF_ERROR(MakeFolder(folder));
    own_path_ = PathOf(folder, FileOf(opening, comm_.rank()));
    EK_ASSIGN_OR_RETURN(const Written written, WritePieces(own_path_, params_, *checkpoint_.state));
    part.description = Describe(*checkpoint_.state, written);
    if (checkpoint_.hooks.write == nullptr) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(part.text, checkpoint_.hooks.write(folder));
    return absl::OkStatus();
  }

  // On rank 0: waits for the parts of the other ranks.
  absl::Status Receive(std::vector<Part>& parts) const {
    const absl::Time deadline = SteadyNow() + comm_.timeout();
    for (int rank = 1; rank < comm_.world_size(); ++rank) {
      const absl::StatusOr<std::string> bytes =
          Receive(absl::StrCat("part/", rank), rank, deadline - SteadyNow());
      if (!bytes.ok() && !comm_.status().ok())
        return parts[0].status.ok() ? bytes.status() : parts[0].status;
      absl::StatusOr<Part> part = bytes.ok()
                                      ? internal::FromBytes<Part>(*bytes, "a rank's part of a save")
                                      : bytes.status();
      parts[rank] = part.ok() ? *std::move(part) : Part{.status = part.status()};
    }
    return absl::OkStatus();
  }

  absl::Status Finish(const Opening& opening, const std::vector<Part>& parts) const {
    std::vector<std::string> ledgers, files, texts;
    for (const Part& part : parts) {
      ledgers.push_back(part.ledger);
      files.push_back(FileOf(opening, static_cast<int>(files.size())));
      texts.push_back(part.text);
    }
    // Ranks that stepped unequally have no common state: no checkpoint is written.
    EK_RETURN_IF_ERROR(StepLedger::Compare(ledgers));
    EK_ASSIGN_OR_RETURN(const CheckpointManifest manifest,
                        ManifestOf(files, parts, params_, checkpoint_.steps_finished));
    EK_RETURN_IF_ERROR(WriteManifest(opening.folder, manifest));
    if (checkpoint_.hooks.finish == nullptr) return absl::OkStatus();
    const absl::Status finished = checkpoint_.hooks.finish(texts);
    if (!finished.ok()) unlink(PathOf(opening.folder, CheckpointManifest::kFile).c_str());
    return finished;
  }

  std::string Topic(absl::string_view part) const { return absl::StrCat(topic_, "/", part); }

  void SendToAll(absl::string_view part, const std::string& message) const {
    for (int rank = 1; rank < comm_.world_size(); ++rank)
      comm_.control().Send(rank, Topic(part), message);
  }

  // Receives a message. After a timeout, drops it when it arrives.
  absl::StatusOr<std::string> Receive(absl::string_view part, int from,
                                      absl::Duration timeout) const {
    const std::string topic = Topic(part);
    absl::StatusOr<std::string> message =
        comm_.control().Receive(topic, std::max(timeout, absl::ZeroDuration()),
                                {.rank = from,
                                 .text = absl::StrCat("a save (\"", topic, "\") for rank ", from),
                                 .is_endless = true});
    if (!message.ok() && comm_.status().ok()) comm_.control().Discard(topic);
    return message;
  }

  Communicator& comm_;
  CheckpointToWrite checkpoint_;
  const std::string name_;   // The context of errors.
  const std::string topic_;  // Unique to this save.
  const std::string ledger_;
  std::vector<ParamInfo> params_;
  std::string own_path_;  // Empty: nothing was written.
  // Rank 0 has received this rank's part, and no result has arrived: the manifest may refer to it.
  bool may_be_complete_ = false;
};

}  // namespace

absl::Status WriteCheckpoint(Communicator& comm, const ParameterSet& params,
                             CheckpointToWrite checkpoint) {
  const PhaseScope saving(comm, StepPhase::kSaving);
  return Save(comm, params, std::move(checkpoint)).Run();
}

CheckpointWriter::CheckpointWriter() : thread_(std::make_unique<internal::WorkerThread>()) {}
CheckpointWriter::~CheckpointWriter() = default;

PendingSave CheckpointWriter::Start(Communicator& comm, const ParameterSet& params,
                                    CheckpointToWrite checkpoint,
                                    absl::Span<TensorView* const> more) {
  const PhaseScope saving(comm, StepPhase::kSaving);
  // The caller of that save gets its result. Less than the other ranks wait in the next step.
  last_.Wait(comm.timeout() / 4).IgnoreError();
  if (!last_.IsDone() && checkpoint.state.ok())
    checkpoint.state =
        absl::DeadlineExceededError("the previous checkpoint is still being written");
  if (checkpoint.state.ok()) {
    std::vector<TensorView*> tensors(more.begin(), more.end());
    if (checkpoint.state->copies.empty()) {
      for (StatePiece& piece : checkpoint.state->pieces) tensors.push_back(&piece.data);
    }
    if (const absl::Status copied = Copy(tensors); !copied.ok()) checkpoint.state = copied;
  }
  last_.state_ = std::make_shared<PendingSave::State>();
  const auto save = std::make_shared<Save>(comm, params, std::move(checkpoint));
  const absl::Status posted = thread_->Post([state = last_.state_, save] {
    YieldToSteps();
    state->End(save->Run());
  });
  // The other ranks wait for this one's part, and learn here that there is none.
  if (!posted.ok()) last_.state_->End(save->Refuse(posted));
  return last_;
}

void CheckpointWriter::Reserve(absl::Span<const TensorView> tensors) {
  int64_t bytes = 0;
  for (const TensorView& tensor : tensors) bytes += Aligned(tensor.bytes());
  last_.state_ = std::make_shared<PendingSave::State>();
  const absl::Status posted = thread_->Post([this, state = last_.state_, bytes] {
    YieldToSteps();
    absl::Status status = Allocate(bytes);
    // The system gives a page at the first access.
    if (status.ok()) std::memset(copy_.get(), 0, bytes);
    state->End(status);
  });
  if (!posted.ok()) last_.state_->End(posted);
}

absl::Status CheckpointWriter::Allocate(int64_t bytes) {
  if (bytes <= copy_bytes_) return absl::OkStatus();
  copy_.reset();
  copy_bytes_ = 0;
  copy_.reset(AllocateForCopies(bytes));
  if (copy_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes for a copy of the state"));
  }
  copy_bytes_ = bytes;
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Copy(absl::Span<TensorView* const> tensors) {
  int64_t bytes = 0;
  for (const TensorView* tensor : tensors) bytes += Aligned(tensor->bytes());
  EK_RETURN_IF_ERROR(Allocate(bytes));
  int64_t at = 0;
  for (TensorView* const tensor : tensors) {
    std::byte* const to = copy_.get() + at;
    if (tensor->count > 0) std::memcpy(to, tensor->data, tensor->bytes());
    tensor->data = to;
    at += Aligned(tensor->bytes());
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
