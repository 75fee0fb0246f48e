// SPDX-License-Identifier: GPL-2.0-only
/*
 * The nap: a thread gives its lane's resources to the sibling and keeps the lane.
 *
 * Preemption is off, so nothing else is scheduled here; interrupts are on, so everything that needs
 * this CPU gets it: each one ends the wait, and the thread looks whether it is wanted elsewhere.
 * The order is arm, re-check, wait. The published nanonap (the thesis's Figure 5.6) waits without
 * the re-check, and sleeps through a wake-up that came before it armed: kernel/vm builds that order
 * from this file too, to show that its tests would notice.
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

static char *wait = "mwait";
module_param(wait, charp, 0444);
MODULE_PARM_DESC(wait, "How a nap waits: mwait; or spin, for tests on machines without MWAIT");

static unsigned int hint;
module_param(hint, uint, 0444);
MODULE_PARM_DESC(hint, "MWAIT's hint, as in CPUID leaf 5: C-state and sub-state; 0x00 is C1");

/* Everything here is written by its own CPU with preemption off. */
struct napper {
	struct hrtimer timer;
	bool bound_passed;
	u64 armed_word; /* nap_word when armed */
	u64 naps;
	u64 napped_ns;
	u64 waits;
	u64 woke[NANONAP_WOKE_REASONS];
};
static DEFINE_PER_CPU(struct napper, nappers);

static u32 wait_kind;

u32 nap_wait_kind(void)
{
	return wait_kind;
}

u32 nap_hint(void)
{
	return hint;
}

/* The timer interrupt itself ends the wait. Pinned: a lane without a tick keeps its bound too. */
static enum hrtimer_restart pass_bound(struct hrtimer *timer)
{
	WRITE_ONCE(container_of(timer, struct napper, timer)->bound_passed, true);
	return HRTIMER_NORESTART;
}

static bool wanted_by_scheduler(void)
{
#ifdef TIF_NEED_RESCHED_LAZY
	if (test_thread_flag(TIF_NEED_RESCHED_LAZY))
		return true;
#endif
	return need_resched();
}

static bool wanted_in_user_space(void)
{
	return signal_pending(current) || test_thread_flag(TIF_NOTIFY_RESUME);
}

/* 0: go on. */
static int why_wake(const struct napper *napper, const struct nanonap_nap *request)
{
	if (map_idle_since(request->request_cpu, request->seen_switches))
		return NANONAP_WOKE_IDLE;
	if (wanted_by_scheduler())
		return NANONAP_WOKE_RESCHED;
	if (wanted_in_user_space())
		return NANONAP_WOKE_SIGNAL;
	return READ_ONCE(napper->bound_passed) ? NANONAP_WOKE_BOUND : 0;
}

static void arm_mwait(const u64 *word)
{
#ifdef NANONAP_HAVE_IDLE_CLEAR
	/*
	 * Stale buffers must not pass to the sibling. Where the header lacks this, __sti_mwait()
	 * does it.
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

/* As MWAIT would: until the word is written or an interrupt has brought something. */
static void wait_spin(const struct napper *napper, const u64 *word)
{
	while (READ_ONCE(*word) == napper->armed_word && !wanted_by_scheduler() &&
	       !wanted_in_user_space() && !READ_ONCE(napper->bound_passed))
		cpu_relax();
}

/*
 * Interrupts are off from arming to waiting. One that came between the re-check and MWAIT would
 * have its say unheard until the next; so it stays pending instead, and ends MWAIT, which starts in
 * the shadow of STI.
 *
 * raw_: interrupt tracing and lockdep need not follow; nothing here takes a lock.
 */
static int arm_check_wait(struct napper *napper, const struct nanonap_nap *request)
{
	const u64 *word = &this_cpu_ptr(&wake_words)->nap_word;
	int why;

	raw_local_irq_disable();
	if (wait_kind == NANONAP_WAIT_MWAIT)
		arm_mwait(word);
	napper->armed_word = READ_ONCE(*word);
	/* The re-check's loads come after; pairs with the smp_wmb() in wake_siblings(). */
	smp_rmb();
	why = why_wake(napper, request);
	if (why) {
		raw_local_irq_enable();
		return why;
	}
	napper->waits++;
	if (wait_kind == NANONAP_WAIT_SPIN) {
		raw_local_irq_enable();
		wait_spin(napper, word);
	} else {
		__sti_mwait(hint, 0);
	}
	/*
	 * The word was not written since the lane was seen busy: it is the bound that passed, and
	 * no wake-up was lost.
	 */
	if (READ_ONCE(napper->bound_passed) && READ_ONCE(*word) == napper->armed_word)
		return NANONAP_WOKE_BOUND;
	return 0; /* look again */
}

static int wait_on_lane(struct napper *napper, const struct nanonap_nap *request)
{
	int why;

	napper->bound_passed = false;
	hrtimer_start(&napper->timer, ns_to_ktime(request->bound_ns), HRTIMER_MODE_REL_PINNED_HARD);
	do {
		why = arm_check_wait(napper, request);
	} while (!why);
	hrtimer_cancel(&napper->timer);
	return why;
}

/* NANONAP_WOKE_*, or a negative errno. */
int nap(const struct nanonap_nap *request)
{
	struct napper *napper;
	u64 began_ns;
	int why = -ENXIO;

	if (wait_kind == NANONAP_WAIT_NONE)
		return -EOPNOTSUPP;
	preempt_disable();
	if (!pairs_tied(request->request_cpu, smp_processor_id()))
		goto out;
	napper = this_cpu_ptr(&nappers);
	began_ns = ktime_get_mono_fast_ns();
	why = wait_on_lane(napper, request);
	WRITE_ONCE(napper->naps, napper->naps + 1);
	WRITE_ONCE(napper->woke[why], napper->woke[why] + 1);
	WRITE_ONCE(napper->napped_ns, napper->napped_ns + ktime_get_mono_fast_ns() - began_ns);
out:
	preempt_enable();
	return why;
}

void nap_add_stats(unsigned int cpu, struct nanonap_stats *sum)
{
	const struct napper *napper = per_cpu_ptr(&nappers, cpu);
	int why;

	sum->naps += READ_ONCE(napper->naps);
	sum->napped_ns += READ_ONCE(napper->napped_ns);
	sum->waits += READ_ONCE(napper->waits);
	for (why = 0; why < NANONAP_WOKE_REASONS; why++)
		sum->woke[why] += READ_ONCE(napper->woke[why]);
}

static bool mwait_works(void)
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

/* CPUID leaf 5 EDX: four bits a C-state, the number of its sub-states. */
static bool hint_works(void)
{
	unsigned int state = ((hint >> 4) + 1) & 0xf;
	unsigned int substates = state > 7 ? 0 : cpuid_edx(5) >> (4 * state) & 0xf;

	if (!hint)
		return true;
	/* Deeper than C1 the timer that keeps the bound may stop. */
	return hint <= 0xff && (hint & 0xf) < substates &&
	       (state == 1 || boot_cpu_has(X86_FEATURE_ARAT));
}

static int choose_wait(void)
{
	if (sysfs_streq(wait, "spin")) {
		wait_kind = NANONAP_WAIT_SPIN;
		return 0;
	}
	if (!sysfs_streq(wait, "mwait")) {
		pr_err("wait=%s: mwait or spin\n", wait);
		return -EINVAL;
	}
	if (!mwait_works())
		return 0;
	if (!hint_works()) {
		pr_err("hint=%#x: not a C-state of this CPU\n", hint);
		return -EINVAL;
	}
	wait_kind = NANONAP_WAIT_MWAIT;
	return 0;
}

int nap_init(void)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		struct hrtimer *timer = &per_cpu_ptr(&nappers, cpu)->timer;

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
		hrtimer_setup(timer, pass_bound, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_HARD);
#else
		hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_HARD);
		timer->function = pass_bound;
#endif
	}
	return choose_wait();
}
