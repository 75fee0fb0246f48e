/*
 * Requests the pages of its lane from elfend, maps the writable pages, and keeps overwriting them.
 * Arguments: the socket, and the word to write ("hotplug", "critical", "policy", "ipc"), or "junk"
 * for random values in all words. Prints a line for each page that it can write.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include "elfen_abi.h"

#define PAGES 32
#define WORD(field) \
	((sizeof(struct elfen_page_header) + __builtin_offsetof(struct elfen_lane_slot, field)) / 8)

static volatile elfen_u64 *pages[PAGES];
static elfen_u64 words[PAGES];

static int ask(const char *path, int *fds)
{
	static const char request[] = "{\"do\":\"pages\"}";
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(PAGES * sizeof(int))];
	} rights;
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char text[256];
	struct iovec part = { text, sizeof(text) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights,
				  .msg_controllen = sizeof(rights) };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	struct cmsghdr *header;
	size_t bytes;

	strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
	    send(fd, request, sizeof(request) - 1, 0) < 0 || recvmsg(fd, &message, 0) < 0)
		return -1;
	header = CMSG_FIRSTHDR(&message);
	if (!header || header->cmsg_type != SCM_RIGHTS)
		return -1;
	bytes = header->cmsg_len - CMSG_LEN(0);
	memcpy(fds, CMSG_DATA(header), bytes);
	return bytes / sizeof(int);
}

static void map(int fd)
{
	static int next;
	struct stat stat;
	size_t bytes;
	void *page;

	if (fstat(fd, &stat))
		return;
	/* An eBPF map reports size 0. One page of it is enough for the attempt. */
	bytes = stat.st_size ? stat.st_size : 4096;
	page = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		return;
	pages[next] = page;
	words[next++] = bytes / 8;
	printf("can write a page of %ld bytes\n", (long)stat.st_size);
}

int main(int argc, char **argv)
{
	static const elfen_u64 extremes[] = { 0, 1, 2, 3, ~0ULL, 1ULL << 63 };
	elfen_u64 random = 88172645463325252ULL, round;
	int fds[PAGES], count, at;

	count = argc > 2 ? ask(argv[1], fds) : -1;
	if (count < 0)
		return 9;
	for (at = 0; at < count; at++)
		map(fds[at]);
	puts("ready");
	fflush(stdout);
	for (round = 1;; round++) {
		volatile elfen_u64 *page;

		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		for (at = 0; at < PAGES && pages[at]; at++) {
			page = pages[at];
			if (!strcmp(argv[2], "hotplug")) {
				page[WORD(hotplug)] = 1 + round / 100000 % 3;
			} else if (!strcmp(argv[2], "critical")) {
				page[WORD(critical)] = round;
			} else if (!strcmp(argv[2], "policy")) {
				page[WORD(policy_state)] = 2;
				page[WORD(policy_state[1])] = ~0ULL;
				page[WORD(policy_state[2])] = 0;
				page[WORD(policy_state[3])] = 1;
			} else if (!strcmp(argv[2], "ipc")) {
				page[WORD(ipc_milli)] = ~0ULL;
				page[WORD(ipc_since_ns)] = ~0ULL;
				page[WORD(ipc_until_ns)] = ~0ULL;
			} else {
				page[random % words[at]] =
				    round % 3 ? extremes[round % 6] : round;
				page[WORD(state) + (random >> 32) % 32] =
				    round % 5 ? extremes[round % 6] : random;
			}
		}
	}
}
