// Ends compilation under an older C++ with one message, instead of the errors of the next header.
//
// Included by each header that uses C++20, reaches users, and includes no other header of evenkeel
// before.

#ifndef EVENKEEL_COMM_BASE_CPP20_H_
#define EVENKEEL_COMM_BASE_CPP20_H_

#if __cplusplus < 202002L
#error \
    "evenkeel's headers need C++20: g++ -std=c++20; in CMake cxx_std_20; in .bazelrc build --cxxopt=-std=c++20"
#endif

#endif  // EVENKEEL_COMM_BASE_CPP20_H_
