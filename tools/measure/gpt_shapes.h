// The parameters of a small GPT, for benchmarks: 4 layers of width 128, context 128, over bytes;
// 0.84 M elements in 52 tensors, in the order of its modules, by Hugging Face's names.
//
//   for (const NamedShape& shape : GptShapes()) params.Add(shape.name, ...);
//
// Threads: pure.

#ifndef EVENKEEL_TOOLS_MEASURE_GPT_SHAPES_H_
#define EVENKEEL_TOOLS_MEASURE_GPT_SHAPES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace evenkeel {

struct NamedShape {
  std::string name;
  int64_t rows = 1;
  int64_t columns = 1;

  int64_t count() const { return rows * columns; }
};

inline constexpr int kGptLayers = 4;
inline constexpr int64_t kGptWidth = 128, kGptVocabulary = 256, kGptContext = 128;

std::vector<NamedShape> GptShapes();

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_GPT_SHAPES_H_
