// A 2 x 2 mesh: data parallel along one axis, tensor parallel along the other. In the middle of
// backward user code all-reduces along the tensor axis; buckets go along the data axis meanwhile.
// Nothing deadlocks, nobody's sums are touched, and the weights are those of one rank.
//
// The model: y = sum_r b_r (a_r x) with the hidden units split over the tensor axis; the loss is
//            0.5 (y - t)^2.

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kInputs = 3, kHidden = 4, kSteps = 8, kSamples = 6;
constexpr double kRate = 0.05;
// Weights stay below 2; 8 steps of sums of at most 24 terms below 4, in another order.
constexpr double kTolerance = 1e-12;

double Noise(int a, int b, int c) { return std::sin(1.0 + 12.9898 * a + 78.233 * b + 37.719 * c); }

// The hidden units [first, first + units).
struct Layer {
  int first, units;
  std::vector<double> a, b, grad_a, grad_b;

  Layer(int first, int units)
      : first(first), units(units), a(units * kInputs), b(units), grad_a(a), grad_b(b) {
    for (int u = 0; u < units; ++u) {
      b[u] = Noise(1, first + u, 0);
      for (int i = 0; i < kInputs; ++i) a[u * kInputs + i] = Noise(2, first + u, i);
    }
  }
  double HiddenOf(int unit, const std::vector<double>& x) const {
    double sum = 0;
    for (int i = 0; i < kInputs; ++i) sum += a[unit * kInputs + i] * x[i];
    return sum;
  }
};

std::vector<double> Input(int step, int sample) {
  std::vector<double> x(kInputs);
  for (int i = 0; i < kInputs; ++i) x[i] = Noise(3 + step, sample, i);
  return x;
}

// Mean gradients over samples [begin, end) of a step. `add_up` makes one number per sample the
// tensor axis's sum of it; `is_ready(0)` is called when b's gradient is there, `is_ready(1)` when
// a's is.
absl::Status Backward(Layer& layer, int step, int begin, int end,
                      absl::FunctionRef<absl::Status(std::vector<double>&)> add_up,
                      absl::FunctionRef<absl::Status(int)> is_ready) {
  const double weight = 1.0 / (end - begin);
  std::vector<double> y(end - begin);
  for (int s = begin; s < end; ++s) {
    for (int u = 0; u < layer.units; ++u)
      y[s - begin] += layer.b[u] * layer.HiddenOf(u, Input(step, s));
  }
  EK_RETURN_IF_ERROR(add_up(y));
  layer.grad_a.assign(layer.a.size(), 0.0);
  layer.grad_b.assign(layer.b.size(), 0.0);
  std::vector<double> errors;
  for (int s = begin; s < end; ++s) errors.push_back(weight * (y[s - begin] - Noise(9, step, s)));
  for (int s = begin; s < end; ++s) {
    for (int u = 0; u < layer.units; ++u)
      layer.grad_b[u] += errors[s - begin] * layer.HiddenOf(u, Input(step, s));
  }
  EK_RETURN_IF_ERROR(is_ready(0));
  // In the middle of backward, with b's bucket on its way: what a layer below would get.
  std::vector<double> below(kInputs);
  for (int u = 0; u < layer.units; ++u) {
    for (int i = 0; i < kInputs; ++i) below[i] += layer.b[u] * layer.a[u * kInputs + i];
  }
  EK_RETURN_IF_ERROR(add_up(below));
  for (int s = begin; s < end; ++s) {
    const std::vector<double> x = Input(step, s);
    for (int u = 0; u < layer.units; ++u) {
      for (int i = 0; i < kInputs; ++i) {
        layer.grad_a[u * kInputs + i] += errors[s - begin] * layer.b[u] * x[i] + 1e-3 * below[i];
      }
    }
  }
  return is_ready(1);
}

Layer TrainAlone() {
  Layer layer(0, kHidden);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<double> sum_a(layer.a.size()), sum_b(layer.b.size());
    for (int half = 0; half < 2; ++half) {  // The mean of the data axis's two means.
      const absl::Status status = Backward(
          layer, step, half * kSamples / 2, (half + 1) * kSamples / 2,
          [](std::vector<double>&) { return absl::OkStatus(); },
          [](int) { return absl::OkStatus(); });
      EXPECT_TRUE(status.ok());
      for (size_t j = 0; j < sum_a.size(); ++j) sum_a[j] += layer.grad_a[j] / 2;
      for (size_t j = 0; j < sum_b.size(); ++j) sum_b[j] += layer.grad_b[j] / 2;
    }
    for (size_t j = 0; j < sum_a.size(); ++j) layer.a[j] -= kRate * sum_a[j];
    for (size_t j = 0; j < sum_b.size(); ++j) layer.b[j] -= kRate * sum_b[j];
  }
  return layer;
}

absl::Status TrainOnMesh(Communicator& comm, const Layer& alone) {
  const int row = comm.rank() / 2,
            column = comm.rank() % 2;  // On the data axis, and on the tensor axis.
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> data, comm.Split(column, row));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> tensor, comm.Split(row, column));
  {
    Layer layer(column * kHidden / 2, kHidden / 2);
    ParameterSet params;
    params.Add("a", absl::MakeSpan(layer.a), absl::MakeSpan(layer.grad_a));
    params.Add("b", absl::MakeSpan(layer.b), absl::MakeSpan(layer.grad_b));
    // A bucket each, from the second step on.
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(data.get(), &params, {}, {.reducer = {.caps = {Bytes{8}}}}));
    EK_ASSIGN_OR_RETURN(auto optimizer,
                        Optimizer::Create(*data, params, Sgd{.learning_rate = kRate}));
    int sums = 0;
    for (int step = 0; step < kSteps; ++step) {
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(Backward(
          layer, step, row * kSamples / 2, (row + 1) * kSamples / 2,
          [&](std::vector<double>& numbers) {
            ++sums;
            return tensor->AllReduce(absl::MakeSpan(numbers), ReduceOp::kSum);
          },
          [&](int which) {
            const int param = which == 0 ? 1 : 0;
            params.SetGradState(param, GradState::kLocal);
            return ddp->GradientReady(param);
          }));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      EK_RETURN_IF_ERROR(optimizer->Step());
    }
    EXPECT_EQ(tensor->user().position(), sums)
        << "the tensor axis has the user's collectives and no other";
    for (int u = 0; u < layer.units; ++u) {
      EXPECT_NEAR(layer.b[u], alone.b[layer.first + u], kTolerance) << "rank " << comm.rank();
      for (int i = 0; i < kInputs; ++i) {
        EXPECT_NEAR(layer.a[u * kInputs + i], alone.a[(layer.first + u) * kInputs + i], kTolerance);
      }
    }
  }
  EK_RETURN_IF_ERROR(data->Finalize());
  EK_RETURN_IF_ERROR(tensor->Finalize());
  return absl::OkStatus();
}

TEST(MeshTest, DataParallelAlongOneAxisLeavesTheOtherAlone) {
  const Layer alone = TrainAlone();
  const absl::Status status =
      RunTestRanks(4, [&](Communicator& comm) { return TrainOnMesh(comm, alone); });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
