/* The protocol of docs/replacement.md, for the model checker spin: ranks train, are lost, and
 * regroup with or without newcomers. tests/model/check.sh runs it.
 *
 * The store is one process and handles one message at a time, so its replies are facts that only
 * grow: the members of the newest group, the end of that group, the end of an exchange. A process
 * reads such a fact at any later time, or never. This covers every delay of a message, and replies
 * on two connections in either order. A process sends nothing between a request and its reply, so a
 * late request is the same as a slow process. Each `atomic` is one step of one process.
 *
 * -D options set the size: RANKS, LOSSES, NEWCOMERS, STEPS, and
 *   ERRORS   the number of times that a rank gives up although no rank is lost (a deadline)
 *   TEARS    the number of updates that are cut, so that a state belongs to no step
 *   LOST_RUN 1: a rank that was declared lost may run on (it was stopped, or cut off)
 * Each mutant is a further -D option that breaks one rule; the comment at its place names it. */

#ifndef RANKS
#define RANKS 4
#endif
#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef NEWCOMERS
#define NEWCOMERS 1
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef ERRORS
#define ERRORS 0
#endif
#ifndef TEARS
#define TEARS 0
#endif
#ifndef LOST_RUN
#define LOST_RUN 0
#endif

/* Processes 0 .. RANKS - 1 are the ranks of the first group, by place. Newcomers follow; a higher
 * number is a higher incarnation. Sets of processes and of places are bits. */
#define PROCESSES (RANKS + NEWCOMERS)
#define FIRST_RANKS ((1 << RANKS) - 1)
#define Bit(i) (1 << (i))
#define Has(set, i) (((set) >> (i)) & 1)
#define NONE 7 /* No process; the state of no step. */
#define MOST_WAITS 2

/* The rules of docs/replacement.md. check.sh finds the name in the text of a violated assertion. */
hidden byte R1_one_group_makes_steps, R2_a_place_has_one_holder, R3_lost_ranks_stay_out,
    R4_the_pause_is_bounded, R5_states_are_of_the_step, R6_all_recover_before_one_continues,
    R7_finished_steps_differ_by_one, R8_survivors_finish, R9_no_group_after_the_last_step,
    R10_no_process_waits_forever;
#define must(rule, condition) \
  if                          \
  :: condition                \
  :: else -> assert(rule)     \
  fi

mtype = {
  Starts,  /* a newcomer that the store does not know yet */
  Entered, /* a newcomer that waits for its place */
  Told,    /* a member of the newest group, by the store's decision */
  Made,    /* it has connected, and has sent its facts */
  Moves,   /* it has all facts, and sends or receives state */
  Moved,   /* it has come to "recovered" */
  Trains,  /* it has contributed to the step that follows those that it has finished */
  AtEnd,   /* it has come to the agreement on the last step */
  Asks,    /* it has asked for the next group */
  AsksOld, /* only of a mutant */
  Left,    /* it has ended with success */
  Gone     /* it is lost, refused, or has ended with an error */
};

/* The store's record of the job. */
byte members = FIRST_RANKS; /* Of the newest group. */
bool ended;                 /* That group has ended. */
byte asked;                 /* Its members that have asked for the next one. */
byte lost;                  /* All processes that were declared lost. */
byte out;                   /* Places that the job has given up. */
byte holder[RANKS];         /* By place: the process that has it, or had it last. */
byte present;               /* Members that have come to the next exchange. */
byte exchanges;             /* Complete in this group: 1: "made", with the facts; 2: "recovered". */
bool finished;              /* The agreement on the last step is complete. */
bool is_waiting;            /* The store waits for newcomers. */
byte waits;                 /* How often it began to wait since ranks have last continued. */
byte real_waits;            /* The same, by the count of the model: for R4. */

/* The plan, which each member computes from the same facts. */
byte source, from_step;
byte from_state;            /* The state that the source sends. */
bool is_sent;
byte received;              /* Members that have all of it. */

/* The data plane of the newest group. */
byte step;                  /* The step that members contribute to. */
byte gave;                  /* Members that have contributed to it. */

/* The processes. */
mtype at[PROCESSES];
byte steps[PROCESSES];      /* The steps that it has finished, by its own count. */
byte state[PROCESSES];      /* The step of its state, or NONE. */
byte torn;                  /* Processes that report that their state belongs to no step. */
byte place[PROCESSES];
bool no_state;              /* The job has ended because no member has a whole state. */

byte losses = LOSSES, errors = ERRORS, tears = TEARS; /* Those that may still come. */

#define IsLost(i) Has(lost, i)
#define IsMember(i) Has(members, i)
/* The holder was declared lost, and the job has not given up the place. */
#define IsFree(p) (IsLost(holder[p]) && !Has(out, p))

inline Leave(x, where) {
  at[x] = where;
  steps[x] = 0;
  state[x] = 0;
  torn = torn & ~Bit(x)
}

/* Ends the job with an error on all ranks. */
inline EndJob() {
  j = 0;
  do
  :: j < PROCESSES ->
    if
    :: at[j] != Left -> Leave(j, Gone)
    :: else
    fi;
    j++
  :: else -> break
  od;
  j = 0
}

inline BeginWait() {
  printf("the store begins to wait for newcomers\n");
  is_waiting = true;
  waits++;
  real_waits++;
  must(R4_the_pause_is_bounded, real_waits <= MOST_WAITS)
}

#ifdef ENDLESS /* mutant: each loss begins the wait again */
#define MayWait true
#else
#define MayWait (waits < MOST_WAITS)
#endif

/* The store declares a process lost. */
inline Lose(x) {
  printf("%d is lost\n", x);
  lost = lost | Bit(x);
  if
  :: IsMember(x) && !finished ->
#ifdef UNSEEN /* mutant: the store does not watch members that have not connected yet */
    if
    :: at[x] != Told -> ended = true
    :: else
    fi;
#else
    ended = true;
#endif
    if
    :: is_waiting && MayWait -> BeginWait()
    :: else
    fi
  :: else
  fi;
  if
  :: Leave(x, Gone)
#if LOST_RUN
  :: at[x] != Asks && at[x] != Entered /* Its reads and messages go on; the store refuses them. */
#endif
  fi;
  if
  :: (members & ~lost) == 0 -> EndJob()
  :: else
  fi
}

/* A member asks for the next group, and so ends this one. */
inline Ask(me) {
  printf("%d asks for the next group, with %d steps\n", me, steps[me]);
  if
#ifndef NO_FENCE
  :: IsLost(me) -> Leave(me, Gone)
#endif
#ifdef AFTER_LAST /* mutant: a rank that missed the end of the last step regroups */
  :: finished ->
    ended = true;
    lost = lost | (members & ~Bit(me)); /* The others have left. */
    asked = asked | Bit(me);
    at[me] = Asks
#else
  :: finished -> Leave(me, Left)
#endif
  :: else ->
    ended = true;
    asked = asked | Bit(me);
    at[me] = Asks
  fi
}

#ifdef NEWCOMER_HAS_STATE /* mutant: a newcomer counts as a source */
#define IsWhole(i) (IsMember(i) && (!Has(torn, i) || i >= RANKS))
#else
#define IsWhole(i) (IsMember(i) && !Has(torn, i))
#endif

/* The source is the rank with a whole state and the least number of finished steps. */
inline Plan() {
  source = NONE;
  j = 0;
  do
  :: j < PROCESSES ->
    if
    :: IsWhole(j) && (source == NONE || steps[j] < steps[source]) -> source = j
    :: else
    fi;
    j++
  :: else -> break
  od;
  if
  :: source == NONE ->
    printf("no member has a whole state\n");
    no_state = true;
    EndJob()
  :: else ->
    from_step = steps[source];
    from_state = state[source];
    printf("the source is %d, with %d steps\n", source, from_step);
#ifdef HIGHEST /* mutant: ranks continue from the highest finished step */
    j = 0;
    do
    :: j < PROCESSES ->
      if
      :: IsWhole(j) && steps[j] > from_step -> from_step = steps[j]
      :: else
      fi;
      j++
    :: else -> break
    od;
#endif
    j = 0
  fi
}

/* A member comes to the next exchange of its group. */
inline Come(me) {
  present = present | Bit(me);
  if
  :: present == members ->
    present = 0;
    exchanges++;
    printf("exchange %d is complete\n", exchanges);
    if
    :: exchanges == 1 -> Plan()
    :: else ->
      must(R3_lost_ranks_stay_out, (members & lost) == 0);
      step = from_step;
      waits = 0;
      real_waits = 0
    fi
  :: else
  fi
}

/* A rank begins the next step, or after the last one comes to the agreement on it. */
inline Proceed(me) {
  if
  :: steps[me] < STEPS ->
    at[me] = Trains;
    gave = gave | Bit(me);
    if
    :: gave == members ->
      gave = 0;
      step++
    :: else
    fi
  :: else ->
    at[me] = AtEnd;
    if
    :: !ended ->
      present = present | Bit(me);
      if
      :: present == members ->
        present = 0;
        printf("the last step is complete\n");
        finished = true
      :: else
      fi
    :: else
    fi
  fi
}

#ifdef EARLY /* mutant: the store decides before all members have come */
#define AllHaveCome (asked & ~lost)
#else
#define AllHaveCome ((asked & ~lost) && (members & ~(asked | lost)) == 0)
#endif

/* The process can still begin or finish a step in the newest group, although that has ended. */
#define MayTrain(i) ((at[i] == Trains && step > steps[i]) || (at[i] == Moved && exchanges >= 2))

/* The store's decision, and its reply to all. */
inline Decide() {
  must(R9_no_group_after_the_last_step, !finished);
  j = 0;
  do
  :: j < PROCESSES ->
    must(R1_one_group_makes_steps, IsLost(j) || !MayTrain(j));
    j++
  :: else -> break
  od;
#ifdef NO_FENCE /* mutant: a lost rank that asks is a member again */
  members = asked;
#else
  members = asked & ~lost;
#endif
  j = 0;
  do
  :: j < RANKS ->
    k = RANKS;
    do
    :: k < PROCESSES ->
      if
#ifdef GIVE_HELD /* mutant: a newcomer gets its place although the holder is not lost */
      :: at[k] == Entered && place[k] == j && !Has(out, j) ->
#else
      :: at[k] == Entered && place[k] == j && IsFree(j) ->
#endif
        must(R2_a_place_has_one_holder, !Has(members, holder[j]));
        printf("%d gets the place %d\n", k, j);
        holder[j] = k;
        members = members | Bit(k)
      :: else
      fi;
      k++
    :: else -> break
    od;
    if
    :: IsFree(j) -> out = out | Bit(j)
    :: else
    fi;
    j++
  :: else -> break
  od;
  printf("the store decides: the new group has the members (bits) %d\n", members);
  j = 0;
  do
  :: j < PROCESSES ->
    if
    :: IsMember(j) -> at[j] = Told
    :: !IsMember(j) && at[j] != AsksOld &&
           (IsLost(j) || (at[j] == Entered && Has(out, place[j]))) ->
      Leave(j, Gone) /* It is told that it is lost, or too late. */
    :: else
    fi;
    j++
  :: else -> break
  od;
  ended = false;
  asked = 0;
  present = 0;
  exchanges = 0;
  is_waiting = false;
#ifdef FORGETS /* mutant: the number of waits is that of one group, not of the pause */
  waits = 0;
#endif
  source = 0;
  from_step = 0;
  from_state = 0;
  is_sent = false;
  received = 0;
  step = 0;
  gave = 0;
  j = 0;
  k = 0
}

/* Sets `j` to a free place for which no newcomer has come, or to RANKS if there is none. */
inline FindEmptyPlace() {
  j = 0;
  do
  :: j < RANKS ->
    k = RANKS;
    do
    :: k < PROCESSES && !(at[k] == Entered && place[k] == j) -> k++
    :: else -> break
    od;
    if
    :: IsFree(j) && k == PROCESSES -> break
    :: else -> j++
    fi
  :: else -> break
  od;
  k = 0
}

proctype Store() {
  byte j, k;
  do
  :: atomic {
      ended && AllHaveCome && !is_waiting ->
      FindEmptyPlace();
      if
      :: j < RANKS && MayWait ->
        j = 0;
        BeginWait()
      :: else -> Decide()
      fi
    }
  :: atomic { /* Each place has a newcomer, or the time is over: the wait ends at any time. */
      ended && AllHaveCome && is_waiting -> Decide()
    }
  :: atomic { /* Nothing else can happen any more. */
      timeout ->
      j = 0;
      do
      :: j < PROCESSES ->
        must(R10_no_process_waits_forever,
             at[j] == Left || at[j] == Gone || at[j] == Starts || (at[j] == Entered && finished));
        /* If updates are cut, there may be no whole state left. */
        must(R8_survivors_finish,
             j >= RANKS || IsLost(j) || at[j] == Left || (no_state && TEARS > 0));
        j++
      :: else -> break
      od;
      break
    }
  od
}

/* A newcomer may be lost at any time; this does not count as one of the losses. */
#define MayBeLost(x)                                                               \
  (at[x] != Starts && at[x] != Left && at[x] != Gone && !IsLost(x) && \
   (x >= RANKS || losses > 0))

proctype Process(byte me) {
  byte j;
end:
  do
  :: atomic { /* It has all contributions to the step: the update. */
      at[me] == Trains && step > steps[me] ->
      must(R5_states_are_of_the_step, state[me] == steps[me]);
      if
      :: steps[me]++;
        state[me]++;
        printf("%d has finished %d steps\n", me, steps[me]);
        j = 0;
        do
        :: j < PROCESSES ->
          must(R7_finished_steps_differ_by_one,
               !IsMember(j) || IsLost(j) || Has(torn, j) ||
                   (steps[j] <= steps[me] + 1 && steps[me] <= steps[j] + 1));
          j++
        :: else -> break
        od;
        j = 0;
        Proceed(me)
      :: ended && tears > 0 ->
        tears--;
        printf("%d is cut in its update\n", me);
        torn = torn | Bit(me);
        state[me] = NONE;
        Ask(me)
      fi
    }
#ifdef EAGER /* mutant: a rank contributes to a step before it has finished the one before */
  :: atomic {
      at[me] == Trains && step > steps[me] && step < STEPS ->
      gave = gave | Bit(me);
      if
      :: gave == members ->
        gave = 0;
        step++
      :: else
      fi
    }
#endif
  :: atomic { at[me] == AtEnd && finished -> Leave(me, Left) }
  :: atomic { /* A newcomer announces itself. */
      at[me] == Starts ->
      if
      :: place[me] = 0
      :: place[me] = 1
#if RANKS > 2
      :: place[me] = 2
#endif
#if RANKS > 3
      :: place[me] = 3
#endif
      fi;
      if
      :: finished || Has(out, place[me]) || holder[place[me]] > me -> at[me] = Gone
      :: else ->
        printf("the newcomer %d enters for the place %d\n", me, place[me]);
        at[me] = Entered;
        torn = torn | Bit(me);
        state[me] = NONE;
        j = RANKS;
        do
        :: j < PROCESSES ->
          if
          :: at[j] == Entered && place[j] == place[me] && j < me -> Leave(j, Gone)
          :: at[j] == Entered && place[j] == place[me] && j > me -> Leave(me, Gone)
          :: else
          fi;
          j++
        :: else -> break
        od;
        j = 0
      fi
    }
  :: atomic {
      at[me] == Told && !ended ->
      at[me] = Made;
      Come(me)
    }
  :: atomic { /* A rank that is ahead keeps its state until it reads that all have recovered. */
      at[me] == Made && exchanges >= 1 ->
#ifdef IN_PLACE /* mutant: it loses its state when it begins to receive another */
      if
      :: steps[me] != from_step ->
        torn = torn | Bit(me);
        state[me] = NONE
      :: else
      fi;
#endif
      at[me] = Moves
    }
  :: atomic {
      at[me] == Moves && !ended && (me == source || is_sent) ->
      is_sent = true;
      received = received | Bit(me);
      at[me] = Moved;
      Come(me)
    }
  :: atomic {
#ifdef NO_BARRIER /* mutant: a rank continues when it has the state itself */
      at[me] == Moved ->
#else
      at[me] == Moved && exchanges >= 2 ->
#endif
#ifdef STAYS_AHEAD /* mutant: a rank that is ahead of the source does not go back */
      if
      :: steps[me] > from_step && !Has(torn, me)
      :: else ->
        steps[me] = from_step;
        state[me] = from_state
      fi;
#else
      steps[me] = from_step;
      state[me] = from_state;
#endif
      torn = torn & ~Bit(me);
      printf("%d continues with %d steps\n", me, steps[me]);
      must(R6_all_recover_before_one_continues, received == members);
      must(R5_states_are_of_the_step, steps[me] == from_step && state[me] == from_step);
      Proceed(me)
    }
  :: atomic { /* A member reads the end of its group, or gives up. */
      IsMember(me) && at[me] != Asks && at[me] != AsksOld && at[me] != Left && at[me] != Gone &&
          (ended || errors > 0) ->
      if
      :: ended
      :: !ended && errors > 0 -> errors--
      fi;
#ifdef OLD_HUB /* mutant: a rank that gave up in the newest group asks the hub of an older one */
      if
      :: at[me] == Made && !ended && (members & ~lost & ~Bit(me)) ->
        printf("%d gives up, and asks the older group\n", me);
        ended = true;
        lost = lost | Bit(me); /* It has left the newest group. */
        at[me] = AsksOld
      :: else -> Ask(me)
      fi
#else
      Ask(me)
#endif
    }
#ifdef OLD_HUB
  :: atomic { /* The others have continued and left the older group, so its hub replies. */
      at[me] == AsksOld && exchanges >= 2 ->
      printf("%d continues alone\n", me);
      must(R1_one_group_makes_steps, !(members & ~lost))
    }
#endif
  :: atomic { /* It dies, or falls silent. A newcomer that does not fit is refused: the same. */
      MayBeLost(me) ->
      if
      :: me < RANKS -> losses--
      :: else
      fi;
      Lose(me)
    }
  od
}

init {
  byte i;
  atomic {
    do
    :: i < PROCESSES ->
      if
      :: i < RANKS ->
        at[i] = Moved;
        holder[i] = i;
        place[i] = i
      :: else -> at[i] = Starts
      fi;
      run Process(i);
      i++
    :: else -> break
    od;
    i = 0;
    exchanges = 2; /* The first group is made, and its ranks begin step 0. */
    received = members;
    run Store()
  }
}
