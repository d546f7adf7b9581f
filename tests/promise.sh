# For scripts that check promises: sets `failed`, and writes to the folder `work`.
#
#   failed=0
#   source tests/promise.sh
#   promise 'the program ends' timeout 60 ./program
#
# Prints "ok" and the text if the command succeeds; else "FAILED" with the end of its output.
promise() { # text command...
  local text=$1 out=$work/out began=$SECONDS
  shift
  if "$@" >"$out" 2>&1; then
    echo "ok      $text ($((SECONDS - began)) s)"
  else
    echo "FAILED  $text"
    tail -n 60 "$out" | sed "s/^/        /"  # Its lines are no promises.
    failed=1
  fi
}
