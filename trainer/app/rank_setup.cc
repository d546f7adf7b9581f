#include "evenkeel/trainer/app/rank_setup.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/gpt/generate_tokens.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {
namespace {

// Returns the options of an mlp for the loaded data.
MlpOptions MlpOptionsOf(const TrainOptions& options, const TrainingData& data,
                        bool is_plan = false) {
  return {.image = *data.image,
          .hidden = options.hidden,
          .dtype = options.compute == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
          .seed = options.flags.seed,
          .is_plan = is_plan};
}
CnnOptions CnnOptionsOf(const TrainOptions& options, const TrainingData& data,
                        bool is_plan = false) {
  CnnOptions cnn = options.cnn;
  cnn.image = *data.image;
  cnn.is_plan = is_plan;
  return cnn;
}

absl::StatusOr<std::unique_ptr<Model>> MakeOnHost(const TrainOptions& options,
                                                  const TrainingData& data, bool is_plan) {
  const bool is_for_text = options.model == ModelKind::kGpt;
  if (is_for_text == data.image.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--data=", options.data.path, " contains ", is_for_text ? "images" : "text",
        ", but --model=", NameOf(options.model), " is for ", is_for_text ? "text" : "images"));
  }
  switch (options.model) {
    case ModelKind::kMlp:
      return MakeMlp(MlpOptionsOf(options, data, is_plan));
    case ModelKind::kCnn:
      return MakeCnn(CnnOptionsOf(options, data, is_plan));
    case ModelKind::kGpt: {
      GptOptions gpt = options.gpt;
      gpt.vocabulary = data.vocabulary;
      gpt.tokenizer = data.tokenizer;
      gpt.is_plan = is_plan;
      return MakeGpt(gpt);
    }
  }
  return absl::InvalidArgumentError("unknown model");
}

// Returns the model `host`, which MakeOnHost() made, on a device.
absl::StatusOr<std::unique_ptr<Model>> MakeOnDevice(const TrainOptions& options,
                                                    const TrainingData& data, const Model& host,
                                                    const DevicePlace& place) {
  switch (options.model) {
    case ModelKind::kMlp:
      return MakeDeviceMlp(MlpOptionsOf(options, data), host, place, options.compute);
    case ModelKind::kCnn:
      return MakeDeviceCnn(CnnOptionsOf(options, data), host, place, options.compute);
    case ModelKind::kGpt:
      return MakeDeviceGpt(dynamic_cast<const Gpt&>(host), place);
  }
  return absl::InvalidArgumentError("unknown model");
}

// Loads the weights of --init, for a gpt also in Hugging Face's form; a plan is only compared.
absl::Status LoadWeights(const TrainOptions& options, Model& model) {
  if (options.flags.init.empty()) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const std::string path, FindWeights(options.flags.init));
  if (options.model != ModelKind::kGpt) return LoadModel(path, model);
  EK_ASSIGN_OR_RETURN(const GptFile file, GptFile::Read(path));
  return file.LoadInto(model);
}

// A run must not fail at its end because it cannot write its results.
absl::Status CheckCanWrite(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  return Annotate(CheckCanWriteFile(path), absl::StrCat("--", flag, "=", path));
}

// Checks a file that lines are added to. It may be a pipe or a terminal, which is not opened twice.
absl::Status CheckCanAppend(absl::string_view flag, const std::string& path) {
  struct stat info;
  if (path.empty() || stat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode))
    return CheckCanWrite(flag, path);
  const int file = S_ISREG(info.st_mode) ? open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
  if (file >= 0) close(file);
  if (file >= 0 || (!S_ISREG(info.st_mode) && access(path.c_str(), W_OK) == 0))
    return absl::OkStatus();
  return absl::ErrnoToStatus(errno,
                             absl::StrCat("--", flag, "=", path, ": cannot write to this folder"));
}

absl::Status CheckShareLogs(const TrainFlags& flags) {
  std::error_code error;
  if (!std::filesystem::equivalent(flags.balance_log, flags.balance_repeat, error))
    return CheckCanAppend("balance_log", flags.balance_log);
  return absl::InvalidArgumentError(absl::StrCat("--balance_log=", flags.balance_log,
                                                 " and --balance_repeat=", flags.balance_repeat,
                                                 " are the same file; pass another --balance_log"));
}

absl::Status MakeFolder(absl::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  const std::string what = absl::StrCat("--", flag, "=", path, ": cannot write to this folder");
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return absl::ErrnoToStatus(error.value(), what);
  return Annotate(CheckCanWriteFile(path + "/probe"), what);
}

}  // namespace

absl::StatusOr<RankSetup> CheckRank(const TrainOptions& options,
                                    const absl::StatusOr<std::shared_ptr<const TrainingData>>& data,
                                    int rank, int world_size) {
  EK_RETURN_IF_ERROR(data.status());
  RankSetup setup{.data = *data};
  EK_ASSIGN_OR_RETURN(setup.plan, PlanOf(options, *setup.data, world_size));
  EK_ASSIGN_OR_RETURN(setup.model, MakeOnHost(options, *setup.data, /*is_plan=*/true));
  if (options.flags.sample_every > 0 && setup.data->tokenizer == nullptr) {
    return absl::InvalidArgumentError(
        "--sample_every needs a tokenizer, and these token shards have none; pass --tokenizer");
  }
  if (options.flags.sample_every > 0) {
    const GptOptions& gpt = dynamic_cast<const Gpt&>(*setup.model).options();
    EK_RETURN_IF_ERROR(
        Annotate(PromptTokens(gpt, options.flags.sample_prompt).status(), "--sample_prompt"));
  }
  EK_RETURN_IF_ERROR(
      Annotate(CheckFreezeSchedule(options.freeze, setup.model->parameters()), "--freeze"));
  if (rank == 0) EK_RETURN_IF_ERROR(Annotate(LoadWeights(options, *setup.model), "--init"));
  if (options.flags.dry_run) return setup;
  EK_RETURN_IF_ERROR(MakeFolder("flight (or EVENKEEL_FLIGHT)", options.flags.flight));
  if (rank != 0) return setup;
  if (options.saves_folder()) {
    EK_RETURN_IF_ERROR(MakeFolder("save", options.flags.save));
  } else {
    EK_RETURN_IF_ERROR(CheckCanWrite("save", options.flags.save));
  }
  EK_RETURN_IF_ERROR(CheckCanAppend("metrics", options.flags.metrics));
  EK_RETURN_IF_ERROR(CheckShareLogs(options.flags));
  if (!options.flags.prometheus.empty() && !absl::EndsWith(options.flags.prometheus, ".prom")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--prometheus=", options.flags.prometheus,
                     ": node_exporter reads only files whose names end with .prom; rename it"));
  }
  EK_RETURN_IF_ERROR(CheckCanWrite("prometheus", options.flags.prometheus));
  EK_RETURN_IF_ERROR(MakeFolder("tensorboard", options.flags.tensorboard));
  EK_RETURN_IF_ERROR(CheckCanWrite("report", options.flags.report));
  EK_RETURN_IF_ERROR(CheckCanWrite("trace", options.flags.trace));
  return setup;
}

absl::Status MakeModel(const TrainOptions& options, int rank, RankSetup& setup) {
  EK_ASSIGN_OR_RETURN(setup.model, MakeOnHost(options, *setup.data, /*is_plan=*/false));
  return rank == 0 ? Annotate(LoadWeights(options, *setup.model), "--init") : absl::OkStatus();
}

absl::Status MoveToDevice(const TrainOptions& options, DeviceRuntime& runtime, Device device,
                          RankSetup& setup) {
  EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(runtime, device));
  EK_ASSIGN_OR_RETURN(setup.model, MakeOnDevice(options, *setup.data, *setup.model, place));
  return absl::OkStatus();
}

absl::StatusOr<StepPlan> PlanOf(const TrainOptions& options, const TrainingData& data,
                                int world_size, const EpochPosition& from) {
  return MakeStepPlan({.world_size = world_size,
                       .samples = data.train->size(),
                       .batch_size = options.samples_per_step(),
                       .epochs = options.epochs,
                       .max_steps = options.flags.max_steps,
                       .rank_steps = options.rank_steps,
                       .must_be_even = !options.flags.join,
                       .stops_early = options.flags.stop_early,
                       .balances = options.flags.balance,
                       .begin = from});
}

}  // namespace evenkeel
