// Installs evenkeel's programs, and what programs that are built without Bazel need: headers,
// archives, and the files that CMake and pkg-config read.
//
//   bazel run //tools:install -- --prefix=/opt/evenkeel
//
//   find_package(evenkeel CONFIG REQUIRED)  # -DCMAKE_PREFIX_PATH=/opt/evenkeel
//   # PKG_CONFIG_PATH=/opt/evenkeel/lib/pkgconfig
//   g++ -std=c++20 train.cc $(pkg-config --cflags --libs evenkeel)

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/version.h"
#include "evenkeel/tools/installation/libraries_file.h"
#include "evenkeel/tools/installation/needed_headers.h"
#include "evenkeel/tools/installation/package_files.h"
#include "evenkeel/tools/installation/prefix.h"
#include "evenkeel/tools/program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr char kUsage[] =
    R"(install: installs evenkeel's programs, and what CMake and pkg-config need to build others.

  install --prefix=FOLDER

Into FOLDER go bin/evenkeel-*, include/evenkeel/, lib/libevenkeel_*.a, lib/cmake/evenkeel/ and
lib/pkgconfig/evenkeel.pc; it may be moved as a whole afterwards. Files of an earlier
installation are replaced, and removed if they are obsolete. With DESTDIR in the
environment everything goes below $DESTDIR/FOLDER.

Programs then need the system's libraries as this build does. docs/install.md has the rest.
)";

constexpr char kLibrariesFile[] = "tools/installation/libraries.json";

struct Arguments {
  bool is_help = false;
  std::string prefix;
};

absl::StatusOr<Arguments> Parse(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    absl::string_view word = words[i];
    if (word == "--help" || word == "-h") {
      arguments.is_help = true;
    } else if (word == "--prefix" && i + 1 < words.size()) {
      arguments.prefix = words[++i];
    } else if (absl::ConsumePrefix(&word, "--prefix=")) {
      arguments.prefix = std::string(word);
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown argument ", words[i], "; see --help"));
    }
  }
  if (arguments.prefix.empty() && !arguments.is_help) {
    return absl::InvalidArgumentError(
        "--prefix=FOLDER is missing; it names the folder to install to; see --help");
  }
  return arguments;
}

// A path from the user, absolute and without "..": a relative one means the user's folder, not that
// of the program.
fs::path UserPath(const std::string& path) {
  const std::string folder = EnvironmentVariable("BUILD_WORKING_DIRECTORY");
  const fs::path absolute =
      fs::weakly_canonical((folder.empty() ? fs::current_path() : fs::path(folder)) / path);
  return absolute.has_filename() ? absolute : absolute.parent_path();
}

bool IsInside(const fs::path& path, const fs::path& folder) {
  return absl::StartsWith(path.string() + "/", folder.string() + "/");
}

// The folder to write to.
absl::StatusOr<fs::path> Destination(const std::string& prefix) {
  const std::string destdir = EnvironmentVariable("DESTDIR");
  if (!destdir.empty() && fs::path(prefix).is_relative()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "with DESTDIR=", destdir, " the prefix must be absolute, and ", prefix, " is not"));
  }
  const fs::path folder =
      destdir.empty() ? UserPath(prefix) : UserPath(absl::StrCat(destdir, "/", prefix));
  const std::string workspace = EnvironmentVariable("BUILD_WORKSPACE_DIRECTORY");
  if (!workspace.empty() && IsInside(folder, fs::weakly_canonical(workspace))) {
    return absl::InvalidArgumentError(absl::StrCat(folder.string(), " is inside the source tree ",
                                                   workspace, "; pass a folder outside of it"));
  }
  if (folder == "/" || folder == "/usr") {
    return absl::InvalidArgumentError(absl::StrCat(folder.string(),
                                                   " belongs to the system's package manager; use "
                                                   "a folder such as /usr/local or /opt/evenkeel"));
  }
  return folder;
}

absl::StatusOr<std::string> Read(const std::string& file) {
  absl::StatusOr<std::string> content = ReadInput(file);
  if (content.ok()) return content;
  return absl::NotFoundError(
      absl::StrCat(file, " cannot be read; start the program with: bazel run //tools:install"));
}

// Ranks of one job must be of one build, and Abseil's types cross the border: both versions are
// those of this program.
Package PackageOf(const LibrariesFile& libraries) {
  Package package = {
      .version = std::string(kBuild),
      .abseil_version = absl::StrCat(ABSL_LTS_RELEASE_VERSION),
      .abseil = libraries.abseil,
      .link_flags = libraries.link_flags,
      .has_nccl = std::count(libraries.public_headers.begin(), libraries.public_headers.end(),
                             "evenkeel/comm/nccl/nccl.h") != 0};
  for (const LibrariesFile::Archive& archive : libraries.archives)
    package.parts.push_back(archive.part);
  return package;
}

// Compiled in the project that uses it, by its libtorch: {file, name below kLibtorchPath}.
constexpr std::pair<const char*, const char*> kLibtorchFiles[] = {
    {"libtorch/libtorch.h", "include/evenkeel/libtorch.h"},
    {"libtorch/internal.h", "include/evenkeel/libtorch/internal.h"},
    {"libtorch/balanced_sampler.cc", "balanced_sampler.cc"},
    {"libtorch/data_parallel.cc", "data_parallel.cc"},
    {"libtorch/grad_scaler.cc", "grad_scaler.cc"},
    {"libtorch/group.cc", "group.cc"},
    {"libtorch/optimizer.cc", "optimizer.cc"},
    {"libtorch/safetensors.cc", "safetensors.cc"},
    {"libtorch/sync_batch_norm.cc", "sync_batch_norm.cc"},
};

absl::StatusOr<std::vector<FileToInstall>> FilesToInstall() {
  EK_ASSIGN_OR_RETURN(const std::string text, Read(kLibrariesFile));
  EK_ASSIGN_OR_RETURN(const LibrariesFile libraries, ReadLibrariesFile(text));

  std::vector<FileToInstall> files;
  for (const LibrariesFile::Archive& archive : libraries.archives) {
    EK_ASSIGN_OR_RETURN(std::string content, Read(archive.file));
    files.push_back({ArchivePath(archive.part), std::move(content)});
  }
  EK_ASSIGN_OR_RETURN(Headers headers,
                      NeededHeaders(libraries.public_headers, [&](const std::string& header) {
                        const auto found = libraries.headers.find(header);
                        return Read(found == libraries.headers.end() ? header : found->second);
                      }));
  for (auto& [include, content] : headers)
    files.push_back({absl::StrCat("include/", include), std::move(content)});

  // Their names do not collide with others of a system, such as top: bin/evenkeel-top.
  for (const fs::path file : libraries.programs) {
    EK_ASSIGN_OR_RETURN(std::string content, Read(file));
    files.push_back({absl::StrCat(kProgramPath, file.filename().string()), std::move(content)});
  }
  for (const auto& [file, name] : kLibtorchFiles) {
    EK_ASSIGN_OR_RETURN(std::string content, Read(file));
    files.push_back({absl::StrCat(kLibtorchPath, name), std::move(content)});
  }

  const Package package = PackageOf(libraries);
  files.push_back({kCMakeConfigPath, CMakeConfig(package)});
  files.push_back({kCMakeVersionPath, CMakeVersion(package)});
  files.push_back({kPkgConfigPath, PkgConfig(package)});
  for (const fs::path file : {"LICENSE", "examples/train.sbatch"}) {
    EK_ASSIGN_OR_RETURN(std::string content, Read(file));
    files.push_back(
        {absl::StrCat("share/evenkeel/", file.filename().string()), std::move(content)});
  }
  return files;
}

absl::StatusOr<int> Run(const std::vector<std::string>& words) {
  EK_ASSIGN_OR_RETURN(const Arguments arguments, Parse(words));
  if (arguments.is_help) {
    EK_RETURN_IF_ERROR(Print(kUsage));
    return EXIT_SUCCESS;
  }
  EK_ASSIGN_OR_RETURN(const fs::path folder, Destination(arguments.prefix));
  EK_ASSIGN_OR_RETURN(const std::vector<FileToInstall> files, FilesToInstall());
  EK_ASSIGN_OR_RETURN(const InstallSummary done, InstallFiles(folder.string(), files));
  std::printf("evenkeel %s is in %s: %d files written, %d unchanged, %d removed\n",
              std::string(kBuild).c_str(), folder.c_str(), done.written, done.unchanged,
              done.removed);
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Run({argv + 1, argv + argc}); });
}
