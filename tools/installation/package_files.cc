#include "evenkeel/tools/installation/package_files.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace evenkeel {
namespace {

// The Debian packages with what every build of evenkeel needs of the system.
constexpr char kDebianPackages[] = "libabsl-dev libssl-dev zlib1g-dev";

constexpr char kConfig[] = R"cmake(# evenkeel @BUILD@, for CMake:
#
#   find_package(evenkeel CONFIG REQUIRED)
#   target_link_libraries(my_program PRIVATE evenkeel::zero_optim evenkeel::bucket)
#
# A part brings those after it: @PARTS@. evenkeel_HAS_NCCL says whether the backend nccl is in this build.

include(CMakeFindDependencyMacro)
find_dependency(Threads)
# Programs and evenkeel pass each other Abseil's types, so it must be the same Abseil. Only libtorch's header has none
# of them: a project that made targets of its own Abseil before keeps them, and evenkeel is linked with the archives of
# its Abseil. Both fit into one program, because each version of Abseil has a namespace of its own.
if("${evenkeel_FIND_COMPONENTS}" STREQUAL "libtorch" AND TARGET absl::strings AND NOT "${absl_VERSION}" VERSION_EQUAL @ABSEIL@)
  set(_evenkeel_abseil "")
  foreach(_evenkeel_library IN ITEMS @ABSEIL_LIBRARIES@)
    unset(_evenkeel_file)
    find_library(_evenkeel_file NAMES libabsl_${_evenkeel_library}.a NO_CACHE NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH REQUIRED)
    list(APPEND _evenkeel_abseil "${_evenkeel_file}")
  endforeach()
else()
  find_dependency(absl @ABSEIL@ EXACT CONFIG)
  set(_evenkeel_abseil @ABSEIL_LIBRARIES@)
  list(TRANSFORM _evenkeel_abseil PREPEND absl::)
endif()

set(evenkeel_HAS_NCCL @HAS_NCCL@)
foreach(_evenkeel_library IN ITEMS @SHARED@)
  unset(_evenkeel_file)
  find_library(_evenkeel_file NAMES ${_evenkeel_library} NO_CACHE)
  if(NOT _evenkeel_file)
    set(evenkeel_FOUND FALSE)
    set(evenkeel_NOT_FOUND_MESSAGE "evenkeel needs ${_evenkeel_library}; on Debian: apt-get install @DEBIAN@")
    return()
  endif()
endforeach()

get_filename_component(_evenkeel_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
# Adds the target evenkeel::<part>; what it needs follows.
macro(_evenkeel_add part)
  set(evenkeel_${part}_FOUND TRUE)
  if(NOT TARGET evenkeel::${part})
    add_library(evenkeel::${part} STATIC IMPORTED)
    set_target_properties(evenkeel::${part} PROPERTIES
      IMPORTED_LOCATION "${_evenkeel_prefix}/lib/libevenkeel_${part}.a"
      IMPORTED_LINK_INTERFACE_LANGUAGES CXX
      INTERFACE_COMPILE_FEATURES cxx_std_20
      INTERFACE_INCLUDE_DIRECTORIES "${_evenkeel_prefix}/include"
      INTERFACE_LINK_LIBRARIES "${ARGN}")
  endif()
endmacro()

@TARGETS@
# The part libtorch is compiled in the project that asks for it. Its torch: that of
# find_package(Torch), else evenkeel_TORCH, a folder with include/ and lib/, else python3's.
if("libtorch" IN_LIST evenkeel_FIND_COMPONENTS AND NOT TARGET evenkeel::libtorch)
  if(NOT TARGET torch AND NOT evenkeel_TORCH)
    execute_process(
      COMMAND python3 -c "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
      OUTPUT_VARIABLE _evenkeel_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(evenkeel_TORCH "${_evenkeel_torch}" CACHE PATH "The torch of evenkeel::libtorch: a folder with include/ and lib/")
    message(STATUS "evenkeel: torch in ${evenkeel_TORCH}")
  endif()
  if(TARGET torch OR EXISTS "${evenkeel_TORCH}/include/torch/csrc/api/include/torch/torch.h")
    set(_evenkeel_libtorch "${_evenkeel_prefix}/@LIBTORCH@")
    add_library(evenkeel_libtorch STATIC
      "${_evenkeel_libtorch}balanced_sampler.cc"
      "${_evenkeel_libtorch}data_parallel.cc" "${_evenkeel_libtorch}grad_scaler.cc"
      "${_evenkeel_libtorch}group.cc" "${_evenkeel_libtorch}optimizer.cc"
      "${_evenkeel_libtorch}safetensors.cc" "${_evenkeel_libtorch}sync_batch_norm.cc")
    # Parsing torch's headers is most of the time of each source.
    set_target_properties(evenkeel_libtorch PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
    target_compile_features(evenkeel_libtorch PUBLIC cxx_std_20)
    target_include_directories(evenkeel_libtorch PUBLIC "${_evenkeel_libtorch}include")
    target_link_libraries(evenkeel_libtorch PUBLIC evenkeel::@FIRST_PART@)
    if(TARGET torch)
      target_link_libraries(evenkeel_libtorch PUBLIC torch)
    else()
      target_include_directories(evenkeel_libtorch SYSTEM PUBLIC
        "${evenkeel_TORCH}/include" "${evenkeel_TORCH}/include/torch/csrc/api/include")
      target_link_libraries(evenkeel_libtorch PUBLIC
        "-Wl,--push-state,--no-as-needed"
        "${evenkeel_TORCH}/lib/libtorch.so" "${evenkeel_TORCH}/lib/libtorch_cpu.so" "${evenkeel_TORCH}/lib/libc10.so"
        "-Wl,--pop-state,--allow-shlib-undefined")
    endif()
    add_library(evenkeel::libtorch ALIAS evenkeel_libtorch)
    set(evenkeel_libtorch_FOUND TRUE)
  endif()
endif()

foreach(_evenkeel_part IN LISTS evenkeel_FIND_COMPONENTS)
  if(evenkeel_FIND_REQUIRED_${_evenkeel_part} AND NOT evenkeel_${_evenkeel_part}_FOUND)
    set(evenkeel_FOUND FALSE)
    set(evenkeel_NOT_FOUND_MESSAGE "evenkeel has no part ${_evenkeel_part}; it has @PARTS@; libtorch needs a torch, and \"${evenkeel_TORCH}\" has no include/torch/csrc/api/include/torch/torch.h: set -Devenkeel_TORCH to the folder that has include/ and lib/, such as .../site-packages/torch")
  endif()
endforeach()
)cmake";

constexpr char kVersion[] = R"(# Before 1.0 each minor version may change what callers see.
set(PACKAGE_VERSION "@VERSION@")
if(PACKAGE_FIND_VERSION_RANGE)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)  # A range would hold versions that differ.
elseif(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
elseif("${PACKAGE_FIND_VERSION_MAJOR}.${PACKAGE_FIND_VERSION_MINOR}" STREQUAL "@MINOR_VERSION@")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
if(CMAKE_SIZEOF_VOID_P AND NOT CMAKE_SIZEOF_VOID_P EQUAL @POINTER_SIZE@)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)
endif()
)";

constexpr char kPkgConfig[] = R"(prefix=${pcfiledir}/../..
includedir=${prefix}/include
libdir=${prefix}/lib

Name: evenkeel
Description: Data-parallel training for ranks that are not in step (@BUILD@; needs -std=c++20)
Version: @VERSION@
Requires: @REQUIRES@
Cflags: -I${includedir} -pthread
Libs: -L${libdir} @LIBS@ @FLAGS@ -pthread
)";

// "0.3.0" of "0.3.0+abc".
std::string Number(const std::string& version) {
  return version.substr(0, version.find_first_not_of("0123456789."));
}

std::string MinorVersion(const std::string& version) {
  const std::string number = Number(version);
  return number.substr(0, number.find('.', number.find('.') + 1));
}

// One word, so that no build system takes it apart or moves what is in it: a program is bound only
// to the shared libraries that it uses.
std::string AsNeeded(const std::vector<std::string>& link_flags) {
  std::string word = "-Wl,--push-state,--as-needed";
  for (absl::string_view flag : link_flags) {
    absl::ConsumePrefix(&flag, "-Wl,");
    absl::StrAppend(&word, ",", flag);
  }
  return absl::StrCat(word, ",--pop-state");
}

// The shared libraries that are named by their files.
std::string SharedFiles(const std::vector<std::string>& link_flags) {
  std::vector<absl::string_view> files;
  for (absl::string_view flag : link_flags) {
    if (absl::ConsumePrefix(&flag, "-l:")) files.push_back(flag);
  }
  return absl::StrJoin(files, " ");
}

// The parts' targets, the last one first, which brings what is not evenkeel.
std::string CMakeTargets(const Package& package) {
  std::string targets;
  std::vector<std::string> needed;
  needed.push_back("${_evenkeel_abseil}");
  needed.push_back("Threads::Threads");
  needed.push_back(AsNeeded(package.link_flags));
  for (auto part = package.parts.rbegin(); part != package.parts.rend(); ++part) {
    absl::StrAppend(&targets, "_evenkeel_add(", *part, "\n  ", absl::StrJoin(needed, "\n  "),
                    ")\n");
    if (part == package.parts.rbegin()) needed.clear();
    needed.insert(needed.begin(), "evenkeel::" + *part);
  }
  return targets;
}

std::string PkgConfigLibs(const Package& package) {
  return absl::StrJoin(package.parts, " ", [](std::string* out, const std::string& part) {
    absl::StrAppend(out, "-levenkeel_", part);
  });
}

std::string PkgConfigRequires(const Package& package) {
  return absl::StrJoin(package.abseil, ", ", [&](std::string* out, const std::string& library) {
    absl::StrAppend(out, "absl_", library, " = ", package.abseil_version);
  });
}

}  // namespace

std::string ArchivePath(const std::string& part) {
  return absl::StrCat("lib/libevenkeel_", part, ".a");
}

std::string CMakeConfig(const Package& package) {
  return absl::StrReplaceAll(kConfig, {{"@BUILD@", package.version},
                                       {"@PARTS@", absl::StrJoin(package.parts, ", ")},
                                       {"@ABSEIL@", package.abseil_version},
                                       {"@ABSEIL_LIBRARIES@", absl::StrJoin(package.abseil, " ")},
                                       {"@HAS_NCCL@", package.has_nccl ? "TRUE" : "FALSE"},
                                       {"@SHARED@", SharedFiles(package.link_flags)},
                                       {"@DEBIAN@", kDebianPackages},
                                       {"@LIBTORCH@", kLibtorchPath},
                                       {"@FIRST_PART@", package.parts.front()},
                                       {"@TARGETS@", CMakeTargets(package)}});
}

std::string CMakeVersion(const Package& package) {
  return absl::StrReplaceAll(kVersion, {{"@VERSION@", Number(package.version)},
                                        {"@MINOR_VERSION@", MinorVersion(package.version)},
                                        {"@POINTER_SIZE@", absl::StrCat(sizeof(void*))}});
}

std::string PkgConfig(const Package& package) {
  return absl::StrReplaceAll(kPkgConfig, {{"@BUILD@", package.version},
                                          {"@VERSION@", Number(package.version)},
                                          {"@REQUIRES@", PkgConfigRequires(package)},
                                          {"@LIBS@", PkgConfigLibs(package)},
                                          {"@FLAGS@", AsNeeded(package.link_flags)}});
}

}  // namespace evenkeel
