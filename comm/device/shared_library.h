// A shared library that is loaded while the program runs: no program is linked with CUDA's driver,
// NCCL, cuBLAS or cuDNN, so each starts on machines without them.
//
//   #define EK_Z_FUNCTIONS(X) X(compress) X(uncompress)
//   struct ZFunctions {
//     EK_Z_FUNCTIONS(EK_DECLARE_FUNCTION)
//   };
//
//   EK_ASSIGN_OR_RETURN(SharedLibrary library, SharedLibrary::Load("zlib", {"libz.so.1"}));
//   ZFunctions z;
//   EK_FIND_FUNCTIONS(EK_Z_FUNCTIONS, library, z);
//   EK_RETURN_IF_ERROR(library.Keep(library.Name()));
//   z.compress(...)
//
// Threads: thread-compatible; the functions that are found are as thread-safe as the library.
// Errors:  FailedPrecondition if the library cannot be loaded, or lacks functions.

#ifndef EVENKEEL_COMM_DEVICE_SHARED_LIBRARY_H_
#define EVENKEEL_COMM_DEVICE_SHARED_LIBRARY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// Returns the files in which a library of CUDA is searched, for Load(): the name itself, which the
// system's loader finds, and the one in the folder where NVIDIA's packages put CUDA. The folder of
// the build's toolkit is none of them: on another machine, anyone may own it.
std::vector<std::string> FilesOfCuda(absl::string_view soname);

class SharedLibrary {
 public:
  // Loads the first of `files` that can be loaded. A name without a folder is searched as the
  // system finds libraries (LD_LIBRARY_PATH, for one), after those that the process has loaded.
  // `what` and `advice` are for the error: "cannot load zlib: ...; install zlib". It has the
  // reason for each file, but no reason twice.
  static absl::StatusOr<SharedLibrary> Load(absl::string_view what,
                                            const std::vector<std::string>& files,
                                            absl::string_view advice = "");
  // Returns the library that the process has loaded under this name, else the program itself if it
  // contains `function`, else NotFound.
  static absl::StatusOr<SharedLibrary> Loaded(const std::string& soname, const char* function);

  // Sets `function` to null and returns false if the library lacks it.
  template <typename Function>
  bool FindOptional(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(Symbol(name));
    return function != nullptr;
  }
  template <typename Function>
  void Find(const char* name, Function*& function) {
    if (!FindOptional(name, function)) missing_.push_back(name);
  }
  // The library stays loaded, unless Find() has not found a function: "<subject> lacks compress".
  absl::Status Keep(absl::string_view subject);
  // Returns the path of the library's file, or "this program".
  std::string Name() const;

 private:
  struct Closer {
    void operator()(void* handle) const;
  };

  explicit SharedLibrary(void* handle) : handle_(handle) {}
  void* Symbol(const char* name) const;

  std::unique_ptr<void, Closer> handle_;  // Null is RTLD_DEFAULT: this program.
  std::vector<std::string> missing_;
};

// A header may define the name of a function as that of a newer version, here and in each call.
#define EK_TEXT(name) #name
#define EK_EXPANDED_TEXT(name) EK_TEXT(name)
#define EK_DECLARE_FUNCTION(name) decltype(&::name) name = nullptr;
#define EK_FIND_FUNCTION(name) ek_library.Find(EK_EXPANDED_TEXT(name), ek_table.name);
#define EK_FIND_FUNCTIONS(FUNCTIONS, library, table) \
  [](SharedLibrary& ek_library, auto& ek_table) { FUNCTIONS(EK_FIND_FUNCTION) }(library, table)

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_DEVICE_SHARED_LIBRARY_H_
