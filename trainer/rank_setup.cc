#include "evenkeel/trainer/rank_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/cnn.h"
#include "evenkeel/trainer/device/device_cnn.h"
#include "evenkeel/trainer/device/device_gpt.h"
#include "evenkeel/trainer/device/device_mlp.h"
#include "evenkeel/trainer/device/make_place.h"
#include "evenkeel/trainer/device/place.h"
#include "evenkeel/trainer/dry_run.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/mlp.h"
#include "evenkeel/trainer/model_file.h"
#include "evenkeel/zero_optim/file_io.h"

namespace evenkeel {
namespace {

// For the data as it is.
MlpOptions MlpOptionsOf(const TrainOptions& options, const TrainingData& data) {
  return {.image = *data.image,
          .hidden = options.hidden,
          .dtype = options.compute == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
          .seed = options.seed};
}
CnnOptions CnnOptionsOf(const TrainOptions& options, const TrainingData& data) {
  CnnOptions cnn = options.cnn;
  cnn.image = *data.image;
  return cnn;
}

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const TrainOptions& options, const TrainingData& data) {
  const bool is_for_text = options.model == ModelKind::kGpt;
  if (is_for_text == data.image.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data=", options.data.path, " is ", is_for_text ? "images" : "text",
                     ", and --model=", NameOf(options.model), " is for ", is_for_text ? "text" : "images"));
  }
  switch (options.model) {
    case ModelKind::kMlp:
      return MakeMlp(MlpOptionsOf(options, data));
    case ModelKind::kCnn:
      return MakeCnn(CnnOptionsOf(options, data));
    case ModelKind::kGpt: {
      GptOptions gpt = options.gpt;
      gpt.vocabulary = data.vocabulary;
      return MakeGpt(gpt);
    }
  }
  return absl::InvalidArgumentError("there is no such model");
}

// Of what MakeModel() made.
absl::StatusOr<std::unique_ptr<Model>> MakeOnDevice(const TrainOptions& options, const TrainingData& data,
                                                    const Model& host, const DevicePlace& place) {
  switch (options.model) {
    case ModelKind::kMlp:
      return MakeDeviceMlp(MlpOptionsOf(options, data), host, place, options.compute);
    case ModelKind::kCnn:
      return MakeDeviceCnn(CnnOptionsOf(options, data), host, place, options.compute);
    case ModelKind::kGpt:
      return MakeDeviceGpt(dynamic_cast<const Gpt&>(host), place);
  }
  return absl::InvalidArgumentError("there is no such model");
}

// Of a gpt also a file in Hugging Face's form.
absl::Status LoadWeights(const TrainOptions& options, Model& model) {
  if (options.model != ModelKind::kGpt) return LoadModel(options.init_file, model);
  EK_ASSIGN_OR_RETURN(const GptFile file, GptFile::Read(options.init_file));
  // No shape would tell: the weights would mean something else.
  if (file.says_heads() && file.options().heads != options.gpt.heads) {
    return absl::InvalidArgumentError(absl::StrCat(options.init_file, " is a gpt with ", file.options().heads,
                                                   " heads, and --heads says ", options.gpt.heads));
  }
  return file.LoadInto(model);
}

// A run should not find out at its end that it can't write what it is for.
absl::Status CheckCanWrite(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  return Annotate(CheckCanWriteFile(path), absl::StrCat("--", flag, "=", path));
}

// Checks a file that lines are added to. It may be a pipe or a terminal, which is not opened twice.
absl::Status CheckCanAppend(absl::string_view flag, const std::string& path) {
  struct stat info;
  if (path.empty() || stat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode)) return CheckCanWrite(flag, path);
  const int file = S_ISREG(info.st_mode) ? open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
  if (file >= 0) close(file);
  if (file >= 0 || (!S_ISREG(info.st_mode) && access(path.c_str(), W_OK) == 0)) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("--", flag, "=", path, ": cannot write there"));
}

absl::Status MakeFolder(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  const std::string what = absl::StrCat("--", flag, "=", path, ": cannot write there");
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return absl::ErrnoToStatus(error.value(), what);
  return Annotate(CheckCanWriteFile(path + "/probe"), what);
}

// A status as bytes that have room for any message: code, space, message. OK is empty.
std::string Serialize(const absl::Status& status) {
  return status.ok() ? "" : absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

absl::Status Parse(absl::string_view bytes) {
  const size_t space = bytes.find(' ');
  int code = 0;
  if (space == absl::string_view::npos || !absl::SimpleAtoi(bytes.substr(0, space), &code) || code == 0) {
    return absl::InternalError("a malformed status");
  }
  return absl::Status(static_cast<absl::StatusCode>(code), bytes.substr(space + 1));
}

}  // namespace

absl::StatusOr<RankSetup> PrepareRank(const TrainOptions& options,
                                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data, int rank,
                                      int world_size) {
  EK_RETURN_IF_ERROR(data.status());
  RankSetup setup{.data = *data};
  EK_ASSIGN_OR_RETURN(setup.plan, PlanOf(options, *setup.data, world_size));
  if (options.dry_run) {
    TrainOptions dry = options;
    dry.max_steps = std::min(kDrySteps, setup.plan.total_steps);
    EK_ASSIGN_OR_RETURN(setup.plan, PlanOf(dry, *setup.data, world_size));
  }
  EK_ASSIGN_OR_RETURN(setup.model, MakeModel(options, *setup.data));
  EK_RETURN_IF_ERROR(Annotate(CheckFreezeSchedule(options.freeze, setup.model->parameters()), "--freeze"));
  EK_RETURN_IF_ERROR(MakeFolder("flight (or EVENKEEL_FLIGHT)", options.flight_folder));
  if (rank != 0) return setup;
  if (!options.init_file.empty()) {
    EK_RETURN_IF_ERROR(Annotate(LoadWeights(options, *setup.model), "--init"));
  }
  EK_RETURN_IF_ERROR(CheckCanWrite("save", options.save_file));
  EK_RETURN_IF_ERROR(CheckCanAppend("metrics", options.metrics_file));
  EK_RETURN_IF_ERROR(CheckCanWrite("prometheus", options.prometheus_file));
  if (!options.dry_run) EK_RETURN_IF_ERROR(MakeFolder("tensorboard", options.tensorboard_folder));
  EK_RETURN_IF_ERROR(CheckCanWrite("report", options.report_file));
  EK_RETURN_IF_ERROR(CheckCanWrite("trace", options.trace_file));
  return setup;
}

absl::Status MoveToDevice(const TrainOptions& options, DeviceRuntime& runtime, Device device, RankSetup& setup) {
  EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(runtime, device));
  EK_ASSIGN_OR_RETURN(setup.model, MakeOnDevice(options, *setup.data, *setup.model, place));
  return absl::OkStatus();
}

absl::StatusOr<StepPlan> PlanOf(const TrainOptions& options, const TrainingData& data, int world_size,
                                const EpochPosition& from) {
  return MakeStepPlan({.world_size = world_size,
                       .samples = data.train->size(),
                       .batch_size = options.samples_per_step(),
                       .epochs = options.epochs,
                       .max_steps = options.max_steps,
                       .rank_steps = options.rank_steps,
                       .must_be_even = !options.joins,
                       .stops_early = options.stops_early,
                       .begin = from});
}

absl::Status AgreeOnSetup(Communicator& comm, const absl::Status& mine) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                      comm.control().Exchange("setup", Serialize(mine), comm.timeout()));
  const auto failed = std::find_if(parts.begin(), parts.end(), [](const std::string& part) { return !part.empty(); });
  if (failed == parts.end()) return absl::OkStatus();
  const absl::Status status = Parse(*failed);
  const bool is_everywhere = std::count(parts.begin(), parts.end(), *failed) == comm.world_size();
  return is_everywhere ? status : Annotate(status, absl::StrCat("rank ", failed - parts.begin()));
}

}  // namespace evenkeel
