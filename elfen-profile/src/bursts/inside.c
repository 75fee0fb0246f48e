/*
 * The code that bursts need inside a program: a signal handler that moves a thread into the code
 * cache, one that moves a fault back, and what stands in for sigaction(2). The host copies this
 * section into the program. So it refers to nothing outside of it; it allocates nothing and takes
 * no lock. A burst makes no system call but rt_sigreturn(2), because a program may set a filter at
 * any time; each filter has to allow that one.
 *
 * The numbers AT_* are those of elfen-stream/layout.rs; build.rs passes them.
 */

typedef unsigned long word;
typedef unsigned int half;

#define INSIDE __attribute__((section("elfen_inside"), visibility("hidden"), used))
#define WORD(base, at) (*(volatile word *)((base) + (at)))
#define HALF(base, at) (*(volatile half *)((base) + (at)))

enum {
	SYS_RT_SIGACTION = 13,
	SYS_GETPID = 39,
	SYS_GETTID = 186,
	SYS_TGKILL = 234,
	SYS_RT_TGSIGQUEUEINFO = 297,
	SA_SIGINFO_ = 4,
	SA_RESTORER_ = 0x04000000,
	SA_ONSTACK_ = 0x08000000,
	SA_NODEFER_ = 0x40000000,
	SA_RESETHAND_ = (int)0x80000000,
	TRAP_FLAG = 1 << 8,
	DIRECTION_FLAG = 1 << 10,
	POLL_IN_ = 1,
	EFAULT_ = 14,
	STACK_DISABLED = 2,
	AUTODISARM = (int)0x80000000,
	CODE_SEGMENT = 0x33,
};

/* siginfo, and ucontext with its registers */
#define INFO_CODE 8
#define INFO_FD 24
#define UC_STACK 16
#define UC_STACK_FLAGS 24
#define UC_REGISTERS 40
#define REGISTERS 17
#define UC_RDI (40 + 8 * 8)
#define UC_RSI (40 + 9 * 8)
#define UC_RDX (40 + 12 * 8)
#define UC_RAX (40 + 13 * 8)
#define UC_RCX (40 + 14 * 8)
#define UC_RSP (40 + 15 * 8)
#define UC_RIP (40 + 16 * 8)
#define UC_FLAGS (40 + 17 * 8)
#define UC_SEGMENTS (40 + 18 * 8)
#define UC_VECTORS (40 + 23 * 8)
#define UC_MASK 296
#define UC_BYTES 304

/* What the kernel adds to the vector registers of a frame. */
#define VECTORS_NOTE 464
#define VECTORS_FEATURES 472
#define VECTORS_SIZE 480
#define VECTORS_MAGIC 0x46505853u
#define VECTORS_END_MAGIC 0x46505845u

/* SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV and SIGSYS: blocked, they would kill. */
#define NEVER_BLOCKED (1ul << 3 | 1ul << 4 | 1ul << 6 | 1ul << 7 | 1ul << 10 | 1ul << 30)
/* The signals whose handlers are ours: SIGILL, SIGBUS, SIGFPE, SIGSEGV, and SIGURG by the clock. */
#define TICK 23
#define OURS (1ul << 4 | 1ul << 7 | 1ul << 8 | 1ul << 11 | 1ul << TICK)
#define SIGNALS 32

struct action {
	word handler, flags, restorer, mask;
};

/* What a forked child gets a copy of. */
struct own {
	/* What the program does about the signals whose handlers are ours, by number. */
	struct action actions[SIGNALS];
	/* Not 0 once the host takes our handlers out, and how many calls are installing one. */
	volatile word ends, installing;
};

_Static_assert(__builtin_offsetof(struct own, ends) == 32 * 32, "ENDS in removal.rs");
_Static_assert(__builtin_offsetof(struct own, installing) == 33 * 32 - 24, "INSTALLING");

/* The host's twin is `Header` in inside.rs. */
struct header {
	word contexts, context_bytes, contexts_end;
	word first_fd, contexts_max;
	word table, table_mask, table_shift, table_multiplier;
	/* Counted by the program at each change of its libraries, and known to the host. */
	word changes, changes_known;
	/* The points of faults of each cluster, sorted, and the clusters' addresses. */
	struct cluster {
		word from, to, points, length;
	} clusters[8];
	struct own *own;
	/* Not 0 in the process itself, and 0 in its forked children. */
	volatile word *is_origin;
};

extern word elfen_inside_header __attribute__((visibility("hidden")));
INSIDE void elfen_inside_on_tick(int, char *, char *);
INSIDE void elfen_inside_on_fault(int, char *, char *);
INSIDE long elfen_inside_set_action(word, struct action *, struct action *, word);
extern void elfen_inside_restore(void) __attribute__((visibility("hidden")));
/* Returns how many words are left. */
extern word elfen_inside_copy(word to, word from, word words) __attribute__((visibility("hidden")));
extern const char elfen_inside_copying[] __attribute__((visibility("hidden")));
extern const char elfen_inside_copied[] __attribute__((visibility("hidden")));
/* The time stamp counter; 0 if the thread may not read it, as in the kernel's strict mode. */
extern word elfen_inside_ticks(void) __attribute__((visibility("hidden")));
extern const char elfen_inside_was_read[] __attribute__((visibility("hidden")));

__asm__(".pushsection elfen_inside,\"ax\",@progbits\n"
	".globl elfen_inside_header, elfen_inside_restore, elfen_inside_on_change\n"
	".hidden elfen_inside_header, elfen_inside_restore, elfen_inside_on_change\n"
	".globl elfen_inside_on_sigaction\n"
	".hidden elfen_inside_on_sigaction\n"
	".globl elfen_inside_copy, elfen_inside_copying, elfen_inside_copied\n"
	".hidden elfen_inside_copy, elfen_inside_copying, elfen_inside_copied\n"
	".balign 16\n"
	"elfen_inside_header: .quad 0\n"
	"elfen_inside_restore: mov $15, %eax\n"
	"	syscall\n"
	/* Stands in for a function of the dynamic loader that does nothing. */
	"elfen_inside_on_change: mov elfen_inside_header(%rip), %rax\n"
	"	lock incq 9*8(%rax)\n"
	"	ret\n"
	/*
	 * Stands in for the system call rt_sigaction, and is called from below the red zone. It
	 * changes only what a system call changes.
	 */
	"elfen_inside_on_sigaction: push %rdi\n"
	"	push %rsi\n"
	"	push %rdx\n"
	"	push %r8\n"
	"	push %r9\n"
	"	push %r10\n"
	"	mov %r10, %rcx\n"
	"	call elfen_inside_set_action\n"
	"	pop %r10\n"
	"	pop %r9\n"
	"	pop %r8\n"
	"	pop %rdx\n"
	"	pop %rsi\n"
	"	pop %rdi\n"
	"	ret\n"
	"elfen_inside_copy: mov %rdx, %rcx\n"
	"elfen_inside_copying: rep movsq\n"
	"elfen_inside_copied: mov %rcx, %rax\n"
	"	ret\n"
	".globl elfen_inside_ticks, elfen_inside_was_read\n"
	".hidden elfen_inside_ticks, elfen_inside_was_read\n"
	"elfen_inside_ticks: rdtsc\n"
	"elfen_inside_was_read: shl $32, %rdx\n"
	"	or %rdx, %rax\n"
	"	ret\n"
	".popsection\n");

_Static_assert(__builtin_offsetof(struct header, changes) == 9 * 8, "elfen_inside_on_change");

static inline __attribute__((always_inline)) long call(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
			 : "rcx", "r11", "memory");
	return result;
}

static inline __attribute__((always_inline)) void copy(word to, word from, word words)
{
	__asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
}

/* The code in the cache for an address of the program; 0 if there is none. */
static inline __attribute__((always_inline)) word code_for(struct header *header, word at)
{
	word index = at * header->table_multiplier >> header->table_shift;
	word tries;

	for (tries = 0; tries <= header->table_mask; tries++) {
		word entry = header->table + 16 * index;
		word key = WORD(entry, 0);

		if (key == at)
			return WORD(entry, 8);
		if (!key)
			return 0;
		index = (index + 1) & header->table_mask;
	}
	return 0;
}

/* What the kernel does about a signal, so that ours comes first and `wanted` is as asked for. */
static inline __attribute__((always_inline)) struct action ours_for(word signal,
								    struct action *wanted)
{
	struct action ours = *wanted;

	ours.handler = (word)(signal == TICK ? elfen_inside_on_tick : elfen_inside_on_fault);
	ours.flags |= SA_SIGINFO_ | SA_RESTORER_;
	ours.flags &= ~(word)(half)SA_RESETHAND_;
	if (!(wanted->flags & SA_RESTORER_))
		ours.restorer = (word)elfen_inside_restore;
	ours.mask = ~NEVER_BLOCKED;
	return ours;
}

/* Returns whether a handler of ours may be installed; end_installing() follows then. */
static inline __attribute__((always_inline)) int begin_installing(struct own *own)
{
	if (own->ends)
		return 0;
	__atomic_fetch_add(&own->installing, 1, __ATOMIC_SEQ_CST);
	if (!own->ends)
		return 1;
	__atomic_fetch_sub(&own->installing, 1, __ATOMIC_SEQ_CST);
	return 0;
}

static inline __attribute__((always_inline)) void end_installing(struct own *own)
{
	__atomic_fetch_sub(&own->installing, 1, __ATOMIC_SEQ_CST);
}

/*
 * The program's rt_sigaction. Its handlers of our signals are called by ours, and it never sees
 * ours, which stay in the kernel for a moment when the recording ends. A child of vfork(2) uses
 * this memory too: it resets signals, but installs no handler.
 */
INSIDE long elfen_inside_set_action(word signal, struct action *act, struct action *old, word size)
{
	struct header *header = (struct header *)*(volatile word *)&elfen_inside_header;
	struct own *own = header->own;
	struct action *known = &own->actions[signal % SIGNALS], before, wanted, ours;
	long result;

	if (signal >= SIGNALS || !(OURS >> signal & 1) || size != 8)
		return call(SYS_RT_SIGACTION, signal, (long)act, (long)old, size);
	before = *known;
	/* No signal has the number 0: the kernel only reads what it was given. */
	if (act && call(SYS_RT_SIGACTION, 0, (long)act, 0, size) == -EFAULT_)
		return -EFAULT_;
	if (act && act->handler > 1 && *header->is_origin && begin_installing(own)) {
		wanted = *act;
		ours = ours_for(signal, &wanted);
		/* First, because the host may put it back before and after the system call. */
		*known = wanted;
		result = call(SYS_RT_SIGACTION, signal, (long)&ours, (long)old, size);
		/* If only `old` cannot be written, the kernel has installed it. */
		if (result && result != -EFAULT_)
			*known = before;
		end_installing(own);
	} else {
		result = call(SYS_RT_SIGACTION, signal, (long)act, (long)old, size);
	}
	if (!result && old
	    && (old->handler == (word)elfen_inside_on_fault
		|| old->handler == (word)elfen_inside_on_tick))
		*old = before;
	return result;
}

static inline __attribute__((always_inline)) word fs_base(void)
{
	word base;

	__asm__ volatile("rdfsbase %0" : "=r"(base));
	return base;
}

static inline __attribute__((always_inline)) word gs_base(void)
{
	word base;

	__asm__ volatile("rdgsbase %0" : "=r"(base));
	return base;
}

/* The host has checked for FSGSBASE. */
static inline __attribute__((always_inline)) void set_gs_base(word base)
{
	__asm__ volatile("wrgsbase %0" : : "r"(base));
}

/* Copies the kernel's frame, by which the burst will end. Returns whether that is possible. */
static inline __attribute__((always_inline)) int copy_frame(word context, word frame)
{
	word vectors = WORD(frame, UC_VECTORS), own = context + AT_VECTORS;
	half size;

	if (!vectors || HALF(vectors, VECTORS_NOTE) != VECTORS_MAGIC)
		return 0;
	size = HALF(vectors, VECTORS_SIZE);
	if (size > AT_VECTORS_BYTES - 8 || size % 4)
		return 0;
	copy(context + AT_FRAME, frame, UC_BYTES / 8);
	copy(own + VECTORS_NOTE, vectors + VECTORS_NOTE, (512 - VECTORS_NOTE) / 8);
	HALF(own, size) = VECTORS_END_MAGIC;
	WORD(context, AT_FRAME + UC_VECTORS) = own;
	WORD(context, AT_FEATURES) = WORD(vectors, VECTORS_FEATURES);
	return 1;
}

/*
 * Copies registers and stack, from which the host finds the callers. The host names the thread's
 * stack. Should a part of it be gone, the fault ends the copy.
 */
static inline __attribute__((always_inline)) void copy_stack(word context, word frame)
{
	word area = context + AT_STACKS + WORD(context, AT_KEPT) * AT_STACK_BYTES;
	/* In a function's last instructions, its caller's registers are below the stack. */
	word from = WORD(frame, UC_RSP) - AT_STACK_BELOW;
	word end = WORD(context, AT_STACK_LIMIT), words = 0;

	if (!end)
		return;
	copy(area + 8, frame + UC_REGISTERS, REGISTERS);
	if (from >= WORD(context, AT_STACK_START) && from < end) {
		words = (end - from) / 8;
		if (words > AT_STACK_COPY_BYTES / 8)
			words = AT_STACK_COPY_BYTES / 8;
		words -= elfen_inside_copy(area + AT_STACK_COPY, from, words);
	}
	WORD(area, 0) = 8 * words;
}

/* Takes the words of a burst, and keeps the burst that is in them. Returns whether that worked. */
static inline __attribute__((always_inline)) int take_words(word context)
{
	word state = WORD(context, AT_STATE), kept = WORD(context, AT_KEPT);
	word left = WORD(context, AT_EVENTS_LEFT), given = WORD(context, AT_EVENTS_GIVEN);
	word to = context + AT_KEPT_AT + kept * AT_KEPT_BYTES;
	/* An edge has less than eight memory accesses in front of it, mostly. */
	word addresses = AT_ADDRESSES_ROOM + 8 * given;

	if (WORD(context, AT_ADDRESSES_LEFT) < addresses)
		return 0;
	if (state != AT_ARMED && (state != AT_DONE || kept >= AT_KEPT_MAX))
		return 0;
	if (!__atomic_compare_exchange_n((word *)(context + AT_STATE), &state, AT_RUNS, 0,
					 __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
		return 0;
	if (state == AT_ARMED)
		return 1;
	copy(to, context + AT_EVENTS_LEFT, AT_BURST_WORDS);
	if (left < given)
		copy(to + 64, context + AT_EVENTS + 8 * (left + 1), given - left);
	WORD(context, AT_KEPT) = kept + 1;
	return 1;
}

/*
 * Goes on in the program's handler, as if the kernel had called it: by a frame of our own, which
 * sets registers and blocked signals in one step.
 */
static inline __attribute__((always_inline)) void deliver(struct action *action, int signal,
							   char *info, char *frame)
{
	word own[UC_BYTES / 8 + 2];
	word at = ((word)own + 15) & ~15ul;

	copy(at, (word)frame, UC_BYTES / 8);
	WORD(at, UC_RDI) = signal;
	WORD(at, UC_RSI) = (word)info;
	WORD(at, UC_RDX) = (word)frame;
	WORD(at, UC_RAX) = 0;
	/* The kernel has put the return address in front of the frame. */
	WORD(at, UC_RSP) = (word)frame - 8;
	WORD(at, UC_RIP) = action->handler;
	WORD(at, UC_FLAGS) &= ~(word)(DIRECTION_FLAG | TRAP_FLAG);
	WORD(at, UC_MASK) |= action->mask;
	/* While this handler runs, the kernel has taken such a stack away. */
	if (HALF(at, UC_STACK_FLAGS) & AUTODISARM) {
		WORD(at, UC_STACK) = WORD(at, UC_STACK + 16) = 0;
		HALF(at, UC_STACK_FLAGS) = STACK_DISABLED;
	}
	if (!(action->flags & SA_NODEFER_))
		WORD(at, UC_MASK) |= 1ul << (signal - 1);
	__asm__ volatile("mov %0, %%rsp; mov $15, %%eax; syscall" : : "r"(at) : "memory", "rax");
	__builtin_unreachable();
}

/* Goes on in the program's handler, if there is one. */
static inline __attribute__((always_inline)) void pass_on(struct action *action, int signal,
							   char *info, char *frame)
{
	struct action once = *action;

	if (once.handler <= 1)
		return;
	if (once.flags & (half)SA_RESETHAND_)
		action->handler = 0;
	deliver(&once, signal, info, frame);
}

/* Handles the signal of a thread's clock. */
INSIDE void elfen_inside_on_tick(int signal, char *info, char *frame)
{
	struct header *header = (struct header *)*(volatile word *)&elfen_inside_header;
	word slot = HALF(info, INFO_FD) - header->first_fd;
	word context, code, at = WORD(frame, UC_RIP);

	/* Others may send this signal too. */
	if (HALF(info, INFO_CODE) != POLL_IN_ || slot >= header->contexts_max) {
		pass_on(&header->own->actions[TICK], signal, info, frame);
		return;
	}
	context = header->contexts + slot * header->context_bytes;
	/* The clocks of another recording have the same numbers. */
	if (WORD(context, AT_THREAD) != fs_base())
		return;
	if (*(volatile word *)&header->changes != *(volatile word *)&header->changes_known)
		return;
	if (!elfen_inside_ticks() || !take_words(context))
		return;
	code = code_for(header, at);
	WORD(context, AT_BEGAN_AT) = at;
	WORD(context, AT_BEGAN_CODE) = code;
	WORD(context, AT_BEGAN_STACK) = WORD(frame, UC_RSP);
	WORD(context, AT_BEGAN_ADDRESSES) = WORD(context, AT_ADDRESSES_LEFT);
	WORD(context, AT_EVENTS_LEFT) = WORD(context, AT_EVENTS_GIVEN);
	if (!code) {
		WORD(context, AT_STATE) = AT_DONE;
		return;
	}
	if ((HALF(frame, UC_SEGMENTS) & 0xffff) != CODE_SEGMENT || gs_base()
	    || !copy_frame(context, (word)frame)) {
		WORD(context, AT_STATE) = AT_REFUSED;
		return;
	}
	copy_stack(context, (word)frame);
	/* No signal is delivered inside the burst: its handler would see addresses of the cache. */
	WORD(frame, UC_MASK) |= ~NEVER_BLOCKED;
	WORD(frame, UC_RIP) = code;
	set_gs_base(context);
	WORD(context, AT_BEGAN_TICKS) = elfen_inside_ticks();
}

/* The cluster of an address; 8 if there is none. */
static inline __attribute__((always_inline)) int cluster_of(struct header *header, word at)
{
	int number = 0;

	while (number < 8
	       && (at < header->clusters[number].from || at >= header->clusters[number].to))
		number++;
	return number;
}

/* Moves a thread that faulted inside a burst to where the program would have faulted. */
static inline __attribute__((always_inline)) int move_back(struct header *header, int number,
							    word frame)
{
	word rip = WORD(frame, UC_RIP), context, first, length;

	/* Only what is at a point can fault. */
	first = *(volatile word *)&header->clusters[number].points;
	length = *(volatile word *)&header->clusters[number].length;
	while (length > 1) {
		word middle = length / 2;

		if ((WORD(first, 16 * middle) & ~(1ul << 63)) <= rip) {
			first += 16 * middle;
			length -= middle;
		} else {
			length = middle;
		}
	}
	context = gs_base();
	if (!length || (WORD(first, 0) & ~(1ul << 63)) != rip)
		return 0;
	if (context < header->contexts || context >= header->contexts_end)
		return 0;
	WORD(frame, UC_RIP) = WORD(first, 8);
	if (WORD(first, 0) >> 63)
		WORD(frame, UC_RCX) = WORD(context, AT_SAVED_RCX);
	WORD(frame, UC_MASK) = WORD(context, AT_FRAME + UC_MASK);
	WORD(context, AT_LEFT_AT) = WORD(first, 8);
	WORD(context, AT_ENDED_TICKS) = elfen_inside_ticks();
	set_gs_base(0);
	WORD(context, AT_STATE) = AT_DONE;
	return 1;
}

/* Handles faults. One inside a burst occurs again in the program, and comes here again. */
INSIDE void elfen_inside_on_fault(int signal, char *info, char *frame)
{
	struct header *header = (struct header *)*(volatile word *)&elfen_inside_header;
	struct action *action = &header->own->actions[signal % SIGNALS], none;
	int is_sent = (int)HALF(info, INFO_CODE) <= 0;
	word handler = action->handler;
	int cluster = cluster_of(header, WORD(frame, UC_RIP));
	long process, thread;

	if (!is_sent && WORD(frame, UC_RIP) == (word)elfen_inside_copying) {
		WORD(frame, UC_RIP) = (word)elfen_inside_copied;
		return;
	}
	if (!is_sent && WORD(frame, UC_RIP) == (word)elfen_inside_ticks) {
		WORD(frame, UC_RIP) = (word)elfen_inside_was_read;
		WORD(frame, UC_RAX) = WORD(frame, UC_RDX) = 0;
		return;
	}
	if (cluster < 8 && is_sent) {
		/* Not a fault, but another process's signal: it waits for the end of the burst. */
		WORD(frame, UC_MASK) |= 1ul << (signal - 1);
		process = call(SYS_GETPID, 0, 0, 0, 0);
		thread = call(SYS_GETTID, 0, 0, 0, 0);
		call(SYS_RT_TGSIGQUEUEINFO, process, thread, signal, (long)info);
		return;
	}
	if (cluster < 8 && move_back(header, cluster, (word)frame))
		return;
	if (handler == 1 && is_sent)
		return;
	pass_on(action, signal, info, frame);
	none.handler = none.flags = none.restorer = none.mask = 0;
	call(SYS_RT_SIGACTION, signal, (long)&none, 0, 8);
	if (is_sent) {
		process = call(SYS_GETPID, 0, 0, 0, 0);
		thread = call(SYS_GETTID, 0, 0, 0, 0);
		call(SYS_TGKILL, process, thread, signal, 0);
	}
}

/* Where the parts are, for the host. */
extern const char __start_elfen_inside[] __attribute__((visibility("hidden")));
extern const char __stop_elfen_inside[] __attribute__((visibility("hidden")));
extern const char elfen_inside_on_change[] __attribute__((visibility("hidden")));
extern const char elfen_inside_on_sigaction[] __attribute__((visibility("hidden")));

void elfen_inside_parts(word parts[8])
{
	parts[0] = (word)__start_elfen_inside;
	parts[1] = (word)__stop_elfen_inside;
	parts[2] = (word)&elfen_inside_header;
	parts[3] = (word)elfen_inside_on_tick;
	parts[4] = (word)elfen_inside_on_fault;
	parts[5] = (word)elfen_inside_restore;
	parts[6] = (word)elfen_inside_on_change;
	parts[7] = (word)elfen_inside_on_sigaction;
}
