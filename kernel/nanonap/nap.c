// SPDX-License-Identifier: GPL-2.0-only
/*
 * The nap: a thread leaves its core's resources to the sibling and stays on its lane.
 *
 * Preemption is off during a nap, so no other task is scheduled here. Interrupts are on. Each
 * interrupt ends the wait, and the thread checks whether the nap must end.
 *
 * The order is arm, re-check, wait. The nanonap of the thesis (Figure 5.6) waits without the
 * re-check, and sleeps through a wake-up that came before it armed. kernel/vm also builds that
 * order from this file, to show that its tests detect the error.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/hrtimer.h>
#include <linux/moduleparam.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/string.h>
#include <linux/timekeeping.h>
#include <linux/version.h>
#include <asm/cpufeature.h>
#if __has_include(<asm/cpuid/api.h>)
#include <asm/cpuid/api.h>
#endif
#include <asm/mwait.h>
#include <asm/nospec-branch.h>

#include "module.h"

static char *nanonap_wait = "mwait";
module_param_named(wait, nanonap_wait, charp, 0444);
MODULE_PARM_DESC(wait, "How a nap waits: mwait; or spin, for tests on machines without MWAIT");

static unsigned int nanonap_hint;
module_param_named(hint, nanonap_hint, uint, 0444);
MODULE_PARM_DESC(hint, "MWAIT's hint, as in CPUID leaf 5: C-state and sub-state; 0x00 is C1");

/* Only the CPU itself writes this, with preemption off. */
struct nanonap_napper {
	struct hrtimer timer;
	bool bound_passed;
	u64 armed_word; /* nap_word when armed */
	u64 naps;
	u64 napped_ns;
	u64 waits;
	u64 woke[NANONAP_WOKE_REASONS];
};
static DEFINE_PER_CPU(struct nanonap_napper, nanonap_nappers);

static u32 nanonap_kind;

u32 nanonap_wait_kind(void)
{
	return nanonap_kind;
}

u32 nanonap_mwait_hint(void)
{
	return nanonap_hint;
}

/* The timer's interrupt ends the wait. The timer is pinned, so it also works without a tick. */
static enum hrtimer_restart nanonap_pass_bound(struct hrtimer *timer)
{
	WRITE_ONCE(container_of(timer, struct nanonap_napper, timer)->bound_passed, true);
	return HRTIMER_NORESTART;
}

static bool nanonap_wanted_by_scheduler(void)
{
#ifdef TIF_NEED_RESCHED_LAZY
	if (test_thread_flag(TIF_NEED_RESCHED_LAZY))
		return true;
#endif
	return need_resched();
}

static bool nanonap_wanted_in_user_space(void)
{
	return signal_pending(current) || test_thread_flag(TIF_NOTIFY_RESUME);
}

/* Returns why the nap must end, or 0 if it goes on. */
static int nanonap_why_wake(const struct nanonap_napper *napper, const struct nanonap_nap *request)
{
	if (nanonap_map_idle_since(request->request_cpu, request->seen_switches))
		return NANONAP_WOKE_IDLE;
	if (nanonap_wanted_by_scheduler())
		return NANONAP_WOKE_RESCHED;
	if (nanonap_wanted_in_user_space())
		return NANONAP_WOKE_SIGNAL;
	return READ_ONCE(napper->bound_passed) ? NANONAP_WOKE_BOUND : 0;
}

static void nanonap_arm_mwait(const u64 *word)
{
#ifdef NANONAP_HAVE_IDLE_CLEAR
	/*
	 * Clears CPU buffers, whose contents must not leak to the sibling. On kernels without this
	 * function, __sti_mwait() clears them.
	 */
	x86_idle_clear_cpu_buffers();
#endif
	if (boot_cpu_has_bug(X86_BUG_CLFLUSH_MONITOR)) {
		mb();
		clflush((void *)word);
		mb();
	}
	__monitor(word, 0, 0);
}

/* Emulates MWAIT: spins until the word is written or an interrupt requires the thread. */
static void nanonap_wait_spin(const struct nanonap_napper *napper, const u64 *word)
{
	while (READ_ONCE(*word) == napper->armed_word && !nanonap_wanted_by_scheduler() &&
	       !nanonap_wanted_in_user_space() && !READ_ONCE(napper->bound_passed))
		cpu_relax();
}

/*
 * Interrupts are off from arming to waiting. Otherwise an interrupt between the re-check and MWAIT
 * would not be noticed until the next one. With interrupts off it stays pending, and ends MWAIT,
 * which starts in the shadow of STI.
 *
 * The raw_ variants suffice: nothing here takes a lock, so interrupt tracing and lockdep need not
 * know.
 */
static int nanonap_arm_check_wait(struct nanonap_napper *napper, const struct nanonap_nap *request)
{
	const u64 *word = &this_cpu_ptr(&nanonap_wake_words)->nap_word;
	int why;

	raw_local_irq_disable();
	if (nanonap_kind == NANONAP_WAIT_MWAIT)
		nanonap_arm_mwait(word);
	napper->armed_word = READ_ONCE(*word);
	/* The re-check loads after this. Pairs with the smp_wmb() in nanonap_wake_siblings(). */
	smp_rmb();
	why = nanonap_why_wake(napper, request);
	if (why) {
		raw_local_irq_enable();
		return why;
	}
	napper->waits++;
	if (nanonap_kind == NANONAP_WAIT_SPIN) {
		raw_local_irq_enable();
		nanonap_wait_spin(napper, word);
	} else {
		__sti_mwait(nanonap_hint, 0);
	}
	/*
	 * If the word was not written since the lane was seen busy, then the bound ended the wait,
	 * and no wake-up was lost.
	 */
	if (READ_ONCE(napper->bound_passed) && READ_ONCE(*word) == napper->armed_word)
		return NANONAP_WOKE_BOUND;
	return 0; /* look again */
}

static int nanonap_wait_on_lane(struct nanonap_napper *napper, const struct nanonap_nap *request)
{
	int why;

	napper->bound_passed = false;
	hrtimer_start(&napper->timer, ns_to_ktime(request->bound_ns), HRTIMER_MODE_REL_PINNED_HARD);
	do {
		why = nanonap_arm_check_wait(napper, request);
	} while (!why);
	hrtimer_cancel(&napper->timer);
	return why;
}

/* Naps; returns NANONAP_WOKE_*, or a negative errno. */
int nanonap_nap(const struct nanonap_nap *request)
{
	struct nanonap_napper *napper;
	u64 began_ns;
	int why = -ENXIO;

	if (nanonap_kind == NANONAP_WAIT_NONE)
		return -EOPNOTSUPP;
	preempt_disable();
	if (!nanonap_pairs_tied(request->request_cpu, smp_processor_id()))
		goto out;
	napper = this_cpu_ptr(&nanonap_nappers);
	began_ns = ktime_get_mono_fast_ns();
	why = nanonap_wait_on_lane(napper, request);
	WRITE_ONCE(napper->naps, napper->naps + 1);
	WRITE_ONCE(napper->woke[why], napper->woke[why] + 1);
	WRITE_ONCE(napper->napped_ns, napper->napped_ns + ktime_get_mono_fast_ns() - began_ns);
out:
	preempt_enable();
	return why;
}

void nanonap_add_stats(unsigned int cpu, struct nanonap_stats *sum)
{
	const struct nanonap_napper *napper = per_cpu_ptr(&nanonap_nappers, cpu);
	int why;

	sum->naps += READ_ONCE(napper->naps);
	sum->napped_ns += READ_ONCE(napper->napped_ns);
	sum->waits += READ_ONCE(napper->waits);
	for (why = 0; why < NANONAP_WOKE_REASONS; why++)
		sum->woke[why] += READ_ONCE(napper->woke[why]);
}

static bool nanonap_mwait_works(void)
{
	if (!boot_cpu_has(X86_FEATURE_MWAIT)) {
		pr_info("this CPU has no MONITOR/MWAIT: naps are refused\n");
		return false;
	}
	if (boot_cpu_has_bug(X86_BUG_MONITOR)) {
		pr_info("on this CPU a store does not end MWAIT (an erratum): naps are refused\n");
		return false;
	}
	return true;
}

/* CPUID leaf 5 EDX has four bits for each C-state: the number of its sub-states. */
static bool nanonap_hint_works(void)
{
	unsigned int state = ((nanonap_hint >> 4) + 1) & 0xf;
	unsigned int substates = state > 7 ? 0 : cpuid_edx(5) >> (4 * state) & 0xf;

	if (!nanonap_hint)
		return true;
	/* In states deeper than C1, the timer that ends the nap at its bound may stop. */
	return nanonap_hint <= 0xff && (nanonap_hint & 0xf) < substates &&
	       (state == 1 || boot_cpu_has(X86_FEATURE_ARAT));
}

static int nanonap_choose_wait(void)
{
	if (sysfs_streq(nanonap_wait, "spin")) {
		nanonap_kind = NANONAP_WAIT_SPIN;
		return 0;
	}
	if (!sysfs_streq(nanonap_wait, "mwait")) {
		pr_err("wait=%s: mwait or spin\n", nanonap_wait);
		return -EINVAL;
	}
	if (!nanonap_mwait_works())
		return 0;
	if (!nanonap_hint_works()) {
		pr_err("hint=%#x: not a C-state of this CPU\n", nanonap_hint);
		return -EINVAL;
	}
	nanonap_kind = NANONAP_WAIT_MWAIT;
	return 0;
}

int nanonap_nap_init(void)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		struct hrtimer *timer = &per_cpu_ptr(&nanonap_nappers, cpu)->timer;

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
		hrtimer_setup(timer, nanonap_pass_bound, CLOCK_MONOTONIC,
			      HRTIMER_MODE_REL_PINNED_HARD);
#else
		hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_HARD);
		timer->function = nanonap_pass_bound;
#endif
	}
	return nanonap_choose_wait();
}
