// The rules of the trainer's flags: an entry of train_flags.inc ends with the rules of its flag.
//
//   FLAG(int64_t, accumulate, 1, "passes per step", Within{1, 1 << 20}, kDealing)
//   OPTION(int, epochs, {}, "passes over all the data", AtLeast{1},
//          ByModel(&TrainOptions::epochs, 4, 8, 6), kFree.As(&TrainOptions::epochs))
//
//   VisitRules(flags, [](const auto& flag, const auto& rule) { ... });  // each rule of each flag
//
// MakeTrainOptions() checks the values and models, and fills in the defaults of models;
// SettingsOf() (describe_options.h) makes the settings in checkpoints.
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_APP_FLAG_RULES_H_
#define EVENKEEL_TRAINER_APP_FLAG_RULES_H_

#include <type_traits>

#include "absl/strings/string_view.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/zero_optim/loss_scaler.h"

namespace evenkeel {

// The valid values of a number.
struct AtLeast {
  double lowest;
};
struct Within {
  double lowest;
  double highest;
};

// The flag is refused with other models.
struct ForModels {
  absl::string_view models;  // "mlp and cnn".
};

// The option has the flag's value or, if the flag is not given, the model's default.
template <typename Value>
struct ModelDefault {
  Value TrainOptions::*option;
  Value of_model[3];  // In the order of ModelKind.
};
template <typename Value>
constexpr ModelDefault<Value> ByModel(Value TrainOptions::*option, std::type_identity_t<Value> mlp,
                                      std::type_identity_t<Value> cnn,
                                      std::type_identity_t<Value> gpt) {
  return {option, {mlp, cnn, gpt}};
}

// The flag is a setting of the run, of one of the kinds of run_settings.h. Its value is that of the
// flag, which must then be a FLAG, or of an option: kFree.As(&TrainOptions::epochs). A resumed run
// does not compare flags without such a rule, unless SettingsOf() takes their results.
enum class SettingKind { kFixed, kDealing, kFree };
template <typename Value>
struct OptionSetting {
  SettingKind kind;
  Value TrainOptions::*option;
};
struct FlagSetting {
  SettingKind kind;

  template <typename Value>
  constexpr OptionSetting<Value> As(Value TrainOptions::*option) const {
    return {kind, option};
  }
};
inline constexpr FlagSetting kFixed{SettingKind::kFixed};
inline constexpr FlagSetting kDealing{SettingKind::kDealing};
inline constexpr FlagSetting kFree{SettingKind::kFree};

// A flag and its value on the command line.
template <typename Value>
struct GivenFlag {
  absl::string_view name;
  const Value* value;  // Null: an OPTION that is not given.
  bool is_given;       // False for a FLAG that has its default.
};

// Calls `visit` for each rule of each flag, in the order of the flags.
template <typename Visit>
void VisitRules(const TrainFlags& flags, Visit&& visit) {
  const TrainFlags defaults;
  const auto visit_all = [&visit](const auto& flag, const auto&... rules) {
    (visit(flag, rules), ...);
  };
  const auto visit_option = [&visit_all](const auto& flag, const auto&... rules) {
    static_assert((!std::is_same_v<std::decay_t<decltype(rules)>, FlagSetting> && ...),
                  "an OPTION may have no value: its setting is kFree.As(&TrainOptions::NAME)");
    visit_all(flag, rules...);
  };
#define GROUP(title)
#define FLAG(type, name, initial, help, ...)                                                \
  visit_all(GivenFlag<type>{#name, &flags.name, flags.name != defaults.name} __VA_OPT__(, ) \
                __VA_ARGS__);
#define OPTION(type, name, shown, help, ...)                               \
  visit_option(GivenFlag<type>{#name, flags.name ? &*flags.name : nullptr, \
                               flags.name.has_value()} __VA_OPT__(, ) __VA_ARGS__);
#include "evenkeel/trainer/app/train_flags.inc"
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_FLAG_RULES_H_
