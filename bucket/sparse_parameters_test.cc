// Gradients that consist of some rows: gathered, added up in the order of ranks, and equal to what
// a dense one would be.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kRows = 7, kRowSize = 3;

std::vector<float> Floats(const SparseRows& sparse) {
  std::vector<float> floats(sparse.values.size() / sizeof(float));
  if (!floats.empty()) std::memcpy(floats.data(), sparse.values.data(), sparse.values.size());
  return floats;
}

TEST(SparseParametersTest, TakeRowsThatFitAndAddThemUp) {
  std::vector<float> table(kRows * kRowSize);
  ParameterSet params;
  const int index = params.AddSparse("table", absl::MakeSpan(table), kRowSize);
  EXPECT_TRUE(params.Validate().ok()) << params.Validate();
  EXPECT_EQ(params.row_size(index), kRowSize);
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  std::vector<double> doubles(6);
  const TensorView view = absl::MakeSpan(values);
  const std::vector<int64_t> rows = {6, 0};
  EXPECT_TRUE(params.SetSparseGrad(index, rows, view).ok());
  EXPECT_EQ(params.grad_state(index), GradState::kLocal);
  EXPECT_TRUE(params.SetSparseGrad(index, std::vector<int64_t>{6}, view.Slice(0, 3)).ok());
  EXPECT_THAT(params.sparse_grad(index).rows, ElementsAre(0, 6));
  EXPECT_THAT(Floats(params.sparse_grad(index)), ElementsAre(4, 5, 6, 2, 4, 6));

  EXPECT_EQ(params.SetSparseGrad(index, std::vector<int64_t>{7, 0}, view),
            absl::InvalidArgumentError("parameter \"table\" has no row 7, it has 7"));
  EXPECT_EQ(params.SetSparseGrad(index, std::vector<int64_t>{-1, 0}, view),
            absl::InvalidArgumentError("parameter \"table\" has no row -1, it has 7"));
  EXPECT_EQ(
      params.SetSparseGrad(index, rows, view.Slice(0, 5)),
      absl::InvalidArgumentError("parameter \"table\": 2 rows are float32[6], not float32[5]"));
  EXPECT_EQ(
      params.SetSparseGrad(index, rows, absl::MakeSpan(doubles)),
      absl::InvalidArgumentError("parameter \"table\": 2 rows are float32[6], not float64[6]"));
  EXPECT_EQ(params.SetSparseGrad(3, rows, view),
            absl::InvalidArgumentError("parameter 3 is not a sparse one of a floating-point type"));
  EXPECT_THAT(Floats(params.sparse_grad(index)), ElementsAre(4, 5, 6, 2, 4, 6))
      << "Nothing changed.";

  params.ClearGradients();
  EXPECT_TRUE(params.SetSparseGrad(index, rows, view).ok());
  EXPECT_THAT(Floats(params.sparse_grad(index)), ElementsAre(4, 5, 6, 1, 2, 3));
}

TEST(SparseParametersTest, RowsMustDivideAndSharedOnesBeOfOneKind) {
  std::vector<float> table(kRows * kRowSize);
  for (int row_size : {4, -1}) {
    ParameterSet params;
    params.AddSparse("table", absl::MakeSpan(table), row_size);
    EXPECT_EQ(params.Validate(),
              absl::InvalidArgumentError(absl::StrCat(
                  "parameter \"table\" is float32[21], which is not in rows of ", row_size)));
  }
  ParameterSet both;
  both.AddSparse("table", absl::MakeSpan(table), kRowSize);
  EXPECT_EQ(both.AddSparse("again", absl::MakeSpan(table), kRowSize), 0);
  EXPECT_TRUE(both.Validate().ok());
  both.Add("projection", absl::MakeSpan(table));
  EXPECT_THAT(std::string(both.Validate().message()),
              HasSubstr("\"table\" and \"projection\" are the same memory, in rows"));
}

// An embedding and a dense layer; `dense` has the same gradients in full.
class Lookup {
 public:
  explicit Lookup(bool is_sparse)
      : is_sparse_(is_sparse),
        table_(kRows * kRowSize),
        grad_(table_.size()),
        bias_(5),
        bias_grad_(5) {
    if (is_sparse) {
      params_.AddSparse("table", absl::MakeSpan(table_), kRowSize);
    } else {
      params_.Add("table", absl::MakeSpan(table_), absl::MakeSpan(grad_));
    }
    params_.Add("bias", absl::MakeSpan(bias_), absl::MakeSpan(bias_grad_));
  }
  ParameterSet& params() { return params_; }

  // Some rows, some of them twice, as many as rank and step say; with every third pair none.
  static std::vector<int64_t> RowsOf(int rank, int step) {
    std::vector<int64_t> rows;
    for (int i = 0; i < (rank + 2 * step) % 5; ++i)
      rows.push_back((rank * 3 + i * i + step) % kRows);
    return rows;
  }
  static std::vector<float> ValuesOf(int rank, int step, size_t rows) {
    std::vector<float> values;
    for (size_t i = 0; i < rows * kRowSize; ++i)
      values.push_back(ToyModel::Noise(rank, step, 3, static_cast<int>(i)));
    return values;
  }

  absl::Status Backward(int rank, int step, absl::FunctionRef<absl::Status(int)> announce) {
    const std::vector<int64_t> rows = RowsOf(rank, step);
    std::vector<float> values = ValuesOf(rank, step, rows.size());
    for (float& g : params_[1].grad.as<float>()) {
      const float more = ToyModel::Noise(rank, step, 4, 0);
      g = params_.grad_state(1) == GradState::kNone ? more : g + more;
    }
    params_.SetGradState(1, GradState::kLocal);
    EK_RETURN_IF_ERROR(announce(1));
    if (!params_.trainable(0)) return absl::OkStatus();
    if (is_sparse_) {
      EK_RETURN_IF_ERROR(params_.SetSparseGrad(0, rows, absl::MakeSpan(values)));
    } else {
      const std::span<float> grad = params_[0].grad.as<float>();
      if (params_.grad_state(0) == GradState::kNone) std::fill(grad.begin(), grad.end(), 0.0f);
      for (size_t i = 0; i < values.size(); ++i)
        grad[rows[i / kRowSize] * kRowSize + i % kRowSize] += values[i];
      params_.SetGradState(0, GradState::kLocal);
    }
    return announce(0);
  }

  std::vector<float> TableGradient() const {
    std::vector<float> full(table_.size(), 0.0f);
    if (params_.grad_state(0) == GradState::kNone) return full;
    if (!is_sparse_) {
      const std::span<const float> grad = params_[0].grad.as<float>();
      return std::vector<float>(grad.begin(), grad.end());
    }
    const SparseRows& sparse = params_.sparse_grad(0);
    const std::vector<float> values = Floats(sparse);
    for (size_t i = 0; i < values.size(); ++i)
      full[sparse.rows[i / kRowSize] * kRowSize + i % kRowSize] += values[i];
    return full;
  }

 private:
  const bool is_sparse_;
  std::vector<float> table_, grad_, bias_, bias_grad_;
  ParameterSet params_;
};

class SparseInDataParallelTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(std::get<0>(GetParam()), body);
    EXPECT_TRUE(status.ok()) << status;
  }
  DataParallelOptions Options() const {
    return {.reducer = {.gradient_as_bucket_view = std::get<1>(GetParam())}};
  }
};

absl::Status TrainStep(DataParallel& ddp, Lookup& model, int rank, int step) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(
      model.Backward(rank, step, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

void ExpectSorted(const SparseRows& sparse) {
  for (size_t i = 1; i < sparse.rows.size(); ++i) EXPECT_LT(sparse.rows[i - 1], sparse.rows[i]);
}

TEST_P(SparseInDataParallelTest, RowsAreThoseOfTheDenseGradient) {
  Run([&](Communicator& comm) -> absl::Status {
    Lookup sparse(true), dense(false);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &sparse.params(), {}, Options()));
    EK_ASSIGN_OR_RETURN(auto reference,
                        DataParallel::Create(&comm, &dense.params(), {}, Options()));
    EXPECT_EQ(ddp->buckets().size(), 1u) << "Of the dense parameter.";
    for (int step = 0; step < 6; ++step) {
      if (step == 4) {  // Frozen and back.
        sparse.params().SetTrainable(0, false);
        dense.params().SetTrainable(0, false);
      }
      if (step == 5) {
        sparse.params().SetTrainable(0, true);
        dense.params().SetTrainable(0, true);
      }
      EK_RETURN_IF_ERROR(TrainStep(*ddp, sparse, comm.rank(), step));
      EK_RETURN_IF_ERROR(TrainStep(*reference, dense, comm.rank(), step));
      EXPECT_THAT(sparse.TableGradient(), SameSums(dense.TableGradient())) << "step " << step;
      EXPECT_THAT(sparse.params()[1].grad.as<float>()[0],
                  SameSum(dense.params()[1].grad.as<float>()[0]));
      ExpectSorted(sparse.params().sparse_grad(0));
      bool is_used = step != 4;
      if (is_used) {
        is_used = false;
        for (int rank = 0; rank < comm.world_size(); ++rank)
          is_used |= !Lookup::RowsOf(rank, step).empty();
      }
      EXPECT_EQ(sparse.params().grad_state(0), is_used ? GradState::kReduced : GradState::kNone)
          << "step " << step;
    }
    return absl::OkStatus();
  });
}

TEST_P(SparseInDataParallelTest, WhatWasAccumulatedAddsUp) {
  Run([&](Communicator& comm) -> absl::Status {
    Lookup sparse(true), dense(false);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &sparse.params(), {}, Options()));
    EK_ASSIGN_OR_RETURN(auto reference,
                        DataParallel::Create(&comm, &dense.params(), {}, Options()));
    for (int step = 0; step < 3; ++step) {
      for (auto [model, trainer] :
           {std::pair(&sparse, ddp.get()), std::pair(&dense, reference.get())}) {
        model->params().ClearGradients();
        for (int part = 0; part < 3; ++part) {
          EK_RETURN_IF_ERROR(
              trainer->BeginStep(part < 2 ? StepMode::kAccumulate : StepMode::kSync));
          EK_RETURN_IF_ERROR(
              model->Backward(comm.rank(), 3 * step + part,
                              [t = trainer](int param) { return t->GradientReady(param); }));
          EK_RETURN_IF_ERROR(trainer->FinishStep());
        }
      }
      EXPECT_THAT(sparse.TableGradient(), SameSums(dense.TableGradient())) << "step " << step;
    }
    return absl::OkStatus();
  });
}

// Ranks that become exhausted have no rows, but those that they had accumulated; all have the same
// gradient.
TEST_P(SparseInDataParallelTest, RanksThatRanDryContributeWhatTheyHadAndGetAll) {
  Run([&](Communicator& comm) -> absl::Status {
    std::vector<std::vector<float>> results;
    for (bool is_sparse : {true, false}) {
      Lookup model(is_sparse);
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options()));
      ddp->SetOptimizerState({});
      EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
        // Every third batch accumulates two steps, so that some ranks become exhausted with rows
        // that were not reduced.
        for (int step = 0; step < 2 + comm.rank(); ++step) {
          if (step % 3 != 2) model.params().ClearGradients();
          EK_RETURN_IF_ERROR(
              ddp->BeginStep(step % 3 == 1 ? StepMode::kAccumulate : StepMode::kSync));
          EK_RETURN_IF_ERROR(model.Backward(comm.rank(), step,
                                            [&](int param) { return ddp->GradientReady(param); }));
          EK_RETURN_IF_ERROR(ddp->FinishStep());
          results.push_back(model.TableGradient());
        }
        return absl::OkStatus();
      }));
    }
    const size_t half = results.size() / 2;
    for (size_t i = 0; i < half; ++i)
      EXPECT_THAT(results[i], SameSums(results[half + i]))
          << "rank " << comm.rank() << " step " << i;
    return absl::OkStatus();
  });
}

TEST_P(SparseInDataParallelTest, HalvesAreRoundedOnce) {
  Run([&](Communicator& comm) -> absl::Status {
    std::vector<BFloat16> table(4);
    ParameterSet params;
    params.AddSparse("table", absl::MakeSpan(table), 2);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, {}, Options()));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    // 256 + 1 is no bfloat16: rounded in between, nothing would come of the ones.
    std::vector<BFloat16> values(6, BFloat16(1.0f));
    values[0] = BFloat16(256.0f);
    EK_RETURN_IF_ERROR(
        params.SetSparseGrad(0, std::vector<int64_t>{1, 1, 1}, absl::MakeSpan(values)));
    EK_RETURN_IF_ERROR(ddp->GradientReady(0));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EXPECT_THAT(params.sparse_grad(0).rows, ElementsAre(1));
    BFloat16 first;
    std::memcpy(&first, params.sparse_grad(0).values.data(), sizeof(first));
    EXPECT_EQ(static_cast<float>(first), 258.0f);
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, SparseInDataParallelTest,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Bool()));

}  // namespace
}  // namespace evenkeel
