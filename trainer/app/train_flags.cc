#include "evenkeel/trainer/app/train_flags.h"

namespace evenkeel {

void AddTrainFlags(FlagTable& table, TrainFlags& flags) {
#define GROUP(title) table.Group(title);
#define FLAG(type, name, value, help) table.Add(#name, flags.name, help);
#define OPTION(type, name, shown, help) table.Add<type>(#name, flags.name, shown, help);
#include "evenkeel/trainer/app/train_flags.inc"
}

}  // namespace evenkeel
