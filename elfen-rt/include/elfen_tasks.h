/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The task map in C and C++: which task runs on every CPU. elfend hands it out. elfen.h includes
 * this file.
 */
#ifndef ELFEN_TASKS_H
#define ELFEN_TASKS_H

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#ifndef ELFEN_SOCKET
#define ELFEN_SOCKET "/run/elfen/elfend.sock"
#endif

/* The mapped task map. `link` keeps the eBPF program attached: the map is live while it is open. */
struct elfen_tasks {
	struct elfen_page_header *page;
	struct elfen_watch_slot *watch;
	elfen_u32 cpus;
	int link;
};

/*
 * Requests the map, its leases and the link from elfend. Returns 0, or -1 with errno, which is
 * EACCES if elfend refuses.
 */
static inline int elfen_tasks_ask(int given[3])
{
	static const char request[] = "{\"do\":\"tasks\"}";
	const size_t room = CMSG_SPACE(3 * sizeof(int)), length = CMSG_LEN(3 * sizeof(int));
	const struct timeval patience = { 2, 0 };
	union { struct cmsghdr header; char bytes[CMSG_SPACE(3 * sizeof(int))]; } rights;
	struct sockaddr_un address;
	struct msghdr message;
	char text[64];
	struct iovec part = { text, sizeof(text) };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), failed;

	if (fd < 0)
		return -1;
	memset(&address, 0, sizeof(address));
	memset(&message, 0, sizeof(message));
	address.sun_family = AF_UNIX;
	memcpy(address.sun_path, ELFEN_SOCKET, sizeof(ELFEN_SOCKET));
	message.msg_iov = &part;
	message.msg_iovlen = 1;
	message.msg_control = &rights;
	message.msg_controllen = room;
	failed = setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) ||
		 setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) ||
		 connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
		 send(fd, request, sizeof(request) - 1, MSG_NOSIGNAL) < 0 ||
		 recvmsg(fd, &message, MSG_CMSG_CLOEXEC) < 0 ? errno : 0;
	close(fd);
	if (!failed && (message.msg_controllen < length || rights.header.cmsg_len != length))
		failed = EACCES;
	errno = failed;
	if (!failed)
		memcpy(given, CMSG_DATA(&rights.header), 3 * sizeof(int));
	return failed ? -1 : 0;
}

/* Maps the start of an array map. The kernel refuses to map more than the array has. */
static inline void *elfen_map(int fd, size_t size, int protection)
{
	void *at = mmap(NULL, size, protection, MAP_SHARED, fd, 0);

	return at == MAP_FAILED ? NULL : at;
}

static inline void elfen_tasks_close(struct elfen_tasks *tasks)
{
	if (tasks->page)
		munmap(tasks->page, (tasks->cpus + 1) * sizeof(struct elfen_task_slot));
	if (tasks->watch)
		munmap(tasks->watch, tasks->cpus * sizeof(struct elfen_watch_slot));
	if (tasks->link >= 0)
		close(tasks->link);
	memset(tasks, 0, sizeof(*tasks));
	tasks->link = -1;
}

/* Opens elfend's task map. Requires root or the group elfen. */
static inline enum elfen_status elfen_tasks_open(struct elfen_tasks *tasks,
						 struct elfen_error *error)
{
	const elfen_u32 slot = sizeof(struct elfen_task_slot);
	int given[3];
	void *header;

	memset(tasks, 0, sizeof(*tasks));
	tasks->link = -1;
	if (elfen_tasks_ask(given))
		return elfen_fail(error, ELFEN_SYSTEM, (elfen_u64)errno, 0);
	tasks->link = given[2];
	header = elfen_map(given[0], sizeof(struct elfen_page_header), PROT_READ);
	/* Mapping verifies the length in the header: the kernel refuses to map too much. */
	if (header && !elfen_page_check((struct elfen_page_header *)header,
					(ELFEN_SLOTS_MAX + 1) * (size_t)slot,
					ELFEN_MAGIC_TASK, slot, error)) {
		tasks->cpus = (elfen_u32)error->found;
		tasks->page = (struct elfen_page_header *)elfen_map(
			given[0], (tasks->cpus + 1) * (size_t)slot, PROT_READ);
		tasks->watch = (struct elfen_watch_slot *)elfen_map(
			given[1], tasks->cpus * sizeof(*tasks->watch), PROT_READ | PROT_WRITE);
	}
	if (!header || (tasks->cpus && (!tasks->page || !tasks->watch)))
		elfen_fail(error, ELFEN_SYSTEM, (elfen_u64)errno, 0);
	if (header)
		munmap(header, sizeof(struct elfen_page_header));
	close(given[0]);
	close(given[1]);
	if (error->status != ELFEN_OK)
		elfen_tasks_close(tasks);
	return error->status;
}

static inline const struct elfen_task_slot *elfen_task_at(const struct elfen_tasks *tasks,
							  elfen_u32 cpu)
{
	return cpu < tasks->cpus ? (const struct elfen_task_slot *)(tasks->page + 1) + cpu : NULL;
}

/* `tgid << 32 | tid` of the task that runs on `cpu`; 0 if the CPU idles or does not exist. */
static inline elfen_u64 elfen_task(const struct elfen_tasks *tasks, elfen_u32 cpu)
{
	const struct elfen_task_slot *slot = elfen_task_at(tasks, cpu);

	return slot ? ELFEN_LOAD(slot->task) : 0;
}

/* Has the switches of `cpu` timed for ELFEN_LEASE_NS. Call it every second. */
static inline void elfen_task_watch(struct elfen_tasks *tasks, elfen_u32 cpu)
{
	if (cpu < tasks->cpus)
		__atomic_fetch_add(&tasks->watch[cpu].renewals, 1, __ATOMIC_RELAXED);
}

#endif
