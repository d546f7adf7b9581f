// Returns the result of `make`, or ResourceExhausted with `sentence` if memory runs out.
//
//   return IfMemoryAllows("mlp: not enough memory",
//                         [&]() -> absl::StatusOr<std::unique_ptr<Model>> { ... });
//
// Threads: as `make`.

#ifndef EVENKEEL_TRAINER_LAYERS_IF_MEMORY_ALLOWS_H_
#define EVENKEEL_TRAINER_LAYERS_IF_MEMORY_ALLOWS_H_

#include <new>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

template <typename Make>
std::invoke_result_t<Make> IfMemoryAllows(absl::string_view sentence, Make make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(sentence);
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_IF_MEMORY_ALLOWS_H_
