// A rank of an MPI in the benchmark. Compiled on the spot with the MPI's own compiler (mpi.h),
// together with rank_side.h and case.h and nothing else, and started by its mpirun:
//
//   mpirun -n 2 mpi_rank FOLDER

#include <mpi.h>

#include <climits>
#include <cstdio>
#include <string>

#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/rank_side.h"

namespace evenkeel::bench {
namespace {

MPI_Datatype TypeOf(Scalar scalar) {
  const MPI_Datatype types[] = {MPI_FLOAT,         MPI_DOUBLE,  MPI_DATATYPE_NULL,
                                MPI_DATATYPE_NULL, MPI_INT32_T, MPI_INT64_T};
  return types[static_cast<int>(scalar)];
}

class MpiCollectives : public Collectives {
 public:
  MpiCollectives(int rank, int world) : rank_(rank), world_(world) {}

  std::string WhyNot(const Case& what) override {
    if (TypeOf(what.scalar) == MPI_DATATYPE_NULL)
      return std::string("MPI has no ") + NameOf(what.scalar);
    if (what.count() > INT_MAX) return "MPI counts elements in an int";
    return what.registered ? "its memory is not registered here" : "";
  }

  std::string Run(const Case& what, void* in, void* out) override {
    const int code = Call(what, in, out);
    if (code == MPI_SUCCESS) return "";
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    return std::string(text, length);
  }

 private:
  int Call(const Case& what, void* in, void* out) {
    const MPI_Datatype type = TypeOf(what.scalar);
    const int count = static_cast<int>(what.count()), part = static_cast<int>(what.part());
    switch (what.op) {
      case Op::kAllReduce:
        return MPI_Allreduce(MPI_IN_PLACE, out, count, type, MPI_SUM, MPI_COMM_WORLD);
      case Op::kReduce:
        return MPI_Reduce(rank_ == kRoot ? MPI_IN_PLACE : out, rank_ == kRoot ? out : nullptr,
                          count, type, MPI_SUM, kRoot, MPI_COMM_WORLD);
      case Op::kBroadcast:
        return MPI_Bcast(out, count, type, kRoot, MPI_COMM_WORLD);
      case Op::kReduceScatter:
        return MPI_Reduce_scatter_block(in, out, part, type, MPI_SUM, MPI_COMM_WORLD);
      case Op::kAllGather:
        return MPI_Allgather(in, part, type, out, part, type, MPI_COMM_WORLD);
      case Op::kAllToAll:
        return MPI_Alltoall(in, part, type, out, part, type, MPI_COMM_WORLD);
      case Op::kSendRecv:
        return MPI_Sendrecv(in, count, type, (rank_ + 1) % world_, 0, out, count, type,
                            (rank_ + world_ - 1) % world_, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      case Op::kBarrier:
        return MPI_Barrier(MPI_COMM_WORLD);
    }
    return MPI_ERR_OP;
  }

  const int rank_, world_;
};

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mpi_rank FOLDER\n");
    return 2;
  }
  MPI_Init(&argc, &argv);
  int rank = 0, world = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MpiCollectives collectives(rank, world);
  const int code = ServeRank({argv[1], rank, world}, collectives);
  MPI_Finalize();
  return code;
}

}  // namespace
}  // namespace evenkeel::bench

int main(int argc, char** argv) { return evenkeel::bench::Main(argc, argv); }
