#include "evenkeel/tests/programs/program.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/testing/test_model.h"

namespace evenkeel {
namespace {

using internal::PlainTraining;
using internal::TestModel;

const std::vector<int64_t> kSizes = {7, 40, 33, 1, 18};
static_assert(kProgramParams == 5);

constexpr absl::string_view kPlaces[] = {"before begin", "before step", "between steps",
                                         "after step"};
constexpr absl::string_view kActs[] = {"change value", "change gradient", "clear",
                                       "clear all",    "freeze",          "unfreeze",
                                       "omit step",    "skip step",       "repeat step"};

constexpr int kAnyRank = -1;

bool Lacks(const Program& program, int rank, int step, int param) {
  return program.lacks_gradients && StableHash(StableHash(rank, step), param) % 3 == 0;
}

// A factor changes each element that is not zero.
void Change(TensorView view) {
  for (double& element : view.as<double>()) element = 0.5 * element + 0.125;
}

// Clips by value, and adds noise that depends on the element and on the number of the call.
void ChangePiece(const GradientPiece& piece, int call) {
  const auto elements = piece.gradient.as<double>();
  for (size_t k = 0; k < elements.size(); ++k) {
    const uint64_t index = static_cast<uint64_t>(piece.first) + k;
    const uint64_t noise = StableHash(StableHash(call, piece.param), index) % 1000;
    elements[k] = std::clamp(elements[k], -0.3, 0.3) + static_cast<double>(noise) / 1e4;
  }
}

void Clamp(const ParameterSet& params) {
  for (int i = 0; i < params.size(); ++i) {
    for (double& value : params[i].value.as<double>()) value = std::clamp(value, -0.9, 0.9);
  }
}

// Code of the loop between the calls of the library.
class Loop {
 public:
  Loop(const Program& program, ParameterSet& params) : program_(program), params_(params) {}

  bool Has(Act act, int step, int rank) const {
    return std::ranges::any_of(program_.acts, [&](const Action& action) {
      return action.act == act && action.step == step && action.IsOf(rank);
    });
  }
  void Run(At at, int step, int rank) {
    for (const Action& action : program_.acts) {
      if (action.at != at || action.step != step || !action.IsOf(rank)) continue;
      const int i = action.param;
      if (action.act == Act::kChangeValue) Change(params_[i].value);
      if (action.act == Act::kChangeGradient && HasGradient(rank, i)) Change(params_[i].grad);
      if (action.act == Act::kClear) params_.SetGradState(i, GradState::kNone);
      if (action.act == Act::kClearAll) params_.ClearGradients();
      if (action.act == Act::kFreeze) params_.SetTrainable(i, false);
      if (action.act == Act::kUnfreeze) params_.SetTrainable(i, true);
    }
  }

 private:
  // A program that does not look at the state changes memory that Slices does not use.
  bool HasGradient(int rank, int param) const {
    return params_.grad_state(param) == GradState::kReduced ||
           (rank != kAnyRank && std::holds_alternative<Slices>(program_.placement));
  }

  const Program& program_;
  ParameterSet& params_;
};

// One process.
class Alone {
 public:
  explicit Alone(const Program& program)
      : program_(program), plain_(&model_, program.rule), loop_(program, model_.params()) {}

  std::string Run() {
    for (int step = 0; step < program_.steps(); ++step) {
      loop_.Run(At::kBeforeBegin, step, kAnyRank);
      Reduce(step);
      loop_.Run(At::kBeforeStep, step, kAnyRank);
      if (!loop_.Has(Act::kOmitStep, step, kAnyRank)) {
        Step(step);
        if (loop_.Has(Act::kRepeatStep, step, kAnyRank)) {
          loop_.Run(At::kBetweenSteps, step, kAnyRank);
          Step(step);
        }
      }
      loop_.Run(At::kAfterStep, step, kAnyRank);
    }
    return model_.Bytes();
  }

 private:
  void Reduce(int step) {
    ParameterSet& params = model_.params();
    params.ClearGradients();
    for (int i = 0; i < params.size(); ++i) {
      if (!params.trainable(i)) continue;
      const auto sum = params[i].grad.as<double>();
      StateTensor own(DType::kFloat64, params[i].grad.count);
      for (int rank = 0; rank < static_cast<int>(program_.inputs.size()); ++rank) {
        if (step >= program_.inputs[rank] || Lacks(program_, rank, step, i)) continue;
        model_.ComputeGradient(rank, step, i, own.view());
        if (params.grad_state(i) == GradState::kNone) std::fill(sum.begin(), sum.end(), 0);
        for (size_t k = 0; k < sum.size(); ++k) sum[k] += own.as<double>()[k];
        params.SetGradState(i, GradState::kReduced);
      }
      for (double& element : sum) element /= static_cast<double>(program_.inputs.size());
    }
  }
  void Step(int step) {
    ParameterSet& params = model_.params();
    StepOptions options = program_.options;
    options.skip = loop_.Has(Act::kSkipStep, step, kAnyRank);
    std::vector<std::optional<TensorView>> gradients(params.size());
    for (int i = 0; i < params.size(); ++i) {
      if (!params.trainable(i) || params.grad_state(i) == GradState::kNone) continue;
      gradients[i] = params[i].grad;
      if (program_.has_function_before)
        ChangePiece({.param = i, .gradient = params[i].grad}, call_);
    }
    ++call_;
    plain_.Update(gradients, options);
    if (program_.has_function_after) Clamp(params);
  }

  const Program& program_;
  TestModel model_{kSizes, DType::kFloat64};
  PlainTraining plain_;
  Loop loop_;
  int call_ = 0;
};

// A rank of a group.
class Rank {
 public:
  Rank(const Program& program, Communicator& comm)
      : program_(program), comm_(comm), loop_(program, model_.params()) {}

  absl::StatusOr<std::string> Run() {
    EK_RETURN_IF_ERROR(Create());
    std::vector<Joinable*> joinables = {optimizer_.get()};
    if (ddp_ != nullptr) joinables.push_back(ddp_.get());
    EK_RETURN_IF_ERROR(RunJoined(joinables, {}, [this](JoinScope&) -> absl::Status {
      for (int step = 0; step < program_.inputs[comm_.rank()]; ++step)
        EK_RETURN_IF_ERROR(TrainStep(step));
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(optimizer_->WaitForAll());
    return model_.Bytes();
  }

 private:
  absl::Status Create() {
    if (program_.is_without_reducer) {
      EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(comm_, model_.params(), program_.rule,
                                                        {.placement = program_.placement}));
    } else {
      const DataParallelOptions options{.reducer = {.caps = {Bytes{256}},
                                                    .gradient_as_bucket_view = program_.has_views,
                                                    .find_unused = program_.lacks_gradients},
                                        .trainability = {.warn_on_change = false}};
      EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(&comm_, &model_.params(), {}, options));
      EK_ASSIGN_OR_RETURN(
          optimizer_, Optimizer::Create(*ddp_, program_.rule, {.placement = program_.placement}));
    }
    if (program_.has_function_before) {
      EK_RETURN_IF_ERROR(
          optimizer_->BeforeUpdate([this](absl::Span<const GradientPiece> pieces) -> absl::Status {
            for (const GradientPiece& piece : pieces) ChangePiece(piece, call_);
            ++call_;
            return absl::OkStatus();
          }));
    }
    if (program_.has_function_after) {
      EK_RETURN_IF_ERROR(optimizer_->AfterUpdate([this] {
        Clamp(model_.params());
        return absl::OkStatus();
      }));
    }
    return absl::OkStatus();
  }

  absl::Status TrainStep(int step) {
    const int rank = comm_.rank();
    loop_.Run(At::kBeforeBegin, step, rank);
    EK_RETURN_IF_ERROR(Reduce(step));
    loop_.Run(At::kBeforeStep, step, rank);
    if (!loop_.Has(Act::kOmitStep, step, rank)) {
      EK_RETURN_IF_ERROR(Step(step));
      if (loop_.Has(Act::kRepeatStep, step, rank)) {
        loop_.Run(At::kBetweenSteps, step, rank);
        EK_RETURN_IF_ERROR(Step(step));
      }
    }
    EK_RETURN_IF_ERROR(optimizer_->WaitForAll());
    loop_.Run(At::kAfterStep, step, rank);
    return absl::OkStatus();
  }

  absl::Status Reduce(int step) {
    ParameterSet& params = model_.params();
    params.ClearGradients();
    if (ddp_ != nullptr) EK_RETURN_IF_ERROR(ddp_->BeginStep());
    for (int i = params.size() - 1; i >= 0; --i) {
      if (!params.trainable(i) || Lacks(program_, comm_.rank(), step, i)) continue;
      model_.PutGradient(comm_.rank(), step, i, /*adds=*/false);
      params.SetGradState(i, GradState::kLocal);
      if (ddp_ != nullptr) EK_RETURN_IF_ERROR(ddp_->GradientReady(i));
    }
    return ddp_ != nullptr ? ddp_->FinishStep() : absl::OkStatus();
  }

  absl::Status Step(int step) {
    const auto* const replicated = std::get_if<Replicated>(&program_.placement);
    if (replicated != nullptr && replicated->update_in_backward) return absl::OkStatus();
    StepOptions options = program_.options;
    options.skip = loop_.Has(Act::kSkipStep, step, comm_.rank());
    return optimizer_->Step(options);
  }

  const Program& program_;
  Communicator& comm_;
  TestModel model_{kSizes, DType::kFloat64};
  Loop loop_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;  // Goes first.
  int call_ = 0;
};

}  // namespace

bool Action::IsOf(int rank) const {
  return rank == kAnyRank || ranks.empty() || std::ranges::find(ranks, rank) != ranks.end();
}

std::string ToString(const Action& action) {
  return absl::StrCat("step ", action.step, " ", kPlaces[static_cast<int>(action.at)], ": ",
                      kActs[static_cast<int>(action.act)], " ", action.param,
                      action.ranks.empty() ? "" : " on rank ", absl::StrJoin(action.ranks, ","));
}

int Program::steps() const { return *std::ranges::max_element(inputs); }

bool Program::IsEven(int step) const {
  return std::ranges::all_of(inputs, [&](int steps) { return step < steps; });
}

std::string ToString(const Program& program) {
  std::string text = absl::StrCat("inputs ", absl::StrJoin(program.inputs, ","), ", placement ",
                                  program.placement.index());
  if (const auto* const placement = std::get_if<Replicated>(&program.placement))
    absl::StrAppend(&text, placement->update_in_backward ? " in backward" : "");
  if (const auto* const placement = std::get_if<Slices>(&program.placement)) {
    absl::StrAppend(&text, placement->update_in_backward ? " in backward" : "",
                    placement->overlap_forward ? " overlapped" : "");
  }
  const auto add = [&](bool is_set, absl::string_view what) {
    if (is_set) absl::StrAppend(&text, ", ", what);
  };
  add(program.options.clip.has_value(), "clips");
  add(program.has_views, "views");
  add(program.lacks_gradients, "lacks gradients");
  add(program.has_function_before, "function before");
  add(program.has_function_after, "function after");
  add(program.is_without_reducer, "without reducer");
  for (const Action& action : program.acts) absl::StrAppend(&text, "; ", ToString(action));
  return text;
}

std::string RunAlone(const Program& program) { return Alone(program).Run(); }

absl::StatusOr<std::string> RunRank(const Program& program, Communicator& comm) {
  return Rank(program, comm).Run();
}

bool IsNear(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  for (size_t at = 0; at < a.size(); at += sizeof(double)) {
    double x = 0, y = 0;
    std::memcpy(&x, a.data() + at, sizeof(x));
    std::memcpy(&y, b.data() + at, sizeof(y));
    if (!(std::abs(x - y) <= 1e-9)) return false;
  }
  return true;
}

}  // namespace evenkeel
