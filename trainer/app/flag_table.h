// The flags of a program as one table, which parses them (gflags), sets their values and prints a
// readable help: the program's own flags in groups, one line each, without the flags of gflags.
//
//   std::string data; bool shuffle = true; std::optional<double> lr;
//   FlagTable flags;
//   flags.Group("Data");
//   flags.Add("data", data, "=PATH folder with IDX files");
//   flags.Add("shuffle", shuffle, "shuffle anew in each epoch");
//   flags.Group("Optimizer");
//   flags.Add("lr", lr, 0.1, "learning rate");
//   EK_ASSIGN_OR_RETURN(const bool runs, flags.Parse("Trains a model.\n\n", argc, argv));
//
//   Data:
//     --data=PATH     folder with IDX files (default none)
//     --[no]shuffle   shuffle anew in each epoch (default on)
//
// A flag's text is complete in itself; "(default ...)" is added unless the text mentions a default.
// A prefix "=X " names the value: "=K of K ranks" shows as --flag=K.
//
// Types:     bool, int32_t, int64_t, uint64_t, double and std::string.
// Ownership: the values outlive the program's use of gflags; names and texts are literals.
// Threads:   thread-compatible. A name is added once in a process.

#ifndef EVENKEEL_TRAINER_APP_FLAG_TABLE_H_
#define EVENKEEL_TRAINER_APP_FLAG_TABLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace evenkeel {

class FlagTable {
 public:
  // Begins a group of flags: those added from now on.
  void Group(const char* title) { groups_.push_back({title}); }

  // Adds a flag whose default is the current `value`.
  template <typename Value>
  void Add(const char* name, Value& value, const char* help);
  // Adds a flag that leaves `value` without a value unless the flag is given. The help shows
  // `shown` as its default.
  template <typename Value>
  void Add(const char* name, std::optional<Value>& value, std::type_identity_t<Value> shown,
           const char* help) {
    const auto given = std::make_shared<Value>(shown);
    Add(name, *given, help);
    take_.push_back([=, &value] {
      if (IsGiven(name)) value = *given;
    });
  }

  // Changes to the folder in which `bazel run` was called, and parses the flags. Returns false if
  // it has printed `summary` and the help, because --help was given.
  // Errors: InvalidArgument for an argument that is not a flag, and for an unknown flag, with the
  //         most similar one. A malformed value ends the program, as gflags does.
  absl::StatusOr<bool> Parse(absl::string_view summary, int argc, char** argv);

  std::string Help() const;

 private:
  struct Flags {
    const char* title;
    std::vector<const char*> names;
  };

  absl::Status CheckNames(absl::Span<char* const> arguments) const;
  static bool IsGiven(const char* name);

  std::vector<Flags> groups_;
  std::vector<std::shared_ptr<void>> defaults_;  // gflags keeps each beside its value.
  std::vector<std::function<void()>> take_;      // Set the optional values after parsing.
};

// Parses a number that has digits only. Returns false for any other text.
bool ParseCount(absl::string_view text, int64_t& count);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_FLAG_TABLE_H_
