// oneCCL's collectives behind C functions, for bench.py: float32, sums, one communicator.
//
// Returns: 0, or 1 after printing why.

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>

namespace {

std::unique_ptr<ccl::shared_ptr_class<ccl::kvs>> store;
std::unique_ptr<ccl::communicator> group;

template <typename Function>
int Guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oneCCL: %s\n", error.what());
    return 1;
  }
}

}  // namespace

extern "C" {

size_t oneccl_address_bytes() { return ccl::kvs::address_max_size; }

// The first rank writes the address of its store, which the others are given.
int oneccl_create_address(char* address) {
  return Guarded([&] {
    ccl::init();
    store = std::make_unique<ccl::shared_ptr_class<ccl::kvs>>(ccl::create_main_kvs());
    std::memcpy(address, (*store)->get_address().data(), ccl::kvs::address_max_size);
  });
}

int oneccl_join(int rank, int world, const char* address) {
  return Guarded([&] {
    if (store == nullptr) {
      ccl::init();
      ccl::kvs::address_type bytes;
      std::memcpy(bytes.data(), address, bytes.size());
      store = std::make_unique<ccl::shared_ptr_class<ccl::kvs>>(ccl::create_kvs(bytes));
    }
    group = std::make_unique<ccl::communicator>(ccl::create_communicator(world, rank, *store));
  });
}

int oneccl_all_reduce(float* full, size_t count) {
  return Guarded([&] { ccl::allreduce(full, full, count, ccl::reduction::sum, *group).wait(); });
}

int oneccl_all_gather(const float* part, float* full, size_t part_count) {
  return Guarded(
      [&] { ccl::allgather(part, full, part_count, ccl::datatype::float32, *group).wait(); });
}

int oneccl_reduce_scatter(const float* full, float* part, size_t part_count) {
  return Guarded(
      [&] { ccl::reduce_scatter(full, part, part_count, ccl::reduction::sum, *group).wait(); });
}

int oneccl_all_to_all(const float* from, float* to, size_t part_count) {
  return Guarded([&] { ccl::alltoall(from, to, part_count, *group).wait(); });
}

}  // extern "C"
