// Memory that moves between steps, as a tensor library's to() does it: everything that held an old
// address uses the new one, and nothing is written to the old one. Against the same training in
// memory that stays, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/mixed_precision.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/bucket/value_memory.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/shm/shm.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kWorld = 3;
const std::vector<int> kSizes = {3, 40, 1, 25, 2};
const UpdateRule kRule = AdamW{.learning_rate = 0.05};

enum class Optimizing { kUnsharded, kInBackward, kSharded, kSliced, kSlicedInBackward };
constexpr Optimizing kAllKinds[] = {Optimizing::kUnsharded, Optimizing::kInBackward,
                                    Optimizing::kSharded, Optimizing::kSliced,
                                    Optimizing::kSlicedInBackward};

struct Case {
  Optimizing optimizing = Optimizing::kUnsharded;
  bool reads = false;  // By readers; else by Rebind().
  bool views = false;
  Fusion fusion = Fusion::kFlat;
  bool mixed = false;       // Computes in 16 bits.
  bool registered = false;  // Values begin in the group's memory.
};

std::string NameOf(const Case& test) {
  return absl::StrCat("optimizer ", static_cast<int>(test.optimizing),
                      test.reads ? " readers" : " rebind", test.views ? " views" : "",
                      test.fusion == Fusion::kFlat ? "" : " coalesced", test.mixed ? " mixed" : "",
                      test.registered ? " registered" : "");
}

// Floats that can move. Memory that was left holds NaN, unless it is written to.
class Movable {
 public:
  explicit Movable(int count) : places_(1) { places_[0].resize(count); }
  float* data() { return at_ != nullptr ? at_ : places_.back().data(); }
  int count() const { return static_cast<int>(places_[0].size()); }
  TensorView view() { return TensorView(data(), count(), DType::kFloat32); }
  std::vector<float> content() { return std::vector<float>(data(), data() + count()); }

  void Move() {
    std::vector<float> next = content();
    Leave();
    at_ = nullptr;
    places_.push_back(std::move(next));
  }
  // Something else has moved it.
  void MovedTo(void* data) {
    Leave();
    at_ = static_cast<float*>(data);
  }
  bool WasWrittenWhereItWas() const {
    const auto is_nan = [](float x) { return std::isnan(x); };
    return !std::all_of(places_.begin(), places_.end() - 1, [&](const std::vector<float>& place) {
      return std::ranges::all_of(place, is_nan);
    });
  }

 private:
  void Leave() { std::fill(data(), data() + count(), std::numeric_limits<float>::quiet_NaN()); }

  std::vector<std::vector<float>> places_;
  float* at_ = nullptr;
};

struct Outcome {
  std::vector<std::vector<float>> values, gradients;
  std::vector<float> buffer;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

class Training {
 public:
  Training(Communicator& comm, const Case& test, bool moves)
      : comm_(comm), test_(test), moves_(moves), buffer_(/*count=*/3) {
    for (size_t p = 0; p < kSizes.size(); ++p) {
      values_.emplace_back(kSizes[p]);
      gradients_.emplace_back(kSizes[p]);
      for (int j = 0; j < kSizes[p]; ++j)
        values_[p].data()[j] = ToyModel::Noise(0, 1000, static_cast<int>(p), j);
      params_.Add(absl::StrCat("p", p), values_[p].view(), gradients_[p].view());
    }
  }

  absl::StatusOr<Outcome> Run() {
    EK_RETURN_IF_ERROR(MakeParts());
    for (int epoch = 0; epoch < 2; ++epoch) {
      const int steps = std::vector<int>{4, 2, 5}[(comm_.rank() + epoch) % kWorld];
      EK_RETURN_IF_ERROR(RunJoined({ddp_.get(), joinable()}, {}, [&](JoinScope&) -> absl::Status {
        for (int step = 0; step < steps; ++step) EK_RETURN_IF_ERROR(Step(10 * epoch + step));
        return Move();
      }));
    }
    EK_RETURN_IF_ERROR(comm_.Barrier());
    mixed_.reset();
    ddp_.reset();  // Views go back to memory of their own.
    Outcome outcome{.buffer = buffer_.content()};
    for (Movable& value : values_) outcome.values.push_back(value.content());
    for (Movable& gradient : gradients_) {
      if (test_.optimizing == Optimizing::kUnsharded)
        outcome.gradients.push_back(gradient.content());
    }
    for (const std::vector<Movable>* tensors : {&values_, &gradients_}) {
      for (const Movable& tensor : *tensors) EXPECT_FALSE(tensor.WasWrittenWhereItWas());
    }
    EXPECT_FALSE(buffer_.WasWrittenWhereItWas());
    return outcome;
  }

 private:
  Joinable* joinable() { return optimizer_.get(); }

  Placement placement() const {
    switch (test_.optimizing) {
      case Optimizing::kUnsharded:
        break;
      case Optimizing::kInBackward:
        return Replicated{.update_in_backward = true};
      case Optimizing::kSharded:
        return WholeTensors{.bucket_cap = Bytes{64}};
      case Optimizing::kSliced:
        return Slices{};
      case Optimizing::kSlicedInBackward:
        return Slices{.update_in_backward = true};
    }
    return Replicated{};
  }

  absl::Status MakeParts() {
    if (test_.registered) {
      EK_ASSIGN_OR_RETURN(registered_, MoveValues(comm_, params_));
      for (size_t p = 0; p < kSizes.size(); ++p)
        values_[p].MovedTo(params_[static_cast<int>(p)].value.data);
    }
    DataParallelOptions options;
    options.reducer = {.caps = {Bytes{16}, Bytes{128}},
                       .gradient_as_bucket_view = test_.views,
                       .fusion = test_.fusion};
    if (test_.reads) {
      options.memory = {.value = [this](int param) { return values_[param].view(); },
                        .gradient = [this](int param) { return gradients_[param].view(); },
                        .buffer = [this](int) { return buffer_.view(); }};
    }
    EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(&comm_, &params_, {buffer_.view()}, options));
    EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*ddp_, kRule, {.placement = placement()}));
    if (test_.mixed) {
      EK_ASSIGN_OR_RETURN(mixed_, MixedPrecision::Create(&params_, ddp_.get()));
    }
    return absl::OkStatus();
  }

  absl::Status Move() {
    if (!moves_) return absl::OkStatus();
    EK_RETURN_IF_ERROR(optimizer_->WaitForAll());
    buffer_.Move();
    for (size_t p = 0; p < kSizes.size(); ++p) {
      values_[p].Move();
      gradients_[p].Move();
    }
    registered_ = Memory();
    if (test_.reads) return absl::OkStatus();
    EK_RETURN_IF_ERROR(ddp_->RebindBuffer(0, buffer_.view()));
    for (size_t p = 0; p < kSizes.size(); ++p) {
      EK_RETURN_IF_ERROR(
          params_.Rebind(static_cast<int>(p), values_[p].view(), gradients_[p].view()));
    }
    return absl::OkStatus();
  }

  // Two backwards, of which the first accumulates.
  absl::Status Step(int step) {
    params_.SetTrainable(2, step % 10 != 1);
    params_.ClearGradients();
    for (const StepMode mode : {StepMode::kAccumulate, StepMode::kSync}) {
      EK_RETURN_IF_ERROR(Move());
      EK_RETURN_IF_ERROR(ddp_->BeginStep(mode));
      const int batch = 2 * step + (mode == StepMode::kSync);
      for (int j = 0; j < 3; ++j)
        buffer_.data()[j] = 0.9f * buffer_.data()[j] + Noise(batch, 99, j);
      for (int p = params_.size() - 1; p >= 0; --p) {
        if (params_.trainable(p)) EK_RETURN_IF_ERROR(Backward(p, batch));
      }
      EK_RETURN_IF_ERROR(ddp_->FinishStep());
    }
    if (test_.optimizing == Optimizing::kInBackward) return absl::OkStatus();
    return optimizer_->Step();
  }

  float Noise(int batch, int what, int j) const {
    return ToyModel::Noise(comm_.rank(), batch, what, j);
  }

  absl::Status Backward(int param, int batch) {
    const int64_t count = params_[param].value.count;
    const auto gradient_at = [&](int64_t j, float weight) {
      return 0.25f * weight + Noise(batch, param, static_cast<int>(j)) +
             0.125f * buffer_.data()[j % 3];
    };
    if (mixed_ != nullptr) {
      const auto weights = mixed_->Compute(param).as<BFloat16>(),
                 into = mixed_->Gradient(param).as<BFloat16>();
      for (int64_t j = 0; j < count; ++j)
        into[j] = BFloat16(gradient_at(j, static_cast<float>(weights[j])));
      return mixed_->GradientReady(param);
    }
    const auto weights = params_[param].value.as<float>(), into = params_[param].grad.as<float>();
    const bool adds = params_.grad_state(param) != GradState::kNone;
    for (int64_t j = 0; j < count; ++j)
      into[j] = (adds ? into[j] : 0.0f) + gradient_at(j, weights[j]);
    params_.SetGradState(param, GradState::kLocal);
    return ddp_->GradientReady(param);
  }

  Communicator& comm_;
  const Case test_;
  const bool moves_;
  std::vector<Movable> values_, gradients_;
  Movable buffer_;
  Memory registered_;
  ParameterSet params_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<MixedPrecision> mixed_;
};

std::vector<Outcome> OutcomesOf(const Case& test, bool moves) {
  std::vector<Outcome> outcomes(kWorld);
  const auto body = [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(outcomes[comm.rank()], Training(comm, test, moves).Run());
    return absl::OkStatus();
  };
  absl::Status status;
  if (test.registered) {
    auto group = CreateShmGroupInProcess(kWorld);
    status = group.ok() ? internal::RunGroup(*group, body) : group.status();
  } else {
    status = RunRanks(kWorld, body);
  }
  EXPECT_TRUE(status.ok()) << status;
  return outcomes;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool reads : {false, true}) {
    for (const Optimizing optimizing : kAllKinds) {
      for (const bool views : {false, true}) {
        cases.push_back({.optimizing = optimizing, .reads = reads, .views = views});
      }
    }
    cases.push_back({.reads = reads, .fusion = Fusion::kCoalesced});
    for (const Optimizing optimizing :
         {Optimizing::kUnsharded, Optimizing::kSharded, Optimizing::kSliced}) {
      cases.push_back({.optimizing = optimizing, .reads = reads, .mixed = true});
      cases.push_back({.optimizing = optimizing, .reads = reads, .registered = true});
    }
  }
  return cases;
}

TEST(MovedMemoryTest, TrainsAsInMemoryThatStays) {
  for (const Case& test : Cases()) {
    SCOPED_TRACE(NameOf(test));
    const std::vector<Outcome> expected = OutcomesOf(test, /*moves=*/false),
                               moved = OutcomesOf(test, /*moves=*/true);
    for (int rank = 0; rank < kWorld; ++rank)
      EXPECT_TRUE(moved[rank] == expected[rank]) << "rank " << rank;
    if (HasFailure()) return;
  }
}

// After an error in the middle of a step.
TEST(MovedMemoryTest, ARepeatedStepHasItsBuffersWhereTheyLieNow) {
  auto first = CreateLocalGroup(2), second = CreateLocalGroup(2);
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status status = internal::RunGroup(*second, [&](Communicator& comm) -> absl::Status {
    ToyModel model({3, 5});
    Movable buffer(2);
    buffer.data()[0] = 7;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(
                                      (*first)[comm.rank()].get(), &model.params(), {buffer.view()},
                                      {.memory = {.buffer = [&](int) { return buffer.view(); }}}));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    buffer.data()[0] = 8;
    buffer.Move();
    EK_RETURN_IF_ERROR(ddp->ReplaceGroup(&comm));
    EXPECT_EQ(buffer.data()[0], 7);
    EXPECT_FALSE(buffer.WasWrittenWhereItWas());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(MovedMemoryTest, WhatCannotHaveMovedThereIsRefused) {
  std::vector<float> three(3), five(5), other(5), buffer(4);
  std::vector<double> wide(5);
  const TensorView good = absl::MakeSpan(other);
  const struct {
    TensorView value, gradient;
    std::string message;
  } wrong[] = {
      {absl::MakeSpan(three), {}, "parameter \"b\" is float32[5] and cannot move to float32[3]"},
      {absl::MakeSpan(wide), {}, "parameter \"b\" is float32[5] and cannot move to float64[5]"},
      {TensorView(other.data(), 5, DType::kFloat32, Device::Cuda(1)),
       {},
       "to float32[5] on cuda:1"},
      {TensorView(nullptr, 5, DType::kFloat32), {}, "to no memory for float32[5]"},
      {good, absl::MakeSpan(three),
       "the gradient of parameter \"b\" is float32[5] and cannot move to float32"},
  };
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    ToyModel model({3});
    ParameterSet& params = model.params();
    std::vector<float> gradient(5);
    const int b = params.Add("b", absl::MakeSpan(five), absl::MakeSpan(gradient));
    std::optional<TensorView> read;
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &params, {TensorView(absl::MakeSpan(buffer))},
                                             {.memory = {.value = [&](int i) {
                                                return read.has_value() && i == b ? *read
                                                                                  : params[i].value;
                                              }}}));
    for (const auto& [value, grad, message] : wrong) {
      const absl::Status rebound = params.Rebind(b, value, grad);
      EXPECT_EQ(rebound.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(rebound.message()), HasSubstr(message));
      EXPECT_EQ(params[b].value.data, five.data());
      if (grad.data != nullptr) continue;
      read = value;
      EXPECT_THAT(std::string(ddp->BeginStep().message()),
                  AllOf(HasSubstr("data_parallel#0: parameter \"b\""), HasSubstr(message)));
      read.reset();
    }
    EXPECT_THAT(std::string(params.Rebind(2, good).message()),
                HasSubstr("parameter 2 is out of range: the number of parameters is 2"));
    EXPECT_THAT(std::string(ddp->RebindBuffer(0, absl::MakeSpan(three)).message()),
                HasSubstr("data_parallel#0: buffer 0 is float32[4] and cannot move to float32[3]"));
    EXPECT_THAT(std::string(ddp->RebindBuffer(1, absl::MakeSpan(three)).message()),
                HasSubstr("the number of buffers is 1"));
    EK_RETURN_IF_ERROR(params.Rebind(b, absl::MakeSpan(gradient)));
    EXPECT_THAT(std::string(ddp->BeginStep().message()), HasSubstr("overlaps"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
