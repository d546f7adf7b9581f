// The few lines that every use of oneDNN shares.
//
//   OneDnn dnn;                                                    // an engine and a stream on the CPU
//   return StatusFromOneDnn("cnn", [&]() -> absl::Status { ... }); // a thrown dnnl::error becomes a status
//
// Layers that wrap oneDNN primitives may throw dnnl::error; the model that is made of them runs them in
// StatusFromOneDnn, so that none leaves it.
//
// Threads: an OneDnn is thread-compatible; several may be used at once.

#ifndef EVENKEEL_TRAINER_LAYERS_ONEDNN_H_
#define EVENKEEL_TRAINER_LAYERS_ONEDNN_H_

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

struct OneDnn {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};

  mutable int64_t allocated = 0;  // Bytes, by Allocate(), all in all.

  dnnl::memory Allocate(const dnnl::memory::desc& desc) const {
    allocated += static_cast<int64_t>(desc.get_size());
    return {desc, engine};
  }
  // Memory of somebody else; const is cast away, so only pass it on as a primitive's input.
  dnnl::memory Wrap(const dnnl::memory::desc& desc, const void* data) const {
    return {desc, engine, const_cast<void*>(data)};
  }
};

absl::Status StatusFromOneDnnCode(absl::string_view what, dnnl_status_t code);

// `call` answers an absl::Status.
template <typename Call>
absl::Status StatusFromOneDnn(absl::string_view what, Call call) {
  try {
    return call();
  } catch (const dnnl::error& error) {
    return Annotate(StatusFromOneDnnCode(what, error.status), error.message);
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_ONEDNN_H_
