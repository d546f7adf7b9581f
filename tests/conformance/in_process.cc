#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/conformance/tested_backend.h"

namespace evenkeel {

const TestedBackend& Tested() {
  const TestBackend& backend = TheTestBackend();
  static const TestedBackend tested = {
      .name = backend.name,
      .adds_in_rank_order = backend.adds_in_rank_order,
      .finds_disagreement_at_once = backend.finds_disagreement_at_once,
      .min_and_max_pass_nan_on = backend.min_and_max_pass_nan_on,
      .create = backend.create,
  };
  return tested;
}

}  // namespace evenkeel
