// How fast the CPU combines gradients, on each instruction set, beside a plain loop as the compiler
// makes it by default.
//
//   bazel run //comm/arith:reduce_kernels_benchmark

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/comm/arith/reduce_kernels.h"
#include "evenkeel/comm/base/float16.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

// `inputs` arrays of `n` elements, all 1 (which every dtype can sum), and one for the result.
struct Data {
  Data(DType dtype, int inputs, int64_t n)
      : arrays(inputs + 1, std::vector<char>(n * SizeOf(dtype))) {
    for (std::vector<char>& array : arrays) {
      FillIdentity(ReduceOp::kProduct, dtype, array.data(), n);
      in.push_back(array.data());
    }
    in.pop_back();
    out = arrays.back().data();
  }
  std::vector<std::vector<char>> arrays;
  std::vector<const void*> in;
  void* out;
};

void BM_ReduceInto(benchmark::State& state, InstructionSet set, DType dtype) {
  const int inputs = static_cast<int>(state.range(0));
  const int64_t n = state.range(1);
  Data data(dtype, inputs, n);
  for (auto _ : state) {
    ReduceIntoWith(set, ReduceOp::kSum, dtype, data.out, data.in, n, 0.5);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * n * (inputs + 1) * SizeOf(dtype));
}

void BM_NaiveFloat32(benchmark::State& state) {
  const int64_t n = state.range(1);
  Data data(DType::kFloat32, 2, n);
  const float* a = static_cast<const float*>(data.in[0]);
  const float* b = static_cast<const float*>(data.in[1]);
  float* out = static_cast<float*>(data.out);
  for (auto _ : state) {
    for (int64_t i = 0; i < n; ++i) out[i] = (a[i] + b[i]) * 0.5f;
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * n * 3 * sizeof(float));
}

void BM_NaiveFloat16(benchmark::State& state) {
  const int64_t n = state.range(1);
  Data data(DType::kFloat16, 2, n);
  const Float16* a = static_cast<const Float16*>(data.in[0]);
  const Float16* b = static_cast<const Float16*>(data.in[1]);
  Float16* out = static_cast<Float16*>(data.out);
  for (auto _ : state) {
    for (int64_t i = 0; i < n; ++i) {
      out[i].bits =
          Float16FromFloat((FloatFromFloat16(a[i].bits) + FloatFromFloat16(b[i].bits)) * 0.5f);
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * n * 3 * sizeof(Float16));
}

BENCHMARK(BM_NaiveFloat32)->Args({2, 16 << 10})->Args({2, 4 << 20});
BENCHMARK(BM_NaiveFloat16)->Args({2, 16 << 10})->Args({2, 4 << 20});

void RegisterEach() {
  for (DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32}) {
    for (InstructionSet set : SupportedInstructionSets()) {
      const char* const names[] = {"baseline", "avx2", "avx512"};
      const std::string name = std::string("BM_ReduceInto/") + std::string(ToString(dtype)) + "/" +
                               names[static_cast<int>(set)];
      benchmark::RegisterBenchmark(name.c_str(), BM_ReduceInto, set, dtype)
          ->ArgNames({"inputs", "n"})
          ->ArgsProduct({{2, 4, 8}, {16 << 10, 4 << 20}});
    }
  }
}
const bool kRegistered = (RegisterEach(), true);

}  // namespace
}  // namespace evenkeel::internal
