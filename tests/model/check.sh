#!/bin/bash
# Checks the protocol by which lost ranks are replaced (docs/replacement.md): the model checker spin
# explores all runs of its model, regroup.pml, with up to 4 ranks, 2 losses and 2 newcomers.
#
#   tests/model/check.sh                        all rules and mutants: less than a minute
#   tests/model/check.sh --more                 two larger models, too: a minute more, 1 GB of memory
#   tests/model/check.sh --trail -DRANKS=3 ...  prints a shortest run that breaks a rule, with these
#                                               options of the model, for example -DIN_PLACE
#
# Prints one line per rule, then one per mutant, "ok" or "FAILED" first, and exits with 1 if one
# fails. A mutant breaks a rule on purpose: spin must find that.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

for program in spin gcc; do
  command -v $program >/dev/null ||
    { echo "FAILED  the protocol of docs/replacement.md keeps its rules: apt-get install $program"; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export work model=$PWD/regroup.pml

# compile FOLDER "FLAGS of gcc" OPTION...: makes FOLDER/pan, the search.
compile() {
  local folder=$1 flags=$2
  shift 2
  mkdir -p "$folder"
  # shellcheck disable=SC2086  # several flags
  (cd "$folder" && spin "$@" -a "$model" && gcc $flags -w -o pan pan.c) >"$folder/said" 2>&1
}

# search NAME all|cycles|first OPTION...: all runs, and whether one is endless, or the first run that breaks a rule.
# Leaves what pan says.
search() {
  local folder=$work/$1 flags='-O1 -DNOREDUCE -DSAFETY' options='-w22 -c0'
  [[ $2 != cycles ]] || flags='-O1 -DNOREDUCE -DNP' options='-w22 -c0 -l'
  [[ $2 != first ]] || flags='-O0 -DNOREDUCE -DSAFETY' options='-w20'
  shift 2
  compile "$folder" "$flags" "$@" || return 0
  # shellcheck disable=SC2086  # several options
  (cd "$folder" && ./pan -m100000 $options 2>&1 | awk '!/^pan:[0-9]+: / || !seen[$3 $4]++' >said)
  rm -f "$folder"/pan*
}
export -f compile search

if [[ ${1:-} == --trail ]]; then
  shift
  set -- -Dhidden= "$@" # A breadth-first search refuses hidden variables.
  compile "$work/trail" '-O1 -DNOREDUCE -DSAFETY -DBFS' "$@" || { cat "$work/trail/said"; exit 1; }
  cd "$work/trail" || exit 1
  ./pan -w22 | grep '^pan:1:' || { echo 'no run breaks a rule'; exit; }
  spin "$@" -T -t -k ./*.trail "$model" | grep -Ev '^ *(spin:|#processes|[0-9]+:|[0-9]+ processes)|^\s.*='
  exit 1
fi

sizes=( # kind of search; options; text
  'all;-DRANKS=4;4 ranks, 2 losses, a newcomer'
  'all;-DRANKS=3 -DNEWCOMERS=2;3 ranks, 2 losses, 2 newcomers'
  'all;-DRANKS=3 -DERRORS=1 -DLOST_RUN=1;3 ranks, 2 losses, a newcomer, a deadline, lost ranks run on'
  'cycles;-DRANKS=3 -DERRORS=1 -DTEARS=1;3 ranks, 2 losses, a newcomer, a deadline, a cut update'
  'all;-DRANKS=2 -DNEWCOMERS=2 -DERRORS=2 -DTEARS=1 -DLOST_RUN=1;2 ranks, 2 newcomers, 2 deadlines, and all of these'
)
[[ ${1:-} != --more ]] || sizes+=(
  'all;-DRANKS=4 -DLOSSES=3;4 ranks, 3 losses, a newcomer'
  'all;-DRANKS=4 -DERRORS=1;4 ranks, 2 losses, a newcomer, a deadline'
)
rules=(
  'R1: no two groups make steps at a time'
  'R2: a place has one holder, and is given away only if that was declared lost'
  'R3: no rank continues in a group with a member that was declared lost'
  'R4: the store begins to wait for newcomers at most twice in a pause'
  "R5: all ranks of a group continue with the source's step, and with the state of that step"
  'R6: no rank continues before all members have recovered'
  'R7: the finished steps of two ranks that are not lost differ by at most one'
  'R8: all ranks that are not lost finish the last step'
  'R9: no group follows the agreement on the last step'
  'R10: no process waits forever'
)
mutants=( # option; the rule that fails; if ...
  'GIVE_HELD;R2;a place is given away whose holder was not declared lost'
  'NO_FENCE;R3;a rank that was declared lost is a member again when it asks'
  'EARLY;R1;the store decides before all members have asked'
  'OLD_HUB;R1;a rank that gives up in the newest group asks the hub of an older one'
  'UNSEEN;R10;the store does not watch members that have not connected yet'
  'ENDLESS;R4;each loss begins the wait again'
  'FORGETS;R4;the number of waits is that of a group, not of the pause'
  'HIGHEST;R5;survivors continue from the highest finished step'
  'STAYS_AHEAD;R5;a rank that is ahead of the source does not go back'
  'NEWCOMER_HAS_STATE;R5;a newcomer counts as a source'
  'IN_PLACE;R8;a rank that is ahead of the source loses its state before all have recovered'
  'NO_BARRIER;R6;a rank continues when it has the state itself'
  'EAGER;R7;a rank contributes to a step before it has finished the one before'
  'AFTER_LAST;R9;a rank that missed the end of the last step regroups'
)

{
  for i in "${!sizes[@]}"; do
    IFS=';' read -r kind options _ <<<"${sizes[i]}"
    printf '%s\0' "search size$i $kind $options"
  done
  for mutant in "${mutants[@]}"; do
    option=${mutant%%;*}
    printf '%s\0' "search $option first -D$option -DRANKS=3 -DERRORS=1 -DLOST_RUN=1"
  done
} | xargs -0 -n 1 -P "$(nproc)" bash -c

# The rules that the search NAME found broken: " R1 R5 ", or nothing.
broken_in() {
  local rules
  rules=$(sed -nE 's/^pan:[0-9]+: (assertion violated (R[0-9]+)_.*|invalid end state.*|non-progress cycle.*)/\2/p' \
    "$work/$1/said" | sed 's/^$/R10/' | sort -u | tr '\n' ' ')
  echo "${rules:+ $rules}"
}

# Whether the search NAME has seen all runs, and each error that it counts is one of a rule.
is_complete() {
  grep -Eq '^State-vector.* errors: [0-9]+$' "$work/$1/said" &&
    ! grep -Eq 'Search not completed|depth too small|out of memory' "$work/$1/said" &&
    { [[ -n $(broken_in "$1") ]] || grep -q '^State-vector.* errors: 0$' "$work/$1/said"; }
}

failed=0
result() { # "", or what fails; sentence
  if [[ -z $1 ]]; then
    echo "ok      $2"
  else
    echo "FAILED  $2: $1"
    failed=1
  fi
}

incomplete=
for i in "${!sizes[@]}"; do
  text=${sizes[i]##*;} said=$work/size$i/said
  if is_complete "size$i"; then
    figures=$(sed -nE 's/^ *([0-9.e+]+) states, stored.*/\1 states/p; s/^pan: elapsed time ([0-9.]+) .*/in \1 s/p' \
      "$said" | xargs)
    echo "        $text: $figures"
  else
    echo "        $text: the search has not seen all runs"
    tail -n 5 "$said" | sed 's/^/          /'
    incomplete='the search has not seen all runs'
  fi
done
for rule in "${rules[@]}"; do
  wrong=$incomplete
  for i in "${!sizes[@]}"; do
    IFS=';' read -r _ options _ <<<"${sizes[i]}"
    [[ $(broken_in "size$i") != *" ${rule%%:*} "* ]] || wrong="tests/model/check.sh --trail $options"
  done
  result "$wrong" "$rule"
done
for mutant in "${mutants[@]}"; do
  IFS=';' read -r option rule text <<<"$mutant"
  found=$(broken_in "$option")
  [[ $found == *" $rule "* ]] && wrong= || wrong="broken:${found:- no rule}"
  result "$wrong" "mutant: $rule fails if $text"
done
exit $failed
