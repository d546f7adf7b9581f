#include "evenkeel/comm/nccl/functions.h"

#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
constexpr int kOldestVersion = 21800;

struct Closer {
  void operator()(void* library) const { dlclose(library); }
};
// Null is RTLD_DEFAULT: the program, its libraries, and those that were opened with RTLD_GLOBAL.
using SharedLibrary = std::unique_ptr<void, Closer>;

absl::StatusOr<SharedLibrary> FindLibrary(const std::string& path) {
  if (SharedLibrary loaded(dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)); loaded != nullptr)
    return loaded;
  static_assert(RTLD_DEFAULT == nullptr);
  if (dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) return SharedLibrary(RTLD_DEFAULT);

  std::vector<std::string> files = {path};
  if (path.empty()) files = {kSoname, EVENKEEL_NCCL_OF_BUILD};
  std::string reason;
  for (const std::string& file : files) {
    SharedLibrary library(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL));
    if (library != nullptr) return library;
    const char* const error = dlerror();
    if (reason.empty() && error != nullptr) reason = error;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("cannot load NCCL: ", reason,
                   "; install NCCL, or set EVENKEEL_NCCL to the path of its ", kSoname));
}

std::string NameOf(const SharedLibrary& library) {
  link_map* map = nullptr;
  if (library != nullptr) (void)dlinfo(library.get(), RTLD_DI_LINKMAP, &map);
  return map != nullptr ? map->l_name : "this program";
}

}  // namespace

absl::StatusOr<NcclFunctions> LoadNccl(const std::string& path) {
  EK_ASSIGN_OR_RETURN(SharedLibrary library, FindLibrary(path));
  const auto find = [&](const char* name, auto& function) {
    void* const symbol = dlsym(library.get(), name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    return symbol != nullptr;
  };
  NcclFunctions nccl;
  if (!find("ncclGetVersion", nccl.ncclGetVersion)) {
    return absl::FailedPreconditionError(
        absl::StrCat(NameOf(library), " has no ncclGetVersion: set EVENKEEL_NCCL to the path of ",
                     "NCCL's ", kSoname));
  }
  int version = 0;
  (void)nccl.ncclGetVersion(&version);
  const std::string found = absl::StrCat(NameOf(library), " has NCCL ", NcclVersionText(version));
  if (version < kOldestVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        found, ", which is too old: ", NcclVersionText(kOldestVersion), " or newer is needed"));
  }
  std::vector<const char*> missing;
#define EK_FIND(name) \
  if (!find(#name, nccl.name)) missing.push_back(#name);
  EK_NCCL_FUNCTIONS(EK_FIND)
#undef EK_FIND
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(found, ", but lacks ", absl::StrJoin(missing, ", ")));
  }
  find("ncclMemAlloc", nccl.ncclMemAlloc);
  find("ncclMemFree", nccl.ncclMemFree);
  find("ncclCommRegister", nccl.ncclCommRegister);
  find("ncclCommDeregister", nccl.ncclCommDeregister);
  find("ncclAlltoAll", nccl.ncclAlltoAll);
  (void)library.release();  // Stays loaded.
  return nccl;
}

}  // namespace evenkeel::internal
