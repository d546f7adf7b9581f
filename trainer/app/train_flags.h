// The values of the trainer's flags. train_flags.inc is the table of flags.
//
//   TrainFlags flags;
//   FlagTable table;
//   AddTrainFlags(table, flags);
//
// To add a flag, add an entry there and its use in MakeTrainOptions() (train_options.h).

#ifndef EVENKEEL_TRAINER_APP_TRAIN_FLAGS_H_
#define EVENKEEL_TRAINER_APP_TRAIN_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "evenkeel/trainer/app/flag_table.h"
#include "evenkeel/trainer/checkpoint/checkpoint_options.h"

namespace evenkeel {

inline constexpr char kDefaultHidden[] = "64";
inline constexpr int kDefaultRanks = 2;  // On the CPU.
inline constexpr int64_t kDefaultCheckpointEvery = 500;

// Members have the names and defaults of the flags. None: not given.
struct TrainFlags {
#define GROUP(title)
#define FLAG(type, name, value, help) type name = value;
#define OPTION(type, name, shown, help) std::optional<type> name;
#include "evenkeel/trainer/app/train_flags.inc"
};

// Adds all flags to `table`. `flags` must outlive the parsing.
void AddTrainFlags(FlagTable& table, TrainFlags& flags);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_TRAIN_FLAGS_H_
