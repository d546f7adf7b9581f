#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/flight_signal.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/libtorch/internal.h"

namespace evenkeel::libtorch {
namespace {

constexpr char kUnknown[] = "an exception not derived from std::exception";

constexpr std::pair<torch::ScalarType, DType> kTypes[] = {
    {torch::kFloat, DType::kFloat32}, {torch::kDouble, DType::kFloat64},
    {torch::kHalf, DType::kFloat16},  {torch::kBFloat16, DType::kBFloat16},
    {torch::kChar, DType::kInt8},     {torch::kByte, DType::kUint8},
    {torch::kBool, DType::kUint8},    {torch::kShort, DType::kInt16},
    {torch::kInt, DType::kInt32},     {torch::kLong, DType::kInt64},
};

std::optional<DType> DTypeOfTensor(torch::ScalarType type) {
  for (const auto& [torch_type, dtype] : kTypes)
    if (torch_type == type) return dtype;
  return std::nullopt;
}

ReduceOp OpOf(Reduce how) {
  switch (how) {
    case Reduce::kSum:
      return ReduceOp::kSum;
    case Reduce::kAverage:
      return ReduceOp::kAverage;
    case Reduce::kMin:
      return ReduceOp::kMin;
    case Reduce::kMax:
      return ReduceOp::kMax;
  }
  Refuse("unknown reduction");
}

// Calls a collective with the elements in the order of their indices: strides may differ between
// the ranks.
template <class Collective>
void InOrder(const torch::Tensor& tensor, const std::string& what, const Collective& collective) {
  const at::NoGradGuard no_grad;
  ViewOf(tensor, what);
  const torch::Tensor ordered = tensor.contiguous();
  Check(collective(MemoryOf(ordered)));
  if (!ordered.is_same(tensor)) tensor.copy_(ordered);
}

Error ErrorOf(const absl::Status& status) {
  const std::optional<FailureInfo> info = FailureInfoOf(status);
  const std::string text = absl::StrCat("evenkeel: ", status.message());
  if (!info.has_value()) return Error(text, "", {}, "", -1);
  return Error(text, std::string(ToString(info->kind)), info->ranks, info->operation,
               info->position);
}

}  // namespace

StatusError::StatusError(const absl::Status& status) : Error(ErrorOf(status)), status(status) {}

void Refuse(const std::string& what) { throw Error("evenkeel: " + what, "", {}, "", -1); }

torch::ScalarType ScalarTypeOf(DType type) {
  for (const auto& [torch_type, dtype] : kTypes)
    if (dtype == type) return torch_type;
  Refuse(absl::StrCat("torch has no type for ", ToString(type)));
}

TensorView ViewOf(const torch::Tensor& tensor, const std::string& what) {
  if (!tensor.defined()) Refuse(what + " is undefined");
  if (tensor.device().type() != torch::kCPU || tensor.layout() != torch::kStrided)
    Refuse(absl::StrCat(what, " is a ", tensor.toString(), " on ", tensor.device().str(),
                        "; only strided tensors on the CPU are supported"));
  if (!tensor.is_non_overlapping_and_dense())
    Refuse(absl::StrCat(what, " has gaps or overlaps in memory (", c10::str(tensor.sizes()),
                        ", strides ", c10::str(tensor.strides()), "); pass its contiguous() copy"));
  if (!DTypeOfTensor(tensor.scalar_type()).has_value())
    Refuse(absl::StrCat(what, " has the type ", c10::toString(tensor.scalar_type()),
                        ", which is not supported"));
  return MemoryOf(tensor);
}

TensorView MemoryOf(const torch::Tensor& tensor) {
  const std::optional<DType> dtype = DTypeOfTensor(tensor.scalar_type());
  if (!dtype.has_value() || tensor.device().type() != torch::kCPU) return {};
  return TensorView(tensor.data_ptr(), tensor.numel(), *dtype);
}

Group::Group(const GroupOptions& options) : state_(std::make_shared<State>()) {
  FactoryOptions factory{.backend = options.backend,
                         .connect_timeout = absl::FromChrono(options.connect_timeout)};
  factory.communicator.timeout = absl::FromChrono(options.timeout);
  state_->comm = Value(CreateCommunicator(Value(ReadEnvironment()), factory));
  if (state_->comm->device().is_cpu()) return;
  Refuse(absl::StrCat("the backend ", options.backend, " is for GPUs; use auto, shm or tcp"));
}

Group::~Group() {
  state_->is_left = true;
  state_->DropParked();
}

int Group::rank() const { return state_->comm->rank(); }
int Group::size() const { return state_->comm->world_size(); }
std::string Group::backend() const { return std::string(state_->comm->backend_name()); }

void Group::all_reduce(const torch::Tensor& tensor, Reduce how) {
  if (tensor.scalar_type() == torch::kBool) {  // Bytes, of which any but 0 is true.
    if (how == Reduce::kAverage) Refuse("all_reduce() got bools to average");
    if (how == Reduce::kSum) how = Reduce::kMax;
  }
  InOrder(tensor, "the tensor of all_reduce()",
          [&](TensorView view) { return state_->comm->AllReduce(view, OpOf(how)); });
}

void Group::broadcast(const torch::Tensor& tensor, int root) {
  InOrder(tensor, "the tensor of broadcast()",
          [&](TensorView view) { return state_->comm->Broadcast(view, root); });
}

void Group::barrier() { Check(state_->comm->Barrier()); }

Group::PhaseScope::PhaseScope(std::shared_ptr<State> state, Phase phase)
    : state_(std::move(state)),
      before_(static_cast<int>(
          StepControl::Of(*state_->comm)
              .phases()
              .Enter(phase == Phase::kInput ? StepPhase::kInput : StepPhase::kSaving))) {}

Group::PhaseScope::~PhaseScope() {
  StepControl::Of(*state_->comm).phases().Enter(static_cast<StepPhase>(before_));
}

std::string Group::straggler_news() { return StragglerNews(*state_->comm); }
std::string Group::straggler_table() { return StragglersOf(*state_->comm).Table(); }

void Group::abort(const std::string& why) {
  state_->comm->Abort(absl::UnknownError(why), "failed");
}
void Group::finalize() {
  state_->DropParked();
  Check(state_->comm->Finalize());
}

namespace {

// `launch --flight` asks a job for its flight records by this signal, which ends other programs.
void DumpFlightIfAsked() {
  const char* const folder = std::getenv("EVENKEEL_FLIGHT");
  struct sigaction action;
  if (folder == nullptr || *folder == 0 || sigaction(SIGUSR1, nullptr, &action) != 0 ||
      action.sa_handler != SIG_DFL) {
    return;
  }
  Check(DumpFlightOnSignal(SIGUSR1, folder));
}

}  // namespace

int run(const std::function<void(Group&)>& body, const GroupOptions& options) {
  std::string rank;
  const auto failed = [&rank](const char* what) {
    const bool names_rank = absl::StartsWith(what, "evenkeel: " + rank);
    std::fputs(absl::StrCat(names_rank ? "" : rank, what, "\n").c_str(), stderr);
    return 1;
  };
  try {
    DumpFlightIfAsked();
    Group group(options);
    rank = absl::StrCat("rank ", group.rank(), ": ");
    try {
      body(group);
    } catch (const c10::Error& error) {
      group.abort(TextOf(error));
      throw;
    } catch (const std::exception& error) {
      group.abort(std::string(absl::StripPrefix(error.what(), "evenkeel: ")));
      throw;
    } catch (...) {
      group.abort(kUnknown);
      throw;
    }
    group.finalize();
    return 0;
  } catch (const c10::Error& error) {
    return failed(TextOf(error).c_str());
  } catch (const std::exception& error) {
    return failed(error.what());
  } catch (...) {
    return failed(kUnknown);
  }
}

}  // namespace evenkeel::libtorch
