#include "evenkeel/comm/nccl/functions.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
constexpr int kOldestVersion = 21800;

absl::StatusOr<SharedLibrary> FindLibrary(const std::string& path) {
  absl::StatusOr<SharedLibrary> loaded = SharedLibrary::Loaded(kSoname, "ncclGetVersion");
  if (loaded.ok()) return loaded;
  return SharedLibrary::Load(
      "NCCL", path.empty() ? FilesOfCuda(kSoname) : std::vector<std::string>{path},
      absl::StrCat("install NCCL, or set EVENKEEL_NCCL to the path of its ", kSoname));
}

}  // namespace

absl::StatusOr<NcclFunctions> LoadNccl(const std::string& path) {
  EK_ASSIGN_OR_RETURN(SharedLibrary library, FindLibrary(path));
  NcclFunctions nccl;
  if (!library.FindOptional("ncclGetVersion", nccl.ncclGetVersion)) {
    return absl::FailedPreconditionError(
        absl::StrCat(library.Name(), " has no ncclGetVersion: set EVENKEEL_NCCL to the path of ",
                     "NCCL's ", kSoname));
  }
  int version = 0;
  (void)nccl.ncclGetVersion(&version);
  const std::string found = absl::StrCat(library.Name(), " has NCCL ", NcclVersionText(version));
  if (version < kOldestVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        found, ", which is too old: ", NcclVersionText(kOldestVersion), " or newer is needed"));
  }
  EK_FIND_FUNCTIONS(EK_NCCL_FUNCTIONS, library, nccl);
  library.FindOptional("ncclMemAlloc", nccl.ncclMemAlloc);
  library.FindOptional("ncclMemFree", nccl.ncclMemFree);
  library.FindOptional("ncclCommRegister", nccl.ncclCommRegister);
  library.FindOptional("ncclCommDeregister", nccl.ncclCommDeregister);
  library.FindOptional("ncclAlltoAll", nccl.ncclAlltoAll);
  EK_RETURN_IF_ERROR(library.Keep(absl::StrCat(found, ", but")));
  return nccl;
}

}  // namespace evenkeel::internal
