// NCCL itself, as internal/nccl_api.h has it.
//
// Reads what NCCL reads of the environment to tell hosts apart: NCCL_HOSTID, and NCCL_MULTI_RANK_GPU_ENABLE.

#ifndef EVENKEEL_COMM_INTERNAL_NCCL_LIBRARY_H_
#define EVENKEEL_COMM_INTERNAL_NCCL_LIBRARY_H_

#include "evenkeel/comm/internal/nccl_api.h"

namespace evenkeel::internal {

NcclApi& NcclLibrary();  // Never destroyed.

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_NCCL_LIBRARY_H_
