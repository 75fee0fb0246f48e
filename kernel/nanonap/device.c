// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/nanonap. This file checks every argument from user space.
 *
 * An open file holds the module, a mapping holds its file, and a nap runs inside a call on its
 * file. So the module can be removed only when no process naps, reads or watches. All requests of a
 * process end when its files are closed.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/stringify.h>
#include <linux/uaccess.h>

#include "module.h"

#ifndef CONFIG_X86_64
#error "nanonap waits with MONITOR/MWAIT and shares 64-bit words: x86-64 alone"
#endif

/* One open file. */
struct nanonap_session {
	bool greeted;
	unsigned long watched[]; /* a bit for each CPU, so that a file counts only once */
};

static int nanonap_open(struct inode *inode, struct file *file)
{
	struct nanonap_session *session;

	session = kzalloc(struct_size(session, watched, BITS_TO_LONGS(nr_cpu_ids)),
			  GFP_KERNEL_ACCOUNT);
	if (!session)
		return -ENOMEM;
	file->private_data = session;
	return 0;
}

static int nanonap_release(struct inode *inode, struct file *file)
{
	struct nanonap_session *session = file->private_data;
	unsigned int cpu;

	for_each_set_bit(cpu, session->watched, nr_cpu_ids)
		nanonap_map_unwatch(cpu);
	kfree(session);
	return 0;
}

static int nanonap_mmap(struct file *file, struct vm_area_struct *vma)
{
	return nanonap_map_mmap(vma);
}

/* Checks a CPU from user space. Returns it, safe as an index on a mispredicted path, or -EINVAL. */
static int nanonap_possible_cpu(u32 cpu)
{
	if (cpu >= nr_cpu_ids || !cpu_possible(array_index_nospec(cpu, nr_cpu_ids)))
		return -EINVAL;
	return array_index_nospec(cpu, nr_cpu_ids);
}

static int nanonap_greet(struct nanonap_session *session, struct nanonap_version __user *user)
{
	struct nanonap_version answer = {
		.version = NANONAP_ABI,
		.wait = nanonap_wait_kind(),
		.hint = nanonap_mwait_hint(),
		.cpus = nr_cpu_ids,
		.map_bytes = nanonap_map_bytes(),
		.ties = nanonap_pairs_count(),
	};
	u32 spoken;

	if (get_user(spoken, &user->version))
		return -EFAULT;
	if (copy_to_user(user, &answer, sizeof(answer)))
		return -EFAULT;
	if (spoken != NANONAP_ABI)
		return -EPROTO;
	WRITE_ONCE(session->greeted, true);
	return 0;
}

static int nanonap_nap_as_asked(const struct nanonap_nap __user *user)
{
	struct nanonap_nap request;
	int cpu;

	if (copy_from_user(&request, user, sizeof(request)))
		return -EFAULT;
	cpu = nanonap_possible_cpu(request.request_cpu);
	if (cpu < 0)
		return cpu;
	if (request.reserved || !request.bound_ns || request.bound_ns > NANONAP_BOUND_MAX_NS)
		return -EINVAL;
	request.request_cpu = cpu;
	return nanonap_nap(&request);
}

static int nanonap_watch(struct nanonap_session *session, const struct nanonap_watch __user *user)
{
	struct nanonap_watch request;
	int cpu;

	if (copy_from_user(&request, user, sizeof(request)))
		return -EFAULT;
	cpu = nanonap_possible_cpu(request.cpu);
	if (cpu < 0)
		return cpu;
	if (request.on > 1)
		return -EINVAL;
	/* The atomic bit ensures that only one of several threads counts. */
	if (request.on && !test_and_set_bit(cpu, session->watched))
		nanonap_map_watch(cpu);
	else if (!request.on && test_and_clear_bit(cpu, session->watched))
		nanonap_map_unwatch(cpu);
	return 0;
}

static int nanonap_tell_stats(struct nanonap_stats __user *user)
{
	struct nanonap_stats answer = {};
	u32 asked, reserved;
	int cpu;

	if (get_user(asked, &user->cpu) || get_user(reserved, &user->reserved))
		return -EFAULT;
	if (reserved)
		return -EINVAL;
	answer.cpu = asked;
	if (asked == NANONAP_ALL_CPUS) {
		for_each_possible_cpu(cpu)
			nanonap_add_stats(cpu, &answer);
	} else {
		cpu = nanonap_possible_cpu(asked);
		if (cpu < 0)
			return cpu;
		nanonap_add_stats(cpu, &answer);
	}
	return copy_to_user(user, &answer, sizeof(answer)) ? -EFAULT : 0;
}

static long nanonap_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct nanonap_session *session = file->private_data;
	void __user *user = (void __user *)argument;

	if (command == NANONAP_VERSION)
		return nanonap_greet(session, user);
	if (!READ_ONCE(session->greeted))
		return -EPROTO;
	switch (command) {
	case NANONAP_NAP:
		return nanonap_nap_as_asked(user);
	case NANONAP_WATCH:
		return nanonap_watch(session, user);
	case NANONAP_STATS:
		return nanonap_tell_stats(user);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations nanonap_operations = {
	.owner = THIS_MODULE,
	.open = nanonap_open,
	.release = nanonap_release,
	.mmap = nanonap_mmap,
	.unlocked_ioctl = nanonap_ioctl,
	/* The structures have the same layout for 32-bit programs. */
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice nanonap_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "nanonap",
	.fops = &nanonap_operations,
	/* udev sets the group: nanonap.rules. */
	.mode = 0660,
};

static void __init nanonap_check_layouts(void)
{
	BUILD_BUG_ON(sizeof(struct nanonap_version) != 32);
	BUILD_BUG_ON(sizeof(struct nanonap_nap) != 24);
	BUILD_BUG_ON(sizeof(struct nanonap_watch) != 8);
	BUILD_BUG_ON(sizeof(struct nanonap_stats) != 96);
}

/* The device is registered last, so that no process can nap or read before the map is complete. */
static int __init nanonap_init(void)
{
	int error;

	nanonap_check_layouts();
	error = nanonap_nap_init();
	if (error)
		return error;
	error = nanonap_pairs_init();
	if (error)
		return error;
	error = nanonap_map_init();
	if (error)
		goto no_map;
	error = misc_register(&nanonap_device);
	if (error)
		goto no_device;
	return 0;

no_device:
	nanonap_map_exit();
no_map:
	nanonap_pairs_exit();
	return error;
}

static void __exit nanonap_exit(void)
{
	misc_deregister(&nanonap_device);
	nanonap_map_exit();
	nanonap_pairs_exit();
}

module_init(nanonap_init);
module_exit(nanonap_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Gives an SMT lane to its sibling without giving up the thread");
MODULE_VERSION(__stringify(NANONAP_RELEASE));
