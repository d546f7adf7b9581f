// One way to train out of many: a choice on each axis of what can be combined, and all of them.
//
//   for (const Combination& combination :
//        AllCombinations(/*world=*/3, OptimizerKind::kSharded, InputsKind::kUneven)) {
//     combination.Name();      // "world3_sharded_uneven_adamw_views_accumulating"
//   }
//
// A new axis is a member here, a line of kAxes, and what the two trainings (reference.h,
// rank_training.h) do with it.
//
// Threads: immutable values and pure functions.

#ifndef EVENKEEL_TESTS_PARITY_COMBINATION_H_
#define EVENKEEL_TESTS_PARITY_COMBINATION_H_

#include <string>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

enum class OptimizerKind {
  kUnsharded,
  kSharded,           // Owners of whole tensors.
  kSliced,            // Equal slices of the buckets.
  kSlicedInBackward,  // The same, updated as soon as a bucket is reduced.
};
inline constexpr OptimizerKind kOptimizerKinds[] = {OptimizerKind::kUnsharded,
                                                    OptimizerKind::kSharded, OptimizerKind::kSliced,
                                                    OptimizerKind::kSlicedInBackward};

enum class InputsKind {
  kEven,             // As many steps on each rank, and no RunJoined().
  kJoined,           // The same in RunJoined().
  kUneven,           // Low ranks become exhausted first.
  kUnevenEffective,  // The same, divided by the ranks that are active.
};
inline constexpr InputsKind kInputsKinds[] = {InputsKind::kEven, InputsKind::kJoined,
                                              InputsKind::kUneven, InputsKind::kUnevenEffective};

struct Combination {
  int world = 1;
  OptimizerKind optimizer = OptimizerKind::kUnsharded;
  InputsKind inputs = InputsKind::kEven;
  // The axes of kAxes.
  bool adamw = false;    // Else SGD with momentum; both decay.
  bool buffers = false;  // Running means that gradients depend on.
  bool accumulates =
      false;             // Two backward passes per step, the first of which does not synchronise.
  bool changes = false;  // The first parameter is frozen in the first step, another one in the
                         // fourth and fifth.
  bool views = false;    // Gradients are views of buckets.
  bool float32 = false;  // Else float64.
  DType wire =
      DType::kFloat64;   // The type in which gradients travel, if it is narrower than theirs.
  double clip_norm = 0;  // The p of the norm by which gradients are clipped; 0: they are not.
  bool mixed = false;    // Forward and backward in float16, through MixedPrecision; needs float32.
  bool scaled = false;   // The loss, by a LossScaler; one step has a gradient that is not finite.
  bool zeroes =
      false;  // Gradients are zeroed in memory and keep their state; else they are cleared.

  std::vector<std::string> names;  // All choices but an axis' first.
  std::string Name() const;

  // An update in backward knows neither the norm of all gradients nor whether all are finite.
  bool IsPossible() const;

  // Derived values --------------------------------------------------------------------------------
  int steps() const { return 6; }  // The group's.
  int StepsOf(int rank) const;
  int passes() const { return accumulates ? 2 : 1; }
  bool is_compressed() const { return wire != DType::kFloat64; }
  bool joins() const { return inputs != InputsKind::kEven; }
  bool Trains(int param, int step) const;
  bool Overflows(int step) const {
    return scaled && step == 2;
  }  // The step is left out on all ranks.
  // Nothing but the order of additions differs from one process.
  bool is_exact() const { return !float32 && !is_compressed(); }
  static constexpr double kMaxNorm =
      0.5;  // Where gradients are clipped: less than the norm of most steps.
  UpdateRule RuleAt(int step) const;  // With that step's learning rate.
  // Bounds the largest difference of a weight over the largest change of a weight since the start.
  double Bound() const;
};

std::vector<Combination> AllCombinations(int world, OptimizerKind optimizer, InputsKind inputs);
// About so many of them, spread over all axes; the same ones every time.
std::vector<Combination> SomeCombinations(int world, OptimizerKind optimizer, InputsKind inputs,
                                          int count);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_PARITY_COMBINATION_H_
