/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The C side of tests/header.rs: Rust reads pages that this program writes, and vice versa. */
#include "elfen.h"
#include "elfen_tag.h"
#include <sys/wait.h>

#define FIELDS(name, ...) \
	static const size_t name[] = { __VA_ARGS__ }
#define AT(type, field) __builtin_offsetof(struct type, field) / 8

/* The 64-bit words of each slot in the order of their names in the test. */
FIELDS(task_words, AT(elfen_task_slot, task), AT(elfen_task_slot, switched_at_ns),
       AT(elfen_task_slot, switches), AT(elfen_task_slot, switches_begun),
       AT(elfen_task_slot, busy_ns), AT(elfen_task_slot, busy_since_ns));
FIELDS(lane_words, AT(elfen_lane_slot, state), AT(elfen_lane_slot, state_since_ns),
       AT(elfen_lane_slot, batch_cpu), AT(elfen_lane_slot, request_cpu),
       AT(elfen_lane_slot, naps), AT(elfen_lane_slot, borrowed_ns),
       AT(elfen_lane_slot, overlapped_ns), AT(elfen_lane_slot, napped_ns),
       AT(elfen_lane_slot, policy_state), AT(elfen_lane_slot, policy_state[3]),
       AT(elfen_lane_slot, counted_ran_ns), AT(elfen_lane_slot, counted_shared_ns),
       AT(elfen_lane_slot, wakes), AT(elfen_lane_slot, hotplug),
       AT(elfen_lane_slot, ipc_milli), AT(elfen_lane_slot, ipc_since_ns),
       AT(elfen_lane_slot, ipc_until_ns), AT(elfen_lane_slot, critical),
       AT(elfen_lane_slot, account_claim), AT(elfen_lane_slot, account_index),
       AT(elfen_lane_slot, check_nap), AT(elfen_lane_slot, guard_nap),
       AT(elfen_lane_slot, reaction.max_ns), AT(elfen_lane_slot, wake.max_ns));
FIELDS(control_words, AT(elfen_control_slot, generation), AT(elfen_control_slot, generation_begun),
       AT(elfen_control_slot, policy), AT(elfen_control_slot, budget_ns),
       AT(elfen_control_slot, budget_until_ns), AT(elfen_control_slot, slo_latency_ns),
       AT(elfen_control_slot, slo_per_million), AT(elfen_control_slot, ref_ipc_milli));
FIELDS(thread_words, AT(elfen_thread_slot, words.value), AT(elfen_thread_slot, words.calls),
       AT(elfen_thread_slot, words.instructions), AT(elfen_thread_slot, words.cycles),
       AT(elfen_thread_slot, thread), AT(elfen_thread_slot, claims),
       AT(elfen_thread_slot, refused), AT(elfen_thread_slot, entries),
       AT(elfen_thread_slot, ambiguous), AT(elfen_thread_slot, returns),
       AT(elfen_thread_slot, counting), AT(elfen_thread_slot, uncounted));

struct channel {
	const char *name;
	elfen_u64 magic;
	size_t slot_size, count;
	const size_t *words;
};
#define CHANNEL(name, magic) \
	{ #name, magic, sizeof(struct elfen_##name##_slot), \
	  sizeof(name##_words) / sizeof(size_t), name##_words }
static const struct channel channels[] = {
	CHANNEL(task, ELFEN_MAGIC_TASK),
	CHANNEL(lane, ELFEN_MAGIC_LANE),
	CHANNEL(control, ELFEN_MAGIC_CONTROL),
	CHANNEL(thread, ELFEN_MAGIC_THREAD),
};

static elfen_u64 page[4096 / 8 * 4] ELFEN_ALIGNED;

/* Writes a page with one slot to stdout, with the given values in its words. */
static int emit(const struct channel *channel, char **values)
{
	struct elfen_page_header *header = (struct elfen_page_header *)page;
	size_t i, size = sizeof(*header) + channel->slot_size;

	header->magic = channel->magic;
	header->version = ELFEN_ABI_VERSION;
	header->slot_count = 1;
	header->size = size;
	header->slot_size = (elfen_u32)channel->slot_size;
	for (i = 0; i < channel->count; i++)
		page[16 + channel->words[i]] = strtoull(values[i], NULL, 10);
	return fwrite(page, 1, size, stdout) == size ? 0 : 1;
}

/* Reads a page with one slot from stdin and prints its words. */
static int show(const struct channel *channel)
{
	struct elfen_error error;
	size_t i, size = fread(page, 1, sizeof(page), stdin);
	char line[128];

	if (elfen_page_check((struct elfen_page_header *)page, size, channel->magic,
			     (elfen_u32)channel->slot_size, &error)) {
		elfen_explain(&error, line, sizeof(line));
		printf("%s\n", line);
		return 1;
	}
	for (i = 0; i < channel->count; i++)
		printf("%llu ", (unsigned long long)page[16 + channel->words[i]]);
	return 0;
}

static int refuse(const struct elfen_error *error)
{
	char line[128];

	elfen_explain(error, line, sizeof(line));
	printf("refused %d %s\n", (int)error->status, line);
	fflush(stdout);
	return 1;
}

/*
 * Serves lane 1 of 2: three finished requests and one that runs until stdin ends. Then ends that
 * request and releases the slot.
 */
static int serve(const char *name)
{
	struct elfen_service service;
	struct elfen_service_slot *slot;
	struct elfen_error error;
	int i;

	if (elfen_service_open(&service, name, 2, &error) ||
	    elfen_service_claim(&service, 1, 3, &error))
		return refuse(&error);
	slot = elfen_service_at(&service, 1);
	for (i = 0; i < 3; i++) {
		elfen_service_begin(slot, 16, elfen_now_ns() - 1000000000u);
		elfen_service_class(slot, 9);
		elfen_service_stage(slot, 2);
		elfen_service_end(slot);
	}
	elfen_service_stage(slot, 3); /* no request runs: no stage is marked */
	elfen_service_end(slot);      /* and no end */
	elfen_service_queue(&service, 1, 5);
	elfen_service_begin(slot, 17, 123456);
	elfen_service_count(slot, 900, 1000);
	printf("serving\n");
	fflush(stdout);
	while (getchar() != EOF)
		;
	elfen_service_end(slot);
	elfen_service_release(slot);
	elfen_service_close(&service);
	return 0;
}

/* Prints the words of a service with one lane. */
static int read_service(const char *name)
{
	struct elfen_service service;
	struct elfen_service_slot *slot;
	struct elfen_error error;

	if (elfen_service_open(&service, name, 1, &error))
		return refuse(&error);
	slot = elfen_service_at(&service, 0);
	printf("%d %llu %llu %llu %llu %d", (int)(ELFEN_LOAD(slot->writer) >> 42),
	       (unsigned long long)ELFEN_LOAD(slot->cpu),
	       (unsigned long long)ELFEN_LOAD(slot->queue_len),
	       (unsigned long long)ELFEN_LOAD(slot->running_request),
	       (unsigned long long)ELFEN_LOAD(slot->finished_requests),
	       ELFEN_LOAD(slot->latency.max_ns) >= 1000000000u);
	return 0;
}

/*
 * Prints an account with a task that still runs: 100 ns before, 50 of them shared; the task runs
 * since 1000, when the request lane had been busy for 40 in total.
 */
static int account(void)
{
	struct elfen_account account;
	elfen_u64 words[sizeof(account) / 8];
	size_t i;

	memset(&account, 0, sizeof(account));
	account.claim = (elfen_u64)ELFEN_CLAIM_SELF << 32 | 7;
	account.begun = account.done = 3;
	account.ran_ns = 100;
	account.shared_ns = 50;
	account.since_ns = 1000;
	account.busy_at_ns = 40;
	memcpy(words, &account, sizeof(account));
	for (i = 0; i < sizeof(words) / sizeof(words[0]); i++)
		printf("%s%llu", i ? " " : "", (unsigned long long)words[i]);
	return 0;
}

/*
 * Publishes a tag and a value in the parent, and others in its child. Prints the ids and tags of
 * both.
 */
static int tags(void)
{
	elfen_u32 outer, inner;
	pid_t child;

	elfen_tag("outer");
	elfen_value(1);
	outer = elfen_tag_now();
	fflush(stdout);
	child = fork();
	if (child == 0) {
		inner = elfen_tag("inner");
		elfen_value(2);
		if (inner != 0)
			_exit(1); /* a new slot begins without a tag */
		printf("%u", elfen_tag_now());
		fflush(stdout);
		_exit(0);
	}
	if (child < 0 || waitpid(child, NULL, 0) != child)
		return 1;
	printf(" %d %d %u", (int)getpid(), (int)child, outer);
	return elfen_tag_now() != outer;
}

int main(int argc, char **argv)
{
	size_t i;

	if (argc == 2 && !strcmp(argv[1], "tags"))
		return tags();

	if (argc == 2 && !strcmp(argv[1], "account"))
		return account();

	if (argc == 2 && !strcmp(argv[1], "lease"))
		return printf("%llu", ELFEN_LEASE_NS) < 0;
	if (argc == 3 && !strcmp(argv[1], "serve"))
		return serve(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "read"))
		return read_service(argv[2]);
	for (i = 0; argc > 2 && i < sizeof(channels) / sizeof(channels[0]); i++) {
		if (strcmp(argv[2], channels[i].name))
			continue;
		if (!strcmp(argv[1], "show"))
			return show(&channels[i]);
		if (!strcmp(argv[1], "emit") && (size_t)argc == 3 + channels[i].count)
			return emit(&channels[i], argv + 3);
	}
	return 2;
}
