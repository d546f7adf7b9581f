#include "evenkeel/comm/base/librarys_thread.h"

namespace evenkeel::internal {
namespace {

thread_local bool is_the_librarys = false;

}  // namespace

void ThisThreadIsTheLibrarys() { is_the_librarys = true; }
bool IsTheLibrarysThread() { return is_the_librarys; }

LibrarysTurn::LibrarysTurn() : before_(is_the_librarys) { is_the_librarys = true; }
LibrarysTurn::~LibrarysTurn() { is_the_librarys = before_; }

}  // namespace evenkeel::internal
