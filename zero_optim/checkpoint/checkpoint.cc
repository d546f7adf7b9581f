#include "evenkeel/zero_optim/checkpoint/checkpoint.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/files/strict_json.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "evenkeel optimizer state";
constexpr int kVersion = 2;
constexpr int kMaxDepth =
    6;  // The manifest, its parameters, one, its tensors, the pieces of one, a piece.

absl::Status Malformed(absl::string_view how) {
  return absl::InvalidArgumentError(absl::StrCat("manifest: ", how));
}

std::string PathOf(const std::string& folder, absl::string_view file) {
  return absl::StrCat(folder, "/", file);
}

// A natural number of that name; -1 if there is none.
int64_t NumberIn(const Json& json, const char* name) {
  const auto found = json.find(name);
  const uint64_t* number = found == json.end() ? nullptr : found->get_ptr<const uint64_t*>();
  return number == nullptr || *number > INT64_MAX ? -1 : static_cast<int64_t>(*number);
}

absl::StatusOr<CheckpointManifest::Piece> ReadPiece(const Json& json) {
  if (!json.is_array() || json.size() != 4)
    return Malformed("a piece is not [begin, count, file, offset]");
  int64_t numbers[4];
  for (int i = 0; i < 4; ++i) {
    const auto* number = json[i].get_ptr<const uint64_t*>();
    if (number == nullptr || *number > INT32_MAX * uint64_t{1 << 20})
      return Malformed("a piece is not of numbers");
    numbers[i] = static_cast<int64_t>(*number);
  }
  if (numbers[2] > INT32_MAX) return Malformed("a piece is in no file");
  return CheckpointManifest::Piece{numbers[0], numbers[1], static_cast<int>(numbers[2]),
                                   numbers[3]};
}

absl::StatusOr<CheckpointManifest::File> ReadFileEntry(const Json& json) {
  const auto name = json.find("name"), sums = json.find("crc32");
  const auto text_of = [&](Json::const_iterator found) {
    return found == json.end() ? nullptr : found->get_ptr<const std::string*>();
  };
  const std::string* const path = json.is_object() ? text_of(name) : nullptr;
  // Nothing outside of the folder is read, nor removed.
  if (path == nullptr || path->empty() || path->find('/') != std::string::npos || *path == ".." ||
      *path == ".") {
    return Malformed("a file has no plain name");
  }
  CheckpointManifest::File file{.name = *path};
  const std::string* const hex = text_of(sums);
  absl::StatusOr<FileSums> read =
      FileSums::FromHex(NumberIn(json, "bytes"), hex == nullptr ? "?" : *hex);
  if (!read.ok() || json.size() != 3)
    return Malformed(absl::StrCat("\"", *path, "\" has no size or checksums"));
  file.sums = *std::move(read);
  return file;
}

absl::Status CheckCovers(absl::string_view where, const CheckpointManifest::Param& param,
                         const std::vector<CheckpointManifest::File>& files,
                         const std::vector<CheckpointManifest::Piece>& pieces) {
  const int64_t count = param.count;
  int64_t covered = 0;
  for (const CheckpointManifest::Piece& piece : pieces) {
    if (piece.file >= static_cast<int>(files.size())) {
      return Malformed(absl::StrCat(where, " is in file ", piece.file, " of ", files.size()));
    }
    const int64_t room = (files[piece.file].sums.bytes - piece.offset) / SizeOf(param.dtype);
    if (piece.count > 0 && piece.count > room) {
      return Malformed(absl::StrCat(where, " ends behind the end of ", files[piece.file].name));
    }
    if (piece.begin != covered) {
      return Malformed(absl::StrCat(where, ": elements from ", std::min(covered, piece.begin),
                                    " to ", std::max(covered, piece.begin), " are ",
                                    piece.begin > covered ? "missing" : "present twice"));
    }
    covered += piece.count;
  }
  if (covered == count) return absl::OkStatus();
  return Malformed(absl::StrCat(where, " has ", covered, " of ", count, " elements"));
}

absl::StatusOr<CheckpointManifest::Param> ReadParam(
    const std::string& name, const Json& json, const std::vector<CheckpointManifest::File>& files) {
  CheckpointManifest::Param param;
  if (!json.is_object() || json.size() != 4)
    return Malformed(absl::StrCat("\"", name, "\" is not a parameter"));
  param.count = NumberIn(json, "count");
  param.step = NumberIn(json, "step");
  if (param.count < 0 || param.step < 1)
    return Malformed(absl::StrCat("\"", name, "\" has no count or step"));
  const auto dtype = json.find("dtype");
  const auto* text = dtype == json.end() ? nullptr : dtype->get_ptr<const std::string*>();
  if (text == nullptr ||
      (*text != ToString(DType::kFloat32) && *text != ToString(DType::kFloat64))) {
    return Malformed(absl::StrCat("\"", name, "\" is neither float32 nor float64"));
  }
  param.dtype = *text == ToString(DType::kFloat32) ? DType::kFloat32 : DType::kFloat64;
  const auto tensors = json.find("tensors");
  if (tensors == json.end() || !tensors->is_object())
    return Malformed(absl::StrCat("\"", name, "\" has no tensors"));
  for (const auto& [tensor, pieces] : tensors->items()) {
    if (!pieces.is_array())
      return Malformed(absl::StrCat("\"", name, "\" ", tensor, " has no pieces"));
    for (const Json& piece : pieces) {
      EK_ASSIGN_OR_RETURN(param.tensors[tensor].emplace_back(), ReadPiece(piece));
    }
    EK_RETURN_IF_ERROR(
        CheckCovers(absl::StrCat("\"", name, "\" ", tensor), param, files, param.tensors[tensor]));
  }
  return param;
}

Json ToJson(const CheckpointManifest& manifest) {
  Json json = {
      {"format", kFormat}, {"version", kVersion}, {"steps_finished", manifest.steps_finished}};
  Json& list = json["files"] = Json::array();
  for (const CheckpointManifest::File& file : manifest.files) {
    list.push_back({{"name", file.name}, {"bytes", file.sums.bytes}, {"crc32", file.sums.Hex()}});
  }
  Json& all = json["params"] = Json::object();
  for (const auto& [name, param] : manifest.params) {
    Json tensors = Json::object();
    for (const auto& [tensor, pieces] : param.tensors) {
      Json& places = tensors[tensor] = Json::array();
      for (const CheckpointManifest::Piece& piece : pieces) {
        places.push_back({piece.begin, piece.count, piece.file, piece.offset});
      }
    }
    all[name] = {{"dtype", ToString(param.dtype)},
                 {"count", param.count},
                 {"step", param.step},
                 {"tensors", tensors}};
  }
  return json;
}

std::string Dump(const Json& json) {
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
}

std::string ChecksumOf(const Json& json) {
  return absl::StrCat(absl::Hex(StableHash(0, Dump(json)), absl::kZeroPad16));
}

}  // namespace

std::string CheckpointManifest::Serialize() const {
  Json json = ToJson(*this);
  json["checksum"] = ChecksumOf(json);
  return Dump(json);
}

absl::StatusOr<CheckpointManifest> CheckpointManifest::Parse(absl::string_view json) {
  EK_ASSIGN_OR_RETURN(const Json all, internal::ParseStrictJson(json, kMaxDepth, "the manifest"));
  const auto format = all.find("format");
  const auto checksum = all.find("checksum");
  if (format == all.end() || *format != kFormat || NumberIn(all, "version") != kVersion ||
      all.size() != 6 || checksum == all.end()) {
    return Malformed(
        absl::StrCat("this is not the manifest of an optimizer's checkpoint, version ", kVersion));
  }
  CheckpointManifest manifest;
  manifest.steps_finished = NumberIn(all, "steps_finished");
  const auto files = all.find("files"), params = all.find("params");
  if (manifest.steps_finished < 0 || files == all.end() || !files->is_array() ||
      params == all.end() || !params->is_object()) {
    return Malformed("steps_finished, files or params are missing");
  }
  for (const Json& file : *files) {
    if (!file.is_object()) return Malformed("a file entry is not an object");
    EK_ASSIGN_OR_RETURN(manifest.files.emplace_back(), ReadFileEntry(file));
  }
  for (const auto& [name, param] : params->items()) {
    EK_ASSIGN_OR_RETURN(manifest.params[name], ReadParam(name, param, manifest.files));
  }
  if (*checksum != ChecksumOf(ToJson(manifest))) {
    return Malformed("it is damaged: its checksum is another one");
  }
  return manifest;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder, const ParameterSet& params) {
  EK_ASSIGN_OR_RETURN(const std::string json, ReadFile(PathOf(folder, CheckpointManifest::kFile),
                                                       {.max_bytes = internal::kMaxJsonBytes}));
  auto manifest = CheckpointManifest::Parse(json);
  if (!manifest.ok()) return Annotate(manifest.status(), folder);
  Checkpoint opened;
  opened.folder_ = folder;
  opened.manifest_ = *std::move(manifest);
  for (int i = 0; i < params.size(); ++i)
    opened.params_.emplace_back(params[i].name, params[i].value.count);
  for (const auto& [name, param] : opened.manifest_.params) {
    const int index = params.Find(name);
    if (index < 0)
      return absl::InvalidArgumentError(
          absl::StrCat(folder, ": there is no parameter \"", name, "\""));
    const TensorView& value = params[index].value;
    if (value.count != param.count || StateDType(value.dtype) != param.dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat(folder, ": \"", name, "\" is ", ToString(param.dtype), "[", param.count,
                       "] in the checkpoint, and ", ToString(value), " here"));
    }
    opened.steps_[index] = param.step;
  }
  return opened;
}

absl::StatusOr<const std::vector<CheckpointManifest::Piece>*> Checkpoint::PiecesOf(
    const std::string& param, const std::string& tensor) const {
  if (const auto found = manifest_.params.find(param); found != manifest_.params.end()) {
    const auto pieces = found->second.tensors.find(tensor);
    if (pieces != found->second.tensors.end()) return &pieces->second;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(folder_, ": there is no ", tensor, " of \"", param, "\""));
}

absl::Status Checkpoint::Read(absl::Span<const StatePiece> into) const {
  for (size_t file = 0; file < manifest_.files.size(); ++file) {
    std::optional<CheckedFile> opened;  // When something of it is needed.
    for (const StatePiece& wanted : into) {
      const std::string& name = params_[wanted.param].first;
      EK_ASSIGN_OR_RETURN(const std::vector<CheckpointManifest::Piece>* const pieces,
                          PiecesOf(name, wanted.tensor));
      for (const CheckpointManifest::Piece& piece : *pieces) {
        const int64_t begin = std::max(piece.begin, wanted.begin);
        const int64_t end = std::min(piece.begin + piece.count, wanted.begin + wanted.data.count);
        if (piece.file != static_cast<int>(file) || begin >= end) continue;
        if (!opened.has_value()) {
          const CheckpointManifest::File& entry = manifest_.files[file];
          EK_ASSIGN_OR_RETURN(opened, CheckedFile::Open(PathOf(folder_, entry.name), entry.sums));
        }
        const int64_t size = SizeOf(wanted.data.dtype);
        std::byte* const to =
            static_cast<std::byte*>(wanted.data.data) + (begin - wanted.begin) * size;
        EK_RETURN_IF_ERROR(
            opened->Read(piece.offset + (begin - piece.begin) * size,
                         absl::MakeSpan(to, static_cast<size_t>((end - begin) * size))));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<OptimizerState> Checkpoint::ReadState() const {
  return ReadState([this](int param) { return StateRange{0, params_[param].second}; });
}

absl::StatusOr<OptimizerState> Checkpoint::ReadState(Wanted wants) const {
  OptimizerState state;
  std::vector<StatePiece> into;
  for (const auto& [index, step] : steps_) {
    const std::optional<StateRange> range = wants(index);
    if (!range.has_value()) continue;
    const CheckpointManifest::Param& param = manifest_.params.at(params_[index].first);
    ParameterState& entry = state.params[index];
    entry.step = step;
    for (const auto& [name, pieces] : param.tensors) {
      StateTensor& tensor = entry.tensors[name];
      tensor = StateTensor(param.dtype, range->count);
      into.push_back({index, name, range->begin, tensor.view()});
    }
  }
  EK_RETURN_IF_ERROR(Read(into));
  return state;
}

absl::StatusOr<LoadedCheckpoint> ReadCheckpoint(const std::string& folder, absl::string_view name,
                                                Communicator& comm, const ParameterSet& params,
                                                Checkpoint::Wanted wants) {
  LoadedCheckpoint loaded;
  uint64_t hash = 0;
  const auto read = [&]() -> absl::Status {
    EK_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder, params));
    hash = StableHash(0, checkpoint.manifest().Serialize());
    loaded.steps = checkpoint.steps();
    loaded.steps_finished = checkpoint.manifest().steps_finished;
    EK_ASSIGN_OR_RETURN(loaded.state, checkpoint.ReadState(wants));
    return absl::OkStatus();
  };
  const absl::Status own = read();
  const std::string topic = absl::StrCat("load/", name);
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> hashes,
                      Annotate(AgreeOn(comm, topic, own, absl::StrCat(hash)), topic));
  for (size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ranks 0 and ", rank, " see different checkpoints in ", folder));
  }
  return loaded;
}

}  // namespace evenkeel
