#include "evenkeel/tests/parity/combination.h"

#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/zero_optim/gradient_check.h"

namespace evenkeel {
namespace {

struct Choice {
  const char* name;  // An axis' first choice has none.
  std::function<void(Combination&)> take;
};

const std::vector<std::vector<Choice>>& Axes() {
  static const auto* const kAxes = new std::vector<std::vector<Choice>>{
      {{"", nullptr}, {"adamw", [](Combination& c) { c.adamw = true; }}},
      {{"", nullptr}, {"buffers", [](Combination& c) { c.buffers = true; }}},
      {{"", nullptr}, {"accumulating", [](Combination& c) { c.accumulates = true; }}},
      {{"", nullptr}, {"freezing", [](Combination& c) { c.changes = true; }}},
      {{"", nullptr}, {"views", [](Combination& c) { c.views = true; }}},
      {{"", nullptr}, {"float32", [](Combination& c) { c.float32 = true; }}},
      {{"", nullptr},
       {"as_float16", [](Combination& c) { c.wire = DType::kFloat16; }},
       {"as_bfloat16", [](Combination& c) { c.wire = DType::kBFloat16; }}},
      {{"", nullptr},
       {"clipped", [](Combination& c) { c.clip_norm = 2; }},
       {"clipped_by_largest", [](Combination& c) { c.clip_norm = kInfinityNorm; }}},
      {{"", nullptr}, {"mixed", [](Combination& c) { c.mixed = true; }}},
      {{"", nullptr}, {"scaled", [](Combination& c) { c.scaled = true; }}},
      {{"", nullptr}, {"zeroing", [](Combination& c) { c.zeroes = true; }}},
  };
  return *kAxes;
}

const char* NameOf(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kUnsharded:
      return "unsharded";
    case OptimizerKind::kSharded:
      return "sharded";
    case OptimizerKind::kSliced:
      return "sliced";
    case OptimizerKind::kSlicedInBackward:
      return "sliced_in_backward";
  }
  return "";
}

const char* NameOf(InputsKind kind) {
  switch (kind) {
    case InputsKind::kEven:
      return "even";
    case InputsKind::kJoined:
      return "joined";
    case InputsKind::kUneven:
      return "uneven";
    case InputsKind::kUnevenEffective:
      return "uneven_effective";
  }
  return "";
}

}  // namespace

std::string Combination::Name() const {
  return absl::StrCat("world", world, "_", NameOf(optimizer), "_", NameOf(inputs),
                      names.empty() ? "" : "_", absl::StrJoin(names, "_"));
}

int Combination::StepsOf(int rank) const {
  const bool is_uneven = inputs == InputsKind::kUneven || inputs == InputsKind::kUnevenEffective;
  return is_uneven ? steps() - 2 * ((world - 1 - rank) % 3) : steps();
}

bool Combination::IsPossible() const {
  if (mixed && !float32) return false;
  return optimizer != OptimizerKind::kSlicedInBackward || (clip_norm == 0 && !scaled);
}

bool Combination::Trains(int param, int step) const {
  if (!changes) return true;
  if (param == 0) return step >= 1;
  return param != 3 || (step != 3 && step != 4);
}

UpdateRule Combination::RuleAt(int step) const {
  const double rate = 0.1 / (1 + 0.5 * step);
  // Adam makes of a gradient that is all rounding as large a step as of any, unless it is small
  // beside epsilon.
  if (adamw)
    return AdamW{.learning_rate = rate, .epsilon = is_exact() ? 1e-8 : 0.25, .weight_decay = 0.1};
  return Sgd{.learning_rate = rate, .momentum = 0.9, .weight_decay = 0.01};
}

// In float64 what is promised is 1e-5; nothing but the order of additions differs, so less will do.
double Combination::Bound() const {
  // A gradient is rounded to 8 or to 11 bits on each rank, its sum once more, and momentum adds up
  // steps of one sign.
  if (wire == DType::kBFloat16) return 3e-2;
  if (wire == DType::kFloat16 || mixed) return 4e-3;
  return float32 ? 2e-4 : 1e-9;
}

std::vector<Combination> AllCombinations(int world, OptimizerKind optimizer, InputsKind inputs) {
  std::vector<Combination> all = {{.world = world, .optimizer = optimizer, .inputs = inputs}};
  for (const std::vector<Choice>& axis : Axes()) {
    std::vector<Combination> more;
    for (const Combination& combination : all) {
      for (const Choice& choice : axis) {
        more.push_back(combination);
        if (choice.take == nullptr) continue;
        choice.take(more.back());
        more.back().names.push_back(choice.name);
      }
    }
    all = std::move(more);
  }
  std::erase_if(all, [](const Combination& combination) { return !combination.IsPossible(); });
  return all;
}

std::vector<Combination> SomeCombinations(int world, OptimizerKind optimizer, InputsKind inputs,
                                          int count) {
  std::vector<Combination> all = AllCombinations(world, optimizer, inputs), some;
  // Steps of the golden section come to all parts of every axis; each group of ranks begins at
  // another place.
  const double section = 0.6180339887498949;
  double at = section * (world + 7 * static_cast<int>(optimizer) + 31 * static_cast<int>(inputs));
  std::set<size_t> taken;
  for (int i = 0; i < count; ++i, at += section) {
    const size_t index =
        static_cast<size_t>((at - std::floor(at)) * static_cast<double>(all.size()));
    if (taken.insert(index).second) some.push_back(all[index]);
  }
  return some;
}

}  // namespace evenkeel
