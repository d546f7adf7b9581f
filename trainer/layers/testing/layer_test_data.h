// Plain tensors for tests of layers that work in oneDNN's own layouts.

#ifndef EVENKEEL_TRAINER_LAYERS_TESTING_LAYER_TEST_DATA_H_
#define EVENKEEL_TRAINER_LAYERS_TESTING_LAYER_TEST_DATA_H_

#include <cstdint>
#include <span>
#include <vector>

#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

inline std::vector<float> RandomFloats(int64_t count, uint64_t seed) {
  StableRandom random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(2 * random.Uniform() - 1);
  return values;
}

inline dnnl::memory::desc PlainDesc(const dnnl::memory::dims& dims) {
  return {dims, dnnl::memory::data_type::f32, dnnl::memory::format_tag::nchw};
}

// A tensor in `desc`'s layout, from plain values.
inline dnnl::memory ToLayout(const OneDnn& dnn, std::span<const float> plain,
                             const dnnl::memory::desc& desc) {
  dnnl::memory from = dnn.Wrap(PlainDesc(DimsOf(desc)), plain.data());
  dnnl::memory to = dnn.Allocate(desc);
  dnnl::reorder(from, to).execute(dnn.stream, from, to);
  return to;
}

// Its plain values.
inline std::vector<float> ToPlain(const OneDnn& dnn, const dnnl::memory& memory) {
  const dnnl::memory::desc desc = PlainDesc(DimsOf(memory.get_desc()));
  std::vector<float> plain(desc.get_size() / sizeof(float));
  dnnl::memory from = memory;
  dnnl::memory to = dnn.Wrap(desc, plain.data());
  dnnl::reorder(from, to).execute(dnn.stream, from, to);
  return plain;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_TESTING_LAYER_TEST_DATA_H_
