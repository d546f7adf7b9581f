// Engine, stream, memory and error handling for users of oneDNN.
//
//   OneDnn dnn;  // an engine and a stream on the CPU
//   return StatusFromOneDnn("cnn", [&]() -> absl::Status { ... }); // a thrown dnnl::error becomes
//     a status
//
// Layers that wrap oneDNN primitives may throw dnnl::error; the model runs them in
// StatusFromOneDnn, so that no exception leaves it.
//
// Threads: an OneDnn is thread-compatible; several may be used at once.

#ifndef EVENKEEL_TRAINER_LAYERS_ONEDNN_H_
#define EVENKEEL_TRAINER_LAYERS_ONEDNN_H_

#include <algorithm>
#include <cstdint>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

struct OneDnn {
  dnnl::engine engine = MakeEngine();
  dnnl::stream stream{engine};

  mutable int64_t allocated = 0;  // Total bytes taken by Allocate().
  bool only_counts = false;       // Allocate() takes no memory; nothing can be executed.

  dnnl::memory Allocate(const dnnl::memory::desc& desc) const {
    allocated += static_cast<int64_t>(desc.get_size());
    return only_counts ? dnnl::memory(desc, engine, DNNL_MEMORY_NONE) : dnnl::memory(desc, engine);
  }
  // oneDNN 2.6 uses the results of its small allocations unchecked. Where they would fail, this one
  // throws std::bad_alloc first.
  static dnnl::engine MakeEngine() {
    ::operator delete(::operator new(1 << 20));
    return {dnnl::engine::kind::cpu, 0};
  }
  // Wraps memory of another owner; const is cast away, so use it only as a primitive's input.
  dnnl::memory Wrap(const dnnl::memory::desc& desc, const void* data) const {
    return {desc, engine, const_cast<void*>(data)};
  }
};

// Plans (primitive_desc) of primitives, and what else differs between the versions 2 and 3 of
// oneDNN: version 2 makes a plan from a `desc` struct, version 3 from the arguments of that struct.
#if DNNL_VERSION_MAJOR < 3
inline constexpr bool kIsOneDnn2 = true;
using PoolingForward = dnnl::pooling_v2_forward;
using PoolingBackward = dnnl::pooling_v2_backward;
inline dnnl::memory::dims DimsOf(const dnnl::memory::desc& desc) { return desc.dims(); }
inline void AppendRelu(dnnl::post_ops& ops) {
  ops.append_eltwise(1.0f, dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
}
#else
inline constexpr bool kIsOneDnn2 = false;
using PoolingForward = dnnl::pooling_forward;
using PoolingBackward = dnnl::pooling_backward;
inline dnnl::memory::dims DimsOf(const dnnl::memory::desc& desc) { return desc.get_dims(); }
inline void AppendRelu(dnnl::post_ops& ops) {
  ops.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
}
#endif

template <typename Primitive, typename... Arguments>
typename Primitive::primitive_desc ForwardPlan(const OneDnn& dnn,
                                               const dnnl::primitive_attr& attribute,
                                               const Arguments&... arguments) {
  if constexpr (kIsOneDnn2) {
    return {typename Primitive::desc(arguments...), attribute, dnn.engine};
  } else {
    return {dnn.engine, arguments..., attribute};
  }
}

template <typename Primitive, typename Forward, typename... Arguments>
typename Primitive::primitive_desc BackwardPlan(const OneDnn& dnn, const Forward& forward,
                                                const Arguments&... arguments) {
  if constexpr (kIsOneDnn2) {
    return {typename Primitive::desc(arguments...), dnn.engine, forward};
  } else {
    return {dnn.engine, arguments..., forward};
  }
}

// The result has the layout of the source.
template <typename... Arguments>
auto BatchNormPlan(const OneDnn& dnn, dnnl::prop_kind kind, const dnnl::memory::desc& layout,
                   const Arguments&... arguments) {
  using Forward = dnnl::batch_normalization_forward;
  if constexpr (kIsOneDnn2) {
    return ForwardPlan<Forward>(dnn, {}, kind, layout, arguments...);
  } else {
    return ForwardPlan<Forward>(dnn, {}, kind, layout, layout, arguments...);
  }
}

template <typename... Arguments>
auto BatchNormBackwardPlan(const OneDnn& dnn,
                           const dnnl::batch_normalization_forward::primitive_desc& forward,
                           const dnnl::memory::desc& layout, const Arguments&... arguments) {
  using Backward = dnnl::batch_normalization_backward;
  constexpr auto kKind = dnnl::prop_kind::backward;
  if constexpr (kIsOneDnn2) {
    return BackwardPlan<Backward>(dnn, forward, kKind, layout, layout, arguments...);
  } else {
    return BackwardPlan<Backward>(dnn, forward, kKind, layout, layout, layout, arguments...);
  }
}

// Working memory of primitives that never run at the same time. Each of them would keep its own,
// which AVX512 products have: together some MB.
//
//   const auto plan = ForwardPlan<dnnl::matmul>(dnn, SharedScratch::In(attribute), left, right,
//                                               output);
//   scratch.Grow(dnn, plan);
//   arguments[DNNL_ARG_SCRATCHPAD] = scratch.memory();
class SharedScratch {
 public:
  static dnnl::primitive_attr In(dnnl::primitive_attr attribute) {
    attribute.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return attribute;
  }

  // Makes it large enough for the primitive.
  void Grow(const OneDnn& dnn, const dnnl::primitive_desc& desc) {
    const auto bytes = static_cast<int64_t>(desc.scratchpad_desc().get_size());
    if (memory_ && bytes <= bytes_) return;
    bytes_ = std::max<int64_t>(bytes, 1);
    using Data = dnnl::memory::data_type;
    memory_ = dnn.Allocate({{bytes_}, Data::u8, dnnl::memory::format_tag::a});
  }
  const dnnl::memory& memory() const { return memory_; }

 private:
  dnnl::memory memory_;
  int64_t bytes_ = 0;
};

absl::Status StatusFromOneDnnCode(absl::string_view what, dnnl_status_t code);

// Runs `call`, which returns an absl::Status or StatusOr, and turns a thrown dnnl::error into one.
template <typename Call>
std::invoke_result_t<Call> StatusFromOneDnn(absl::string_view what, Call call) {
  try {
    return call();
  } catch (const dnnl::error& error) {
    return Annotate(StatusFromOneDnnCode(what, error.status), error.message);
  }
}

// Moves a tensor into the memory layout that a primitive requires.
//
//   LayoutAdapter to_plain(dnn, blocked_desc, plain_desc);
//   dnnl::memory plain = to_plain(dnn, blocked);    // `blocked` itself if the layouts are the same
//
// oneDNN's convolutions choose blocked layouts (such as nChw16c); adjacent layers mostly agree, so
// adapters have a cost only where a plain tensor enters or leaves.
//
// Ownership: the result is the adapter's own memory (valid until its next call), or the argument.
// Errors:    throws dnnl::error.
class LayoutAdapter {
 public:
  LayoutAdapter() = default;  // Returns its argument.
  LayoutAdapter(const OneDnn& dnn, const dnnl::memory::desc& from, const dnnl::memory::desc& to) {
    if (from == to) return;
    moved_ = dnn.Allocate(to);
    reorder_ = dnnl::reorder(dnnl::reorder::primitive_desc(dnn.engine, from, dnn.engine, to));
  }

  dnnl::memory operator()(const OneDnn& dnn, const dnnl::memory& source) const {
    if (!moved_) return source;
    dnnl::memory from = source;
    dnnl::memory to = moved_;
    reorder_.execute(dnn.stream, from, to);
    return moved_;
  }

 private:
  dnnl::memory moved_;  // Empty if the layouts are the same.
  dnnl::reorder reorder_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_ONEDNN_H_
