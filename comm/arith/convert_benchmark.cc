// How fast floats become 16-bit floats and back, on each instruction set, beside the loop over one
// element.
//
//   bazel run //comm/arith:convert_benchmark

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/base/instruction_set.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

constexpr int64_t kElements = 1 << 18;  // 1 MiB of float32.

void BM_Convert(benchmark::State& state, InstructionSet set, DType from, DType to,
                ConvertOptions options) {
  std::vector<double> a(kElements), b(kElements);
  const TensorView in(a.data(), kElements, from), out(b.data(), kElements, to);
  for (auto _ : state) {
    ConvertFloatsWith(set, in, out, options);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * (in.bytes() + out.bytes()));
}

template <typename T>
void BM_ElementByElement(benchmark::State& state) {
  std::vector<float> from(kElements, 1.5f);
  std::vector<T> to(kElements);
  for (auto _ : state) {
    for (int64_t i = 0; i < kElements; ++i) to[i] = T(from[i]);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kElements * (sizeof(float) + sizeof(T)));
}
BENCHMARK(BM_ElementByElement<Float16>);
BENCHMARK(BM_ElementByElement<BFloat16>);

const int kRegistered = [] {
  const char* names[] = {"baseline", "avx2", "avx512"};
  for (InstructionSet set : SupportedInstructionSets()) {
    const std::string name = absl::StrCat("BM_Convert/", names[static_cast<int>(set)], "/");
    for (DType half : {DType::kFloat16, DType::kBFloat16}) {
      benchmark::RegisterBenchmark(absl::StrCat(name, "float32_to_", ToString(half)).c_str(),
                                   BM_Convert, set, DType::kFloat32, half,
                                   ConvertOptions{.scale = 0.5});
      benchmark::RegisterBenchmark(absl::StrCat(name, "float64_to_", ToString(half)).c_str(),
                                   BM_Convert, set, DType::kFloat64, half, ConvertOptions{});
      benchmark::RegisterBenchmark(absl::StrCat(name, ToString(half), "_added_to_float32").c_str(),
                                   BM_Convert, set, half, DType::kFloat32,
                                   ConvertOptions{.scale = 0.5, .add = true});
    }
  }
  return 0;
}();

}  // namespace
}  // namespace evenkeel::internal
