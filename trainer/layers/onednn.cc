#include "evenkeel/trainer/layers/onednn.h"

#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::Status StatusFromOneDnnCode(absl::string_view what, dnnl_status_t code) {
  switch (code) {
    case dnnl_success:
      return absl::OkStatus();
    case dnnl_out_of_memory:
      return absl::ResourceExhaustedError(absl::StrCat(what, ": oneDNN is out of memory"));
    case dnnl_unimplemented:
      return absl::UnimplementedError(
          absl::StrCat(what, ": oneDNN has no kernel for this on this machine"));
    default:
      return absl::InternalError(
          absl::StrCat(what, ": oneDNN returned status ", static_cast<int>(code)));
  }
}

}  // namespace evenkeel
