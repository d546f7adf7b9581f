// Marks the threads of the library: control threads, communication threads, workers. The detection
// of deadlocks (comm/control/waits.h) does not count them, since they only act on requests.
//
//   ThisThreadIsTheLibrarys();  // at the start of such a thread
//
// Threads: each call concerns the calling thread.

#ifndef EVENKEEL_COMM_BASE_LIBRARYS_THREAD_H_
#define EVENKEEL_COMM_BASE_LIBRARYS_THREAD_H_

#include <utility>

namespace evenkeel::internal {

inline thread_local bool is_the_librarys_thread = false;

// Marks the calling thread as one of the library, permanently.
inline void ThisThreadIsTheLibrarys() { is_the_librarys_thread = true; }
inline bool IsTheLibrarysThread() { return is_the_librarys_thread; }

// While it lives, the calling thread counts as one of the library: it runs callbacks.
class LibrarysTurn {
 public:
  LibrarysTurn() : before_(std::exchange(is_the_librarys_thread, true)) {}
  ~LibrarysTurn() { is_the_librarys_thread = before_; }
  LibrarysTurn(const LibrarysTurn&) = delete;
  LibrarysTurn& operator=(const LibrarysTurn&) = delete;

 private:
  const bool before_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_LIBRARYS_THREAD_H_
