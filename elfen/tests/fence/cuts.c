/* Requests the pages of elfend, tries to damage each, and prints the error numbers. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MOST 18

static int failed(long done)
{
	return done < 0 ? errno : 0;
}

int main(int argc, char **argv)
{
	static const char request[] = "{\"do\":\"pages\"}";
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(MOST * sizeof(int))];
	} rights;
	char text[64];
	struct iovec part = { text, sizeof(text) };
	struct msghdr message = { .msg_iov = &part,
				  .msg_iovlen = 1,
				  .msg_control = &rights,
				  .msg_controllen = sizeof(rights) };
	const int asks = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	size_t count, each;
	int files[MOST];

	strncpy(at.sun_path, argv[argc - 1], sizeof(at.sun_path) - 1);
	if (connect(asks, (struct sockaddr *)&at, sizeof(at)) ||
	    send(asks, request, strlen(request), 0) < 0 || recvmsg(asks, &message, 0) <= 0 ||
	    !CMSG_FIRSTHDR(&message))
		return 9;
	count = (rights.header.cmsg_len - CMSG_LEN(0)) / sizeof(int);
	memcpy(files, CMSG_DATA(&rights.header), count * sizeof(int));
	for (each = 0; each < count; each++) {
		void *page;

		/* The task map and the link are not memory files, so they have no seals to test. */
		if (fcntl(files[each], F_GET_SEALS) < 0)
			continue;
		page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, files[each], 0);
		printf("write %d", page == MAP_FAILED ? errno : 0);
		printf(", cut %d", failed(ftruncate(files[each], 0)));
		printf(", lengthen %d", failed(ftruncate(files[each], 1 << 20)));
		printf(", seal %d\n", failed(fcntl(files[each], F_ADD_SEALS, F_SEAL_WRITE)));
	}
	return 0;
}
