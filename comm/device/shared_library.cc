#include "evenkeel/comm/device/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace evenkeel::internal {

static_assert(RTLD_DEFAULT == nullptr);

std::vector<std::string> FilesOfCuda(absl::string_view soname) {
  return {std::string(soname), absl::StrCat("/usr/local/cuda/lib64/", soname)};
}

void SharedLibrary::Closer::operator()(void* handle) const { dlclose(handle); }

absl::StatusOr<SharedLibrary> SharedLibrary::Load(absl::string_view what,
                                                  const std::vector<std::string>& files,
                                                  absl::string_view advice) {
  std::vector<std::string> errors;
  std::set<std::string> reasons;
  for (const std::string& file : files) {
    if (void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL); handle != nullptr)
      return SharedLibrary(handle);
    const char* const error = dlerror();
    const std::string text = error == nullptr ? "unknown error" : error;
    const absl::string_view reason = absl::StripPrefix(text, file);
    if (reasons.insert(std::string(reason)).second) errors.push_back(text);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "cannot load ", what, ": ", absl::StrJoin(errors, "; "), advice.empty() ? "" : "; ", advice));
}

absl::StatusOr<SharedLibrary> SharedLibrary::Loaded(const std::string& soname,
                                                    const char* function) {
  if (void* const handle = dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD); handle != nullptr)
    return SharedLibrary(handle);
  // The program, its libraries, and those that were opened with RTLD_GLOBAL.
  if (dlsym(RTLD_DEFAULT, function) != nullptr) return SharedLibrary(RTLD_DEFAULT);
  return absl::NotFoundError(absl::StrCat(soname, " is not loaded"));
}

void* SharedLibrary::Symbol(const char* name) const { return dlsym(handle_.get(), name); }

absl::Status SharedLibrary::Keep(absl::string_view subject) {
  if (!missing_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(subject, " lacks ", absl::StrJoin(missing_, ", ")));
  }
  (void)handle_.release();
  return absl::OkStatus();
}

std::string SharedLibrary::Name() const {
  link_map* map = nullptr;
  if (handle_ != nullptr) (void)dlinfo(handle_.get(), RTLD_DI_LINKMAP, &map);
  return map != nullptr ? map->l_name : "this program";
}

}  // namespace evenkeel::internal
