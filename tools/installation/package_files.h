// The files by which CMake and pkg-config find an installed evenkeel.
//
//   Package package = {
//       .version = "0.4.0", .abseil_version = "20220623", .parts = {"join", "comm"}, ...};
//   CMakeConfig(package), CMakeVersion(package), PkgConfig(package)
//
// Files name others relative to themselves, so an installation may be moved as a whole. Abseil and
// shared libraries are the system's: programs name the same Abseil as evenkeel, and only the shared
// libraries that they use.
//
// Threads: pure functions.

#ifndef EVENKEEL_TOOLS_INSTALLATION_PACKAGE_FILES_H_
#define EVENKEEL_TOOLS_INSTALLATION_PACKAGE_FILES_H_

#include <string>
#include <vector>

namespace evenkeel {

inline constexpr char kCMakeConfigPath[] = "lib/cmake/evenkeel/evenkeelConfig.cmake";
inline constexpr char kCMakeVersionPath[] = "lib/cmake/evenkeel/evenkeelConfigVersion.cmake";
inline constexpr char kLibtorchPath[] = "share/evenkeel/libtorch/";
inline constexpr char kPkgConfigPath[] = "lib/pkgconfig/evenkeel.pc";

// Where the archive of a part is.
std::string ArchivePath(const std::string& part);

struct Package {
  std::string version;                  // "0.4.0", or "0.3.0+abc" for a user's own build.
  std::string abseil_version;           // "20220623"
  std::vector<std::string> parts;       // Each may need those after it.
  std::vector<std::string> abseil;      // Abseil's libraries: "status"
  std::vector<std::string> link_flags;  // For the compiler: "-l:libssl.so", "-L/folder", "-Wl,...".
  bool has_nccl = false;                // The backend nccl is in the build.
};

std::string CMakeConfig(const Package& package);
std::string CMakeVersion(const Package& package);
std::string PkgConfig(const Package& package);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_INSTALLATION_PACKAGE_FILES_H_
