#include "evenkeel/examples/trainer_facade.h"

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace ek = evenkeel;

static absl::Status Train(ek::Communicator& comm, Tensor weights, double rate,
                          const std::function<bool()>& backward) {
  ek::ParameterSet params;
  params.Add("weights", absl::MakeSpan(weights.value, weights.count),
             absl::MakeSpan(weights.gradient, weights.count));
  EK_ASSIGN_OR_RETURN(auto ddp, ek::DataParallel::Create(&comm, &params, {}));
  EK_ASSIGN_OR_RETURN(auto optimizer, ek::Optimizer::Create(*ddp, ek::Sgd{.learning_rate = rate}));
  return ek::RunJoined({ddp.get(), optimizer.get()}, {}, [&](ek::JoinScope&) -> absl::Status {
    while (backward()) {
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      params.SetGradState(0, ek::GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp->GradientReady(0));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      EK_RETURN_IF_ERROR(optimizer->Step());
    }
    return absl::OkStatus();
  });
}

static absl::Status Run(Tensor weights, double rate, const std::function<bool()>& backward) {
  EK_ASSIGN_OR_RETURN(const ek::Environment environment, ek::ReadEnvironment());
  EK_ASSIGN_OR_RETURN(auto comm, ek::CreateCommunicator(environment));
  const absl::Status status = Train(*comm, weights, rate, backward);
  if (status.ok()) return comm->Finalize();
  comm->Abort(status);
  return status;
}

std::string TrainOnAllRanks(Tensor weights, double rate, const std::function<bool()>& backward) {
  const absl::Status status = Run(weights, rate, backward);
  return status.ok() ? "" : status.ToString();
}
